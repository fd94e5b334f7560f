"""Several keyed optimizers as one, and one inside another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.optim.keyed import KeyedOptimizer, differ, section


class _Parts(KeyedOptimizer):
    """One or several keyed optimizers seen as one. ``params``, ``state`` and ``param_groups`` are always theirs."""

    def __init__(self, optims: Sequence[tuple[str, KeyedOptimizer]]) -> None:
        self._prepare()
        self._optims = list(optims)
        self._wrapped = [optimizer for _, optimizer in self._optims]
        seen: dict[str, str] = {}
        for own_name, optimizer in self._own_names():
            for key in own_name:
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of every part."""
        for _, optimizer in self._optims:
            optimizer.zero_grad(set_to_none=set_to_none)

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
        differ("this optimizer's parameters", self.params, {*self.params, *section(state_dict, "state")})
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

    def _parts(self, state_dict: Mapping[str, Any]) -> list[tuple[KeyedOptimizer, dict[str, Any]]]:
        """Each optimizer with its own part of a state dict, under its own names."""
        parts = []
        for own_name, optimizer in self._own_names():
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

    def _own_names(self) -> list[tuple[dict[str, str], KeyedOptimizer]]:
        """Name here -> own name, of each optimizer."""
        return [
            ({self.prepend_opt_key(name, prefix): name for name in optimizer.params}, optimizer)
            for prefix, optimizer in self._optims
        ]

    def post_load_state_dict(self) -> None:
        for _, optimizer in self._optims:
            optimizer.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        for own_name, optimizer in self._own_names():
            optimizer.init_state([own_name[n] for n in sparse_grad_parameter_names or () if n in own_name])

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        for _, optimizer in self._optims:
            optimizer.save_param_groups(save)


@names_wrong_arguments
class CombinedOptimizer(_Parts):
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
        super().__init__([("", own) if isinstance(own, KeyedOptimizer) else (own[0], own[1]) for own in optims])

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """(prefix, optimizer) of each part."""
        return self._optims

    def __repr__(self) -> str:
        return "\n".join(f"{prefix or '(no prefix)'}: {optimizer!r}" for prefix, optimizer in self._optims)

    def step(self, closure: Any = None) -> Any:
        """Steps every part, in order; the closure is evaluated once, before them."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for _, optimizer in self._optims:
            optimizer.step()
        return loss


class OptimizerWrapper(_Parts):
    """A keyed optimizer around another one; the base of those that do something before or after its step.

    Args:
        optimizer: the one inside. Parameters, state and groups are always its own.
        beside: further parts, which have parameters and states and never step.
    """

    def __init__(self, optimizer: KeyedOptimizer, *beside: KeyedOptimizer) -> None:
        self._optimizer = optimizer
        super().__init__([("", own) for own in (optimizer, *beside)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._optimizer!r})"

    def step(self, closure: Any = None) -> Any:
        """As of the optimizer inside."""
        return self._optimizer.step(closure)
