"""Which rows of static tables were trained since a consumer's last read.

Each row has a stamp: how many reads came before its last step. All consumers share the stamps. A step writes one number
for each id, and memory does not grow. Dynamic tables need no tracker: their index has the step of each id's last
access, which ``dmp.dump(path, since=)`` reads.

Names follow TorchRec's ``torchrec.distributed.model_tracker``.

Shape letters: N ids of a kernel's batch, U distinct rows, E rows of a shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.distributed.dmp_collection import DMPCollection
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recshard_lab.embedding import (
    BaseManagedCollisionEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedCollection,
)
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig
from recshard_lab.embedding.optimizers import EmbOptimType

if TYPE_CHECKING:
    from recshard_lab.sparse import KeyedJaggedTensor


_FUSE = "FusedEmbeddingBagCollection, or compute_kernel='fused'"


class TrackingMode(Enum):
    """What TorchRec's tracker returns of a row. `ModelDeltaTracker` has ``ID_ONLY``."""

    ID_ONLY = "id_only"
    EMBEDDING = "embedding"
    MOMENTUM_LAST = "momentum_last"
    MOMENTUM_DIFF = "momentum_diff"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


class Trackers(Enum):
    """TorchRec's kinds of trackers."""

    DELTA_TRACKER = "delta_tracker"
    RAW_ID_TRACKER = "raw_id_tracker"


@dataclass
class UniqueRows:
    """The distinct rows of a table that were trained.

    Args:
        ids: ``[U]`` int64, ascending.
        states: what the tracker keeps of each row; None with `TrackingMode.ID_ONLY`.
    """

    ids: Tensor
    states: Tensor | None


@dataclass
class _Shard:
    """A shard on this rank.

    Attributes:
        first_row: the table's row that is row 0 of the shard.
        stamps: ``[E]`` int32: 1 more than the reads before each row's last step. 0 for no step.
    """

    first_row: int
    stamps: Tensor


