"""Metrics of each name in ``RecMetricEnum``: random samples, windows, fused tasks, ranks, and what they refuse."""

from collections.abc import Callable
from typing import Any

import torch
from torchrec.metrics.metric_module import REC_METRICS_MAPPING
from torchrec.metrics.metrics_config import (
    RecComputeMode,
    RecMetricEnum,
    RecTaskInfo,
    SessionMetricDef,
)

from tests.compat.parity.case import case, on_ranks, raised

M = "torchrec.metrics"
N, STEPS = 16, 3
UNFUSED, FUSED = RecComputeMode.UNFUSED_TASKS_COMPUTATION, RecComputeMode.FUSED_TASKS_COMPUTATION
TASKS = ("a", "b")


def samples(seed: int, n: int = N) -> dict[str, dict[str, torch.Tensor]]:
    """Random predictions, labels, weights (some are 0) of two tasks."""
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, dict[str, torch.Tensor]] = {"predictions": {}, "labels": {}, "weights": {}}
    for task in TASKS:
        found["predictions"][task] = torch.randint(1, 20, (n,), generator=draw) / 20
        found["labels"][task] = torch.randint(2, (n,), generator=draw).float()
        found["weights"][task] = torch.randint(0, 4, (n,), generator=draw) / 2
    return found


def made(kind: Any, tasks: Any = TASKS, world: int = 1, rank: int = 0, task: Any = None, **more: Any) -> Any:
    infos = [RecTaskInfo(name=name, **(task or {})) for name in tasks]
    settings = {"batch_size": N, "window_size": 2 * N * world, **more}
    return REC_METRICS_MAPPING[kind](world_size=world, my_rank=rank, tasks=infos, **settings)


Change = Callable[[int, dict[str, Any]], dict[str, Any]]


def same(step: int, given: dict[str, Any]) -> dict[str, Any]:
    return given


def digits(tensor: torch.Tensor) -> list[float]:
    """Its values with 8 digits, which keeps the record small."""
    return [float(f"{value:.8g}") for value in tensor.flatten().tolist()]


def values(kind: Any, change: Change = same, modes: Any = (UNFUSED, FUSED), **more: Any) -> Any:
    """Values after steps of more samples than a window has, with separate and with fused tasks."""
    found = []
    for mode in modes:
        metric = made(kind, compute_mode=mode, **more)
        for step in range(STEPS):
            metric.update(**change(step, samples(step)))
        got = metric.compute()
        found += [{key: [str(value.dtype), *digits(value)] for key, value in got.items()}]
    return [*found, sorted(metric.get_required_inputs())]


def on_two_ranks(*kinds: Any) -> Any:
    """Values of rank 0 after steps of other samples on each rank, for each metric, change of a step and arguments."""

    def job(rank: int) -> Any:
        found = []
        for kind, change, more in kinds:
            metric = made(kind, ("a",), world=2, rank=rank, **more)
            for step in range(STEPS):
                metric.update(**change(step, samples(10 * step + rank)))
            found.append({key: digits(value) for key, value in metric.compute().items()})
        return found

    return on_ranks(2, job)


def required(**inputs: Any) -> Change:
    """Adds required inputs to a step: name -> function of the step."""
    return lambda step, given: {**given, "required_inputs": {name: make(step) for name, make in inputs.items()}}


def groups(count: int) -> Callable[[int], torch.Tensor]:
    return lambda step: torch.randint(count, (N,), generator=torch.Generator().manual_seed(99 + step))


def floats(step: int) -> torch.Tensor:
    return torch.rand(N, generator=torch.Generator().manual_seed(step)) + step


E = RecMetricEnum


@case(f"{M}.average.AverageMetric", f"{M}.average.AverageMetricComputation")
def means_of_labels_and_predictions() -> Any:
    return [made(E.AVERAGE).compute(), values(E.AVERAGE)]


@case(f"{M}.nmse.NMSEMetric", f"{M}.nmse.NMSEMetricComputation")
def errors_over_those_of_a_constant() -> Any:
    ones = made(E.NMSE)
    ones.update(**{**samples(0), "labels": {task: torch.ones(N) for task in TASKS}})
    return [made(E.NMSE).compute(), values(E.NMSE), ones.compute()]


