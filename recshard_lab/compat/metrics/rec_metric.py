"""The base classes of metrics: ``torchrec.metrics.rec_metric``.

A *computation* has states, which it adds to in ``update()``, and returns reports of them in ``compute()``. A *metric*
splits a batch into tasks, passes them to its computations, and names the reports. States of all ranks are reduced
before reports are computed; after that each rank has its own states again.

Shape letters: T tasks of a computation (1 if tasks are not fused), n samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recshard_lab.compat.metrics.config import RecComputeMode, RecTaskInfo
from recshard_lab.compat.metrics.names import MetricNameBase, MetricNamespaceBase, MetricPrefix, compose_metric_key

MAX_BUFFER_COUNT = 1000
"""The highest number of parts that a window has."""

PerTask = Tensor | Mapping[str, Tensor]


class RecMetricException(Exception):
    """A metric with wrong settings, or without an input that it requires."""


@dataclass(frozen=True)
class MetricComputationReport:
    """One value of a computation.

    Args:
        name: of the value.
        metric_prefix: lifetime or window.
        value: ``[T]``.
        description: is added to the key.
    """

    name: MetricNameBase
    metric_prefix: MetricPrefix
    value: Tensor
    description: str | None = None


class WindowBuffer:
    """The parts of a window, of which a state is the sum.

    Args:
        max_size: samples of a window.
        max_buffer_count: parts of a window. A window of small parts has fewer samples than `max_size`.

    >>> window, total = WindowBuffer(max_size=2, max_buffer_count=2), torch.zeros(1)
    >>> for value in (1.0, 2.0, 4.0):
    ...     window.aggregate_state(total, torch.tensor([value]), size=1)
    >>> total.item()
    6.0
    """

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self._max_size, self._max_buffer_count = max_size, max_buffer_count
        self._buffers: deque[Tensor] = deque()
        self._sizes: deque[int] = deque()
        self._window_used_size = 0

    @property
    def buffers(self) -> deque[Tensor]:
        """The parts, the oldest first."""
        return self._buffers

    def aggregate_state(self, window_state: Tensor, curr_state: Tensor, size: int) -> None:
        """Adds a part, and removes parts that leave the window.

        Args:
            window_state: the sum of the parts, which is changed in place.
            curr_state: the new part.
            size: its samples.
        """
        self._buffers.append(curr_state.clone())
        self._sizes.append(size)
        window_state += curr_state
        self._window_used_size += size
        while self._window_used_size > self._max_size or len(self._buffers) > self._max_buffer_count:
            window_state -= self._buffers.popleft()
            self._window_used_size -= self._sizes.popleft()


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda states: states.sum(0),
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
    "min": lambda states: states.amin(0),
}


class RecMetricComputation(nn.Module, ABC):
    """The states of a metric and what follows from them. Subclasses define ``update`` and ``_compute``.

    Args:
        my_rank: this rank.
        batch_size: samples of one rank in a step.
        n_tasks: T.
        window_size: samples of this rank in a window.
        compute_on_all_ranks: whether all ranks have reports. Otherwise only rank 0 has.
        should_validate_update: whether tasks without a valid step report 0.
        compute_mode: kept for subclasses.
        process_group: the ranks. Default: the default group, if there is one.
        fused_update_limit: kept for subclasses.
        allow_missing_label_with_zero_weight: kept for subclasses.

    Raises:
        RecMetricException: further arguments.
    """

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        process_group: dist.ProcessGroup | None = None,
        fused_update_limit: int = 0,
        allow_missing_label_with_zero_weight: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._my_rank, self._batch_size, self._n_tasks, self._window_size = my_rank, batch_size, n_tasks, window_size
        self._compute_on_all_ranks, self._should_validate_update = compute_on_all_ranks, should_validate_update
        self._compute_mode, self.process_group = compute_mode, process_group
        self._fused_update_limit = fused_update_limit
        self._allow_missing_label_with_zero_weight = allow_missing_label_with_zero_weight
        self._defaults: dict[str, Tensor | list[Any]] = {}
        self._reductions: dict[str, Callable[[Any], Any] | None] = {}
        self._batch_window_buffers: dict[str, WindowBuffer] = {}
        self._own_states: dict[str, Any] | None = None
        if should_validate_update:
            self._add_state("has_valid_update", torch.zeros(n_tasks, dtype=torch.uint8), False, dist_reduce_fx="max")

    # ---- states ----

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        """The attribute of a state's sum over the window."""
        return f"window_{state_name}"

    def get_window_state(self, state_name: str) -> Tensor:
        """A state's sum over the window."""
        state: Tensor = getattr(self, self.get_window_state_name(state_name))
        return state

    def _add_state(
        self,
        name: str,
        default: Tensor | list[Any],
        add_window_state: bool,
        dist_reduce_fx: str | Callable[[Any], Any] | None = None,
        persistent: bool = False,
    ) -> None:
        """Adds a state as an attribute.

        Args:
            name: of the attribute.
            default: the first value: a tensor whose first dimension is T, or an empty list of tensors.
            add_window_state: whether to add the sum over the window.
            dist_reduce_fx: "sum", "mean", "max", "min", or a function: the states of all ranks, stacked -> one state.
                For a list: the lists of all ranks, joined -> one list. None: lists are joined.
            persistent: whether the state is in the state dict.

        Raises:
            RecMetricException: a window of a list, or an unknown reduction.
        """
        if isinstance(dist_reduce_fx, str) and dist_reduce_fx not in (*_REDUCTIONS, "cat"):
            raise RecMetricException(f"dist_reduce_fx {dist_reduce_fx!r} is unknown. Fix: use one of {[*_REDUCTIONS]}")
        reduction = _REDUCTIONS.get(dist_reduce_fx) if isinstance(dist_reduce_fx, str) else dist_reduce_fx
        if isinstance(default, list):
            if add_window_state:
                raise RecMetricException(f"state {name!r} is a list, which has no window. Fix: add_window_state=False")
            setattr(self, name, [])
        else:
            self.register_buffer(name, default.clone(), persistent=persistent)
        self._defaults[name], self._reductions[name] = default, reduction
        if add_window_state:
            window = self.get_window_state_name(name)
            self._add_state(window, default, False, dist_reduce_fx=dist_reduce_fx)
            self._batch_window_buffers[window] = WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    def _aggregate_window_state(self, state_name: str, state: Tensor, num_samples: int) -> None:
        """Adds a part of `num_samples` samples to the window of a state."""
        window = self.get_window_state_name(state_name)
        part = state.detach().to(self.get_window_state(state_name))
        self._batch_window_buffers[window].aggregate_state(getattr(self, window), part, num_samples)

    def reset(self) -> None:
        """Removes all samples."""
        for name, default in self._defaults.items():
            current = getattr(self, name)
            setattr(self, name, [] if isinstance(default, list) else default.clone().to(current.device))
        for window in self._batch_window_buffers:
            self._batch_window_buffers[window] = WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    # ---- all ranks ----

    def sync(self) -> None:
        """Replaces the states by those of all ranks, reduced, until `unsync`. All ranks call it.

        Raises:
            RecMetricException: they are reduced already.
        """
        if self._own_states is not None:
            raise RecMetricException("the states are those of all ranks already. Fix: call unsync() first")
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
            return
        self._own_states = {name: getattr(self, name) for name in self._defaults}
        device = next((state.device for state in self._own_states.values() if isinstance(state, Tensor)), None)
        ranks: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(ranks, _on(self._own_states, torch.device("cpu")), self.process_group)
        for name, reduction in self._reductions.items():
            states = [_on(rank[name], device) for rank in ranks]
            if isinstance(states[0], list):
                joined = [part for state in states for part in state]
                setattr(self, name, reduction(joined) if reduction and joined else joined)
            else:
                stacked = torch.stack(states)
                setattr(self, name, reduction(stacked) if reduction else stacked)

    def unsync(self) -> None:
        """Restores this rank's states."""
        for name, state in (self._own_states or {}).items():
            setattr(self, name, state)
        self._own_states = None

    # ---- what subclasses define ----

    @abstractmethod
    def update(self, *, predictions: Tensor | None, labels: Tensor, weights: Tensor | None, **kwargs: Any) -> None:
        """Adds samples to the states.

        Args:
            predictions, labels, weights: ``[T, n]``.
            kwargs: ``required_inputs``, name -> ``[n]``, and others that the caller of the metric passed.
        """

    @abstractmethod
    def _compute(self) -> list[MetricComputationReport]: ...

    def pre_compute(self) -> None:
        """Is called before the states of all ranks are reduced."""

    def compute(self) -> list[MetricComputationReport]:
        """The reports of all ranks' samples. All ranks call it; ranks other than 0 have none by default."""
        synced = self._own_states is None
        if synced:
            self.sync()
        try:
            return self.local_compute() if self._my_rank == 0 or self._compute_on_all_ranks else []
        finally:
            if synced:
                self.unsync()

    def local_compute(self) -> list[MetricComputationReport]:
        """The reports of this rank's samples."""
        reports = self._compute()
        if not self._should_validate_update:
            return reports
        valid = self.has_valid_update.bool()
        return [
            MetricComputationReport(
                report.name,
                report.metric_prefix,
                torch.where(valid, report.value, torch.zeros_like(report.value)),
                report.description,
            )
            for report in reports
        ]

    has_valid_update: Tensor


