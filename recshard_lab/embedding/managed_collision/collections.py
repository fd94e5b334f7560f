"""Collections in front of which ids of any value become rows.

Shape letters: B batch, N ids, D columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding.collections import EmbeddingBagCollection, EmbeddingCollection, TableCollection
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.dynamic.admission import initial_rows, stream_of
from recshard_lab.embedding.fused import FusedCollection, FusedEmbeddingBagCollection, FusedEmbeddingCollection
from recshard_lab.embedding.kernels.mapped import Step
from recshard_lab.embedding.managed_collision.modules import (
    ManagedCollisionCollection,
    ManagedCollisionModule,
    ManagedEmbeddingConfig,
    RowOwners,
)
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

# Resets rows of a table that have new owners: the weight, its gradient, and the optimizer state.
#
# Shape letters: M rows, E rows of the table, D columns.


_waiting = WeakTensorKeyDictionary()  # parameter -> the rows whose state is reset before the next step


def first_rows(table: BaseEmbeddingConfig, ids: Tensor, columns: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """``[M, columns]`` the initial values of the rows of ids ``[M]``.

    They are what ``init_fn`` writes to these rows, or else a function of the table's name, the id and the column, so
    that they do not depend on ranks, rows or the order of ids.
    """
    if table.init_fn is not None:
        rows = torch.empty(len(ids), columns[1] - columns[0], dtype=dtype, device=ids.device)
        table.init_fn(rows)
        return rows
    ends = table.get_weight_init_min(), table.get_weight_init_max()
    return initial_rows(ids, stream_of(0, table.name), columns, ends).to(dtype)


@torch.no_grad()
def reset_rows(weight: Tensor, rows: Tensor, values: Tensor, states: Iterable[Tensor]) -> None:
    """Writes ``values [M, D]`` to rows ``[M]``, and 0 to their entries of the optimizer states with E entries."""
    weight[rows] = values
    for state in states:
        if state.dim() and state.shape[0] == len(weight):
            state[rows] = 0


def without_rows(grad: Tensor, rows: Tensor) -> Tensor:
    """A gradient that is 0 in these rows."""
    if not grad.is_sparse:
        grad[rows] = 0
        return grad
    grad = grad.coalesce()
    kept = ~torch.isin(grad.indices()[0], rows)
    return torch.sparse_coo_tensor(grad.indices()[:, kept], grad.values()[kept], grad.shape)


def reset_at_next_step(parameter: Tensor, rows: Tensor) -> None:
    """Resets these rows of a torch optimizer's states before it next steps the parameter.

    The optimizer is found when it steps, so that no code has to name it.
    """
    _hook_once()
    _waiting[parameter] = torch.cat([_waiting[parameter], rows]).unique() if parameter in _waiting else rows


@cache
def _hook_once() -> None:
    register_optimizer_step_pre_hook(_before_step)


@torch.no_grad()
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = _waiting.pop(parameter, None) if len(_waiting) else None
            if rows is None:
                continue
            for name, state in optimizer.state.get(parameter, {}).items():
                if isinstance(state, Tensor) and state.dim() and state.shape[0] == parameter.shape[0]:
                    state[rows] = group.get("initial_accumulator_value", 0.0) if name == "sum" else 0.0


class _Hold(torch.autograd.Function):
    """Returns its input, and keeps a `Step` until its backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: Step) -> Tensor:
        ctx.step = step
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.step = None
        return grad, None


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """The base of both collections.

    Attributes:
        inner_types: collections that it can have.
    """

    inner_types: ClassVar[tuple[type[nn.Module], ...]]

    def __init__(
        self,
        embedding_module: nn.Module,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool,
    ) -> None:
        super().__init__()
        if not isinstance(embedding_module, self.inner_types):
            known = " or ".join(kind.__name__ for kind in self.inner_types)
            raise ValueError(f"the collection is a {type(embedding_module).__name__}. Fix: pass {known}")
        self._embedding_module = embedding_module
        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._pending: weakref.WeakSet[Step] = weakref.WeakSet()
        if list(self._configs()) != list(managed_collision_collection.embedding_configs()):
            raise ValueError(
                "the collection and the ManagedCollisionCollection have different tables. Fix: build both from one list"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pending = weakref.WeakSet()

    def _configs(self) -> list[BaseEmbeddingConfig]:
        tables: list[BaseEmbeddingConfig] = cast(TableCollection, self._embedding_module)._tables
        return tables

    def planned_configs(self) -> list[ManagedEmbeddingConfig]:
        """The tables, with the cuts that plans may make."""
        modules = self._managed_collision_collection.modules_by_table()
        return [ManagedEmbeddingConfig.of(table, modules[table.name]) for table in self._configs()]

    @property
    def embedding_module(self) -> nn.Module:
        """The collection of the rows."""
        return self._embedding_module

    @property
    def managed_collision_collection(self) -> ManagedCollisionCollection:
        """The module of each table."""
        return self._managed_collision_collection

    @property
    def return_remapped_features(self) -> bool:
        """Whether a forward also returns the rows of ids."""
        return self._return_remapped_features

    @names_wrong_arguments
    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Looks up one batch. In training, ids may get rows first, which are reset.

        Args:
            features: has every feature of the tables; others are not read.
            mutate_miss_lengths: as of `ManagedCollisionCollection.forward`.

        Returns:
            The collection's output, and with ``return_remapped_features`` the features with rows in place of ids,
            otherwise None.

        Raises:
            ValueError: as of the collection.
        """
        modules = self._managed_collision_collection.modules_by_table()
        owners = [own for own in modules.values() if isinstance(own, RowOwners)]
        for number, module in enumerate(owners):
            module.pinned_from = min((step.numbers[number] for step in self._pending), default=None)
        remapped = self._managed_collision_collection(features, mutate_miss_lengths=mutate_miss_lengths)
        self._reset(modules)
        looked_up = self._embedding_module(remapped)
        if self.training and torch.is_grad_enabled():
            looked_up = self._held(looked_up, Step([module.step for module in owners]))
        return looked_up, remapped if self._return_remapped_features else None

    def _reset(self, modules: Mapping[str, ManagedCollisionModule]) -> None:
        """Resets the rows that have new owners, before the lookup."""
        inner = self._embedding_module
        weights = {name.split(".")[-2]: weight for name, weight in inner.named_parameters(remove_duplicate=False)}
        fused = inner.optimizer_states() if isinstance(inner, FusedCollection) else None
        for table in self._configs():
            rows, weight = modules[table.name].evict(), weights[table.name]
            if rows is None:
                continue
            values = first_rows(table, modules[table.name].owners_of(rows), (0, table.embedding_dim), weight.dtype)
            # .data: the graph of an earlier batch needs rows that it looked up, and those keep their owners
            reset_rows(weight.data, rows, values, fused[table.name].values() if fused is not None else ())
            if fused is None:
                if weight.grad is not None:
                    weight.grad = without_rows(weight.grad, rows)
                reset_at_next_step(weight, rows)

    def _held(self, looked_up: Any, step: Step) -> Any:
        """The output, which keeps the rows of the batch until its backward."""
        self._pending.add(step)
        if isinstance(looked_up, KeyedTensor):
            values = _Hold.apply(looked_up.values(), step)
            return KeyedTensor(looked_up.keys(), looked_up.length_per_key(), values)
        return {
            key: JaggedTensor._unchecked(_Hold.apply(own.values(), step), own.weights_or_none(), own.lengths())
            for key, own in looked_up.items()
        }


@checks_arguments
class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose ids have any value: a module of each table replaces them by rows.

    A row that gets another owner is reset before it is looked up: its weight to ``init_fn`` or its initial values, its
    gradient and its optimizer state to those of a new row. This holds for a torch optimizer, which is found when it
    steps, and for a `FusedEmbeddingBagCollection`. Rows of batches whose backward is to come keep their owners.

    Args:
        embedding_bag_collection: `EmbeddingBagCollection` or `FusedEmbeddingBagCollection`.
        managed_collision_collection: the modules of its tables.
        return_remapped_features: whether a forward also returns the rows of ids.
        allow_in_place_embed_weight_update: accepted as in TorchRec. Resets never change the autograd graph.

    Raises:
        ValueError: another collection, or other tables.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> from recshard_lab.embedding.managed_collision import HashZchManagedCollisionModule
    >>> table = EmbeddingBagConfig(4, 8, "t", feature_names=["user"])
    >>> module = HashZchManagedCollisionModule(4, torch.device("cpu"), total_num_buckets=1)
    >>> users = ManagedCollisionEmbeddingBagCollection(
    ...     EmbeddingBagCollection([table]), ManagedCollisionCollection({"t": module}, [table]), True
    ... )
    >>> pooled, rows = users(KeyedJaggedTensor(["user"], torch.tensor([10**12, -5]), lengths=torch.tensor([1, 1])))
    >>> pooled["user"].shape, rows["user"].values().tolist()
    (torch.Size([2, 8]), [1, 0])
    """

    inner_types = (EmbeddingBagCollection, FusedEmbeddingBagCollection)

    def __init__(
        self,
        embedding_bag_collection: nn.Module,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_bag_collection, managed_collision_collection, return_remapped_features)

    def embedding_bag_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables."""
        return self._configs()

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._embedding_module.is_weighted()  # type: ignore[operator]


@checks_arguments
class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """`ManagedCollisionEmbeddingBagCollection` for an `EmbeddingCollection`.

    Args:
        embedding_collection: `EmbeddingCollection` or `FusedEmbeddingCollection`.
        managed_collision_collection, return_remapped_features, allow_in_place_embed_weight_update: as there.

    Raises:
        ValueError: another collection, or other tables.

    >>> from recshard_lab.embedding import EmbeddingConfig
    >>> from recshard_lab.embedding.managed_collision import LRU_EvictionPolicy, MCHManagedCollisionModule
    >>> table = EmbeddingConfig(4, 8, "t", feature_names=["user"])
    >>> module = MCHManagedCollisionModule(4, torch.device("cpu"), LRU_EvictionPolicy(), eviction_interval=1)
    >>> users = ManagedCollisionEmbeddingCollection(
    ...     EmbeddingCollection([table]), ManagedCollisionCollection({"t": module}, [table])
    ... )
    >>> rows, _ = users(KeyedJaggedTensor(["user"], torch.tensor([10**12]), lengths=torch.tensor([1])))
    >>> rows["user"].values().shape
    torch.Size([1, 8])
    """

    inner_types = (EmbeddingCollection, FusedEmbeddingCollection)

    def __init__(
        self,
        embedding_collection: nn.Module,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(embedding_collection, managed_collision_collection, return_remapped_features)

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables."""
        return self._configs()

    def need_indices(self) -> bool:
        """Whether outputs carry the rows of their ids as weights."""
        return self._embedding_module.need_indices()  # type: ignore[operator]