@case(f"{M}.sum_weights.SumWeightsMetric", f"{M}.num_positive_samples.NumPositiveSamplesMetric")
def sums_of_weights_and_labels() -> Any:
    kinds = (E.SUM_WEIGHTS, E.NUM_POSITIVE_SAMPLES, E.WEIGHTED_SUM_PREDICTIONS)
    return [[made(kind).compute(), values(kind)] for kind in kinds]


def missing(step: int, given: dict[str, Any]) -> dict[str, Any]:
    """Replaces some labels by NaN."""
    labels = {task: column.masked_fill(groups(3)(step) == 0, torch.nan) for task, column in given["labels"].items()}
    return {**given, "labels": labels}


@case(f"{M}.num_missing_labels.NumMissingLabelsMetric", f"{M}.num_positive_samples.NumPositiveSamplesMetric")
def labels_that_are_missing() -> Any:
    return [
        values(E.NUM_MISSING_LABELS, missing),
        values(E.NUM_POSITIVE_SAMPLES, missing),
        values(E.NUM_MISSING_LABELS),
    ]


@case(f"{M}.ne_positive.NEPositiveMetric", f"{M}.ne_positive.NEPositiveMetricComputation")
def entropy_of_positive_samples() -> Any:
    return [made(E.NE_POSITIVE).compute(), values(E.NE_POSITIVE)]


@case(f"{M}.unweighted_ne.UnweightedNEMetric", f"{M}.unweighted_ne.UnweightedNEMetricComputation")
def entropy_without_weights() -> Any:
    return [made(E.UNWEIGHTED_NE).compute(), values(E.UNWEIGHTED_NE)]


@case(f"{M}.cali_free_ne.CaliFreeNEMetric", f"{M}.cali_free_ne.CaliFreeNEMetricComputation")
def entropy_without_the_error_of_the_mean() -> Any:
    return [made(E.CALI_FREE_NE).compute(), values(E.CALI_FREE_NE)]


@case(f"{M}.segmented_ne.SegmentedNEMetric", f"{M}.segmented_ne.SegmentedNEMetricComputation")
def entropy_of_groups() -> Any:
    one = required(grouping_keys=groups(3))
    return [
        values(E.SEGMENTED_NE, one, num_groups=3),
        values(E.SEGMENTED_NE, one, num_groups=4, include_logloss=True),
        values(E.SEGMENTED_NE, required(k=groups(2)), num_groups=2, grouping_keys="k"),
    ]


@case(f"{M}.auprc.AUPRCMetric", f"{M}.auprc.AUPRCMetricComputation")
def precision_recall_curve_of_a_window() -> Any:
    return values(E.AUPRC, modes=(UNFUSED,))


@case(f"{M}.rauc.RAUCMetric", f"{M}.rauc.RAUCMetricComputation")
def regression_area_of_a_window() -> Any:
    graded = lambda step, given: {**given, "labels": {task: floats(step + 5) for task in TASKS}}  # noqa: E731
    return [values(E.RAUC), values(E.RAUC, graded)]


@case(f"{M}.precision_session.PrecisionSessionMetric", f"{M}.precision_session.PrecisionSessionMetricComputation")
def precision_of_sessions() -> Any:
    found = []
    for definition in ({"top_threshold": 1}, {"top_threshold": 3}, {"top_threshold": 2, "run_ranking_of_labels": True}):
        task = {"session_metric_def": SessionMetricDef("visit", **definition)}
        found.append(values(E.PRECISION_SESSION_LEVEL, required(visit=groups(5)), modes=(UNFUSED,), task=task))
    empty = made(E.PRECISION_SESSION_LEVEL, task=task).compute()
    return [*found, {key: float(value) for key, value in empty.items()}]


