"""Averaging of weights over the steps of a training run (Polyak and Juditsky 1992, SIAM J. Control Optim. 30(4)).

The steps of stochastic gradient descent scatter around a minimum. Their mean is nearer to it than the last step, and it
generalises better, most of all with a learning rate too large to converge (Izmailov et al. 2018, arXiv 1803.05407).

Averaging is elementwise: each rank averages its shards, and the averages of all ranks are the average of the whole
model, under every sharding scheme and without a message.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """The running mean of a model's parameters: exponential, after a plain mean over the first steps.

    After step t:  ``a += max(1 - decay, 1 / t) * (w - a)``. Until step 1 / (1 - decay) this is the plain mean of the
    weights after each step. After that, the step k steps ago has the weight ``decay^k``. The initial weights do not
    count.

    Each update reads and writes every weight of this rank, also rows that no sample used. The averages take as much
    memory as the weights. Buffers are not averaged.

    Args:
        model: unsharded, or a `DistributedModelParallel`: then this rank's shards and replicas.
        decay: in [0, 1]; 0 keeps the last weights, 1 is the plain mean of all steps.

    Raises:
        ValueError: another decay.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = WeightAverage(model, decay=0.5)
    >>> for value in (8.0, 2.0, 1.0):
    ...     _ = nn.init.constant_(model.weight, value)
    ...     average.update()
    >>> average.copy_to_model(); model.weight.item()
    3.0
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"decay must be in [0, 1], got {decay}")
        self.decay = decay
        self.steps = 0
        self._weights = [parameter.detach() for parameter in model.parameters()]
        # fp16 cannot hold small changes of a mean: it is kept in fp32 at least
        self._means = [torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average. Call it after each step."""
        self.steps += 1
        if self._weights:
            now: list[Tensor] = [w.to(mean.dtype) for w, mean in zip(self._weights, self._means, strict=True)]
            get_ema_multi_avg_fn(min(self.decay, 1.0 - 1.0 / self.steps))(self._means, now, self.steps)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Overwrites the model's weights with their mean. Does nothing before the first update."""
        if self.steps:
            for weight, mean in zip(self._weights, self._means, strict=True):
                weight.copy_(mean)
