"""Metrics of a model: values, windows, tasks, sessions, ranks, and the module that has them all."""

import dataclasses
from functools import partial
from typing import Any

import torch
from torchrec.metrics.accuracy import AccuracyMetric
from torchrec.metrics.auc import AUCMetric
from torchrec.metrics.calibration import CalibrationMetric
from torchrec.metrics.ctr import CTRMetric
from torchrec.metrics.gauc import GAUCMetric
from torchrec.metrics.mae import MAEMetric
from torchrec.metrics.metric_module import (
    RecMetricModule,
    StateMetric,
    generate_metric_module,
)
from torchrec.metrics.metrics_config import (
    DefaultMetricsConfig,
    DefaultTaskInfo,
    EmptyMetricsConfig,
    RecComputeMode,
    RecTaskInfo,
    SessionMetricDef,
    StateMetricEnum,
)
from torchrec.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from torchrec.metrics.mse import MSEMetric
from torchrec.metrics.ndcg import NDCGMetric
from torchrec.metrics.ne import NEMetric
from torchrec.metrics.precision import PrecisionMetric
from torchrec.metrics.rec_metric import (
    MetricComputationReport,
    RecMetric,
    RecMetricComputation,
    RecMetricList,
)
from torchrec.metrics.recall import RecallMetric
from torchrec.metrics.recall_session import RecallSessionMetric
from torchrec.metrics.weighted_avg import WeightedAvgMetric
from torchrec.metrics.xauc import XAUCMetric

from tests.compat.parity.case import case, raised

M = "torchrec.metrics"
PREDICTIONS = torch.tensor([0.9, 0.4, 0.6, 0.1])
LABELS = torch.tensor([1.0, 1.0, 0.0, 0.0])
WEIGHTS = torch.tensor([1.0, 2.0, 1.0, 1.0])
GROUPS = torch.tensor([0, 0, 1, 1])


def made(kind: Any, tasks: Any = None, **more: Any) -> Any:
    settings = {"world_size": 1, "my_rank": 0, "batch_size": 4, "window_size": 8, **more}
    return kind(tasks=[DefaultTaskInfo] if tasks is None else tasks, **settings)


def updated(
    metric: Any, predictions: Any = PREDICTIONS, labels: Any = LABELS, weights: Any = WEIGHTS, **more: Any
) -> Any:
    name = "DefaultTask"
    metric.update(
        predictions={name: predictions},
        labels={name: labels},
        weights=None if weights is None else {name: weights},
        **more,
    )
    return metric


@case(f"{M}.ne.NEMetric", f"{M}.rec_metric.RecMetric")
def normalized_entropy() -> Any:
    metric = made(NEMetric, include_logloss=True)
    found = [metric.compute()]
    for scale in (1.0, 0.9, 0.8):
        found.append(updated(metric, PREDICTIONS * scale).compute())
    found += [metric.local_compute(), metric.state_dict()]
    metric.reset()
    return [*found, metric.compute(), updated(made(NEMetric), weights=None).compute()]


@case(f"{M}.rec_metric.RecMetric")
def several_tasks() -> Any:
    tasks = [RecTaskInfo(name="a"), RecTaskInfo(name="b")]
    found = []
    for mode in (RecComputeMode.UNFUSED_TASKS_COMPUTATION, RecComputeMode.FUSED_TASKS_COMPUTATION):
        metric = made(NEMetric, tasks, compute_mode=mode)
        for _ in range(3):
            metric.update(
                predictions={"a": PREDICTIONS, "b": PREDICTIONS},
                labels={"a": LABELS, "b": 1 - LABELS},
                weights={"a": WEIGHTS, "b": WEIGHTS},
            )
        found.append(metric.compute())
    return found


@case(f"{M}.rec_metric.RecMetric")
def a_task_without_predictions_is_skipped() -> Any:
    metric = made(NEMetric, [RecTaskInfo(name="a"), RecTaskInfo(name="b")])
    metric.update(predictions={"a": PREDICTIONS}, labels={"a": LABELS}, weights={"a": WEIGHTS})
    return metric.compute()


@case(f"{M}.rec_metric.RecMetric")
def steps_that_are_joined() -> Any:
    metric = made(NEMetric, fused_update_limit=3)
    for scale in (1.0, 0.5):
        updated(metric, PREDICTIONS * scale)
    return metric.compute()