def classes(step: int, given: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(step)
    predictions = {task: torch.randint(6, (N, 3), generator=draw).float() for task in TASKS}
    return {**given, "predictions": predictions, "labels": {task: groups(3)(step) for task in TASKS}}


@case(f"{M}.multiclass_recall.MulticlassRecallMetric", f"{M}.multiclass_recall.MulticlassRecallMetricComputation")
def recall_of_classes() -> Any:
    found = values(E.MULTICLASS_RECALL, classes, number_of_classes=3)
    return [found, made(E.MULTICLASS_RECALL, number_of_classes=3).compute()]


def encoded(step: int, given: dict[str, Any]) -> dict[str, Any]:
    return {
        **given,
        "predictions": {task: groups(8)(step) for task in TASKS},
        "labels": {task: groups(8)(step + 50) for task in TASKS},
    }


@case(
    f"{M}.multi_label_precision.MultiLabelPrecisionMetric",
    f"{M}.multi_label_precision.MultiLabelPrecisionMetricComputation",
)
def precision_of_labels() -> Any:
    kind = E.MULTI_LABEL_PRECISION
    return [
        values(kind, encoded, modes=(UNFUSED,), num_labels=3),
        values(kind, encoded, modes=(UNFUSED,), num_labels=2, label_names=["x", "y"]),
        sorted(made(kind, num_labels=2, label_names=["x", "y"]).state_dict()),
        made(kind, num_labels=2).compute(),
    ]


@case(f"{M}.hindsight_target_pr.HindsightTargetPRMetric", f"{M}.hindsight_target_pr.HindsightTargetPRMetricComputation")
def precision_and_recall_at_a_target() -> Any:
    found = []
    for target in (0.4, 0.7, 1.5):
        metric = made(E.HINDSIGHT_TARGET_PR, target_precision=target)
        for step in range(3):
            metric.update(**samples(step))
        found.append({key: value for key, value in metric.compute().items() if not key.endswith("target_pr")})
    return [*found, {key: list(state.shape) for key, state in metric.state_dict().items()}]


@case(f"{M}.scalar.ScalarMetric", f"{M}.scalar.ScalarMetricComputation")
def a_number_as_a_label() -> Any:
    reported = lambda step, given: {**given, "labels": {task: floats(step) for task in TASKS}}  # noqa: E731
    empty = {key: float(value) for key, value in made(E.SCALAR).compute().items()}
    return [values(E.SCALAR, reported), empty, sorted(made(E.SCALAR).state_dict())]


IMPRESSIONS = required(latest_imp=floats, total_latest_imp=lambda step: torch.tensor([4.0 + step]))


@case(f"{M}.output.OutputMetric", f"{M}.output.OutputMetricComputation")
def outputs_as_they_are() -> Any:
    return [
        values(E.OUTPUT, IMPRESSIONS, modes=(UNFUSED,)),
        made(E.OUTPUT).compute(),
        raised(lambda: made(E.OUTPUT).update(**samples(0))),
    ]


NAMED = {"tensor_name": "x"}


@case(f"{M}.tensor_weighted_avg.TensorWeightedAvgMetric", f"{M}.tensor_weighted_avg.TensorWeightedAvgMetricComputation")
def mean_of_a_required_input() -> Any:
    found = []
    for task in (NAMED, {**NAMED, "weighted": False}):
        for mode in (UNFUSED, FUSED):
            metric = made(E.TENSOR_WEIGHTED_AVG, task=task, compute_mode=mode, description="_of_x")
            for step in range(2):
                metric.update(**required(x=floats)(step, samples(step)))
                found.append(metric.compute())
    return [*found, sorted(metric.get_required_inputs())]


@case(f"{M}.rec_metric.RecMetric")
def sums_over_two_ranks() -> Any:
    kinds = (E.AVERAGE, E.NMSE, E.NE_POSITIVE, E.UNWEIGHTED_NE, E.CALI_FREE_NE, E.RECALIBRATED_NE, E.SERVING_NE)
    more = (E.RECALIBRATED_CALIBRATION, E.SERVING_CALIBRATION, E.SUM_WEIGHTS, E.NUM_POSITIVE_SAMPLES)
    plain = [(kind, same, {}) for kind in (*kinds, *more, E.WEIGHTED_SUM_PREDICTIONS)]
    return on_two_ranks(*plain, (E.NUM_MISSING_LABELS, missing, {}))


@case(f"{M}.metric_module.REC_METRICS_MAPPING", f"{M}.metrics_config.RecMetricEnum")
def each_name_has_its_class() -> Any:
    def class_of(kind: Any) -> Any:
        found = REC_METRICS_MAPPING.get(kind)
        return found and [found, str(found._namespace), found._computation_class]

    return {str(kind): class_of(kind) for kind in RecMetricEnum}
