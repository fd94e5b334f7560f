"""The face that optimizers stepped inside backward show to a training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

from recshard_lab.embedding.fused_base import FusedCollection
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


class FusedCollectionOptimizer(FusedOptimizer):
    """Learning rate and states of an unsharded fused collection, for schedulers and state dicts.

    Parameters are named ``movies.weight``, and states ``movies.weight.momentum_1``, as in TorchRec. A changed ``lr`` of
    the param group applies from the next `step` or `zero_grad` on. States share memory with the kernel.

    Args:
        collection: its `FusedCollection.fused_optimizer` returns this optimizer.
    """

    def __init__(self, collection: FusedCollection) -> None:
        self._prepare()
        self._collection = collection
        self.param_groups = [{"params": list(self.params.values()), "lr": collection.optimizer_spec.learning_rate}]

    @property
    def params(self) -> dict[str, Any]:  # type: ignore[override]
        """Name -> weights ``[E, D]``."""
        holders = self._collection.get_submodule(self._collection.tables_name)
        return {f"{name}.weight": holder.weight for name, holder in holders.named_children()}

    @property
    def state(self) -> dict[Any, dict[str, Any]]:  # type: ignore[override]
        """Weights -> state name -> tensor, for rules with states."""
        params = self.params
        return {
            params[f"{table}.weight"]: {
                f"{table}.weight.{name.replace('momentum', 'momentum_')}": tensor for name, tensor in states.items()
            }
            for table, states in self._collection.optimizer_states().items()
            if states
        }

    def step(self, closure: Any = None) -> Any:
        """Runs ``closure`` if passed, and passes the learning rate to the kernel."""
        result = closure() if closure is not None else None
        self.zero_grad()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Passes the learning rate to the kernel. Fused tables have no ``.grad``."""
        rate = float(self.param_groups[0]["lr"])
        if rate != self._collection.optimizer_spec.learning_rate:
            self._collection.set_learning_rate(rate)


FusedOptimizerModule.register(FusedCollection)
