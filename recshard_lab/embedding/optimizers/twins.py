"""From ordinary torch optimizers to fused ones with the same steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.optimizers.dense import (
    LAMB,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from recshard_lab.embedding.optimizers.spec import OptimizerSpec
from recshard_lab.embedding.optimizers.types import EmbOptimType, WeightDecayMode

_TWINS: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
    torch.optim.AdamW: EmbOptimType.ADAM,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    PartialRowWiseAdam: EmbOptimType.PARTIAL_ROWWISE_ADAM,
    LAMB: EmbOptimType.LAMB,
    PartialRowWiseLAMB: EmbOptimType.PARTIAL_ROWWISE_LAMB,
    LarsSGD: EmbOptimType.LARS_SGD,
}
_SAME_NUMBERS = {"foreach", "fused", "capturable", "differentiable"}  # how torch computes, not what
_HONOURED = {"lr", "eps", "weight_decay"}


def spec_from_optimizer(
    optimizer_class: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any] | None = None
) -> OptimizerSpec:
    """The fused optimizer with the steps of a torch optimizer. Every argument is translated or refused.

    Rows that a batch does not touch keep their weights, even if momentum or weight decay of the dense optimizer would
    move them.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adagrad``, ``Adam`` or ``AdamW``, or one of this library's.
        optimizer_kwargs: its arguments; the class's defaults for the others.

    Raises:
        ValueError: an optimizer without a fused equal, or an argument that the equal does not have.

    >>> spec_from_optimizer(torch.optim.AdamW, {"lr": 0.5}).weight_decay_mode
    <WeightDecayMode.DECOUPLE: 2>
    """
    twin = _TWINS.get(optimizer_class)
    if twin is None:
        known = ", ".join(known.__name__ for known in _TWINS)
        raise ValueError(f"{optimizer_class.__name__} has no fused equal. Fix: choose one of {known}")
    signature = inspect.signature(optimizer_class).parameters
    defaults = {name: signature[name].default for name in signature if name != "params"}
    given = dict(optimizer_kwargs or {})
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ValueError(f"{optimizer_class.__name__} has no argument {unknown}. Fix: use only {list(defaults)}")
    values = {**defaults, **given}
    read: dict[str, Any] = {name: float(values[name]) for name in ("eps", "weight_decay") if name in defaults}
    extra = _EXTRA.get(twin, lambda values: {})(values)
    honoured = _HONOURED | ({"betas"} if "beta1" in extra else set()) | {"decoupled_weight_decay", *extra}
    for name in set(given) - honoured - _SAME_NUMBERS:
        if given[name] != defaults[name]:
            raise ValueError(
                f"{optimizer_class.__name__}({name}={given[name]!r}) cannot run inside backward on the touched rows "
                f"alone. Fix: leave {name} out"
            )
    if twin is EmbOptimType.ADAM and read["weight_decay"]:
        apart = optimizer_class is torch.optim.AdamW or values.get("decoupled_weight_decay", False)
        read["weight_decay_mode"] = WeightDecayMode.DECOUPLE if apart else WeightDecayMode.L2
    return OptimizerSpec(twin, float(values["lr"]), **read, **extra)


def _betas(values: Mapping[str, Any]) -> dict[str, float]:
    beta1, beta2 = values["betas"]
    return {"beta1": float(beta1), "beta2": float(beta2)}


def _lars(values: Mapping[str, Any]) -> dict[str, float]:
    return {"momentum": float(values["momentum"]), "eta": float(values["eta"])}


_EXTRA: dict[EmbOptimType, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    EmbOptimType.ADAM: _betas,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: _betas,
    EmbOptimType.LAMB: _betas,
    EmbOptimType.PARTIAL_ROWWISE_LAMB: _betas,
    EmbOptimType.LARS_SGD: _lars,
}


def spec_of_parameter(parameter: Tensor) -> OptimizerSpec | None:
    """The fused equal of a parameter's optimizer in backward (`apply_optimizer_in_backward`); None without one.

    Raises:
        ValueError: several optimizers on one parameter, or one that cannot be fused.
    """
    classes = getattr(parameter, "_optimizer_classes", [])
    if not classes:
        return None
    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"a parameter has {len(classes)} optimizers in backward, {names}. Fix: apply only one")
    return spec_from_optimizer(classes[0], parameter._optimizer_kwargs[0])  # type: ignore[attr-defined]
