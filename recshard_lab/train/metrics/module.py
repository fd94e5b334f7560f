"""All metrics of a model in one object, from one config; names as in TorchRec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.train.metrics.classes import (
    AccuracyMetric,
    HindsightTargetPRMetric,
    MulticlassRecallMetric,
    MultiLabelPrecisionMetric,
    PrecisionMetric,
    RecallMetric,
)
from recshard_lab.train.metrics.entropies import (
    CaliFreeNEMetric,
    NEPositiveMetric,
    RecalibratedCalibrationMetric,
    RecalibratedNEMetric,
    SegmentedNEMetric,
    ServingCalibrationMetric,
    ServingNEMetric,
    UnweightedNEMetric,
)
from recshard_lab.train.metrics.means import (
    AverageMetric,
    MAEMetric,
    MSEMetric,
    NMSEMetric,
    NumMissingLabelsMetric,
    NumPositiveSamplesMetric,
    ScalarMetric,
    SumWeightsMetric,
    WeightedAvgMetric,
    WeightedSumPredictionsMetric,
    XAUCMetric,
)
from recshard_lab.train.metrics.rec_metric import DefaultTaskInfo, RecMetric, RecTaskInfo
from recshard_lab.train.metrics.sums import CalibrationMetric, CTRMetric, LogLossMetric, NEMetric
from recshard_lab.train.metrics.throughput import ThroughputMetric
from recshard_lab.train.metrics.windowed import (
    AUCMetric,
    AUPRCMetric,
    GAUCMetric,
    NDCGMetric,
    PrecisionSessionMetric,
    RAUCMetric,
    RecallSessionMetric,
)


class RecMetricEnum(Enum):
    """The metrics that a config can name."""

    NE = "ne"
    LOG_LOSS = "log_loss"
    CALIBRATION = "calibration"
    CTR = "ctr"
    AUC = "auc"
    GROUPED_AUC = "grouped_auc"
    NDCG = "ndcg"
    RECALL_SESSION_LEVEL = "recall_session_level"
    ACCURACY = "accuracy"
    AUPRC = "auprc"
    AVERAGE = "average"
    CALI_FREE_NE = "cali_free_ne"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    MAE = "mae"
    MSE = "mse"
    MULTICLASS_RECALL = "multiclass_recall"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NE_POSITIVE = "ne_positive"
    NMSE = "nmse"
    NUM_MISSING_LABELS = "num_missing_labels"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    PRECISION = "precision"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    RAUC = "rauc"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALL = "recall"
    SCALAR = "scalar"
    SEGMENTED_NE = "segmented_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_NE = "serving_ne"
    SUM_WEIGHTS = "sum_weights"
    UNWEIGHTED_NE = "unweighted_ne"
    WEIGHTED_AVG = "weighted_avg"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"
    XAUC = "xauc"


METRICS: dict[RecMetricEnum, type[RecMetric]] = {
    RecMetricEnum.NE: NEMetric,
    RecMetricEnum.LOG_LOSS: LogLossMetric,
    RecMetricEnum.CALIBRATION: CalibrationMetric,
    RecMetricEnum.CTR: CTRMetric,
    RecMetricEnum.AUC: AUCMetric,
    RecMetricEnum.GROUPED_AUC: GAUCMetric,
    RecMetricEnum.NDCG: NDCGMetric,
    RecMetricEnum.RECALL_SESSION_LEVEL: RecallSessionMetric,
    RecMetricEnum.ACCURACY: AccuracyMetric,
    RecMetricEnum.AUPRC: AUPRCMetric,
    RecMetricEnum.AVERAGE: AverageMetric,
    RecMetricEnum.CALI_FREE_NE: CaliFreeNEMetric,
    RecMetricEnum.HINDSIGHT_TARGET_PR: HindsightTargetPRMetric,
    RecMetricEnum.MAE: MAEMetric,
    RecMetricEnum.MSE: MSEMetric,
    RecMetricEnum.MULTICLASS_RECALL: MulticlassRecallMetric,
    RecMetricEnum.MULTI_LABEL_PRECISION: MultiLabelPrecisionMetric,
    RecMetricEnum.NE_POSITIVE: NEPositiveMetric,
    RecMetricEnum.NMSE: NMSEMetric,
    RecMetricEnum.NUM_MISSING_LABELS: NumMissingLabelsMetric,
    RecMetricEnum.NUM_POSITIVE_SAMPLES: NumPositiveSamplesMetric,
    RecMetricEnum.PRECISION: PrecisionMetric,
    RecMetricEnum.PRECISION_SESSION_LEVEL: PrecisionSessionMetric,
    RecMetricEnum.RAUC: RAUCMetric,
    RecMetricEnum.RECALIBRATED_CALIBRATION: RecalibratedCalibrationMetric,
    RecMetricEnum.RECALIBRATED_NE: RecalibratedNEMetric,
    RecMetricEnum.RECALL: RecallMetric,
    RecMetricEnum.SCALAR: ScalarMetric,
    RecMetricEnum.SEGMENTED_NE: SegmentedNEMetric,
    RecMetricEnum.SERVING_CALIBRATION: ServingCalibrationMetric,
    RecMetricEnum.SERVING_NE: ServingNEMetric,
    RecMetricEnum.SUM_WEIGHTS: SumWeightsMetric,
    RecMetricEnum.UNWEIGHTED_NE: UnweightedNEMetric,
    RecMetricEnum.WEIGHTED_AVG: WeightedAvgMetric,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: WeightedSumPredictionsMetric,
    RecMetricEnum.XAUC: XAUCMetric,
}


@dataclass
class RecMetricDef:
    """The settings of one metric.

    Args:
        rec_tasks: its tasks; empty for all tasks of the config.
        window_size: samples of all ranks.
        arguments: arguments of this metric only, such as ``k``.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    window_size: int = 10_000_000
    arguments: dict[str, Any] | None = None


