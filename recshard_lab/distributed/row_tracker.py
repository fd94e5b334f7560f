"""Which rows of a model's tables were trained, or looked up, since a consumer's last read.

::

    records="steps"     one stamp per row: the batch of its last step        4 bytes per row, memory does not grow
    records="lookups"   the ids of each batch, until all have read them      `DeltaStoreTrec`; with a state of each row

Batches have numbers. A read ends a batch, and returns the rows from the batch at which the consumer's last read ended.
Dynamic tables need no tracker: their index has the step of each id's last access, which ``dmp.dump(path, since=)``
reads.

Names follow TorchRec's ``torchrec.distributed.model_tracker``.

Shape letters: N ids of a kernel's batch, U distinct rows, E rows of a shard, D columns, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
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


class TrackingMode(Enum):
    """What is returned of a row. `ModelDeltaTracker` describes each."""

    ID_ONLY = "id_only"
    EMBEDDING = "embedding"
    MOMENTUM_LAST = "momentum_last"
    MOMENTUM_DIFF = "momentum_diff"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


class UpdateMode(Enum):
    """Which state of an id that was looked up several times is kept."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


SUPPORTED_MODULES = (ShardedEmbeddingCollection, ShardedEmbeddingBagCollection)
"""The modules whose lookups are recorded."""


@dataclass
class UniqueRows:
    """The distinct rows of a table that were trained or looked up.

    Args:
        ids: ``[U]`` int64, ascending.
        states: what the tracker keeps of each row; None with `TrackingMode.ID_ONLY`.
    """

    ids: Tensor
    states: Tensor | None


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


class DeltaStoreTrec:
    """A store of lookups in memory.

    Args:
        updateMode: which state of an id is kept. With ``NONE``, lookups have no states.

    >>> store = DeltaStoreTrec()
    >>> store.append(0, "movies", torch.tensor([7, 2])); store.append(1, "movies", torch.tensor([7, 1]))
    >>> store.compact(0, 2); store.get_unique()["movies"].ids
    tensor([1, 2, 7])
    """

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        self.updateMode = updateMode
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
        for fqn, inside in self.get_indexed_lookups(start_idx, end_idx).items():
            if inside:
                rows, lookups = _unique(inside, self.updateMode), self.per_fqn_lookups[fqn]
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


