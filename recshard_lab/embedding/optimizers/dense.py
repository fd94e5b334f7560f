"""Optimizers that torch lacks, as ordinary ones: the dense twins of the fused rules.

They step whole tensors with ordinary gradients, so that an unsharded model can be trained with them, and a sharded one
be compared. A row is what lies under one index of the first axis; rows whose gradient is all zero do not move and keep
their state, as rows that a batch did not touch in the fused kernels.

Shape letters: E rows, D columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments


class RowOptimizer(torch.optim.Optimizer):
    """The loop that these optimizers share."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name, value in defaults.items():
            if name == "betas" and not (isinstance(value, tuple | list) and len(value) == 2):
                raise ValueError(f"betas must be two numbers, got {value!r}")
            for number in value if name == "betas" else (value,):
                if not isinstance(number, int | float):
                    raise ValueError(f"{name} must be a number (two for betas), got {value!r}")
            if name in ("betas", "momentum"):
                for beta in value if name == "betas" else (value,):
                    if not 0 <= beta < 1:
                        raise ValueError(f"{name} must be from 0 to below 1, got {value!r}")
            elif not isinstance(value, bool) and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        made = {name: _as_float(value) for name, value in defaults.items()}
        try:
            super().__init__(params, made)
        except TypeError as error:
            raise ValueError(f"params must be tensors, or dictionaries with 'params': {error}") from error

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss when a closure is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_one(weight, group)
        return loss

    def _step_one(self, weight: Tensor, group: dict[str, Any]) -> None:
        assert weight.grad is not None
        grad = weight.grad.to_dense() if weight.grad.is_sparse else weight.grad
        wide = torch.promote_types(weight.dtype, torch.float32)
        rows = grad.to(wide).reshape(grad.shape[0] if grad.dim() else 1, -1)
        values = weight.to(wide).view_as(rows)
        touched = (rows != 0).any(1, keepdim=True)
        state = self.state[weight]
        if not state:
            self._init(state, rows)
        before = {name: value.clone() for name, value in state.items() if name != "step"}
        state["step"] = state["step"] + 1
        moved = values + self._update(state, values, rows, group)
        for name, value in before.items():
            kept = touched if value.dim() == 2 else touched.view(-1)
            state[name].copy_(torch.where(kept, state[name], value))
        weight.copy_(torch.where(touched, moved, values).view_as(weight))

    @abstractmethod
    def _init(self, state: dict[str, Any], rows: Tensor) -> None:
        """Makes the state of a parameter of which ``rows`` ``[E, D]`` is the gradient."""

    @abstractmethod
    def _update(self, state: dict[str, Any], values: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """``[E, D]`` to add to the weights; steps the state."""


def _as_float(value: Any) -> Any:
    """Integers as floats, for tensors take none of more than 64 bits."""
    if isinstance(value, tuple | list):
        return tuple(map(_as_float, value))
    try:
        return value if isinstance(value, bool) else float(value)
    except OverflowError:
        raise ValueError(f"{value!r} is no number that a float can hold") from None


def _ones_where_zero(ratio: Tensor, *norms: Tensor) -> Tensor:
    """A trust ratio, 1 where one of its norms is zero."""
    sound = torch.stack([norm > 0 for norm in norms]).all(0)
    return torch.where(sound, ratio, torch.ones_like(ratio))


class _Moments(RowOptimizer):
    """What Adam and LAMB share."""

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    row_wise = False  # one second moment a row

    def _init(self, state: dict[str, Any], rows: Tensor) -> None:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = torch.zeros_like(rows)
        state["exp_avg_sq"] = rows.new_zeros(rows.shape[0]) if self.row_wise else torch.zeros_like(rows)

    def _direction(self, state: dict[str, Any], grad: Tensor, group: dict[str, Any]) -> Tensor:
        beta1, beta2 = group["betas"]
        square = grad.square().mean(1) if self.row_wise else grad.square()
        state["exp_avg"].mul_(beta1).add_((1 - beta1) * grad)
        state["exp_avg_sq"].mul_(beta2).add_((1 - beta2) * square)
        count = float(state["step"])
        second = state["exp_avg_sq"].view(grad.shape[0], -1) / (1 - beta2**count)
        return state["exp_avg"] / (1 - beta1**count) / (second.sqrt() + group["eps"])


class PartialRowWiseAdam(_Moments):
    """Adam whose second moment is one number a row, the running mean square of the row's gradient.

    ``v[r] = beta2 v[r] + (1 - beta2) mean(g[r]^2);  w[r] -= lr * (m^ / (sqrt(v^[r]) + eps) + weight_decay * w[r])``.
    A third of Adam's state is left out: E numbers where Adam keeps E x D. The dense twin of PARTIAL_ROWWISE_ADAM.

    Args:
        params: parameters; a row is what lies under one index of the first axis.
        lr: step size.
        betas: how slowly the two moments follow.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    >>> PartialRowWiseAdam([weight], lr=1.0).step(); weight.mul(12.5**0.5).tolist()
    [[-3.0, -4.0], [0.0, 0.0]]
    """

    row_wise = True

    def _update(self, state: dict[str, Any], values: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        direction = self._direction(state, grad, group)
        if group["weight_decay"]:  # 0 times an infinite weight is NaN
            direction = direction + group["weight_decay"] * values
        return -group["lr"] * direction


class LAMB(_Moments):
    """Adam whose step is as long as the row is: a trust ratio for every row (You et al. 2020, one layer a row).

    ``r = m^ / (sqrt(v^) + eps) + weight_decay * w;  w -= lr * |w| / |r| * r``, the ratio 1 where a norm is zero. The
    dense twin of the fused LAMB.

    Args:
        params: parameters; a row is what lies under one index of the first axis.
        lr: step size.
        betas: how slowly the two moments follow.
        eps: added to the root.
        weight_decay: inside ``r``.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[0.1, -7.0]])
    >>> LAMB([weight], lr=0.2).step(); round((weight - torch.tensor([[3.0, 4.0]])).norm().item(), 6)
    1.0
    """

    def _update(self, state: dict[str, Any], values: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        direction = self._direction(state, grad, group) + group["weight_decay"] * values
        norms = values.norm(dim=1, keepdim=True), direction.norm(dim=1, keepdim=True)
        return -group["lr"] * _ones_where_zero(norms[0] / norms[1], *norms) * direction


class PartialRowWiseLAMB(LAMB):
    """LAMB whose second moment is one number a row: the dense twin of PARTIAL_ROWWISE_LAMB."""

    row_wise = True


@names_wrong_arguments
class LarsSGD(RowOptimizer):
    """SGD with momentum whose step is as long as the row is (LARS, You et al. 2017, one layer a row).

    ``m = momentum * m + lr * eta * |w| / (|g| + weight_decay * |w|) * (g + weight_decay * w);  w -= m``, the ratio
    ``eta * |w| / ...`` 1 where a norm is zero. The dense twin of the fused LARS_SGD.

    Args:
        params: parameters; a row is what lies under one index of the first axis.
        lr: step size.
        momentum: how slowly ``m`` follows.
        weight_decay: inside the formula.
        eta: trust coefficient.

    >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
    >>> weight.grad = torch.tensor([[0.0, -7.0]])
    >>> LarsSGD([weight], lr=1.0, eta=0.2).step(); weight.tolist()
    [[3.0, 5.0]]
    """

    def __init__(
        self, params: Any, lr: float = 0.01, momentum: float = 0.9, weight_decay: float = 0.0, eta: float = 0.001
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    def _init(self, state: dict[str, Any], rows: Tensor) -> None:
        state["step"] = torch.tensor(0.0)
        state["momentum_buffer"] = torch.zeros_like(rows)

    def _update(self, state: dict[str, Any], values: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        decay = group["weight_decay"]
        weight, length = values.norm(dim=1, keepdim=True), grad.norm(dim=1, keepdim=True)
        ratio = _ones_where_zero(group["eta"] * weight / (length + decay * weight), weight, length)
        state["momentum_buffer"].mul_(group["momentum"]).add_(group["lr"] * ratio * (grad + decay * values))
        return -state["momentum_buffer"]