@dataclass
class ThroughputDef:
    """The settings of throughput: seconds of the window, and steps before it is measured."""

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class MetricsConfig:
    """The metrics of a model.

    Args:
        rec_tasks: the predictions of the model.
        rec_metrics: the metrics.
        throughput_metric: samples per second; None to omit it.
        should_validate_update: as in `RecMetric`.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnum, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    should_validate_update: bool = True


DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={metric: RecMetricDef() for metric in (RecMetricEnum.NE, RecMetricEnum.CALIBRATION, RecMetricEnum.AUC)},
    throughput_metric=ThroughputDef(),
)


class RecMetricModule:
    """Updates metrics with a model's outputs.

    Args:
        batch_size: samples of one rank in a step.
        world_size: W.
        rec_tasks: the predictions of the model.
        rec_metrics: the metrics, each for all or some of the tasks.
        throughput_metric: samples per second; None to omit it.

    >>> module = generate_metric_module(RecMetricModule, DefaultMetricsConfig, batch_size=4, world_size=1, my_rank=0)
    >>> module.update({"prediction": torch.tensor([0.9, 0.4, 0.6, 0.1]), "label": torch.tensor([1., 1., 0., 0.])})
    >>> module.compute()["auc-DefaultTask|window_auc"].item()
    0.75
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: Sequence[RecTaskInfo] = (DefaultTaskInfo,),
        rec_metrics: Sequence[RecMetric] = (),
        throughput_metric: ThroughputMetric | None = None,
    ) -> None:
        self.batch_size, self.world_size = batch_size, world_size
        self.rec_tasks, self.rec_metrics = list(rec_tasks), list(rec_metrics)
        self.throughput_metric = throughput_metric

    @names_wrong_arguments
    def update(self, model_out: Mapping[str, Tensor]) -> None:
        """Adds one step: tensors under the names of the tasks. Weights may be missing.

        Raises:
            ValueError: a prediction, a label or groups are missing, or values are invalid.
        """
        for metric in self.rec_metrics:
            predictions, labels, weights, groups = {}, {}, {}, {}
            for name, task in metric.tasks.items():
                predictions[name] = output_of(model_out, task.prediction_name, name)
                labels[name] = output_of(model_out, task.label_name, name)
                given = model_out.get(task.weight_name)
                weights[name] = torch.ones_like(labels[name]) if given is None else given
                if metric.grouped:
                    if task.session_metric_def is None:
                        raise ValueError(
                            f"{type(metric).__name__} compares inside groups. "
                            f"Fix: set session_metric_def of task {name!r}"
                        )
                    groups[name] = output_of(model_out, task.session_metric_def.session_var_name, name)
            metric.update(predictions=predictions, labels=labels, weights=weights, groups=groups or None)
        if self.throughput_metric is not None:
            self.throughput_metric.update()

    def compute(self) -> dict[str, Tensor]:
        """Every metric's values. All ranks must call it."""
        values = {} if self.throughput_metric is None else self.throughput_metric.compute()
        for metric in self.rec_metrics:
            values |= metric.compute()
        return values

    def state_dict(self) -> dict[str, Any]:
        """Every metric's state. All ranks must call it."""
        state = {metric.namespace: metric.state_dict() for metric in self.rec_metrics}
        if self.throughput_metric is not None:
            state[ThroughputMetric.namespace] = self.throughput_metric.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`, which any number of ranks may have written.

        Raises:
            ValueError: other metrics.
        """
        own: dict[str, Any] = {metric.namespace: metric for metric in self.rec_metrics}
        if self.throughput_metric is not None:
            own[ThroughputMetric.namespace] = self.throughput_metric
        if set(own) != set(state):
            raise ValueError(f"this is the state of {sorted(state)}, and this module measures {sorted(own)}")
        for name, metric in own.items():
            metric.load_state_dict(state[name])


def output_of(model_out: Mapping[str, Tensor], key: str, task: str | None) -> Tensor:
    """What a task reads of a model's output; a task of None is a metric that reads besides all tasks.

    Raises:
        ValueError: the output does not have it.
    """
    if key not in model_out:
        who = "a metric" if task is None else f"task {task!r}"
        raise ValueError(
            f"{who} reads {key!r}, and the model's output has {sorted(model_out)}. Fix: return it from the model, or "
            f"change the name in the task"
        )
    return model_out[key]


def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    process_group: Any = None,
) -> RecMetricModule:
    """The metrics of a config.

    Args:
        metric_class: `RecMetricModule` or a subclass.
        metrics_config: the metrics.
        batch_size: samples of one rank in a step.
        world_size, my_rank, process_group: the ranks.

    Raises:
        ValueError: an unknown metric, or arguments that it does not take.
    """
    metrics = []
    tasks = metrics_config.rec_tasks or [DefaultTaskInfo]
    for kind, definition in metrics_config.rec_metrics.items():
        if kind not in METRICS:
            raise ValueError(f"metric {kind!r} does not exist. Fix: use one of {', '.join(m.name for m in METRICS)}")
        try:
            metric = METRICS[kind](
                world_size,
                my_rank,
                batch_size,
                definition.rec_tasks or tasks,
                window_size=definition.window_size,
                should_validate_update=metrics_config.should_validate_update,
                process_group=process_group,
                **(definition.arguments or {}),
            )
        except TypeError as error:
            raise ValueError(f"{METRICS[kind].__name__} cannot take {definition.arguments}: {error}") from error
        metrics.append(metric)
    timed = metrics_config.throughput_metric
    throughput = None
    if timed is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=timed.window_size,
            warmup_steps=timed.warmup_steps,
        )
    return metric_class(batch_size, world_size, tasks, metrics, throughput)
