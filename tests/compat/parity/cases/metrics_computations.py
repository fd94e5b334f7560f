"""The functions behind the metrics."""

from functools import partial
from typing import Any

import torch
from torchrec.metrics import accuracy, mae, mse, precision, recall, xauc
from torchrec.metrics.auc import AUCMetricComputation, compute_auc, compute_auc_per_group
from torchrec.metrics.calibration import CalibrationMetricComputation, compute_calibration, get_calibration_states
from torchrec.metrics.ctr import CTRMetricComputation, compute_ctr, get_ctr_states
from torchrec.metrics.gauc import GAUCMetricComputation, compute_gauc_3d, compute_window_auc, get_auc_states, to_3d
from torchrec.metrics.metrics_config import SessionMetricDef
from torchrec.metrics.ndcg import NDCGComputation
from torchrec.metrics.ne import (
    NEMetricComputation,
    compute_cross_entropy,
    compute_logloss,
    compute_ne,
    get_ne_states,
)
from torchrec.metrics.recall_session import RecallSessionMetricComputation, ranking_within_session

from tests.compat.parity.case import case

M = "torchrec.metrics"
PREDICTIONS = torch.tensor([[0.9, 0.4, 0.6, 0.1, 0.0, 1.0], [0.5, 0.5, 0.2, 0.8, 1.0, 0.0]])
LABELS = torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
WEIGHTS = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
SAMPLES = (LABELS, PREDICTIONS, WEIGHTS)
SUMS = (torch.tensor([3.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 0.0]))


def reports(computation: Any, **more: Any) -> Any:
    """The reports of a computation of two tasks after two steps."""
    for predictions in (PREDICTIONS, PREDICTIONS.flip(0)):
        computation.update(predictions=predictions, labels=LABELS, weights=WEIGHTS, **more)
    found = [(str(one.name), str(one.metric_prefix), one.value, one.description) for one in computation.compute()]
    return sorted(found, key=lambda report: report[:2])


SETTINGS = {"my_rank": 0, "batch_size": 6, "n_tasks": 2, "window_size": 6}


@case(f"{M}.ne.NEMetricComputation")
def computation_of_normalized_entropy() -> Any:
    return [reports(NEMetricComputation(**SETTINGS)), reports(NEMetricComputation(**SETTINGS, include_logloss=True))]


@case(f"{M}.calibration.CalibrationMetricComputation", f"{M}.ctr.CTRMetricComputation")
def computations_of_ratios() -> Any:
    return [reports(CalibrationMetricComputation(**SETTINGS)), reports(CTRMetricComputation(**SETTINGS))]


@case(f"{M}.auc.AUCMetricComputation")
def computation_of_an_area() -> Any:
    groups = {"grouping_keys": torch.tensor([0, 0, 1, 1, 1, 0])}
    return [
        reports(AUCMetricComputation(**SETTINGS)),
        reports(AUCMetricComputation(**{**SETTINGS, "window_size": 12}, grouped_auc=True), required_inputs=groups)[0],
    ]


@case(f"{M}.gauc.GAUCMetricComputation")
def computation_of_areas_of_groups() -> Any:
    return reports(GAUCMetricComputation(**SETTINGS), num_candidates=torch.tensor([2, 4]))


@case(f"{M}.ndcg.NDCGComputation", f"{M}.ndcg.NUM_SESSIONS", f"{M}.ndcg.SUM_NDCG")
def computation_of_gains() -> Any:
    computation = NDCGComputation(**SETTINGS, k=2)
    sessions = {"session_id": torch.tensor([[0, 0, 1, 1, 1, 0]] * 2)}
    return [reports(computation, required_inputs=sessions), computation.sum_ndcg, computation.num_sessions]


