"""The settings of metrics: ``torchrec.metrics.metrics_config``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from recshard_lab.compat.metrics.names import StrValueMixin


class RecMetricEnumBase(StrValueMixin, Enum):
    """The base of enums of metrics, for metrics of yours."""


class RecMetricEnum(RecMetricEnumBase):
    """TorchRec's metrics. `REC_METRICS_MAPPING` has the class of each, but for LOG_LOSS and SERVING_AE_LOSS."""

    NE = "ne"
    NE_POSITIVE = "ne_positive"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    SEGMENTED_NE = "segmented_ne"
    LOG_LOSS = "log_loss"
    CTR = "ctr"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    MULTICLASS_RECALL = "multiclass_recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    WEIGHTED_AVG = "weighted_avg"
    TOWER_QPS = "tower_qps"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    XAUC = "xauc"
    SCALAR = "scalar"
    PRECISION = "precision"
    RECALL = "recall"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_AE_LOSS = "serving_ae_loss"
    OUTPUT = "output"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    NMSE = "nmse"
    AVERAGE = "average"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"


class StateMetricEnum(StrValueMixin, Enum):
    """Parts of a model with a `StateMetric`."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"


class RecComputeMode(Enum):
    """Whether the tasks of a metric share one computation. Results are equal; fused ones have one dimension less."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass(unsafe_hash=True)
class SessionMetricDef:
    """The sessions of samples.

    Args:
        session_var_name: the name of the required input with the session of each sample.
        top_threshold: how many samples of a session are predicted as positive.
        run_ranking_of_labels: whether the labels with the highest values count as 1, and all others as 0.
    """

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """A prediction of a model, and its keys in the model's output.

    Args:
        name: the name in the keys of results.
        label_name, prediction_name, weight_name: keys in a model's output.
        session_metric_def: sessions, for metrics that need them.
        is_negative_task: whether NDCG reads labels and predictions as ``1 - value``.
        tensor_name: the required input that `TensorWeightedAvgMetric` averages.
        weighted: whether weights count in that average.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None
    is_negative_task: bool = False
    tensor_name: str | None = None
    weighted: bool = True


DefaultTaskInfo = RecTaskInfo()


@dataclass
class RecMetricDef:
    """The settings of one metric.

    Args:
        rec_tasks: its tasks. Pass these or `rec_task_indices`.
        rec_task_indices: numbers of its tasks in the config.
        window_size: samples of all ranks in a window.
        arguments: arguments of this metric only.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = 10_000_000
    arguments: dict[str, Any] | None = None


@dataclass
class ThroughputDef:
    """The settings of throughput: seconds of the window, and steps before it is measured."""

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class BatchSizeStage:
    """A batch size until an iteration.

    Args:
        batch_size: samples of one rank in a step.
        max_iters: the last iteration of the stage, counted from the start. None for the last stage.
    """

    batch_size: int = 0
    max_iters: int | None = 0


def validate_batch_size_stages(batch_size_stages: Sequence[BatchSizeStage] | None) -> None:
    """Checks that the last stage has no end.

    Raises:
        ValueError: it has one.
    """
    if batch_size_stages and batch_size_stages[-1].max_iters is not None:
        raise ValueError(
            f"the last stage of batch sizes ends at iteration {batch_size_stages[-1].max_iters}: later iterations have "
            f"no batch size. Fix: max_iters=None"
        )


@dataclass
class MetricsConfig:
    """The metrics of a model.

    Args:
        rec_tasks: the predictions of the model.
        rec_metrics: the metrics.
        throughput_metric: samples per second; None to omit it.
        rec_compute_mode: as of `RecMetric`.
        fused_update_limit: as of `RecMetric`.
        state_metrics: parts of the model whose `StateMetric` is reported.
        compute_interval_steps: steps from one ``compute()`` to the next, for `RecMetricModule.should_compute`.
        min_compute_interval, max_compute_interval: bounds of that interval in seconds.
        compute_on_all_ranks: whether all ranks have results, not only rank 0.
        should_validate_update: whether steps whose weights are all 0 are skipped.
        enable_pt2_compile, should_clone_update_inputs, use_cpu_offloaded_rec_metric_module: accepted as in TorchRec;
            they choose how TorchRec computes, not its results.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnumBase, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = math.inf
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    enable_pt2_compile: bool = False
    should_clone_update_inputs: bool = False
    use_cpu_offloaded_rec_metric_module: bool | None = None


DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()
