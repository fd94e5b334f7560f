"""Which rows of static tables were trained since a consumer's last read.

Each row has a stamp: how many reads came before its last step. All consumers share the stamps. A step writes one number
for each id, and memory does not grow. Dynamic tables need no tracker: their index has the step of each id's last
access, which ``dmp.dump(path, since=)`` reads.

Names follow TorchRec's ``torchrec.distributed.model_tracker``.

Shape letters: N ids of a kernel's batch, U distinct rows, E rows of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.distributed.dmp_collection import DMPCollection
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.embedding import (
    BaseManagedCollisionEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedCollection,
)
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.managed_collision.config import ManagedEmbeddingConfig

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
            for table in module._on:
                name = f"{prefix}{module.tables_name}.{table.name}.weight"
                stamps.append(self._add(path, name, module, table, 0, table.num_embeddings, module.device))
            return self._recorded(module, module._kernel.feature_slots, stamps)
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
                for (number, _), slot in zip(group.shards, group.kernel.slots, strict=True):
                    at = (module.tables[number], slot.first_row, slot.num_rows, group.device)
                    stamps.append(self._add(path, names[number], module, *at))
                found += self._recorded(group, group.kernel.feature_slots, stamps)
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
        self, owner: Any, feature_slots: Sequence[int], stamps: Sequence[Tensor | None]
    ) -> list[tuple[Any, Callable[[Tensor, Sequence[int]], None]]]:
        if all(own is None for own in stamps):
            return []
        if owner.on_step is not None:
            raise ValueError("the model has a tracker. Fix: call its close() first")
        return [(owner, partial(self._record, [stamps[slot] for slot in feature_slots]))]

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
