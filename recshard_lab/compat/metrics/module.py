"""All metrics of a model in one object: ``torchrec.metrics.metric_module``."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recshard_lab.compat.metrics import classes, curves, entropies, means, order, sums, tower_qps
from recshard_lab.compat.metrics.config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricEnum,
    RecMetricEnumBase,
    RecTaskInfo,
    StateMetricEnum,
)
from recshard_lab.compat.metrics.names import MetricNamespace, compose_customized_metric_key, compose_metric_namespace
from recshard_lab.compat.metrics.rec_metric import RecMetric, RecMetricList
from recshard_lab.compat.metrics.throughput import ThroughputMetric
from recshard_lab.train.metrics.module import output_of

MODEL_METRIC_LABEL = "model"

REC_METRICS_MAPPING: dict[RecMetricEnumBase, type[RecMetric]] = {
    RecMetricEnum.NE: sums.NEMetric,
    RecMetricEnum.NE_POSITIVE: entropies.NEPositiveMetric,
    RecMetricEnum.SEGMENTED_NE: entropies.SegmentedNEMetric,
    RecMetricEnum.RECALIBRATED_NE: entropies.RecalibratedNEMetric,
    RecMetricEnum.RECALIBRATED_CALIBRATION: entropies.RecalibratedCalibrationMetric,
    RecMetricEnum.CTR: sums.CTRMetric,
    RecMetricEnum.CALIBRATION: sums.CalibrationMetric,
    RecMetricEnum.AUC: order.AUCMetric,
    RecMetricEnum.AUPRC: curves.AUPRCMetric,
    RecMetricEnum.RAUC: curves.RAUCMetric,
    RecMetricEnum.MSE: sums.MSEMetric,
    RecMetricEnum.MAE: sums.MAEMetric,
    RecMetricEnum.MULTICLASS_RECALL: classes.MulticlassRecallMetric,
    RecMetricEnum.WEIGHTED_AVG: sums.WeightedAvgMetric,
    RecMetricEnum.TOWER_QPS: tower_qps.TowerQPSMetric,
    RecMetricEnum.RECALL_SESSION_LEVEL: order.RecallSessionMetric,
    RecMetricEnum.PRECISION_SESSION_LEVEL: order.PrecisionSessionMetric,
    RecMetricEnum.ACCURACY: sums.AccuracyMetric,
    RecMetricEnum.NDCG: order.NDCGMetric,
    RecMetricEnum.XAUC: sums.XAUCMetric,
    RecMetricEnum.SCALAR: means.ScalarMetric,
    RecMetricEnum.PRECISION: sums.PrecisionMetric,
    RecMetricEnum.RECALL: sums.RecallMetric,
    RecMetricEnum.SERVING_NE: entropies.ServingNEMetric,
    RecMetricEnum.SERVING_CALIBRATION: entropies.ServingCalibrationMetric,
    RecMetricEnum.OUTPUT: means.OutputMetric,
    RecMetricEnum.TENSOR_WEIGHTED_AVG: means.TensorWeightedAvgMetric,
    RecMetricEnum.CALI_FREE_NE: entropies.CaliFreeNEMetric,
    RecMetricEnum.UNWEIGHTED_NE: entropies.UnweightedNEMetric,
    RecMetricEnum.HINDSIGHT_TARGET_PR: classes.HindsightTargetPRMetric,
    RecMetricEnum.NMSE: means.NMSEMetric,
    RecMetricEnum.AVERAGE: means.AverageMetric,
    RecMetricEnum.MULTI_LABEL_PRECISION: classes.MultiLabelPrecisionMetric,
    RecMetricEnum.NUM_POSITIVE_SAMPLES: means.NumPositiveSamplesMetric,
    RecMetricEnum.SUM_WEIGHTS: means.SumWeightsMetric,
    RecMetricEnum.NUM_MISSING_LABELS: means.NumMissingLabelsMetric,
    RecMetricEnum.WEIGHTED_SUM_PREDICTIONS: means.WeightedSumPredictionsMetric,
}
"""The metric of each name. Add yours here, so that a config can name them.

