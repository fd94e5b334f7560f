"""Row-wise Adagrad as an ordinary torch optimizer: the dense twin of the fused rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulated number a row: the dense twin of EXACT_ROWWISE_ADAGRAD.

    ``s[r] += mean(g[r]^2);  w[r] -= lr * g[r] / (sqrt(s[r]) + eps)``. For a ``[E, D]`` weight the state is
    ``[E]``, D times smaller than Adagrad's. Rows without gradient do not move, as in the fused kernels.

    Args:
        params: parameters, each with at least one axis; the mean runs over all axes but the first.
        lr: step size.
        eps: added to the root.
        weight_decay: ``weight_decay * w`` is added to the gradient of rows whose gradient is not all zero.

    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> weight.grad = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-1.0, 1.0]])
    >>> RowWiseAdagrad([weight], lr=0.5).step(); weight.tolist()
    [[0.5, 0.5], [1.0, 1.0], [1.5, 0.5]]
    """

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-8, weight_decay: float = 0.0) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})

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
        grad = weight.grad
        assert grad is not None
        if grad.is_sparse:
            grad = grad.to_dense()
        accumulate = torch.promote_types(weight.dtype, torch.float32)
        rows = grad.to(accumulate).flatten(1) if grad.dim() > 1 else grad.to(accumulate).unsqueeze(1)
        values = weight.to(accumulate).view_as(rows)
        touched = (rows != 0).any(1, keepdim=True)
        rows = rows + group["weight_decay"] * values * touched
        total = self.state[weight].setdefault("sum", rows.new_zeros(rows.shape[0]))
        total += rows.square().mean(1)
        update = group["lr"] * rows / (total.sqrt() + group["eps"]).unsqueeze(1)
        weight.copy_((values - update).view_as(weight))