@checks_arguments
class ModelDeltaTracker:
    """Records which rows of a model's static tables are trained. Several consumers read them independently.

    A row is recorded when its fused optimizer steps it, in backward or in a deferred step. Each rank has the rows of
    its shards. Every rank has all rows of replicated tables. Rows that are loaded or written in place are not
    recorded. The memory is 4 bytes per row of a shard.

    To publish rows with their optimizer state, dump them: ``dmp.dump(path, rows=tracker.get_unique_ids("publisher"))``.

    Args:
        model: a `DistributedModelParallel` or any module. Make the tracker between two steps.
        consumers: names of the readers. Default: one, ``"default"``.
        delete_on_read: TorchRec's argument. A consumer reads each step once in both cases, and memory is the same.
        auto_compact: TorchRec's argument. It has no effect: a row is never stored twice.
        mode: ``TrackingMode.ID_ONLY``. Others are refused.
        fqns_to_skip: parts of paths, such as a table's name. Such tables are not tracked.

    Raises:
        ValueError: a mode that is refused; a table that a torch optimizer steps, that has managed collision, or that
            has a tracker; a `DMPCollection` of several replicas; two consumers of one name.

    >>> from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection, KeyedJaggedTensor
    >>> table = EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=4, feature_names=["seen"])
    >>> bags = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1})
    >>> tracker = ModelDeltaTracker(bags, consumers=["publisher", "backup"])
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([7, 2, 7]), lengths=torch.tensor([3]))
    >>> bags(batch).values().sum().backward()
    >>> tracker.get_unique_ids("publisher")
    {'embedding_bags.movies.weight': tensor([2, 7])}
    >>> tracker.get_unique_ids("publisher")
    {'embedding_bags.movies.weight': tensor([], dtype=torch.int64)}
    >>> tracker.get_unique_ids("backup")
    {'embedding_bags.movies.weight': tensor([2, 7])}
    """

    DEFAULT_CONSUMER = "default"

    def __init__(
        self,
        model: nn.Module,
        consumers: list[str] | tuple[str, ...] | None = None,
        delete_on_read: bool = True,
        auto_compact: bool = False,
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: list[str] | tuple[str, ...] | set[str] = (),
    ) -> None:
        if mode is not TrackingMode.ID_ONLY:
            raise ValueError(
                f"mode={mode} is not supported: a step would copy its rows first. Fix: use mode=TrackingMode.ID_ONLY. "
                f"dmp.dump(path, rows=tracker.get_unique_ids()) writes current weights and optimizer states"
            )
        if isinstance(model, DMPCollection) and model.grid.num_replicas > 1:
            raise ValueError(
                f"a DMPCollection of {model.grid.num_replicas} replicas cannot be tracked: sync also changes rows that "
                f"this replica has not stepped. Fix: use DistributedModelParallel"
            )
        names = consumers or [self.DEFAULT_CONSUMER]
        if len(set(names)) < len(names):
            raise ValueError(f"two consumers have one name, got {list(names)}. Fix: use a name for each")
        self._reads = dict.fromkeys(names, 0)
        self._now = 1
        self._skipped = set(fqns_to_skip)
        self._shards: dict[str, list[_Shard]] = {}
        self._features: dict[str, list[str]] = {}
        self._watched: dict[str, nn.Module] = {}
        self._executors: list[tuple[ShardedCollection, Any]] = []
        self._tracked: list[Any] = []
        found: list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]] = []
        for path, module in getattr(model, "_bare", model).named_modules():
            found += self._found(path, module)
        for owner, record in found:
            owner.on_step = record
            self._tracked.append(owner)

    # ---- reading ----

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Rows that were trained since this consumer's last read, on this rank.

        Returns:
            The name of each table's weight in state dicts -> its rows ``[U]`` int64, ascending, on the CPU. All ranks
            have all names.

        Raises:
            ValueError: an unknown consumer, or tables that have moved since the tracker was made.
        """
        name = self._known(consumer)
        self._refuse_moved()
        found = {key: _rows_after(self._reads[name], shards) for key, shards in self._shards.items()}
        self._reads[name], self._now = self._now, self._now + 1
        return found

    def get_unique(self, consumer: str | None = None) -> dict[str, UniqueRows]:
        """As `get_unique_ids`, each as `UniqueRows` without states.

        Raises:
            ValueError: as `get_unique_ids`.
        """
        return {name: UniqueRows(rows, None) for name, rows in self.get_unique_ids(consumer).items()}

    def clear(self, consumer: str | None = None) -> None:
        """Forgets what one consumer has not read. Default: what all consumers have not read.

        Raises:
            ValueError: an unknown consumer.
        """
        for name in list(self._reads) if consumer is None else [self._known(consumer)]:
            self._reads[name] = self._now
        self._now += 1

    def step(self) -> None:
        """TorchRec's call after each batch. It has no effect: a batch is recorded when its rows are stepped."""

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """Path -> collection with tracked tables."""
        return dict(self._watched)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Table, named as in `get_unique_ids` -> the features that look it up."""
        return {name: list(features) for name, features in self._features.items()}

    def close(self) -> None:
        """Ends the tracking. Another tracker may be made."""
        while self._tracked:
            self._tracked.pop().on_step = None

    # ---- inside ----

    def _found(self, path: str, module: nn.Module) -> list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]]:
        """What steps the tables of a module, each with what records its steps."""
        prefix = f"{path}." if path else ""
        if isinstance(module, ShardedCollection):
            return self._sharded(path, prefix, module)
        if isinstance(module, DynamicCollection):
            return []
        if isinstance(module, FusedCollection):
            stamps = []
            for table in module._tables:
                name = f"{prefix}{module.tables_name}.{table.name}.weight"
                stamps.append(self._add(path, name, module, table, 0, table.num_embeddings, module.device))
            return self._recorded(module, module._kernel.features, stamps)
        for name, _ in module.named_parameters() if isinstance(module, _OTHERS) else ():
            if self._skipped.isdisjoint((prefix + name).split(".")):
                if isinstance(module, BaseManagedCollisionEmbeddingCollection):
                    raise _managed(prefix + name)
                raise _unfused(prefix + name)
        return []

    def _sharded(
        self, path: str, prefix: str, module: ShardedCollection
    ) -> list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]]:
        names = [f"{prefix}{module.tables_name}.{table.name}.weight" for table in module.tables]
        for name, table in zip(names, module.tables, strict=True):
            if self._skipped.isdisjoint(name.split(".")):
                if isinstance(table, ManagedEmbeddingConfig):
                    raise _managed(name)
                if not table.dynamic and module.kinds[table.name].optimizer is None:
                    raise _unfused(name)
                if not table.dynamic:
                    self._shards[name] = []
        self._executors.append((module, module.executor))
        found = []
        for group in module.executor.lookup.groups:
            if not group.kind.dynamic:
                stamps = []
                for (number, _), slot in zip(group.shards, group.kernel.shards, strict=True):
                    at = (module.tables[number], slot.first_row, slot.num_rows, group.device)
                    stamps.append(self._add(path, names[number], module, *at))
                found += self._recorded(group, group.kernel.features, stamps)
        return found

    def _add(
        self, path: str, name: str, module: nn.Module, table: Any, first_row: int, rows: int, device: torch.device
    ) -> Tensor | None:
        """The stamps of a new shard. None if its table is skipped."""
        if not self._skipped.isdisjoint(name.split(".")):
            return None
        shard = _Shard(first_row, torch.zeros(rows, dtype=torch.int32, device=device))
        self._shards.setdefault(name, []).append(shard)
        self._features[name] = list(table.feature_names)
        self._watched[path] = module
        return shard.stamps

    def _recorded(
        self, owner: Any, feature_shards: Sequence[int], stamps: Sequence[Tensor | None]
    ) -> list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]]:
        if all(own is None for own in stamps):
            return []
        if owner.on_step is not None:
            raise ValueError("the model has a tracker. Fix: call its close() first")
        return [(owner, partial(self._record, [stamps[slot] for slot in feature_shards]))]

    @torch.no_grad()
    def _record(self, stamps: Sequence[Tensor | None], ids: Tensor, counts: Sequence[int]) -> None:
        """Stamps rows that are about to be stepped.

        Args:
            stamps: of the shard of each shard feature.
            ids: ``[N]`` rows of the shards, by shard feature.
            counts: ids of each shard feature.
        """
        for own, rows in zip(stamps, ids.split(list(counts)), strict=True):
            if own is None:
                continue
            if own.device.type == "cpu":
                own.numpy()[rows.numpy()] = self._now  # faster than index_fill_, and takes int32
            else:
                own.index_fill_(0, rows.long(), self._now)

    def _known(self, consumer: str | None) -> str:
        name = self.DEFAULT_CONSUMER if consumer is None else consumer
        if name not in self._reads:
            raise ValueError(f"consumer {name!r} is unknown. Fix: use one of {', '.join(map(repr, self._reads))}")
        return name

    def _refuse_moved(self) -> None:
        if any(getattr(module, "executor", None) is not executor for module, executor in self._executors):
            raise ValueError(
                "the tables have moved (dmp.reshard) since the tracker was made, and their later steps are not "
                "recorded. Fix: read before dmp.reshard, and make a new tracker after it"
            )


_OTHERS = (EmbeddingBagCollection, EmbeddingCollection, BaseManagedCollisionEmbeddingCollection)


def _rows_after(time: int, shards: Sequence[_Shard]) -> Tensor:
    """``[U]`` the table's rows with a later stamp. Column shards of the same rows have equal ones."""
    rows = [(own.stamps > time).nonzero().squeeze(1).cpu() + own.first_row for own in shards]
    return torch.cat([torch.empty(0, dtype=torch.int64), *rows]).unique()


