"""Row-wise Adagrad as a function, as in ``torchrec.optim.rowwise_adagrad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


@torch.no_grad()
def adagrad(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    state_sums: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float,
    lr_decay: float,
    eps: float,
    maximize: bool,
) -> None:
    """One step of Adagrad with one accumulated number a row, in place.

    ``s[r] += mean(g[r]^2);  w[r] -= lr / (1 + (t - 1) lr_decay) * g[r] / (sqrt(s[r]) + eps)`` in step t, as
    `recshard_lab.optim.RowWiseAdagrad`. Weight decay adds to all rows, also to those with a gradient of zero.

    Args:
        params: weights ``[E, D]``.
        grads: their gradients, dense.
        state_sums: accumulated numbers ``[E, 1]``.
        state_steps: 0-d, the number of steps.
        lr, weight_decay, lr_decay, eps, maximize: as of `recshard_lab.optim.RowWiseAdagrad`.

    Raises:
        RuntimeError: a sparse gradient.

    >>> weight, total, step = torch.ones(2, 2), torch.zeros(2, 1), torch.tensor(0.0)
    >>> rates = {"lr": 0.5, "weight_decay": 0.0, "lr_decay": 0.0, "eps": 1e-10, "maximize": False}
    >>> adagrad([weight], [torch.tensor([[2.0, 2.0], [0.0, 0.0]])], [total], [step], **rates)
    >>> weight.tolist(), total.tolist()
    ([[0.5, 0.5], [1.0, 1.0]], [[4.0], [0.0]])
    """
    for param, grad, total, step in zip(params, grads, state_sums, state_steps, strict=True):
        if grad.is_sparse:
            raise RuntimeError("adagrad got a sparse gradient. Fix: pass grad.to_dense()")
        step += 1
        change = (-grad if maximize else grad) + weight_decay * param
        total += change.square().mean(dim=1, keepdim=True)
        rate = lr / (1 + (step - 1) * lr_decay)
        param.sub_(rate * change / (total.sqrt() + eps))
