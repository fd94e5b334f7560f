"""Semi-synchronous training: a local optimizer steps each time, and a global one every few steps.

A global optimizer, such as DiLoCo (arXiv 2311.08105), exchanges weights or gradients with other workers. Its inner
torch optimizer has a method ``global_step(step, closure)``; `step` is a 0-d int64 tensor, the number of local steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from recshard_lab.optim import KeyedOptimizer

_LOCAL, _GLOBAL = "semi_sync_local_", "semi_sync_global_"
_LOCAL_STEP, _GLOBAL_STEP = "__semisync_local_step_counter__", "__semisync_global_step_counter__"


class SemisyncOptimizer(KeyedOptimizer):
    """Steps a local optimizer, and a global optimizer every `num_local_steps` steps.

    The state of a parameter has the entries of both optimizers with prefixes, and the step counters.

    Args:
        global_params: parameters of the global optimizer.
        optimizer: the local optimizer.
        global_optimizer: a `KeyedOptimizerWrapper` of an optimizer with ``global_step(step, closure)``.
        num_local_steps: local steps for each global step.
        semi_sync_worker_shard_group: kept, and not used: TorchRec reserves it for its metrics.
        offload_global_model: whether global parameters are in host memory. They must be on the CPU then.
        non_blocking: whether copies between a GPU and host memory are asynchronous; without effect on the CPU.

    Raises:
        ValueError: `num_local_steps` below 1, a parameter name with different tensors in both optimizers, or
            `offload_global_model` with parameters on another device.

    >>> from recshard_lab.optim import KeyedOptimizerWrapper
    >>> class Halve(torch.optim.SGD):
    ...     def global_step(self, step, closure):
    ...         for group in self.param_groups:
    ...             for weight in group["params"]:
    ...                 weight.data.mul_(0.5)
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> inner = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=0.1))
    >>> outer = KeyedOptimizerWrapper({"w": weight}, lambda params: Halve(params, lr=1.0))
    >>> optimizer = SemisyncOptimizer([weight], inner, outer, num_local_steps=2)
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(1)
    ...     optimizer.step()
    >>> round(weight.item(), 4)
    0.4
    """

    def __init__(
        self,
        global_params: Iterable[Any],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: dist.ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        if num_local_steps < 1:
            raise ValueError(f"num_local_steps must be at least 1, got {num_local_steps}")
        self._worker_model_params = list(global_params)
        self._optimizer, self._global_optimizer = optimizer, global_optimizer
        self._num_local_steps = num_local_steps
        self._worker_shard_group = semi_sync_worker_shard_group
        self._non_blocking = non_blocking
        self._local_step_counter = torch.zeros((), dtype=torch.int64)
        self._global_step_counter = torch.zeros((), dtype=torch.int64)
        self._prepare()
        for name in set(optimizer.params) & set(global_optimizer.params):
            if optimizer.params[name] is not global_optimizer.params[name]:
                raise ValueError(
                    f"parameter {name!r} is another tensor in each optimizer. Fix: use one tensor, or rename one"
                )
        away = sorted({str(p.device) for p in global_optimizer.params.values() if p.device.type != "cpu"})
        if offload_global_model and away:
            raise ValueError(
                f"offload_global_model=True needs global parameters on the CPU, got {away}. Fix: leave it out"
            )

    @property
    def params(self) -> dict[str, Any]:  # type: ignore[override]
        """The parameters of both optimizers, and the step counters."""
        counters = {_GLOBAL_STEP: self._global_step_counter, _LOCAL_STEP: self._local_step_counter}
        return {**self._optimizer.params, **self._global_optimizer.params, **counters}

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """Parameter -> the entries of both optimizers with prefixes. With global entries, the step counters too."""
        found: dict[Any, Any] = {}
        for prefix, optimizer in self._parts():
            for param, entry in optimizer.state.items():
                own = found.setdefault(param, {})
                own |= {f"{prefix}{key}": value for key, value in entry.items()}
                if prefix == _GLOBAL and entry:
                    own |= {_GLOBAL_STEP: self._global_step_counter, _LOCAL_STEP: self._local_step_counter}
        return {param: entry for param, entry in found.items() if entry}

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """The groups of the local optimizer, then of the global one."""
        return [*self._optimizer.param_groups, *self._global_optimizer.param_groups]

    def _parts(self) -> tuple[tuple[str, KeyedOptimizer], ...]:
        return (_LOCAL, self._optimizer), (_GLOBAL, self._global_optimizer)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One local step; each `num_local_steps`-th time also a global one."""
        self._optimizer.step(closure)
        self._local_step_counter += 1
        if int(self._local_step_counter) % self._num_local_steps == 0:
            inner: Any = getattr(self._global_optimizer, "_optimizer", self._global_optimizer)
            inner.global_step(self._local_step_counter, closure)
            self._global_step_counter += 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of both optimizers."""
        for _, optimizer in self._parts():
            optimizer.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies a state into both optimizers and the step counters.

        Raises:
            ValueError: as of `KeyedOptimizer.check_state_dict`; then nothing has changed.
        """
        self.check_state_dict(state_dict)
        names = self._names()
        for prefix, optimizer in self._parts():
            for param, entry in optimizer.state.items():
                loaded = state_dict["state"].get(names[id(param)], {})
                for key in entry:
                    self._load_value(entry, key, loaded[f"{prefix}{key}"])
        counted = [entry for entry in state_dict["state"].values() if _LOCAL_STEP in entry]
        if counted:
            self._local_step_counter.fill_(int(counted[0][_LOCAL_STEP]))
            self._global_step_counter.fill_(int(counted[0][_GLOBAL_STEP]))
        if self.defaults["_save_param_groups"]:
            self._load_groups(state_dict["param_groups"])
        for _, optimizer in self._parts():
            optimizer.post_load_state_dict()

    @staticmethod
    def _load_value(entry: dict[str, Any], key: str, value: Any) -> None:
        if isinstance(entry[key], Tensor):
            entry[key].detach().copy_(torch.as_tensor(value))
        else:
            entry[key] = value

    def _paired_groups(self, given: Iterable[Mapping[str, Any]]) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
        loaded, groups = list(given), self.param_groups
        members = [sorted(group["params"]) for group in loaded]
        if members != [self._names_of(group) for group in groups]:
            raise ValueError(
                f"param_groups of {members} do not fit the groups of this optimizer, "
                f"{[self._names_of(group) for group in groups]}"
            )
        return list(zip(groups, loaded, strict=True))

    def save_param_groups(self, save: bool) -> None:
        """Whether state dicts contain the param groups of both optimizers."""
        super().save_param_groups(save)
        for _, optimizer in self._parts():
            optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Calls the method of this name of both optimizers, if they have it."""
        for _, optimizer in self._parts():
            if hasattr(optimizer, "set_optimizer_step"):
                optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Calls the method of this name of both optimizers, if they have it."""
        for _, optimizer in self._parts():
            if hasattr(optimizer, "update_hyper_parameters"):
                optimizer.update_hyper_parameters(params_dict)