def _unfused(name: str) -> ValueError:
    return ValueError(
        f"table {name!r} is stepped by a torch optimizer, which may change rows without ids in a batch. Fix: fuse its "
        f"optimizer ({_FUSE}), or pass the table's name in fqns_to_skip="
    )


def _managed(name: str) -> ValueError:
    return ValueError(
        f"table {name!r} has managed collision, which also resets rows when they get another owner. Fix: pass the "
        f"table's name in fqns_to_skip="
    )


# Lookups of batches by table, and the distinct rows among them.
#
# Names follow TorchRec's ``torchrec.distributed.model_tracker``.
#
# Shape letters: N ids of a lookup, U distinct ids, S numbers of a state.


class UpdateMode(Enum):
    """Which state of an id that was looked up several times is kept."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


@dataclass
class IndexedLookup:
    """The ids of one table in one batch.

    Args:
        batch_idx: the batch.
        ids: ``[N]`` int64.
        states: ``[N]`` or ``[N, S]``; None without states.
        compact: whether several batches were merged into this one.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None
    compact: bool = False


class DeltaStore(ABC):
    """The interface of stores of lookups."""

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        self.updateMode = updateMode

    @abstractmethod
    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Adds a lookup of the table `fqn`."""

    @abstractmethod
    def delete(self, up_to_idx: int | None = None) -> None:
        """Removes the batches before `up_to_idx`; all if it is None."""

    @abstractmethod
    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merges the batches from `start_idx` to before `end_idx`."""

    @abstractmethod
    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Table -> its distinct rows in the batches from `from_idx`."""


class DeltaStoreTrec(DeltaStore):
    """A store of lookups in memory.

    Args:
        updateMode: which state of an id is kept. With ``NONE``, lookups have no states.

    >>> store = DeltaStoreTrec()
    >>> store.append(0, "movies", torch.tensor([7, 2])); store.append(1, "movies", torch.tensor([7, 1]))
    >>> store.compact(0, 2); store.get_unique()["movies"].ids
    tensor([1, 2, 7])
    """

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        super().__init__(updateMode)
        self.per_fqn_lookups: dict[str, list[IndexedLookup]] = {}

    def append(self, batch_idx: int, fqn: str, ids: Tensor, states: Tensor | None = None) -> None:
        """Adds a lookup.

        Args:
            batch_idx: the batch.
            fqn: the table.
            ids: ``[N]`` int64.
            states: ``[N]`` or ``[N, S]``, unless the mode is ``NONE``.

        Raises:
            ValueError: states are missing, or the mode has none.
        """
        if (states is None) != (self.updateMode is UpdateMode.NONE):
            raise ValueError(
                f"a lookup of {fqn!r} has {'no ' if states is None else ''}states, and the store's mode is "
                f"{self.updateMode.name}. Fix: UpdateMode.NONE without states, FIRST or LAST with states"
            )
        self.per_fqn_lookups.setdefault(fqn, []).append(IndexedLookup(batch_idx, ids, states))

    def delete(self, up_to_idx: int | None = None) -> None:
        """Removes the batches before `up_to_idx`; all if it is None."""
        for fqn, lookups in self.per_fqn_lookups.items():
            self.per_fqn_lookups[fqn] = [one for one in lookups if up_to_idx is not None and one.batch_idx >= up_to_idx]

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merges the batches from `start_idx` to before `end_idx` into one, under the number of the first of them.

        Raises:
            ValueError: the range is empty.
        """
        if start_idx >= end_idx:
            raise ValueError(f"batches {start_idx} to {end_idx} are an empty range. Fix: start_idx < end_idx")
        for fqn, lookups in self.per_fqn_lookups.items():
            inside = [one for one in lookups if start_idx <= one.batch_idx < end_idx]
            if inside:
                rows = _unique(inside, self.updateMode)
                merged = IndexedLookup(inside[0].batch_idx, rows.ids, rows.states, compact=True)
                before = [one for one in lookups if one.batch_idx < start_idx]
                self.per_fqn_lookups[fqn] = [*before, merged, *(one for one in lookups if one.batch_idx >= end_idx)]

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Table -> its lookups in the batches from `start_idx` to before `end_idx`."""
        return {
            fqn: [one for one in lookups if start_idx <= one.batch_idx < end_idx]
            for fqn, lookups in self.per_fqn_lookups.items()
        }

    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Table -> its distinct rows ``[U]``, ascending, in the batches from `from_idx`. Others have no entry."""
        late = {
            fqn: [one for one in lookups if one.batch_idx >= from_idx] for fqn, lookups in self.per_fqn_lookups.items()
        }
        return {fqn: _unique(lookups, self.updateMode) for fqn, lookups in late.items() if lookups}