TorchRec 1.8 has no metric for LOG_LOSS and SERVING_AE_LOSS. The cross entropy is a value of `NEMetric` with
``arguments={"include_logloss": True}``.
"""

STATE_METRICS_NAMESPACE_MAPPING = {
    StateMetricEnum.OPTIMIZERS: MetricNamespace.OPTIMIZERS,
    StateMetricEnum.MODEL_CONFIGURATOR: MetricNamespace.MODEL_CONFIGURATOR,
}


class StateMetric(ABC):
    """Values of a part of a model, such as an optimizer. Classes of yours define them."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Tensor | float]:
        """Name -> value."""


class Metrics(Mapping[str, Any]):
    """Key -> value of all metrics, computed already. TorchRec computes them in the background on some machines.

    Args:
        values: the values.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Metrics({self._values})"

    def is_resolved(self) -> bool:
        """Whether the values are there: always."""
        return True

    def resolve(self) -> dict[str, Any]:
        """The values as a dict."""
        return dict(self._values)

    def subscribe(self, callback: Callable[[dict[str, Any]], None]) -> None:
        """Calls a function with the values."""
        callback(self.resolve())

    def update(self, other: Mapping[str, Any]) -> None:
        """Adds values."""
        self._values.update(other)


class RecMetricModule(nn.Module):
    """Updates metrics with a model's outputs.

    Args:
        batch_size: samples of one rank in a step.
        world_size: the number of ranks.
        rec_tasks: the predictions of the model.
        rec_metrics: the metrics.
        throughput_metric: samples per second.
        state_metrics: key -> a part of the model with values.
        compute_interval_steps: steps from one ``compute()`` to the next, for `should_compute`.
        min_compute_interval, max_compute_interval: bounds of that interval in seconds. `should_compute` counts a step
            only after the lower one, and each step after the upper one.
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: list[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: dict[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = math.inf,
    ) -> None:
        super().__init__()
        self.batch_size, self.world_size = batch_size, world_size
        self.rec_tasks = rec_tasks or []
        self.rec_metrics = rec_metrics or RecMetricList([])
        self.throughput_metric, self.state_metrics = throughput_metric, state_metrics or {}
        self.compute_interval_steps = compute_interval_steps
        self.min_compute_interval, self.max_compute_interval = min_compute_interval, max_compute_interval
        self.trained_batches = 0
        self._computed_at = time.monotonic()

    def _update_rec_metrics(self, model_out: dict[str, Tensor], **kwargs: Any) -> None:
        """Passes the model's output to the metrics. Override it for other outputs."""
        if not len(self.rec_metrics):
            return
        columns: dict[str, dict[str, Tensor]] = {"predictions": {}, "labels": {}, "weights": {}}
        for task in self.rec_tasks:
            keys = (task.prediction_name, task.label_name, task.weight_name)
            for column, key in zip(columns.values(), keys, strict=True):
                column[task.name] = output_of(model_out, key, task.name).flatten()
        required = self.rec_metrics.get_required_inputs()
        if required:
            kwargs["required_inputs"] = {key: output_of(model_out, key, None).flatten() for key in required}
        self.rec_metrics.update(**columns, **kwargs)

    def update(self, model_out: dict[str, Tensor], **kwargs: Any) -> None:
        """Adds one step: tensors under the names of the tasks.

        Raises:
            ValueError: a prediction, a label, a weight or a required input is missing.
        """
        self._update_rec_metrics(model_out, **kwargs)
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        self.trained_batches += 1

    def should_compute(self) -> bool:
        """Whether it is time for ``compute()``."""
        waited = time.monotonic() - self._computed_at
        due = self.trained_batches % self.compute_interval_steps == 0
        return waited >= self.max_compute_interval or (due and waited >= self.min_compute_interval)

    def compute(self) -> Metrics:
        """The values of all metrics. All ranks call it. By default only rank 0 has values of `rec_metrics`."""
        self._computed_at = time.monotonic()
        values: dict[str, Any] = dict(self.rec_metrics.compute())
        if self.throughput_metric is not None:
            values |= self.throughput_metric.compute()
        for key, part in self.state_metrics.items():
            values |= {compose_customized_metric_key(key, name): value for name, value in part.get_metrics().items()}
        return Metrics(values)

    def async_compute(self) -> Metrics:
        """As `compute`."""
        return self.compute()

    def local_compute(self) -> Metrics:
        """The values of `rec_metrics` of this rank's samples."""
        return Metrics(self.rec_metrics.local_compute())

    def sync(self) -> None:
        """Replaces the states by those of all ranks, reduced, until `unsync`. All ranks call it."""
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Restores this rank's states."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Removes all samples of `rec_metrics`."""
        self.rec_metrics.reset()

    def get_required_inputs(self) -> list[str] | None:
        """Keys of the model's output that the metrics read besides those of the tasks; None if there are none."""
        return self.rec_metrics.get_required_inputs()

    def shutdown(self) -> None:
        """Has nothing to stop: no thread computes."""


def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: Mapping[StateMetricEnum, StateMetric],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    batch_size_stages: Sequence[BatchSizeStage] | None = None,
    module_kwargs: dict[str, Any] | None = None,
) -> RecMetricModule:
    """The metrics of a config.

    Args:
        metric_class: `RecMetricModule` or a subclass.
        metrics_config: the metrics.
        batch_size: samples of one rank in a step.
        world_size, my_rank, process_group: the ranks.
        state_metrics_mapping: the objects of the config's ``state_metrics``.
        device: where the states are stored.
        batch_size_stages: as of `ThroughputMetric`.
        module_kwargs: further arguments of `metric_class`.

    Raises:
        KeyError: a metric that `REC_METRICS_MAPPING` does not have, or a state metric without an object.
        ValueError: a metric with both or neither of ``rec_tasks`` and ``rec_task_indices``.
    """
    metrics = []
    for kind, definition in metrics_config.rec_metrics.items():
        if kind not in REC_METRICS_MAPPING:
            known = ", ".join(str(one) for one in REC_METRICS_MAPPING)
            raise KeyError(
                f"metric {kind} has no class, as in TorchRec 1.8. Fix: use one of {known}, or add its class to "
                f"REC_METRICS_MAPPING"
            )
        if bool(definition.rec_tasks) == bool(definition.rec_task_indices):
            raise ValueError(f"metric {kind}: pass either rec_tasks or rec_task_indices, and not an empty list")
        tasks = definition.rec_tasks or [metrics_config.rec_tasks[number] for number in definition.rec_task_indices]
        metrics.append(
            REC_METRICS_MAPPING[kind](
                world_size=world_size,
                my_rank=my_rank,
                batch_size=batch_size,
                tasks=tasks,
                compute_mode=metrics_config.rec_compute_mode,
                window_size=definition.window_size,
                fused_update_limit=metrics_config.fused_update_limit,
                compute_on_all_ranks=metrics_config.compute_on_all_ranks,
                should_validate_update=metrics_config.should_validate_update,
                process_group=process_group,
                **(definition.arguments or {}),
            )
        )
    timed = metrics_config.throughput_metric
    throughput = None
    if timed is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=timed.window_size,
            warmup_steps=timed.warmup_steps,
            batch_size_stages=batch_size_stages,
        )
    parts = {}
    for part in metrics_config.state_metrics:
        space = STATE_METRICS_NAMESPACE_MAPPING[part]
        parts[compose_metric_namespace(space, str(space))] = state_metrics_mapping[part]
    module = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=metrics_config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput,
        state_metrics=parts,
        compute_interval_steps=metrics_config.compute_interval_steps,
        min_compute_interval=metrics_config.min_compute_interval,
        max_compute_interval=metrics_config.max_compute_interval,
        **(module_kwargs or {}),
    )
    return module.to(device)
