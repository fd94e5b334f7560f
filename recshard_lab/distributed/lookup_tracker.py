"""Which rows of a sharded model were looked up since a consumer's last read, with a state of each row.

`ModelDeltaTracker` records steps and needs 4 bytes per row. This tracker records lookups, also those in evaluation, and
stores the ids of each batch until they are read.

Names follow TorchRec's ``torchrec.distributed.model_tracker``.

Shape letters: N ids of a kernel's batch, U distinct rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recshard_lab.distributed.delta_tracker import TrackingMode, UniqueRows
from recshard_lab.distributed.lookup_store import DeltaStoreTrec, UpdateMode
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recshard_lab.embedding.optimizers import EmbOptimType

if TYPE_CHECKING:
    from recshard_lab.sparse import KeyedJaggedTensor

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
            hooks.append((group, partial(self._record, [fqns[slot] for slot in group.kernel.feature_slots])))
        return hooks

    def _state(self, group: Any, slot: int, fqn: str) -> Callable[[], Tensor]:
        """What returns the state of each row of a shard."""
        kernel, shard = group.kernel, group.kernel.slots[slot]
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