@case(f"{M}.rec_metric.RecMetric")
def a_window_smaller_than_a_batch() -> Any:
    return raised(lambda: made(NEMetric, batch_size=16))


@case(f"{M}.calibration.CalibrationMetric", f"{M}.ctr.CTRMetric")
def calibration_and_click_rate() -> Any:
    return [
        [updated(updated(made(kind)), PREDICTIONS / 2, 1 - LABELS).compute(), made(kind).compute()]
        for kind in (CalibrationMetric, CTRMetric)
    ]


@case(f"{M}.metric_module.REC_METRICS_MAPPING")
def errors_and_classes() -> Any:
    kinds = (MSEMetric, MAEMetric, AccuracyMetric, PrecisionMetric, RecallMetric, XAUCMetric)
    return [updated(updated(updated(made(kind))), PREDICTIONS / 2, 1 - LABELS).compute() for kind in kinds]


@case(f"{M}.metric_module.REC_METRICS_MAPPING")
def thresholds_and_r_squared() -> Any:
    kinds = (AccuracyMetric, PrecisionMetric, RecallMetric)
    found = [updated(made(kind, threshold=0.3)).compute() for kind in kinds]
    return [*found, updated(made(MSEMetric, include_r_squared=True)).compute()]


@case(f"{M}.weighted_avg.WeightedAvgMetric")
def weighted_average() -> Any:
    return updated(made(WeightedAvgMetric)).compute()


@case(f"{M}.auc.AUCMetric")
def area_of_a_window() -> Any:
    metric = made(AUCMetric)
    found = [metric.compute()]
    for scale in (1.0, -1.0, 0.5):
        found.append(updated(metric, PREDICTIONS * scale).compute())
    equal = updated(made(AUCMetric), torch.tensor([0.5, 0.5, 0.5, 0.2]), torch.tensor([1.0, 0.0, 1.0, 0.0]))
    return [*found, equal.compute(), metric.state_dict()]


@case(f"{M}.gauc.GAUCMetric")
def area_of_groups() -> Any:
    metric = made(GAUCMetric)
    updated(metric, num_candidates=torch.tensor([3, 1]))
    updated(metric, labels=torch.tensor([1.0, 0.0, 1.0, 0.0]), num_candidates=torch.tensor([2, 2]))
    return [metric.compute(), made(GAUCMetric).compute(), raised(lambda: updated(metric))]


GAINS = {
    "predictions": torch.tensor([0.9, 0.4, 0.6, 0.1, 0.3]),
    "labels": torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0]),
    "weights": torch.tensor([1.0, 2.0, 1.0, 1.0, 3.0]),
}


@case(f"{M}.ndcg.NDCGMetric", f"{M}.ndcg.SESSION_KEY", f"{M}.ndcg.REQUIRED_INPUTS")
def gains_of_sessions() -> Any:
    found = []
    for more in (
        {},
        {"k": 1},
        {"exponential_gain": True},
        {"report_ndcg_as_decreasing_curve": False},
        {"remove_single_length_sessions": True},
        {"scale_by_weights_tensor": True},
        {"session_key": "visit"},
    ):
        metric = made(NDCGMetric, **more)
        for session in ([0, 0, 1, 1, 2], [7, 3, 3, 7, 3]):
            name = str(more.get("session_key", "session_id"))
            updated(metric, **GAINS, required_inputs={name: torch.tensor(session)})
        found += [metric.compute(), sorted(metric.get_required_inputs())]
    return found


@case(f"{M}.recall_session.RecallSessionMetric", f"{M}.metrics_config.SessionMetricDef")
def recall_of_sessions() -> Any:
    found = []
    for more in ({"top_threshold": 1}, {"top_threshold": 2}, {"top_threshold": 1, "run_ranking_of_labels": True}):
        metric = made(RecallSessionMetric, [RecTaskInfo(session_metric_def=SessionMetricDef("visit", **more))])
        updated(metric, labels=torch.tensor([1.0, 1.0, 0.0, 3.0]), required_inputs={"visit": GROUPS})
        found += [metric.compute(), metric.state_dict(), sorted(metric.get_required_inputs())]
    return found