def _unique(lookups: list[IndexedLookup], mode: UpdateMode) -> UniqueRows:
    ids, places = torch.cat([one.ids for one in lookups]).unique(return_inverse=True)
    if mode is UpdateMode.NONE:
        return UniqueRows(ids, None)
    number = torch.arange(len(places), device=places.device)
    end = "amin" if mode is UpdateMode.FIRST else "amax"
    kept = number.new_zeros(len(ids)).scatter_reduce(0, places, number, end, include_self=False)
    return UniqueRows(ids, torch.cat([one.states for one in lookups if one.states is not None])[kept])


# Which rows of a sharded model were looked up since a consumer's last read, with a state of each row.
#
# `ModelDeltaTracker` records steps and needs 4 bytes per row. This tracker records lookups, also those in evaluation,
# and
# stores the ids of each batch until they are read.
#
# Names follow TorchRec's ``torchrec.distributed.model_tracker``.
#
# Shape letters: N ids of a kernel's batch, U distinct rows, D columns.


SUPPORTED_MODULES = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)

UPDATE_MODE_MAP = {
    TrackingMode.ID_ONLY: UpdateMode.NONE,
    TrackingMode.EMBEDDING: UpdateMode.FIRST,
    TrackingMode.MOMENTUM_LAST: UpdateMode.LAST,
    TrackingMode.MOMENTUM_DIFF: UpdateMode.FIRST,
    TrackingMode.ROWWISE_ADAGRAD: UpdateMode.FIRST,
}
"""Mode of a tracker -> which state its store keeps."""

