"""Row-wise Adagrad as an ordinary torch optimizer: the dense twin of the fused rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.optimizers.dense import RowOptimizer


class RowWiseAdagrad(RowOptimizer):
    """Adagrad with one accumulated number a row: the dense twin of EXACT_ROWWISE_ADAGRAD.

    ``s[r] += mean(g[r]^2);  w[r] -= lr / (1 + (t - 1) lr_decay) * g[r] / (sqrt(s[r]) + eps)`` in step t. For a
    ``[E, D]`` weight the state is ``[E, 1]``, D times smaller than Adagrad's. Rows without gradient do not move, as in
    the fused kernels.

    Args:
        params: parameters, each with at least one axis; the mean runs over all axes but the first.
        lr: step size.
        lr_decay: how fast it falls with the number of steps.
        weight_decay: ``weight_decay * w`` is added to the gradient of rows whose gradient is not all zero.
        initial_accumulator_value: what the accumulated numbers start from.
        eps: added to the root.
        maximize: climb instead of descend.

    >>> weight = torch.nn.Parameter(torch.ones(3, 2))
    >>> weight.grad = torch.tensor([[2.0, 2.0], [0.0, 0.0], [-1.0, 1.0]])
    >>> RowWiseAdagrad([weight], lr=0.5).step(); weight.tolist()
    [[0.5, 0.5], [1.0, 1.0], [1.5, 0.5]]
    """

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
        super().__init__(
            params,
            {
                "lr": lr,
                "lr_decay": lr_decay,
                "eps": eps,
                "weight_decay": weight_decay,
                "initial_accumulator_value": initial_accumulator_value,
                "maximize": maximize,
            },
        )
        for group in self.param_groups:
            for weight in group["params"]:
                wide = torch.promote_types(weight.dtype, torch.float32)
                rows = weight.shape[0] if weight.dim() else 1
                start = group["initial_accumulator_value"]
                total = torch.full((rows, 1), start, dtype=wide, device=weight.device)
                self.state[weight] = {"step": torch.tensor(0.0), "sum": total}

    def _init(self, state: dict[str, Any], rows: Tensor) -> None:
        raise AssertionError("the state is made with the optimizer")

    def _update(self, state: dict[str, Any], values: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        grad = -grad if group["maximize"] else grad
        if group["weight_decay"]:  # 0 times a weight that is NaN or infinite would spread over the row's mean
            grad = grad + group["weight_decay"] * values
        state["sum"] += grad.square().mean(1, keepdim=True)
        rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        return -rate * grad / (state["sum"].sqrt() + group["eps"])
