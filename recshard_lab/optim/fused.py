"""The face that optimizers stepped inside backward show to a training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from recshard_lab.optim.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, ABC):
    """Its parameters are stepped in backward: ``step`` has nothing to do, and ``zero_grad`` no ``.grad`` to clear."""

    @property
    def stepped_in_backward(self) -> list[str]:
        return list(self.params)

    def init_state(self, sparse_grad_parameter_names: Collection[str] | None = None) -> None:
        """Nothing to do: the states of fused tables are there from the start."""

    @abstractmethod
    def step(self, closure: Any = None) -> Any:
        """Runs ``closure`` if given; the weights have moved already."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """There is nothing to clear."""


class EmptyFusedOptimizer(FusedOptimizer):
    """That of a model without a fused table.

    >>> EmptyFusedOptimizer().state_dict()
    {'state': {}}
    """

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class FusedOptimizerModule(ABC):
    """A module that steps its parameters in backward and shows their optimizer."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """Learning rates and states of the tables."""