def _on(state: Any, device: torch.device | None) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to(device)
    if isinstance(state, dict):
        return {name: _on(part, device) for name, part in state.items()}
    return [_on(part, device) for part in state] if isinstance(state, list) else state


_FUSED = (RecComputeMode.FUSED_TASKS_COMPUTATION, RecComputeMode.FUSED_TASKS_AND_STATES_COMPUTATION)


class RecMetric(nn.Module, ABC):
    """A metric of some tasks. Subclasses set ``_namespace`` and ``_computation_class``.

    Args:
        world_size, my_rank: the ranks.
        batch_size: samples of one rank in a step.
        tasks: the predictions.
        compute_mode: whether tasks share one computation.
        window_size: samples of all ranks in a window.
        fused_update_limit: how many steps are joined before the computations are updated; 0 for none.
        compute_on_all_ranks: whether all ranks have results, not only rank 0.
        should_validate_update: whether steps whose weights are all 0 are skipped.
        process_group: the ranks. Default: the default group, if there is one.
        kwargs: arguments of the computation.

    Raises:
        ValueError: a window that is smaller than a batch.
    """

    _computation_class: ClassVar[type[RecMetricComputation]]
    _namespace: ClassVar[MetricNamespaceBase]
    PREDICTIONS, LABELS, WEIGHTS = "predictions", "labels", "weights"

    def __init__(
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: list[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._world_size, self._my_rank, self._batch_size, self._tasks = world_size, my_rank, batch_size, tasks
        self._window_size = -(-window_size // world_size)
        self._compute_mode, self._fused_update_limit = compute_mode, fused_update_limit
        self._should_validate_update = should_validate_update
        if self._window_size < batch_size:
            raise ValueError(
                f"the window of a rank has {self._window_size} samples, fewer than a batch of {batch_size}. "
                f"Fix: window_size={batch_size * world_size} or more"
            )
        self._fused = compute_mode in _FUSED
        self._waiting: list[dict[str, Any]] = []
        self._required_inputs: set[str] = set()
        parts: Iterable[Any] = [tasks] if self._fused and tasks else tasks
        self._metrics_computations: Any = nn.ModuleList()
        for part in parts:
            self._required_inputs |= self._get_task_required_inputs(part)
            self._metrics_computations.append(
                self._computation_class(
                    my_rank,
                    batch_size,
                    len(part) if isinstance(part, list) else 1,
                    self._window_size,
                    compute_on_all_ranks,
                    should_validate_update,
                    compute_mode=compute_mode,
                    process_group=process_group,
                    fused_update_limit=fused_update_limit,
                    **{**kwargs, **self._get_task_kwargs(part)},
                )
            )
        if kwargs.get("required_inputs") is not None:
            self._required_inputs |= set(kwargs["required_inputs"])

    def _get_task_kwargs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> dict[str, Any]:
        """Arguments of the computation that follow from a task, or from all tasks if they are fused."""
        return {}

    def _get_task_required_inputs(self, task_config: RecTaskInfo | list[RecTaskInfo]) -> set[str]:
        """Names of required inputs of a task, or of all tasks if they are fused."""
        return set()

    def get_required_inputs(self) -> set[str]:
        """Keys of the model's output that `update` takes as ``required_inputs``."""
        return self._required_inputs

    def update(self, *, predictions: PerTask, labels: PerTask, weights: PerTask | None, **kwargs: Any) -> None:
        """Adds this rank's samples of one step.

        Args:
            predictions, labels: task -> ``[n]``, or ``[tasks, n]``. A task without a prediction is skipped.
            weights: the same. Default: 1.
            kwargs: ``required_inputs``, name -> ``[n]``, and others for the computation.

        Raises:
            RecMetricException: an input is missing that the metric requires.
        """
        step = {"predictions": predictions, "labels": labels, "weights": weights, **kwargs}
        if self._fused_update_limit > 0:
            self._waiting.append(step)
            if len(self._waiting) >= self._fused_update_limit:
                self._flush()
        else:
            self._update(step)

    @torch.no_grad()
    def _update(self, step: dict[str, Any]) -> None:
        more = {key: value for key, value in step.items() if key not in ("predictions", "labels", "weights")}
        rows: list[tuple[Tensor, ...]] = []
        for number, task in enumerate(self._tasks):
            parts = [_of_task(step[key], task.name, number) for key in ("predictions", "labels", "weights")]
            if parts[0] is None or parts[1] is None:
                if self._fused:
                    raise RecMetricException(f"task {task.name!r} has no prediction or label, and tasks are fused")
                continue
            prediction, label = self._row(parts[0]), parts[1].reshape(1, -1)
            ones = torch.ones_like(label, dtype=prediction.dtype)
            weight = ones if parts[2] is None else parts[2].reshape(1, -1)
            if self._fused:
                rows.append((prediction, label, weight))
            else:
                self._add(self._metrics_computations[number], prediction, label, weight, more)
        if rows:
            predictions, labels, weights = (torch.cat(column) for column in zip(*rows, strict=True))
            self._add(self._metrics_computations[0], predictions, labels, weights, more)

    def _row(self, prediction: Tensor) -> Tensor:
        """A task's predictions as ``[1, n]``."""
        return prediction.reshape(1, -1)

    def _add(self, computation: Any, predictions: Tensor, labels: Tensor, weights: Tensor, more: Any) -> None:
        if self._should_validate_update:
            valid = (weights != 0).any(-1)
            if not bool(valid.any()):
                return
            computation.has_valid_update = torch.maximum(computation.has_valid_update, valid.to(torch.uint8))
        computation.update(predictions=predictions, labels=labels, weights=weights, **more)

    def _flush(self) -> None:
        """Joins the waiting steps and adds them."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._update(_joined(waiting))

    def compute(self) -> dict[str, Tensor]:
        """``"{namespace}-{task}|{prefix}{name}"`` -> ``[1]``, of all ranks' samples. All ranks call it.

        Values of fused tasks have no dimension. Ranks other than 0 have no values by default.
        """
        self._flush()
        return self._named("compute", "")

    def local_compute(self) -> dict[str, Tensor]:
        """The same of this rank's samples, with ``local_`` before the prefix."""
        self._flush()
        return self._named("local_compute", "local_")

    def _named(self, method: str, before: str) -> dict[str, Tensor]:
        found = {}
        for number, computation in enumerate(self._metrics_computations):
            computation.pre_compute()
            for report in getattr(computation, method)():
                tasks = self._tasks if self._fused else [self._tasks[number]]
                for row, task in enumerate(tasks):
                    key = compose_metric_key(
                        self._namespace, task.name, report.name, report.metric_prefix, report.description
                    )
                    key = key.replace("|", f"|{before}", 1)
                    found[key] = report.value[row] if self._fused else report.value
        return found

    def sync(self) -> None:
        """Replaces the states by those of all ranks, reduced, until `unsync`. All ranks call it."""
        self._flush()
        for computation in self._metrics_computations:
            computation.sync()

    def unsync(self) -> None:
        """Restores this rank's states."""
        for computation in self._metrics_computations:
            computation.unsync()

    def reset(self) -> None:
        """Removes all samples."""
        self._waiting = []
        for computation in self._metrics_computations:
            computation.reset()

    def get_memory_usage(self) -> dict[Tensor, int]:
        """Tensor of a state or window -> its bytes."""
        found: dict[Tensor, int] = {}
        for computation in self._metrics_computations:
            states = [getattr(computation, name) for name in computation._defaults]
            parts = [part for buffer in computation._batch_window_buffers.values() for part in buffer.buffers]
            for tensor in [*_tensors(states), *parts]:
                found[tensor] = tensor.numel() * tensor.element_size()
        return found


def _of_task(given: PerTask | None, task: str, number: int) -> Tensor | None:
    if given is None:
        return None
    return given[number] if isinstance(given, Tensor) else given.get(task)


def _tensors(states: Sequence[Any]) -> Iterator[Tensor]:
    for state in states:
        yield from [state] if isinstance(state, Tensor) else state


def _joined(steps: Sequence[Any]) -> Any:
    """Tensors of several steps, joined along their last dimension."""
    first = steps[0]
    if isinstance(first, Mapping):
        return {key: _joined([step[key] for step in steps]) for key in first}
    return torch.cat(list(steps), dim=-1) if isinstance(first, Tensor) else first


class RecMetricList(nn.Module):
    """Several metrics as one.

    Args:
        rec_metrics: the metrics.
    """

    def __init__(self, rec_metrics: list[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics: Any = nn.ModuleList(rec_metrics)

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __getitem__(self, number: int) -> RecMetric:
        metric: RecMetric = self.rec_metrics[number]
        return metric

    def get_required_inputs(self) -> list[str] | None:
        """Keys of the model's output that the metrics require; None if there are none."""
        return sorted(set().union(*(metric.get_required_inputs() for metric in self.rec_metrics))) or None

    def update(self, *, predictions: PerTask, labels: PerTask, weights: PerTask | None, **kwargs: Any) -> None:
        """`RecMetric.update` of each."""
        for metric in self.rec_metrics:
            metric.update(predictions=predictions, labels=labels, weights=weights, **kwargs)

    def compute(self) -> dict[str, Tensor]:
        """The values of all metrics."""
        return {key: value for metric in self.rec_metrics for key, value in metric.compute().items()}

    def local_compute(self) -> dict[str, Tensor]:
        """The values of this rank's samples."""
        return {key: value for metric in self.rec_metrics for key, value in metric.local_compute().items()}

    def sync(self) -> None:
        """`RecMetric.sync` of each."""
        for metric in self.rec_metrics:
            metric.sync()

    def unsync(self) -> None:
        """`RecMetric.unsync` of each."""
        for metric in self.rec_metrics:
            metric.unsync()

    def reset(self) -> None:
        """Removes all samples."""
        for metric in self.rec_metrics:
            metric.reset()
