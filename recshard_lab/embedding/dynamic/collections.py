"""Fused collections of dynamic tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import PoolingType
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig, slots_for
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.embedding.dynamic.row_files import Dumped, Paths, Restored, Shards, dump_shards, load_shards
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.embedding.fused import FusedCollection, FusedEmbeddingBagCollection, FusedEmbeddingCollection
from recshard_lab.embedding.inputs import OutOfRange, check_ids
from recshard_lab.embedding.kernels import KernelSpec, LookupKernel
from recshard_lab.embedding.optimizers import EmbOptimType
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor


class AnyId(OutOfRange):
    """The out-of-range policy of dynamic tables: no id is out of range."""

    def fit_all(
        self, bags: Sequence[JaggedTensor], targets: Sequence[tuple[str, str, int]]
    ) -> list[tuple[JaggedTensor, Tensor | None]]:
        """The bags as they are.

        Raises:
            ValueError: ids that are not integers.
        """
        for bag, (feature, _, _) in zip(bags, targets, strict=True):
            check_ids(bag.values(), f"feature {feature!r} has ids of")
        return [(bag, None) for bag in bags]


class DynamicCollection(FusedCollection):
    """The base of both collections. The state dict has one entry: the rows, optimizer states and indexes."""

    policy_type = AnyId
    _kernel: DynamicKernel

    def _first_rows(self, table: DynamicEmbeddingConfig) -> int:
        return slots_for(table.capacity, table.max_capacity)

    def _build(self, spec: KernelSpec, chosen: type[LookupKernel]) -> LookupKernel:
        return DynamicKernel(spec, chosen, self._tables)

    def _hold_weights(self) -> None:
        """No parameters: rows belong to ids, and a table that grows gets new memory."""

    def reset_parameters(self) -> None:
        """Removes every id, from every tier."""
        for table in self._kernel.tables:
            table.erase_if(lambda ids, scores: torch.ones_like(ids, dtype=torch.bool))

    def table(self, name: str) -> DynamicTable:
        """One table.

        Raises:
            ValueError: the collection has no table of this name.
        """
        tables = self.tables()
        if name not in tables:
            raise ValueError(f"table {name!r} does not exist. Fix: use one of {', '.join(map(repr, tables))}")
        return tables[name]

    def tables(self) -> dict[str, DynamicTable]:
        """Name -> table."""
        return {table.config.name: table for table in self._kernel.tables}

    def _shards(self) -> dict[str, Shards]:
        """Name -> the table as its only shard."""
        pairs = zip(self._kernel.tables, self._kernel.pending(), strict=True)
        return {table.config.name: [(table, pending)] for table, pending in pairs}

    def counters(self) -> dict[str, dict[str, dict[str, int]]]:
        """Table -> tier, ``"fast"`` first -> what the tier itself has counted. See `DynamicTable.tier_counters`."""
        return {name: table.tier_counters() for name, table in self.tables().items()}

    def flush_tiers(self) -> None:
        """Moves every row of the tables with tiers to the last one: see `DynamicTable.flush`."""
        self._kernel.flush_tiers()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, for tables that evict by ``"epoch_lru"`` or ``"epoch_lfu"``."""
        for table in self._kernel.tables:
            table.index.epoch = epoch

    def dump(self, path: str | Path, since: int | str | Path | None = None) -> Dumped:
        """Writes the tables to a folder: ids, rows, scores, optimizer states and what admission has counted.

        The folder is complete or absent: if the process is killed, a previous dump at ``path`` stays whole. A dump may
        be loaded by a sharded collection, on any number of ranks, and by tables of another capacity.

        Args:
            path: the folder. An existing dump is replaced once the new one is complete.
            since: writes only rows that changed since an earlier dump, whose path this is, or since this step of
                `ScoredIndex` (that step included). Such a *delta* also has the ids of all other rows, so that loading
                it removes what was erased or evicted. Default: everything.

        Raises:
            DumpError: ``path`` exists and is not a dump, or ``since`` is not a dump of these tables.
            OSError: the disk is full.
            ValueError: the package safetensors is not installed.

        >>> from tempfile import TemporaryDirectory
        >>> users = DynamicEmbeddingConfig("user", 4, capacity=128)
        >>> one, other = (DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 1.0}) for _ in range(2))
        >>> rows = one.table("user").find_or_insert(torch.tensor([10**15, -7]))
        >>> with TemporaryDirectory() as folder:
        ...     one.dump(f"{folder}/full").rows
        ...     more = one.table("user").find_or_insert(torch.tensor([5]))
        ...     one.dump(f"{folder}/delta", since=f"{folder}/full").rows
        ...     other.load([f"{folder}/full", f"{folder}/delta"])
        {'user': 2}
        {'user': 1}
        Restored(rows={'user': 3}, lost={'user': 0})
        """
        return dump_shards(path, self._shards(), since)

    def load(self, path: Paths, *, optimizer_state: bool = True) -> Restored:
        """Becomes what `dump` wrote, here or on ranks. Rows that the tables have now are removed.

        A table of the same size gets the same slots and continues exactly. In a smaller table, the ids with the lowest
        scores of their buckets lose their rows: `DynamicTable.on_evict` is passed them.

        Args:
            path: the folder of a dump, or several in order: a full dump and its deltas.
            optimizer_state: whether to load optimizer states; False sets those of the rows that are read to 0.

        Raises:
            DumpError: no dump, a damaged one, one of other tables or of tables with another seed, ``absent``, ``evict``
                or range of initial values, or a delta whose base the tables do not have.
        """
        return load_shards(path, self._shards(), optimizer_state)

    def get_extra_state(self) -> dict[str, Any]:
        """Every table's index, rows and optimizer states."""
        return {name: table.state() for name, table in self.tables().items()}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Loads what `get_extra_state` returned.

        Raises:
            ValueError: other tables.
        """
        tables = self.tables()
        if list(state) != list(tables):
            raise ValueError(
                f"the state has tables {list(state)}, and the collection {list(tables)}. Fix: build the collection "
                f"with the tables of the state"
            )
        for name, table in tables.items():
            table.load_state(state[name])


@names_wrong_arguments
class DynamicEmbeddingBagCollection(DynamicCollection, FusedEmbeddingBagCollection):
    """`FusedEmbeddingBagCollection` for ids of any value: an id gets its row when it occurs first in training.

    In training, a forward is one step of each table: absent ids are inserted, and if a table is full, the ids with the
    lowest scores lose their rows. Their successors start from initial rows and optimizer states of 0. In evaluation
    (``eval()``, or without gradients) a forward changes nothing. Ids of batches whose backward is to come keep their
    rows.

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

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__(tables, optimizer_type, optimizer_kwargs, is_weighted, device, backend=backend)

    def _counts(self, features: KeyedJaggedTensor) -> list[int]:
        return features.length_per_key()  # no id is out of range


@names_wrong_arguments
class DynamicEmbeddingCollection(DynamicCollection, FusedEmbeddingCollection):
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

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        backend: str | None = None,
    ) -> None:
        sequences = [table.changed(pooling=PoolingType.NONE) for table in tables]
        super().__init__(cast(Any, sequences), optimizer_type, optimizer_kwargs, device, need_indices, backend=backend)
