"""Collections of dynamic tables: `find_or_insert` in training, `find` in evaluation, a fused kernel on the slots.

Shape letters: B batch, N ids of a table, D columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding.collections import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    check_pooling,
    common_dim,
)
from recshard_lab.embedding.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index import slots_for
from recshard_lab.embedding.dynamic.table import DynamicTable, Memory
from recshard_lab.embedding.fused_collections import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from recshard_lab.embedding.inputs import check_weights, feature_of, to_samples
from recshard_lab.embedding.optimizers import EmbOptimType
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class _Step:
    """A batch whose backward is to come. While it exists, its ids are not evicted."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps: dict[str, int] | None = steps


class _Pin(torch.autograd.Function):
    """The identity. Its graph node keeps a `_Step` until backward has begun, or until the graph is freed."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, step: _Step) -> Tensor:
        ctx.step = step
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.step.steps = None
        return grad, None


class DynamicCollection(nn.Module):
    """The base of both collections: dynamic tables whose rows are those of one fused collection.

    The fused collection is rebuilt when a table grows. It is not a submodule: the state dict has rows by id instead.
    """

    rows_class: ClassVar[type[FusedEmbeddingBagCollection] | type[FusedEmbeddingCollection]]

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None,
        device: torch.device | str | None,
        backend: str | None,
        **more: Any,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self._configs = list(tables)
        self._names = embedding_names_by_table(tables)
        self._features = [(config, feature) for config in tables for feature in config.feature_names]
        self._arguments = {
            "optimizer_type": optimizer_type,
            "optimizer_kwargs": dict(optimizer_kwargs or {}),
            "device": device_named(device or "cpu"),
            "backend": backend,
            "out_of_range": "ignore",
            **more,
        }
        self._pending: weakref.WeakSet[_Step] = weakref.WeakSet()
        self._tables: dict[str, DynamicTable] = {}
        self._held: list[Any] = []
        for config in tables:
            allocate = partial(self._allocate, config.name)
            self._tables[config.name] = DynamicTable(config, self._arguments["device"], allocate=allocate)

    # ---- memory ----

    def _allocate(self, name: str, rows: int) -> Memory:
        """Memory for a table of so many rows. The other tables move to the new fused collection as they are."""
        sizes = {config.name: slots_for(config.capacity, config.num_embeddings) for config in self._configs}
        sizes |= {other: table.capacity for other, table in self._tables.items()} | {name: rows}
        if not self._held or sizes[name] != len(self._memory(name)[0]):
            self._held = [self._fused(sizes)]
            for other, table in self._tables.items():
                if other != name:
                    table.move_to(*self._memory(other))
        return self._memory(name)

    def _fused(self, sizes: Mapping[str, int]) -> Any:
        configs: list[Any] = []
        for config in self._configs:
            features = [_key(config, feature) for feature in config.feature_names]
            given = sizes[config.name], config.embedding_dim, config.name, config.data_type, features
            if self.rows_class.pooled:
                configs.append(EmbeddingBagConfig(*given, init_fn=nn.init.zeros_, pooling=config.pooling))
            else:
                configs.append(EmbeddingConfig(*given, init_fn=nn.init.zeros_))
        return self.rows_class(configs, **self._arguments)

    def _memory(self, name: str) -> Memory:
        (rows,) = self._held
        weight = rows.get_submodule(rows.tables_name).get_submodule(name).weight
        return weight.data, rows.optimizer_states()[name]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pending = weakref.WeakSet()
        for name, table in self._tables.items():  # unpickled tensors share no memory
            table.weight, table.states = self._memory(name)

    # ---- lookups ----

    def _slots(self, features: KeyedJaggedTensor) -> tuple[list[JaggedTensor], list[Tensor], _Step | None]:
        """Of every feature of every table its bags, and the slots of their ids; in training, the step."""
        trains = self.training and torch.is_grad_enabled()
        pending = [step.steps for step in self._pending if step.steps is not None]
        bags: list[JaggedTensor] = []
        slots: list[Tensor] = []
        for name, table in self._tables.items():
            own = [feature_of(features, feature, name) for feature in table.config.feature_names]
            ids = torch.cat([bag.values() for bag in own])
            if trains:
                oldest = min((steps[name] for steps in pending), default=None)
                found = table.slots_for(ids, pinned_from=oldest)
            else:
                found = table.slots_of(ids)
            bags += own
            slots += found.split([len(bag.values()) for bag in own])
        if not trains:
            return bags, slots, None
        step = _Step({name: table.index.step for name, table in self._tables.items()})
        self._pending.add(step)
        return bags, slots, step

    def _batch(
        self, features: KeyedJaggedTensor, bags: list[JaggedTensor], slots: list[Tensor], weights: Tensor | None
    ) -> KeyedJaggedTensor:
        """The batch with slots in place of ids, each feature under the fused collection's name for it."""
        keys = [_key(*feature) for feature in self._features]
        lengths = torch.cat([bag.lengths() for bag in bags])
        if not features.variable_stride_per_key():
            return KeyedJaggedTensor(keys, torch.cat(slots), weights, lengths)
        strides = [[len(bag.lengths())] for bag in bags]
        inverse = features.inverse_indices_or_none()
        if inverse is not None:
            order = [inverse[0].index(feature) for _, feature in self._features]
            inverse = keys, inverse[1][order]
        return KeyedJaggedTensor(
            keys, torch.cat(slots), weights, lengths, stride_per_key_per_rank=strides, inverse_indices=inverse
        )

    def _initial(self, config: DynamicEmbeddingConfig, ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """The positions ``[M]`` of absent ids and their rows ``[M, D]`` fp32; None if they read zeros."""
        absent = (slots < 0).nonzero().squeeze(1)
        if config.absent == "zero" or not len(absent):
            return None
        return absent, self._tables[config.name].initial(ids[absent]).float()

    # ---- access ----

    def table(self, name: str) -> DynamicTable:
        """One table.

        Raises:
            ValueError: there is no such table.
        """
        if name not in self._tables:
            raise ValueError(f"table {name!r} does not exist. Fix: use one of {', '.join(map(repr, self._tables))}")
        return self._tables[name]

    def counters(self) -> dict[str, dict[str, int]]:
        """Table -> what its index has counted. See `Counters`."""
        return {name: table.counters.as_dict() for name, table in self._tables.items()}

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, for tables that evict by ``"epoch_lru"`` or ``"epoch_lfu"``."""
        for table in self._tables.values():
            table.index.epoch = epoch

    def set_learning_rate(self, lr: float) -> None:
        """Sets the step size from the next backward on."""
        self._held[0].set_learning_rate(lr)
        self._arguments["optimizer_kwargs"] |= {"lr": lr}

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Table -> state name -> the tensor itself, by slot."""
        states: dict[str, dict[str, Tensor]] = self._held[0].optimizer_states()
        return states

    @property
    def backend(self) -> str:
        """The kernel in use."""
        return str(self._held[0].backend)

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return torch.device(self._arguments["device"])

    def get_extra_state(self) -> dict[str, Any]:
        """Every table's index, rows and optimizer states."""
        return {name: table.state() for name, table in self._tables.items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Loads what `get_extra_state` returned.

        Raises:
            ValueError: other tables.
        """
        if list(state) != list(self._tables):
            raise ValueError(f"the state has tables {list(state)}, and the collection {list(self._tables)}")
        for name, table in self._tables.items():
            table.load_state(state[name])


@EmbeddingBagCollectionInterface.register
@names_wrong_arguments
class DynamicEmbeddingBagCollection(DynamicCollection):
    """`FusedEmbeddingBagCollection` for ids of any value: rows are created when an id occurs first in training.

    In training, a forward is one step of each table: absent ids are inserted, and if a table is full, the ids with the
    lowest scores lose their rows. Their successors start from initial rows and optimizer states of 0. In evaluation
    (``eval()``, or without gradients) a forward changes nothing. Ids of batches whose backward is to come are not
    evicted.

    Args:
        tables: the tables.
        optimizer_type: as of `FusedEmbeddingBagCollection`.
        optimizer_kwargs: its arguments.
        is_weighted: as of `EmbeddingBagCollection`.
        device: where tables and optimizer states are stored.
        backend: the lookup kernel's name. Default: the preferred one.

    Raises:
        ValueError: as of `FusedEmbeddingBagCollection`.

    >>> users = DynamicEmbeddingConfig("user", 4, capacity=128)
    >>> dynamic = DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 0.5})
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([10**15, -7]), lengths=torch.tensor([2]))
    >>> dynamic(batch).values().sum().backward()
    >>> dynamic.table("user").size
    2
    """

    rows_class = FusedEmbeddingBagCollection

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        backend: str | None = None,
    ) -> None:
        check_pooling(tables)
        super().__init__(tables, optimizer_type, optimizer_kwargs, device, backend, is_weighted=is_weighted)
        self._is_weighted = is_weighted

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch. Backward through the result steps the tables.

        Args:
            features: has every feature of the tables; others are not read.

        Returns:
            ``[B, sum of D]``.

        Raises:
            ValueError: a feature, the weights or inverse indices are missing.
        """
        bags, slots, step = self._slots(features)
        weights = None
        if self._is_weighted:
            weights = torch.cat([check_weights(bag.weights_or_none(), features.keys()) for bag in bags])
        pooled = self._held[0](self._batch(features, bags, slots, weights))
        parts = list(pooled.values().split(pooled.length_per_key(), dim=1))
        for at, (config, feature) in enumerate(self._features):
            initial = self._initial(config, bags[at].values(), slots[at])
            if initial is not None:
                own = _pooled(bags[at], *initial, config.pooling is PoolingType.MEAN, self._is_weighted)
                parts[at] = parts[at] + to_samples(own, features, feature)
        rows = torch.cat(parts, dim=1)
        keys = [name for names in self._names for name in names]
        return KeyedTensor(keys, pooled.length_per_key(), rows if step is None else _Pin.apply(rows, step))

    def embedding_bag_configs(self) -> list[DynamicEmbeddingConfig]:
        """The tables, in order."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches must have weights."""
        return self._is_weighted


