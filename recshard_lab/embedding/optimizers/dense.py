"""Optimizers that torch lacks, as ordinary ones: each runs a fused rule on all rows.

They step whole tensors with ordinary gradients, to train an unsharded model beside a sharded one. A row is one index of
the first axis. Rows whose gradient is all zero keep their weights and their state, as rows that a batch did not touch
in the fused kernels.

Shape letters: E rows, D columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.optimizers.rules import (
    RULES,
    EmbOptimType,
    OptimizerSpec,
    WeightDecayMode,
    accumulate_dtype,
    number_from_0,
    step,
)


class RowOptimizer(torch.optim.Optimizer):
    """Runs a fused rule on ordinary parameters."""

    rule: ClassVar[EmbOptimType]
    states: ClassVar[dict[str, str]] = {"momentum1": "exp_avg", "momentum2": "exp_avg_sq"}
    """The rule's states, and their names here."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        numbers = {name: _checked(name, value) for name, value in defaults.items()}
        try:
            super().__init__(params, numbers)
        except TypeError as error:
            raise ValueError(f"params must be tensors, or dictionaries with 'params': {error}") from error

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters. Returns the loss of ``closure``, if there is one."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)
        return loss

    def _step_one(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
        wide = accumulate_dtype(weight.dtype)
        rows = grad.to(wide).reshape(grad.shape[0] if grad.dim() else 1, -1)
        before, state = weight.to(wide).view_as(rows), self.state[weight]
        shapes = OptimizerSpec(self.rule).state_shapes(*rows.shape)
        shapes.pop("iter", None)
        if not state:
            state["step"] = torch.tensor(0.0)
            state.update({self.states[name]: rows.new_zeros(shape) for name, shape in shapes.items()})
        state["step"] = state["step"] + 1
        count, kept = int(state["step"]), torch.arange(len(rows), device=rows.device)
        rate = group["lr"] / (1 + (count - 1) * group.get("lr_decay", 0.0))
        spec = OptimizerSpec(self.rule, rate, **_settings(self.rule, group))
        after = before.clone()
        moved = {name: state[self.states[name]].reshape(shape).clone() for name, shape in shapes.items()}
        signed = -rows if group.get("maximize") else rows.clone()
        step(spec, after, moved, kept, signed, None, rows.shape[1], count)
        touched = (rows != 0).any(1, keepdim=True)
        for name, value in moved.items():
            own = state[self.states[name]].view(len(rows), -1)
            own.copy_(torch.where(touched, value.view_as(own), own))
        weight.copy_(torch.where(touched, after, before).view_as(weight))


def _checked(name: str, value: Any) -> Any:
    """A setting as floats, because tensors take no integers of more than 64 bits."""
    if name == "betas":
        if not (isinstance(value, tuple | list) and len(value) == 2):
            raise ValueError(f"betas must be two numbers, got {value!r}")
        return tuple(float(number_from_0("each of betas", beta, below_1=True)) for beta in value)
    return value if isinstance(value, bool) else float(number_from_0(name, value, below_1=name == "momentum"))


def _settings(rule: EmbOptimType, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `OptimizerSpec` among those of a torch optimizer."""
    named = {**values, **dict(zip(("beta1", "beta2"), values.get("betas", ()), strict=False))}
    return {name: float(named[name]) for name in ("eps", "weight_decay", *RULES[rule].settings) if name in named}


class _Moments(RowOptimizer):
    """Arguments of Adam and LAMB."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class PartialRowWiseAdam(_Moments):
    """Adam whose second moment is one number a row, the running mean square of the row's gradient.

    ``v[r] = beta2 v[r] + (1 - beta2) mean(g[r]^2);  w[r] -= lr * (m^ / (sqrt(v^[r]) + eps) + weight_decay * w[r])``.
    The second moment has E numbers where Adam's has E x D. The fused equal is PARTIAL_ROWWISE_ADAM.

    Args:
        params: parameters; a row is one index of the first axis.
        lr: step size.
        betas: decay rates of the two moments.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> PartialRowWiseAdam([weight], lr=1.0).step(); weight.mul(12.5**0.5).round(decimals=4).tolist()
    [[-3.0, -4.0], [0.0, 0.0]]
    """

    rule = EmbOptimType.PARTIAL_ROWWISE_ADAM


class LAMB(_Moments):
    """Adam with a trust ratio for every row: its step is as long as the row (You et al. 2020, one layer a row).

    ``r = m^ / (sqrt(v^) + eps) + weight_decay * w;  w -= lr * |w| / |r| * r``. The ratio is 1 where a norm is zero. The
    fused equal is LAMB.

    Args:
        params: parameters; a row is one index of the first axis.
        lr: step size.
        betas: decay rates of the two moments.
        eps: added to the root.
        weight_decay: inside ``r``.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[0.1, -7.0]])
    >>> LAMB([weight], lr=0.2).step(); round((weight - torch.tensor([[3.0, 4.0]])).norm().item(), 6)
    1.0
    """

    rule = EmbOptimType.LAMB


class PartialRowWiseLAMB(LAMB):
    """LAMB whose second moment is one number a row. The fused equal is PARTIAL_ROWWISE_LAMB."""

    rule = EmbOptimType.PARTIAL_ROWWISE_LAMB


@names_wrong_arguments
class LarsSGD(RowOptimizer):
    """SGD with momentum and a trust ratio for every row (LARS, You et al. 2017, one layer a row).

    ``m = momentum * m + lr * eta * |w| / (|g| + weight_decay * |w|) * (g + weight_decay * w);  w -= m``. The ratio
    ``eta * |w| / ...`` is 1 where a norm is zero. The fused equal is LARS_SGD.

    Args:
        params: parameters; a row is one index of the first axis.
        lr: step size.
        momentum: decay rate of ``m``.
        weight_decay: inside the formula.
        eta: trust coefficient.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[0.0, -7.0]])
    >>> LarsSGD([weight], lr=1.0, eta=0.2).step(); weight.tolist()
    [[3.0, 5.0]]
    """

    rule = EmbOptimType.LARS_SGD
    states: ClassVar[dict[str, str]] = {"momentum1": "momentum_buffer"}

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 0.001
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulated number a row. The fused equal is EXACT_ROWWISE_ADAGRAD.

    ``s[r] += mean(g[r]^2);  w[r] -= lr / (1 + (t - 1) lr_decay) * g[r] / (sqrt(s[r]) + eps)`` in step t. For a
    ``[E, D]`` weight the state is ``[E, 1]``, D times smaller than Adagrad's.

    Args:
        params: parameters with at least one axis; the mean runs over all axes but the first.
        lr: step size.
        lr_decay: decay rate of the step size.
        weight_decay: ``weight_decay * w`` is added to the gradient of rows whose gradient is not all zero.
        initial_accumulator_value: initial value of the accumulated numbers.
        eps: added to the root.
        maximize: climb instead of descend.

    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> weight.grad = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-1.0, 1.0]])
    >>> RowWiseAdagrad([weight], lr=0.5).step(); weight.round(decimals=4).tolist()
    [[0.5, 0.5], [1.0, 1.0], [1.5, 0.5]]
    """

    rule = EmbOptimType.EXACT_ROWWISE_ADAGRAD
    states: ClassVar[dict[str, str]] = {"momentum1": "sum"}

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        settings = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, {**settings, "initial_accumulator_value": initial_accumulator_value})
        for group in self.param_groups:
            for weight in group["params"]:
                wide = accumulate_dtype(weight.dtype)
                size = (weight.shape[0] if weight.dim() else 1, 1)
                total = torch.full(size, group["initial_accumulator_value"], dtype=wide, device=weight.device)
                self.state[weight] = {"step": torch.tensor(0.0), "sum": total}


# From ordinary torch optimizers to fused ones with the same steps.


_TWINS: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
    torch.optim.AdamW: EmbOptimType.ADAM,
    **{kind: kind.rule for kind in (RowWiseAdagrad, PartialRowWiseAdam, LAMB, PartialRowWiseLAMB, LarsSGD)},
}
# the rate and the form of decay, which every rule reads, and how torch computes, not what
_HONOURED = {"lr", "decoupled_weight_decay", "foreach", "fused", "capturable", "differentiable"}


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
    read = _settings(twin, values)
    for name in set(given) - _HONOURED - set(read) - ({"betas"} if "beta1" in read else set()):
        if given[name] != defaults[name]:
            raise ValueError(
                f"{optimizer_class.__name__}({name}={given[name]!r}) cannot run inside backward on the touched rows "
                f"alone. Fix: leave {name} out"
            )
    if twin is EmbOptimType.ADAM and read["weight_decay"]:
        apart = optimizer_class is torch.optim.AdamW or values.get("decoupled_weight_decay", False)
        read["weight_decay_mode"] = WeightDecayMode.DECOUPLE if apart else WeightDecayMode.L2
    return OptimizerSpec(twin, float(values["lr"]), **read)


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