class Hits(RecMetricComputation):
    """A computation of a user: how many predictions round to their label."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        zeros = torch.zeros(self._n_tasks, dtype=torch.double)
        self._add_state("hits", zeros, add_window_state=True, dist_reduce_fx="sum", persistent=True)

    def update(self, *, predictions: Any, labels: Any, weights: Any, **kwargs: Any) -> None:
        hits = (predictions.round() == labels).double().sum(-1)
        self.hits += hits
        self._aggregate_window_state("hits", hits, predictions.shape[-1])

    def _compute(self) -> Any:
        return [
            MetricComputationReport(MetricName.ACCURACY, MetricPrefix.LIFETIME, self.hits),
            MetricComputationReport(
                MetricName.ACCURACY, MetricPrefix.WINDOW, self.get_window_state("hits"), "_of_mine"
            ),
        ]


class HitsMetric(RecMetric):
    _namespace = MetricNamespace.ACCURACY
    _computation_class = Hits


@case(f"{M}.rec_metric.RecMetricComputation", f"{M}.rec_metric.MetricComputationReport")
def a_metric_of_a_user() -> Any:
    metric = made(HitsMetric)
    for scale in (0.1, 1.0, 1.0):
        updated(metric, PREDICTIONS * scale)
    computation = Hits(0, 4, 2, 8)
    computation.update(predictions=torch.ones(2, 4), labels=torch.ones(2, 4), weights=None)
    reports = [(report.name, report.value, report.description) for report in computation.compute()]
    return [metric.compute(), metric.state_dict(), Hits.get_window_state_name("hits"), reports]


@case(f"{M}.rec_metric.RecMetric", f"{M}.rec_metric.RecMetricComputation", ranks=2)
def two_ranks(rank: int) -> Any:
    share = slice(2 * rank, 2 * rank + 2)
    found = []
    for kind in (NEMetric, AUCMetric, HitsMetric):
        for everywhere in (False, True):
            metric = made(kind, world_size=2, my_rank=rank, batch_size=2, compute_on_all_ranks=everywhere)
            updated(metric, PREDICTIONS[share], LABELS.flip(0)[share], WEIGHTS[share])
            found += [metric.compute(), metric.local_compute(), updated(metric).compute()]
    return found


@case(f"{M}.rec_metric.RecMetricList")
def a_list_of_metrics() -> Any:
    metrics = RecMetricList([made(NEMetric), made(AUCMetric, grouped_auc=True)])
    updated(metrics, required_inputs={"grouping_keys": GROUPS})
    return [metrics.compute(), metrics.local_compute(), metrics.get_required_inputs()]


class LearningRate(StateMetric):
    def get_metrics(self) -> Any:
        return {"lr": 0.5}


def module_of(config: Any, **more: Any) -> Any:
    return generate_metric_module(
        RecMetricModule,
        metrics_config=config,
        batch_size=4,
        world_size=1,
        my_rank=0,
        state_metrics_mapping={StateMetricEnum.OPTIMIZERS: LearningRate()},
        device=torch.device("cpu"),
        **more,
    )


def copied(values: Any) -> Any:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


OUTPUT = {"prediction": PREDICTIONS, "label": LABELS, "weight": WEIGHTS}


@case(
    f"{M}.metric_module.RecMetricModule",
    f"{M}.metric_module.StateMetric",
    f"{M}.metric_module.generate_metric_module",
    f"{M}.metrics_config.DefaultMetricsConfig",
)
def all_metrics_of_a_model() -> Any:
    module = module_of(dataclasses.replace(DefaultMetricsConfig, state_metrics=[StateMetricEnum.OPTIMIZERS]))
    module.update(OUTPUT)
    found = [
        copied(module.compute()),
        dict(module.local_compute()),
        module.should_compute(),
        module.get_required_inputs(),
    ]
    module.update({name: column[:, None] for name, column in OUTPUT.items()})
    values = module.compute()
    found += [
        copied(values.resolve()),
        values.is_resolved(),
        values["ne-DefaultTask|lifetime_ne"],
        module.trained_batches,
    ]
    module.reset()
    return [*found, dict(module.compute()), sorted(name for name in module.state_dict() if name.startswith("rec"))]


@case(f"{M}.metric_module.RecMetricModule", f"{M}.metrics_config.EmptyMetricsConfig")
def outputs_that_are_missing() -> Any:
    module = module_of(DefaultMetricsConfig)
    empty = module_of(EmptyMetricsConfig)
    empty.update({})
    partial_outputs = [{key: OUTPUT[key] for key in OUTPUT if key != missing} for missing in OUTPUT]
    return [*(raised(partial(module.update, output)) for output in partial_outputs), dict(empty.compute())]