@EmbeddingCollectionInterface.register
@names_wrong_arguments
class DynamicEmbeddingCollection(DynamicCollection):
    """`FusedEmbeddingCollection` for ids of any value. See `DynamicEmbeddingBagCollection`.

    Args:
        tables: the tables. Their ``pooling`` is not read.
        optimizer_type: as of `FusedEmbeddingCollection`.
        optimizer_kwargs: its arguments.
        device: where tables and optimizer states are stored.
        need_indices: put the batch's ids into the outputs' weights.
        backend: the lookup kernel's name. Default: the preferred one.

    Raises:
        ValueError: as of `FusedEmbeddingCollection`.

    >>> users = DynamicEmbeddingConfig("user", 4, capacity=128, absent="zero")
    >>> dynamic = DynamicEmbeddingCollection([users], torch.optim.SGD, {"lr": 0.5}).eval()
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([5]), lengths=torch.tensor([1, 0]))
    >>> dynamic(batch)["user"].values().tolist()
    [[0.0, 0.0, 0.0, 0.0]]
    """

    rows_class = FusedEmbeddingCollection

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        backend: str | None = None,
    ) -> None:
        super().__init__(tables, optimizer_type, optimizer_kwargs, device, backend)
        self._need_indices = need_indices

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch. Backward through the results steps the tables.

        Args:
            features: has every feature of the tables; others, weights and inverse indices are not read.

        Returns:
            For each output key ``[N, D]`` rows with the lengths of its feature.

        Raises:
            ValueError: a feature is missing.
        """
        bags, slots, step = self._slots(features)
        found = self._held[0](self._batch(features, bags, slots, None))
        outputs = {}
        names = [name for names in self._names for name in names]
        for (config, feature), name, bag, own in zip(self._features, names, bags, slots, strict=True):
            rows = found[_key(config, feature)].values()
            initial = self._initial(config, bag.values(), own)
            if initial is not None:
                rows = rows.index_copy(0, *initial)
            rows = rows if step is None else _Pin.apply(rows, step)
            outputs[name] = JaggedTensor(
                rows, lengths=bag.lengths(), weights=bag.values() if self._need_indices else None
            )
        return outputs

    def need_indices(self) -> bool:
        """Whether outputs have their ids as weights."""
        return self._need_indices

    def embedding_configs(self) -> list[DynamicEmbeddingConfig]:
        """The tables, in order."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of the outputs, where all tables have the same number.

        Raises:
            ValueError: tables of several widths.
        """
        return common_dim(self._configs)

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the keys of its outputs."""
        return self._names


def _key(config: DynamicEmbeddingConfig, feature: str) -> str:
    """The fused collection's name for a table's feature."""
    return f"{feature}@{config.name}"


def _pooled(bag: JaggedTensor, positions: Tensor, rows: Tensor, mean: bool, weighted: bool) -> Tensor:
    """What the ids at ``positions [M]`` add to the bags ``[B, D]``, by their ``rows [M, D]``."""
    lengths = bag.lengths()
    bags = torch.repeat_interleave(torch.arange(len(lengths), device=rows.device), lengths)
    if weighted:
        rows = rows * bag.weights()[positions][:, None]
    pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bags[positions], rows)
    return pooled / lengths.clamp(min=1)[:, None] if mean else pooled