@dataclass
class DeltaTrackerConfig:
    """The settings of a `ModelDeltaTracker` of lookups, with its names."""

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: list[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: list[str] = field(default_factory=list)


@dataclass
class _Stamps:
    """When each row of a shard was trained.

    Attributes:
        first_row: the table's row that is row 0 of the shard.
        batches: ``[E]`` int32: the batch of each row's last step; below all consumers' batches for no step.
    """

    first_row: int
    batches: Tensor


_NEVER = -2
_OF_OPTIMIZER = (TrackingMode.ROWWISE_ADAGRAD, TrackingMode.MOMENTUM_DIFF)
_UNFUSED = (EmbeddingBagCollection, EmbeddingCollection, BaseManagedCollisionEmbeddingCollection)
_FUSE = "FusedEmbeddingBagCollection, or compute_kernel='fused'"


@checks_arguments
class ModelDeltaTracker:
    """Records which rows of a model's static tables are looked up or trained. Consumers read them independently.

    ``records="lookups"`` is TorchRec's tracker, also of lookups in evaluation. A rank records the ids that arrive at
    its shards, as rows of the shard. Of replicated tables it records the ids of its own batch. Dynamic, managed and
    unsharded tables are not recorded.

    ``records="steps"`` records a row when its fused optimizer steps it, in backward or in a deferred step. Each rank
    has the rows of its shards, as rows of the table. Every rank has all rows of replicated tables. Rows that are loaded
    or written in place are not recorded. To publish rows with their optimizer state, dump them:
    ``dmp.dump(path, rows=tracker.get_unique_ids("publisher"))``.

    Args:
        model: a `DistributedModelParallel` or any module. Make the tracker between two steps.
        consumers: names of the readers. Default: one, ``"default"``.
        delete_on_read: whether lookups that all consumers have read are removed.
        auto_compact: whether `step` merges the batches of lookups that no consumer has read.
        mode: what is returned of a row. ``ID_ONLY``: nothing. ``EMBEDDING``: its weights at the first lookup.
            ``ROWWISE_ADAGRAD`` and ``MOMENTUM_DIFF``: the growth of its row-wise Adagrad state since the first lookup.
        fqns_to_skip: parts of paths, such as a module's or a table's name. Such tables are not tracked.
        records: "lookups" or "steps".

    Raises:
        ValueError: ``MOMENTUM_LAST``; ``EMBEDDING`` of bags; an optimizer mode of other optimizers; a mode with states
            of a table that is split by columns or has several shards on this rank; two consumers of one name. Of steps:
            a mode with states; a table that a torch optimizer steps, that has managed collision, or that has a tracker;
            a `DMPCollection` of several replicas.

    >>> from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection, KeyedJaggedTensor
    >>> table = EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=4, feature_names=["seen"])
    >>> bags = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1})
    >>> tracker = ModelDeltaTracker(bags, consumers=["publisher", "backup"], records="steps")
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
        fqns_to_skip: Iterable[str] = (),
        *,
        records: Literal["lookups", "steps"] = "lookups",
    ) -> None:
        names = list(consumers or [self.DEFAULT_CONSUMER])
        if len(set(names)) < len(names):
            raise ValueError(f"two consumers have one name, got {names}. Fix: use a name for each")
        _refuse_kind(model, mode, records)
        self.per_consumer_batch_idx = dict.fromkeys(names, -1)
        self.curr_batch_idx = 0
        self.store = DeltaStoreTrec(UpdateMode.NONE if mode is TrackingMode.ID_ONLY else UpdateMode.FIRST)
        self.tracked_modules: dict[str, nn.Module] = {}
        self.records, self._mode = records, mode
        self._delete_on_read, self._auto_compact, self._skipped = delete_on_read, auto_compact, set(fqns_to_skip)
        self._features: dict[str, list[str]] = {}
        self._stamps: dict[str, list[_Stamps]] = {}
        self._states: dict[str, Callable[[], Tensor]] = {}
        self._executors: list[tuple[ShardedCollection, Any]] = []
        hooks: list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]] = []
        for path, module in getattr(model, "_bare", model).named_modules():
            hooks += self._hooks(path, module)
        self._hook = "on_step" if records == "steps" else "on_lookup"
        self._owners = [owner for owner, _ in hooks]
        for owner, record in hooks:
            setattr(owner, self._hook, record)

    # ---- reading ----

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Rows that were recorded since this consumer's last read, on this rank.

        Returns:
            Of lookups: path of each table that was looked up -> rows of its shard ``[U]`` int64, ascending. Of steps:
            the name of each table's weight in state dicts -> its rows ``[U]`` int64, ascending, on the CPU. All ranks
            have all names.

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
        if self.moved:
            raise ValueError(
                f"the tables have moved (dmp.reshard) since the tracker was made, and their later {self.records} are "
                f"not recorded. Fix: read before dmp.reshard, and make a new tracker after it"
            )
        since = self.per_consumer_batch_idx[name]
        if self.records == "steps":
            found = {fqn: _rows_since(since, self._stamps.get(fqn, [])) for fqn in self._features}
        else:
            found = self.store.get_unique(since)
        for fqn, rows in found.items():
            if self._mode in _OF_OPTIMIZER:
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
        """Ends a batch of lookups. Steps need no call: a batch is recorded when its rows are stepped."""
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
        """Table, named as in `get_unique_ids` -> the features that look it up."""
        return {fqn: list(features) for fqn, features in self._features.items()}

    @property
    def moved(self) -> bool:
        """Whether tables have moved since the tracker was made. Later batches of them are not recorded."""
        return any(getattr(module, "executor", None) is not executor for module, executor in self._executors)

    def close(self) -> None:
        """Ends the tracking. Another tracker may be made."""
        while self._owners:
            setattr(self._owners.pop(), self._hook, None)

    # ---- recording ----

    def record_ids(self, kjt: KeyedJaggedTensor) -> None:
        """Records the ids of features as looked up, as rows of this rank's shards.

        Raises:
            ValueError: a feature without a tracked table, or a tracker of steps.
        """
        self.record_embeddings(kjt, None)

    def record_embeddings(self, kjt: KeyedJaggedTensor, embeddings: Tensor | None) -> None:
        """Records the ids of features, each with a state.

        Args:
            kjt: N ids.
            embeddings: ``[N, D]``.

        Raises:
            ValueError: as `record_ids`.
        """
        if self.records == "steps":
            raise ValueError("this tracker records steps. Fix: ModelDeltaTracker(model, records='lookups')")
        of_feature = {feature: fqn for fqn, features in self._features.items() for feature in features}
        unknown = sorted(set(kjt.keys()) - of_feature.keys())
        if unknown:
            raise ValueError(f"feature {unknown[0]!r} has no tracked table. Fix: use {sorted(of_feature)}")
        counts = kjt.length_per_key()
        states = [None] * len(counts) if embeddings is None else embeddings.split(counts)
        for key, ids, own in zip(kjt.keys(), kjt.values().split(counts), states, strict=True):
            self.store.append(self.curr_batch_idx, of_feature[key], ids, own)

    # ---- inside ----

    def _hooks(self, path: str, module: nn.Module) -> list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]]:
        """What looks up or steps the tables of a module, each with what records its batches."""
        prefix, steps = f"{path}." if path else "", self.records == "steps"
        kernels: list[tuple[Any, Any, Sequence[int]]]  # with the number of each slot's table
        if isinstance(module, ShardedCollection if steps else SUPPORTED_MODULES):
            tables = module.tables
            self._executors.append((module, module.executor))
            groups = [group for group in module.executor.lookup.groups if not group.kind.dynamic]
            kernels = [(group, group.kernel, [number for number, _ in group.shards]) for group in groups]
        elif steps and isinstance(module, FusedCollection) and not isinstance(module, DynamicCollection):
            tables, kernels = module._tables, [(module, module._kernel, range(len(module._tables)))]
        else:
            for name, _ in module.named_parameters() if steps and isinstance(module, _UNFUSED) else ():
                if self._skipped.isdisjoint((prefix + name).split(".")):
                    managed = isinstance(module, BaseManagedCollisionEmbeddingCollection)
                    raise _managed(prefix + name) if managed else _unfused(prefix + name)
            return []
        fqns: list[str | None] = []
        for table in tables:
            fqn = f"{prefix}{module.tables_name}.{table.name}" + ".weight" * steps
            tracked = self._skipped.isdisjoint(fqn.split("."))
            if steps and tracked and isinstance(table, ManagedEmbeddingConfig):
                raise _managed(fqn)
            fqns.append(fqn if tracked and not table.dynamic else None)
            if fqns[-1] is None:
                continue
            if steps and isinstance(module, ShardedCollection) and module.kinds[table.name].optimizer is None:
                raise _unfused(fqn)
            if self._mode is TrackingMode.EMBEDDING and isinstance(module, ShardedEmbeddingBagCollection):
                raise ValueError(
                    f"module {path!r} pools its rows, and mode=TrackingMode.EMBEDDING returns rows. "
                    f"Fix: use an EmbeddingCollection, or pass the module's name in fqns_to_skip="
                )
            self._features[fqn], self.tracked_modules[path] = list(table.feature_names), module
        hooks: list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]] = []
        for owner, kernel, numbers in kernels:
            shards = [self._shard(fqns[number], owner, kernel, slot) for slot, number in enumerate(numbers)]
            if steps and any(shards) and owner.on_step is not None:
                raise ValueError("the model has a tracker. Fix: call its close() first")
            if any(shards):
                hooks.append((owner, partial(self._record, [shards[slot] for slot in kernel.features])))
        return hooks

    def _shard(self, fqn: str | None, owner: Any, kernel: Any, slot: int) -> _Stamps | str | None:
        """Where the batches of a shard are recorded. None if its table is skipped."""
        shard = kernel.shards[slot]
        if fqn is None:
            return None
        if self.records == "steps":
            batches = torch.full((shard.num_rows,), _NEVER, dtype=torch.int32, device=owner.device)
            self._stamps.setdefault(fqn, []).append(_Stamps(shard.first_row, batches))
            return self._stamps[fqn][-1]
        if self._mode is TrackingMode.ID_ONLY:
            return fqn
        if shard.num_cols != shard.full_dim or fqn in self._states or owner.kind.cache is not None:
            raise ValueError(
                f"table {fqn!r} has several shards or a cache on this rank, and mode={self._mode} needs whole rows in "
                f"one shard. Fix: use table_wise or row_wise, or mode=TrackingMode.ID_ONLY"
            )
        if self._mode is TrackingMode.EMBEDDING:
            self._states[fqn] = lambda: kernel.weights()[slot].detach()
            return fqn
        spec = owner.kind.optimizer
        if spec is None or spec.optimizer is not EmbOptimType.EXACT_ROWWISE_ADAGRAD:
            raise ValueError(
                f"table {fqn!r} is not stepped by fused row-wise Adagrad, whose state mode={self._mode} returns. "
                f"Fix: fuse RowWiseAdagrad, or use mode=TrackingMode.ID_ONLY"
            )
        self._states[fqn] = lambda: next(iter(kernel.optimizer_states()[slot].values())).detach().flatten()
        return fqn

    @torch.no_grad()
    def _record(self, shards: Sequence[_Stamps | str | None], ids: Tensor, counts: Sequence[int]) -> None:
        """Records rows that are about to be looked up or stepped.

        Args:
            shards: of each shard feature, as `_shard` returns it.
            ids: ``[N]`` rows of the shards, by shard feature.
            counts: ids of each shard feature.
        """
        for shard, rows in zip(shards, ids.split(list(counts)), strict=True):
            if isinstance(shard, _Stamps) and rows.device.type == "cpu":
                shard.batches.numpy()[rows.numpy()] = self.curr_batch_idx  # faster than index_fill_, and takes int32
            elif isinstance(shard, _Stamps):
                shard.batches.index_fill_(0, rows.long(), self.curr_batch_idx)
            elif shard is not None and len(rows):
                rows = rows.long().clone()
                states = self._states[shard]()[rows] if shard in self._states else None
                self.store.append(self.curr_batch_idx, shard, rows, states)

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


def _rows_since(batch: int, shards: Sequence[_Stamps]) -> UniqueRows:
    """``[U]`` the table's rows with this stamp or a later one. Column shards of the same rows have equal ones."""
    rows = [(shard.batches >= batch).nonzero().squeeze(1).cpu() + shard.first_row for shard in shards]
    return UniqueRows(torch.cat([torch.empty(0, dtype=torch.int64), *rows]).unique(), None)


def _refuse_kind(model: nn.Module, mode: TrackingMode, records: str) -> None:
    if records == "steps" and mode is not TrackingMode.ID_ONLY:
        raise ValueError(
            f"mode={mode} is not supported: a step would copy its rows first. Fix: use mode=TrackingMode.ID_ONLY. "
            f"dmp.dump(path, rows=tracker.get_unique_ids()) writes current weights and optimizer states"
        )
    replicas = getattr(getattr(model, "grid", None), "num_replicas", 1)  # of a DMPCollection
    if records == "steps" and replicas > 1:
        raise ValueError(
            f"a DMPCollection of {replicas} replicas cannot be tracked: sync also changes rows that "
            f"this replica has not stepped. Fix: use DistributedModelParallel"
        )
    if mode is TrackingMode.MOMENTUM_LAST:
        raise ValueError(
            "mode=TrackingMode.MOMENTUM_LAST is not supported: it reads a buffer of fbgemm's CUDA kernels. "
            "Fix: use MOMENTUM_DIFF with row-wise Adagrad"
        )


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