@case(
    f"{M}.recall_session.RecallSessionMetricComputation",
    f"{M}.recall_session.NUM_TRUE_POS",
    f"{M}.recall_session.NUM_FALSE_NEGATIVE",
)
def computation_of_recall_of_sessions() -> Any:
    computation = RecallSessionMetricComputation(
        **{**SETTINGS, "n_tasks": 1}, session_metric_def=SessionMetricDef("visit", top_threshold=1)
    )
    sessions = torch.tensor([[0, 0, 1, 1, 1, 0]])
    one = [column[:1] for column in SAMPLES]
    computation.update(predictions=one[1], labels=one[0], weights=one[2], required_inputs={"visit": sessions})
    return [computation.num_true_pos, computation.num_false_neg, computation.get_recall_states(*one, sessions)]


@case(f"{M}.ne.compute_cross_entropy", f"{M}.ne.get_ne_states")
def sums_of_normalized_entropy() -> Any:
    return [
        compute_cross_entropy(*SAMPLES, 1e-12),
        compute_cross_entropy(*SAMPLES, 1e-3),
        get_ne_states(*SAMPLES, 1e-12),
        get_ne_states(LABELS[:, :0], PREDICTIONS[:, :0], WEIGHTS[:, :0], 1e-12),
    ]


@case(f"{M}.ne.compute_ne", f"{M}.ne.compute_logloss")
def normalized_entropy_of_sums() -> Any:
    states = get_ne_states(*SAMPLES, 1e-12)
    sums = [states[name] for name in ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")]
    edge = [torch.tensor(row, dtype=torch.double) for row in ([0.0, 1.0], [0.0, 2.0], [0.0, 0.0], [0.0, 2.0])]
    return [
        compute_ne(*sums, 1e-12),
        compute_ne(*edge, 1e-12),
        compute_ne(*edge, 1e-12, True),
        compute_logloss(sums[0], sums[2], sums[3], 1e-12),
        compute_logloss(edge[0], edge[2], edge[3], 1e-12),
    ]


@case(f"{M}.calibration.compute_calibration", f"{M}.calibration.get_calibration_states")
def calibration_of_sums() -> Any:
    return [get_calibration_states(*SAMPLES), compute_calibration(*SUMS)]


@case(
    f"{M}.ctr.compute_ctr",
    f"{M}.ctr.get_ctr_states",
    f"{M}.ctr.CTR_NUM",
    f"{M}.ctr.CTR_DENOM",
)
def click_rate_of_sums() -> Any:
    return [get_ctr_states(*SAMPLES), compute_ctr(*SUMS)]


@case(f"{M}.calibration.CALIBRATION_NUM", f"{M}.calibration.CALIBRATION_DENOM", f"{M}.auc.PREDICTIONS")
def names_of_sums() -> Any:
    from torchrec.metrics import auc, calibration, ctr, ndcg, recall_session

    return {
        "calibration": [calibration.CALIBRATION_NUM, calibration.CALIBRATION_DENOM],
        "ctr": [ctr.CTR_NUM, ctr.CTR_DENOM],
        "auc": [auc.PREDICTIONS, auc.LABELS, auc.WEIGHTS, auc.GROUPING_KEYS, auc.REQUIRED_INPUTS],
        "ndcg": [ndcg.SUM_NDCG, ndcg.NUM_SESSIONS, ndcg.REQUIRED_INPUTS, ndcg.SESSION_KEY],
        "recall": [recall_session.NUM_TRUE_POS, recall_session.NUM_FALSE_NEGATIVE],
    }


@case(f"{M}.mse")
def errors_of_sums() -> Any:
    more = (torch.tensor([2.0, 1.0, 0.0]), torch.tensor([9.0, 0.0, 1.0]))
    return [
        mse.get_mse_states(*SAMPLES),
        mse.compute_mse(*SUMS),
        mse.compute_rmse(*SUMS),
        mse.compute_r_squared(*(part[:2] for part in (*SUMS, *more))),
        mae.get_mae_states(*SAMPLES),
        mae.compute_mae(*SUMS),
    ]


@case(f"{M}.accuracy", f"{M}.precision", f"{M}.recall")
def classes_of_sums() -> Any:
    found = []
    for states in (accuracy.get_accuracy_states, precision.get_precision_states, recall.get_recall_states):
        found += [states(*SAMPLES), states(*SAMPLES, 0.3), states(LABELS, PREDICTIONS, None)]
    return [
        *found,
        accuracy.compute_accuracy(*SUMS),
        precision.compute_precision(*SUMS),
        recall.compute_recall(*SUMS),
        accuracy.THRESHOLD,
    ]


@case(f"{M}.xauc")
def pairs_in_order() -> Any:
    graded = torch.tensor([[0.3, 0.3, 0.3], [0.1, 0.5, 0.2]]), torch.tensor([[1.0, 2.0, 1.0], [0.0, 0.5, 0.5]])
    return [
        xauc.get_xauc_states(*SAMPLES),
        xauc.get_xauc_states(graded[1], graded[0], torch.ones(2, 3)),
        xauc.compute_xauc(*SUMS),
    ]


@case(f"{M}.auc.compute_auc")
def areas() -> Any:
    parts = [[column[:, :3], column[:, 3:]] for column in (PREDICTIONS, LABELS, WEIGHTS)]
    area = partial(compute_auc, 1)
    equal = torch.tensor([[0.5, 0.5, 0.5, 0.2]])
    return [
        compute_auc(2, [PREDICTIONS], [LABELS], [WEIGHTS]),
        compute_auc(2, *parts),
        area([PREDICTIONS[:1]], [torch.ones(1, 6)], [WEIGHTS[:1]]),
        area([equal], [torch.tensor([[1.0, 0.0, 1.0, 0.0]])], [torch.ones(1, 4)]),
        area([equal], [torch.tensor([[0.0, 1.0, 1.0, 0.0]])], [torch.ones(1, 4)]),
        area([torch.zeros(1, 0)], [torch.zeros(1, 0)], [torch.zeros(1, 0)]),
        compute_auc(2, [PREDICTIONS], [LABELS], [WEIGHTS], apply_bin=True),
    ]


@case(f"{M}.auc.compute_auc_per_group")
def areas_per_group() -> Any:
    groups = torch.tensor([0, 0, 1, 1, 1, 0])
    return [
        compute_auc_per_group(2, [PREDICTIONS], [LABELS], [WEIGHTS], groups),
        compute_auc_per_group(2, [PREDICTIONS], [LABELS], [WEIGHTS], groups * 0),
    ]


@case(f"{M}.gauc.to_3d")
def groups_are_padded() -> Any:
    samples = torch.arange(12.0).reshape(6, 2)
    return [to_3d(samples, torch.tensor([2, 4]), 4), to_3d(samples, torch.tensor([2, 4]), 3)]


@case(f"{M}.gauc.compute_gauc_3d", f"{M}.gauc.get_auc_states", f"{M}.gauc.compute_window_auc")
def areas_of_groups() -> Any:
    shape = (2, 2, 3)
    found = [get_auc_states(*SAMPLES, torch.tensor(sizes)) for sizes in ([2, 4], [3, 3], [1, 5], [6])]
    one = partial(torch.tensor, dtype=torch.float32)
    for scores, labels, weights in (
        ([[0.5, 0.5, 0.5]], [[1.0, 0.0, 1.0]], [[1.0, 1.0, 1.0]]),
        ([[0.5, 0.5, 0.4]], [[0.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]]),
        ([[0.9, 0.2, 0.3]], [[1.0, 0.0, 1.0]], [[1.0, 0.0, 1.0]]),
    ):
        found.append(get_auc_states(one(labels), one(scores), one(weights), torch.tensor([3])))
    return [
        *found,
        compute_gauc_3d(*(column.reshape(shape) for column in (PREDICTIONS, LABELS, WEIGHTS))),
        compute_window_auc(*(part.double() for part in SUMS)),
    ]


@case(f"{M}.recall_session.ranking_within_session")
def ranks_inside_sessions() -> Any:
    scores, session = torch.tensor([0.1, 0.5, 0.3, 0.9, 0.3]), torch.tensor([0, 0, 1, 0, 1])
    return [ranking_within_session(scores, session), ranking_within_session(-scores, session)]