_ADAGRAD = EmbOptimType.EXACT_ROWWISE_ADAGRAD
_OF_OPTIMIZER = (TrackingMode.ROWWISE_ADAGRAD, TrackingMode.MOMENTUM_DIFF)


@dataclass
class DeltaTrackerConfig:
    """The settings of a `LookupTracker`, with its names."""

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: list[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: list[str] = field(default_factory=list)


class LookupTracker:
    """Records which rows of a model's sharded tables are looked up. Several consumers read them independently.

    A rank records the ids that arrive at its shards, as rows of the shard. Of replicated tables it records the ids of
    its own batch. Dynamic and managed tables are not recorded.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections.
        consumers: names of the readers. Default: one, ``"default"``.
        delete_on_read: whether batches that all consumers have read are removed.
        auto_compact: whether `step` merges the batches that no consumer has read.
        mode: what is returned of a row. ``ID_ONLY``: nothing. ``EMBEDDING``: its weights at the first lookup.
            ``ROWWISE_ADAGRAD`` and ``MOMENTUM_DIFF``: the growth of its row-wise Adagrad state since the first lookup.
        fqns_to_skip: parts of paths, such as a module's or a table's name. Such tables are not tracked.

    Raises:
        ValueError: ``MOMENTUM_LAST``; ``EMBEDDING`` of bags; an optimizer mode of other optimizers; a mode with states
            of a table that is split by columns or has several shards on this rank; two consumers of one name.
    """

    DEFAULT_CONSUMER = "default"

    def __init__(
        self,
        model: nn.Module,
        consumers: list[str] | None = None,
        delete_on_read: bool = True,
        auto_compact: bool = False,
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
    ) -> None:
        if mode is TrackingMode.MOMENTUM_LAST:
            raise ValueError(
                "mode=TrackingMode.MOMENTUM_LAST is not supported: it reads a buffer of fbgemm's CUDA kernels. "
                "Fix: use MOMENTUM_DIFF with row-wise Adagrad"
            )
        names = consumers or [self.DEFAULT_CONSUMER]
        if len(set(names)) < len(names):
            raise ValueError(f"two consumers have one name, got {names}. Fix: use a name for each")
        self.per_consumer_batch_idx = dict.fromkeys(names, -1)
        self.curr_batch_idx = 0
        self.store = DeltaStoreTrec(UPDATE_MODE_MAP[mode])
        self._mode, self._delete_on_read, self._auto_compact = mode, delete_on_read, auto_compact
        self._skipped = set(fqns_to_skip)
        self._features: dict[str, list[str]] = {}
        self._states: dict[str, Callable[[], Tensor]] = {}
        self.tracked_modules: dict[str, nn.Module] = {}
        self._executors: list[tuple[ShardedCollection, Any]] = []
        hooks: list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]] = []
        for path, module in getattr(model, "_bare", model).named_modules():
            if isinstance(module, SUPPORTED_MODULES) and self._skipped.isdisjoint(path.split(".")):
                hooks += self._hooks(path, module)
        for group, record in hooks:
            group.on_lookup = record

    # ---- reading ----

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Rows that were looked up since this consumer's last read, on this rank.

        Returns:
            Path of each table that was looked up -> rows of its shard ``[U]`` int64, ascending.

        Raises:
            ValueError: an unknown consumer, or tables that have moved since the tracker was made.
        """
        return {fqn: rows.ids for fqn, rows in self.get_unique(consumer).items()}

    def get_unique(
        self,
        consumer: str | None = None,
        top_percentage: float | None = 1.0,
        per_table_percentage: Mapping[str, tuple[float, str]] | None = None,
        sorted_by_indices: bool | None = True,
    ) -> dict[str, UniqueRows]:
        """As `get_unique_ids`, with the states of the mode: ``[U, D]`` weights, or ``[U]`` optimizer states.

        Args:
            consumer: the reader. Default: ``"default"``.
            top_percentage, per_table_percentage: only the defaults are supported: all rows are returned.
            sorted_by_indices: rows are ascending in both cases, as in TorchRec.

        Raises:
            ValueError: as `get_unique_ids`; a share of rows.
        """
        if top_percentage not in (None, 1.0) or per_table_percentage:
            raise ValueError("a share of the rows is not supported: all are returned. Fix: top_percentage=1.0")
        name = self._known(consumer)
        self._refuse_moved()
        found = self.store.get_unique(self.per_consumer_batch_idx[name])
        if self._mode in _OF_OPTIMIZER:
            for fqn, rows in found.items():
                assert rows.states is not None
                rows.states = self._states[fqn]()[rows.ids] - rows.states
        self._read(name)
        return found

    def clear(self, consumer: str | None = None) -> None:
        """Forgets what one consumer has not read. Default: what all consumers have not read.

        Raises:
            ValueError: an unknown consumer.
        """
        for name in list(self.per_consumer_batch_idx) if consumer is None else [self._known(consumer)]:
            self._read(name)

    def step(self) -> None:
        """Ends a batch."""
        self.curr_batch_idx += 1
        if self._auto_compact:
            self.trigger_compaction()

    def trigger_compaction(self) -> None:
        """Merges the batches that no consumer has read."""
        start = max(self.per_consumer_batch_idx.values())
        if start < self.curr_batch_idx:
            self.compact(start, self.curr_batch_idx)

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Merges the batches from `start_idx` to before `end_idx`. `DeltaStoreTrec.compact` has the errors."""
        self.store.compact(start_idx, end_idx)

    def get_tracked_modules(self) -> dict[str, nn.Module]:
        """Path -> collection with tracked tables."""
        return dict(self.tracked_modules)

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Path of each table -> the features that look it up."""
        return {fqn: list(features) for fqn, features in self._features.items()}

    # ---- recording ----

    def record_ids(self, kjt: KeyedJaggedTensor) -> None:
        """Records the ids of features, as rows of this rank's shards.

        Raises:
            ValueError: a feature without a tracked table.
        """
        self._record_features(kjt, None)

    def record_embeddings(self, kjt: KeyedJaggedTensor, embeddings: Tensor) -> None:
        """Records the ids of features, each with a state.

        Args:
            kjt: N ids.
            embeddings: ``[N, D]``.

        Raises:
            ValueError: a feature without a tracked table.
        """
        self._record_features(kjt, embeddings)

    def _record_features(self, kjt: KeyedJaggedTensor, states: Tensor | None) -> None:
        of_feature = {feature: fqn for fqn, features in self._features.items() for feature in features}
        unknown = sorted(set(kjt.keys()) - of_feature.keys())
        if unknown:
            raise ValueError(f"feature {unknown[0]!r} has no tracked table. Fix: use {sorted(of_feature)}")
        counts = kjt.length_per_key()
        parts = [None] * len(counts) if states is None else states.split(counts)
        for key, ids, own in zip(kjt.keys(), kjt.values().split(counts), parts, strict=True):
            self.store.append(self.curr_batch_idx, of_feature[key], ids, own)

    # ---- inside ----

    def _hooks(self, path: str, module: ShardedCollection) -> list[tuple[Any, Any]]:
        if self._mode is TrackingMode.EMBEDDING and isinstance(module, ShardedEmbeddingBagCollection):
            raise ValueError(
                f"module {path!r} pools its rows, and mode=TrackingMode.EMBEDDING returns rows. "
                f"Fix: use an EmbeddingCollection, or pass the module's name in fqns_to_skip="
            )
        prefix = f"{path}." if path else ""
        names = [f"{prefix}{module.tables_name}.{table.name}" for table in module.tables]
        self._executors.append((module, module.executor))
        self.tracked_modules[path] = module
        for name, table in zip(names, module.tables, strict=True):
            if not table.dynamic and self._skipped.isdisjoint(name.split(".")):
                self._features[name] = list(table.feature_names)
        hooks = []
        for group in module.executor.lookup.groups:
            if group.kind.dynamic:
                continue
            fqns = [names[number] if names[number] in self._features else None for number, _ in group.shards]
            if self._mode is not TrackingMode.ID_ONLY:
                for slot, fqn in enumerate(fqns):
                    if fqn is not None:
                        self._states[fqn] = self._state(group, slot, fqn)
            hooks.append((group, partial(self._record, [fqns[slot] for slot in group.kernel.features])))
        return hooks

    def _state(self, group: Any, slot: int, fqn: str) -> Callable[[], Tensor]:
        """What returns the state of each row of a shard."""
        kernel, shard = group.kernel, group.kernel.shards[slot]
        if shard.num_cols != shard.full_dim or fqn in self._states or group.kind.cache is not None:
            raise ValueError(
                f"table {fqn!r} has several shards or a cache on this rank, and mode={self._mode} needs whole rows in "
                f"one shard. Fix: use table_wise or row_wise, or mode=TrackingMode.ID_ONLY"
            )
        if self._mode is TrackingMode.EMBEDDING:
            return lambda: kernel.weights()[slot].detach()
        if group.kind.optimizer is None or group.kind.optimizer.optimizer is not _ADAGRAD:
            raise ValueError(
                f"table {fqn!r} is not stepped by fused row-wise Adagrad, whose state mode={self._mode} returns. "
                f"Fix: fuse RowWiseAdagrad, or use mode=TrackingMode.ID_ONLY"
            )
        return lambda: next(iter(kernel.optimizer_states()[slot].values())).detach().flatten()

    @torch.no_grad()
    def _record(self, fqns: Sequence[str | None], ids: Tensor, counts: Sequence[int]) -> None:
        """Records a lookup of a kernel.

        Args:
            fqns: the table of each shard feature; None if it is skipped.
            ids: ``[N]`` rows of the shards, by shard feature.
            counts: ids of each shard feature.
        """
        for fqn, rows in zip(fqns, ids.split(list(counts)), strict=True):
            if fqn is not None and len(rows):
                rows = rows.long().clone()
                states = self._states[fqn]()[rows] if self._mode is not TrackingMode.ID_ONLY else None
                self.store.append(self.curr_batch_idx, fqn, rows, states)

    def _read(self, name: str) -> None:
        self.curr_batch_idx += 1
        self.per_consumer_batch_idx[name] = self.curr_batch_idx
        if self._delete_on_read:
            self.store.delete(up_to_idx=min(self.per_consumer_batch_idx.values()))

    def _known(self, consumer: str | None) -> str:
        name = self.DEFAULT_CONSUMER if consumer is None else consumer
        if name not in self.per_consumer_batch_idx:
            known = " or ".join(map(repr, self.per_consumer_batch_idx))
            raise ValueError(f"consumer {name!r} is unknown. Fix: use {known}")
        return name

    @property
    def moved(self) -> bool:
        """Whether tables have moved since the tracker was made. Their later lookups are not recorded."""
        return any(getattr(module, "executor", None) is not executor for module, executor in self._executors)

    def _refuse_moved(self) -> None:
        if self.moved:
            raise ValueError(
                "the tables have moved (dmp.reshard) since the tracker was made, and their later lookups are not "
                "recorded. Fix: read before dmp.reshard, and make a new tracker after it"
            )
