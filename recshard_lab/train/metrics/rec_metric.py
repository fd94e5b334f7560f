"""The base of all metrics over ranks: tasks, steps, the window, and one value for all ranks.

A *step* is one call of ``update`` on every rank, with the ranks' parts of one global batch. Parts may have any size,
also zero. A window has whole steps, so W ranks and one process with the same global batches have the same window.

Ranks exchange nothing before ``compute()`` or ``state_dict()``, which all ranks must call. Both return the same on
every rank, for all ranks' samples together. Any number of ranks can load a state.

Shape letters: n samples of one update, K steps of the window, W ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import ShardingEnv, all_reduce, compute_device

PerTask = Tensor | Mapping[str, Tensor]
"""One tensor if there is one task; otherwise task -> tensor."""

_WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "0 or 1": lambda labels: (labels != 0) & (labels != 1),
    "finite and not negative": lambda labels: ~(torch.isfinite(labels) & (labels >= 0)),
    "finite": lambda labels: ~torch.isfinite(labels),
    "finite or NaN": torch.isinf,
    "integers from 0": lambda labels: ~((labels >= 0) & (labels == labels.floor())),
}
"""What labels may be -> which labels are something else."""


@dataclass(frozen=True)
class SessionMetricDef:
    """The groups of samples.

    Args:
        session_var_name: key of the groups ``[n]``, integers, in a model's output.
        top_threshold: k of metrics "at k". Default: all places.
    """

    session_var_name: str
    top_threshold: int | None = None


@dataclass(frozen=True)
class RecTaskInfo:
    """A prediction of a model, and its keys in the model's output; as in TorchRec.

    Args:
        name: the name in the metrics' keys.
        label_name, prediction_name, weight_name: keys in a model's output.
        session_metric_def: groups of samples, for metrics that need them.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None


DefaultTaskInfo = RecTaskInfo()


@dataclass(frozen=True)
class Samples:
    """One rank's samples of one step: fp64 ``[n]``, and groups int64 ``[n]`` (zeros without groups)."""

    predictions: Tensor
    labels: Tensor
    weights: Tensor
    groups: Tensor


