"""Several keyed optimizers as one, and one inside another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.optim.keyed import KeyedOptimizer, differ, section


@names_wrong_arguments
class CombinedOptimizer(KeyedOptimizer):
    """Steps, clears, saves and loads several optimizers together: that of the tables and that of the dense part, say.

    ``params``, ``state`` and ``param_groups`` are those of the parts, as they are at the moment; a group is the very
    dictionary that its optimizer reads, so that a schedule over the combination reaches each part.

    Args:
        optims: the parts; ``(prefix, optimizer)`` puts ``prefix.`` before its parameters' names.

    Raises:
        ValueError: two parameters with one name, or parts that disagree about saving their param groups.

    >>> from recshard_lab.optim import KeyedOptimizerWrapper
    >>> one, two = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    >>> make = lambda params: torch.optim.SGD(params, lr=0.5)
    >>> parts = [KeyedOptimizerWrapper({"w": one}, make), ("over", KeyedOptimizerWrapper({"w": two}, make))]
    >>> list(CombinedOptimizer(parts).params)
    ['w', 'over.w']
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optims = [("", own) if isinstance(own, KeyedOptimizer) else (own[0], own[1]) for own in optims]
        self._prepare()
        seen: dict[str, str] = {}
        for prefix, optimizer in self._optims:
            for name in optimizer.params:
                key = self.prepend_opt_key(name, prefix)
                if key in seen:
                    raise ValueError(
                        f"two of the optimizers have a parameter named {key!r} ({seen[key]} and "
                        f"{type(optimizer).__name__}): give one of them a prefix, (prefix, optimizer)"
                    )
                seen[key] = type(optimizer).__name__
        saves = [optimizer.defaults["_save_param_groups"] for _, optimizer in self._optims]
        if len(set(saves)) > 1:
            raise ValueError(f"some of the optimizers save param groups and some do not ({saves}): make them agree")
        self.defaults["_save_param_groups"] = any(saves)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """``opt_key.name``, without the dot where either is empty."""
        return ".".join(part for part in (opt_key, name) if part)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """(prefix, optimizer) of each part."""
        return self._optims

    @property
    def params(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            self.prepend_opt_key(name, prefix): param
            for prefix, optimizer in self._optims
            for name, param in optimizer.params.items()
        }

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {param: entry for _, optimizer in self._optims for param, entry in optimizer.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for _, optimizer in self._optims for group in optimizer.param_groups]

    @property
    def stepped_in_backward(self) -> list[str]:
        return [self.prepend_opt_key(n, prefix) for prefix, own in self._optims for n in own.stepped_in_backward]

    def defer_steps(self) -> None:
        for _, optimizer in self._optims:
            optimizer.defer_steps()

    def fused_norm_power(self, norm_type: float) -> list[Tensor]:
        return [power for _, optimizer in self._optims for power in optimizer.fused_norm_power(norm_type)]

    def scale_fused_gradients(self, factor: Tensor) -> None:
        for _, optimizer in self._optims:
            optimizer.scale_fused_gradients(factor)

    def __repr__(self) -> str:
        return "\n".join(f"{prefix or '(no prefix)'}: {optimizer!r}" for prefix, optimizer in self._optims)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every part."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Steps every part, in order; the closure is evaluated once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, optimizer in self._optims:
            optimizer.step()
        return loss

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {"state": {}}
        for prefix, optimizer in self._optims:
            own = optimizer.state_dict()
            saved["state"] |= {self.prepend_opt_key(name, prefix): entry for name, entry in own["state"].items()}
            for group in own.get("param_groups", []):
                names = [self.prepend_opt_key(name, prefix) for name in group["params"]]
                saved.setdefault("param_groups", []).append({**group, "params": names})
        return saved

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._known(section(state_dict, "state"))
        for optimizer, own in self._parts(state_dict):
            optimizer.check_state_dict(own)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads every part; nothing changes unless all of them fit.

        Raises:
            ValueError: naming what is missing, unknown or mis-shaped.
        """
        self.check_state_dict(state_dict)
        for optimizer, own in self._parts(state_dict):
            optimizer.load_state_dict(own)

    def _known(self, given: Mapping[str, Any]) -> None:
        differ("parameters", self.params, {*self.params, *given})

    def _parts(self, state_dict: Mapping[str, Any]) -> list[tuple[KeyedOptimizer, dict[str, Any]]]:
        """Each optimizer with its own part of a state dict, under its own names."""
        parts = []
        for prefix, optimizer in self._optims:
            own_name = {self.prepend_opt_key(name, prefix): name for name in optimizer.params}
            own: dict[str, Any] = {
                "state": {own_name[key]: entry for key, entry in state_dict["state"].items() if key in own_name}
            }
            if "param_groups" in state_dict:
                own["param_groups"] = [
                    {**group, "params": [own_name[key] for key in group["params"]]}
                    for group in state_dict["param_groups"]
                    if all(key in own_name for key in group["params"])
                ]
            parts.append((optimizer, own))
        return parts

    def post_load_state_dict(self) -> None:
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        for prefix, optimizer in self._optims:
            own_name = {self.prepend_opt_key(name, prefix): name for name in optimizer.params}
            optimizer.init_state([own_name[n] for n in sparse_grad_parameter_names or () if n in own_name])

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        for _, optimizer in self._optims:
            optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Handed on to the parts that count their steps themselves."""
        for _, optimizer in self._optims:
            if hasattr(optimizer, "set_optimizer_step"):
                optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Handed on to the parts that take them."""
        for _, optimizer in self._optims:
            if hasattr(optimizer, "update_hyper_parameters"):
                optimizer.update_hyper_parameters(params_dict)


class OptimizerWrapper(KeyedOptimizer):
    """A keyed optimizer around another one; the base of those that do something before or after its step.

    Args:
        optimizer: the one inside. Parameters, state and groups are always its own.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        self._prepare()
        self.defaults["_save_param_groups"] = optimizer.defaults["_save_param_groups"]

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        return self._optimizer.params

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    @property
    def stepped_in_backward(self) -> list[str]:
        return self._optimizer.stepped_in_backward

    def defer_steps(self) -> None:
        self._optimizer.defer_steps()

    def fused_norm_power(self, norm_type: float) -> list[Tensor]:
        return self._optimizer.fused_norm_power(norm_type)

    def scale_fused_gradients(self, factor: Tensor) -> None:
        self._optimizer.scale_fused_gradients(factor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the optimizer inside."""
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """As of the optimizer inside."""
        return self._optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._optimizer.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def post_load_state_dict(self) -> None:
        self._optimizer.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        self._optimizer.init_state(sparse_grad_parameter_names)

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        self._optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        """Handed on to an optimizer that counts its steps itself."""
        if hasattr(self._optimizer, "set_optimizer_step"):
            self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Handed on to an optimizer that takes them."""
        if hasattr(self._optimizer, "update_hyper_parameters"):
            self._optimizer.update_hyper_parameters(params_dict)
