"""A torch optimizer's face for the optimizers that run inside backward."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from recshard_lab.distributed.lookup import KernelGroup
from recshard_lab.distributed.sharded_collections import ShardedCollection


class FusedOptimizer(torch.optim.Optimizer):
    """Learning rates of the fused optimizers, in ``param_groups``, where learning-rate schedulers look for them.

    ``step`` has nothing to do: tables are stepped in backward. A changed ``lr`` holds from the next forward on.

    Args:
        collections: module path -> sharded collection.
    """

    def __init__(self, collections: Mapping[str, ShardedCollection]) -> None:
        self._kernels: list[KernelGroup] = []
        groups: list[dict[str, Any]] = []
        for collection in collections.values():
            tensors = {key: nn.Parameter(w) for key, w in collection.executor.lookup.weights().items()}
            for group in collection.executor.lookup.groups:
                if group.kind.optimizer is not None:
                    self._kernels.append(group)
                    groups.append(
                        {
                            "params": [tensors[key] for key in group.shards],
                            "lr": group.kind.optimizer.learning_rate,
                        }
                    )
        super().__init__(groups or [{"params": [], "lr": 0.0}], {"lr": 0.0})
        self._pushed = [group["lr"] for group in self.param_groups]

    def push_learning_rates(self) -> None:
        """Hands changed learning rates to the kernels."""
        for number, (kernels, group) in enumerate(zip(self._kernels, self.param_groups, strict=False)):
            if group["lr"] != self._pushed[number]:
                kernels.kernel.set_learning_rate(float(group["lr"]))
                self._pushed[number] = group["lr"]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps nothing: backward has done it. Runs ``closure`` if given."""
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fused tables have no ``.grad``."""