@names_wrong_arguments
class RecMetric(ABC):
    """A metric over the samples of all ranks; constructor as in TorchRec.

    A value is NaN if it is undefined: without samples, with one class where two are needed, or with a NaN prediction.

    Args:
        world_size: W.
        my_rank: this rank.
        batch_size: samples of one rank in a step. It determines the number of steps in a window.
        tasks: the predictions.
        window_size: samples of all ranks in a window: ``ceil(window_size / (batch_size * W))`` steps.
        should_validate_update: whether to check every value: predictions must be probabilities, and labels and weights
            valid. False avoids a wait for the GPU.
        process_group: the ranks. Default: the default group.

    Raises:
        ValueError: sizes below 1, no task, two of one name, a world of another size.
    """

    namespace: ClassVar[str]
    labels_are: ClassVar[str] = "0 or 1"  # or another key of `_WRONG`
    probabilities: ClassVar[bool] = False  # predictions are in [0, 1]
    grouped: ClassVar[bool] = False

    def __init__(
        self,
        world_size: int = 1,
        my_rank: int = 0,
        batch_size: int = 1,
        tasks: Sequence[RecTaskInfo] = (DefaultTaskInfo,),
        *,
        window_size: int = 100,
        should_validate_update: bool = True,
        process_group: Any = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "window_size": window_size}.items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 62:
                raise ValueError(f"{type(self).__name__}: {name} must be an integer from 1 to 2**62, got {value!r}")
        self.tasks = {task.name: task for task in tasks}
        if not self.tasks or len(self.tasks) != len(tasks):
            names = [task.name for task in tasks]
            raise ValueError(f"{type(self).__name__} needs tasks of different names, at least one; got {names}")
        self.env = _env(world_size, my_rank, process_group)
        self.device = compute_device(self.env)
        self.window_steps = math.ceil(window_size / (batch_size * world_size))
        self.validate = should_validate_update
        self.steps = 0

    @names_wrong_arguments
    def update(
        self,
        *,
        predictions: PerTask,
        labels: PerTask,
        weights: PerTask | None = None,
        groups: PerTask | None = None,
    ) -> None:
        """Adds this rank's samples of one step. A step without samples counts too.

        Args:
            predictions: ``[n]`` or ``[n, 1]`` per task.
            labels: the same shape.
            weights: weight of each sample. Default: 1.
            groups: integers, for metrics of groups.

        Raises:
            ValueError: a task is missing, sizes differ, or values are invalid. Nothing was added.
        """
        taken = {}
        for task in self.tasks:
            given = [_of_task(task, what) for what in (predictions, labels, weights, groups)]
            taken[task] = self._checked(task, *given)
        for task, samples in taken.items():
            self._take(task, samples)
        self.steps += 1

    def compute(self) -> dict[str, Tensor]:
        """``"{metric}-{task}|{window or lifetime}_{metric}"`` -> value, fp64, of all ranks' samples. All ranks call it.

        Raises:
            ValueError: the ranks made different numbers of updates.
        """
        self._check_steps()
        return {
            f"{self.namespace}-{task}|{name}": value
            for task in self.tasks
            for name, value in self._values(task).items()
        }

    def reset(self) -> None:
        """Removes all samples."""
        self.steps = 0
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """The samples or sums of all ranks, the same on every rank. All ranks call it."""
        self._check_steps()
        return {"metric": self.namespace, "steps": self.steps, "tasks": {t: self._state(t) for t in self.tasks}}

    @names_wrong_arguments
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`, which any number of ranks may have written. A shorter window keeps the last steps.

        Raises:
            ValueError: the state of another metric or of other tasks. Nothing was changed.
        """
        found = (state.get("metric"), sorted(state.get("tasks", {})))
        if found != (self.namespace, sorted(self.tasks)):
            raise ValueError(
                f"this is the state of metric {found[0]!r} with tasks {found[1]}, and {type(self).__name__} is "
                f"{self.namespace!r} with tasks {sorted(self.tasks)}"
            )
        self.reset()
        self.steps = int(state["steps"])
        for task in self.tasks:
            self._load(task, state["tasks"][task])

    def _steps_made(self) -> Tensor:
        return torch.tensor([self.steps, self.steps**2], dtype=torch.float64, device=self.device)

    def _check_steps(self) -> None:
        seen = all_reduce(self._steps_made(), self.env, "metrics/steps")
        if float(seen[1]) * self.env.world_size != float(seen[0]) ** 2:
            raise ValueError(
                f"{type(self).__name__}: the ranks made different numbers of updates, this rank {self.steps}. Fix: "
                f"call update() on every rank in every step, with empty tensors if a rank has no samples"
            )

    def _checked(
        self,
        task: str,
        predictions: Tensor | None,
        labels: Tensor | None,
        weights: Tensor | None,
        groups: Tensor | None,
    ) -> Samples:
        if predictions is None or labels is None:
            raise ValueError(f"task {task!r}: predictions and labels are needed, got None")
        predictions, labels = self._predicted(predictions).double(), self._column(labels).double()
        ones = torch.ones(len(predictions), dtype=torch.float64, device=self.device)
        counted = ones if weights is None else self._column(weights).double()
        if self.grouped and groups is None:
            raise ValueError(
                f"{type(self).__name__} compares inside groups. Fix: pass update(groups=...), e.g. user ids"
            )
        if groups is not None and (groups.is_floating_point() or groups.dtype == torch.bool):
            raise ValueError(f"task {task!r}: groups must be integers, got {groups.dtype}")
        by_group = torch.zeros_like(ones, dtype=torch.int64) if groups is None else self._column(groups).long()
        sizes = [len(column) for column in (predictions, labels, counted, by_group)]
        if len(set(sizes)) > 1:
            raise ValueError(f"task {task!r}: predictions, labels, weights and groups must be of one size, got {sizes}")
        if self.validate:
            self._refuse(task, predictions, labels, counted)
        return Samples(predictions, labels, counted, by_group)

    def _column(self, given: Tensor) -> Tensor:
        if given.is_meta:
            raise ValueError("tensors on the meta device have no values")
        return given.detach().flatten().to(self.device)

    def _predicted(self, given: Tensor) -> Tensor:
        return self._column(given)

    def _refuse(self, task: str, predictions: Tensor, labels: Tensor, weights: Tensor) -> None:
        if self.probabilities and bool(((predictions < 0) | (predictions > 1)).any()):
            raise ValueError(
                f"task {task!r}: {type(self).__name__} takes probabilities, got {float(predictions.min()):g} to "
                f"{float(predictions.max()):g}. Fix: pass logits.sigmoid()"
            )
        wrong = _WRONG[self.labels_are](labels)
        if bool(wrong.any()):
            raise ValueError(f"task {task!r}: labels must be {self.labels_are}, got {float(labels[wrong][0]):g}")
        if bool((~(torch.isfinite(weights) & (weights >= 0))).any()):
            raise ValueError(f"task {task!r}: weights must be finite and not negative")

    @abstractmethod
    def _take(self, task: str, samples: Samples) -> None: ...

    @abstractmethod
    def _values(self, task: str) -> dict[str, Tensor]: ...

    @abstractmethod
    def _state(self, task: str) -> dict[str, Any]: ...

    @abstractmethod
    def _load(self, task: str, state: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _forget(self) -> None: ...


def _of_task(task: str, given: PerTask | None) -> Tensor | None:
    if given is None or isinstance(given, Tensor):
        return given
    if task not in given:
        raise ValueError(f"task {task!r} is missing: got {sorted(given)}")
    return given[task]


def _env(world_size: int, my_rank: int, process_group: Any) -> ShardingEnv:
    if world_size == 1 and process_group is None:
        return ShardingEnv(1, my_rank)
    if not dist.is_initialized():
        raise ValueError(f"a metric over {world_size} ranks needs a process group, and none is initialized")
    env = ShardingEnv.from_process_group(process_group or dist.group.WORLD)
    if (env.world_size, env.rank) != (world_size, my_rank):
        raise ValueError(
            f"rank {my_rank} of {world_size} was given, but the process group says rank {env.rank} of {env.world_size}"
        )
    return env
