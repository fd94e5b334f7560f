"""Modules that replace ids of any value by rows of a table of fixed size. The names are TorchRec's.

A table of E rows has equal buckets of rows. The hash of an id names its bucket. A rank that stores whole buckets
decides about them alone, with the result that one process has.

Shape letters: N ids, E rows, M ids that get a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments, device_named
from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from recshard_lab.embedding.dynamic.index import Counters, ScoredIndex
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.managed_collision.policies import MCHEvictionPolicy
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor

HashFunction = Callable[[Tensor, int], Tensor]


class ManagedCollisionModule(ABC, nn.Module):
    """Replaces the ids of one table by rows. The base of TorchRec's interface, for modules of yours.

    Args:
        device: where the state is stored.
        output_segments: the first row of each bucket, and the number of rows.
    """

    def __init__(self, device: torch.device | str, output_segments: Sequence[int]) -> None:
        super().__init__()
        self._device: torch.device = device_named(device)
        self._output_segments = list(output_segments)

    @property
    def device(self) -> torch.device:
        """Where the state is stored."""
        return self._device

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The batch with its ids hashed. Default: the batch."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Counts the ids of a batch in training, and gives rows to some. Returns the batch. Default: counts nothing."""
        return features

    @abstractmethod
    def remap(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """The batch with rows in place of ids.

        Args:
            features: name -> ids. Their weights, if any, are the number of ids of each feature of the table.
            mutate_miss_lengths: whether ids without a row leave their bags. Otherwise they are -1.
        """

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """`preprocess`, `profile` and `remap`: in training, ids may get rows first. Arguments as of `remap`."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    @abstractmethod
    def evict(self) -> Tensor | None:
        """The rows that have other owners since the last call, which the caller must reset. None if there are none."""

    @abstractmethod
    def output_size(self) -> int:
        """Rows E of the table."""

    @abstractmethod
    def input_size(self) -> int:
        """The number of different ids."""

    @abstractmethod
    def buckets(self) -> int:
        """Buckets of rows. Row shards have whole buckets."""

    @property
    def least_bucket_rows(self) -> int:
        """The least rows that a bucket can have."""
        return 1

    @abstractmethod
    def validate_state(self) -> None:
        """Checks the state after it was loaded.

        Raises:
            ValueError: it cannot be this module's.
        """

    @abstractmethod
    def open_slots(self) -> Tensor:
        """``[1]`` rows without an owner."""

    @abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """An empty module of the same settings for the rows of a shard, a range of whole buckets."""

    def owners_of(self, rows: Tensor) -> Tensor:
        """``[M]`` the ids of rows ``[M]``: the initial values of a row are a function of its id."""
        return rows


class RowOwners(ManagedCollisionModule):
    """The base of both modules here: which id owns each row, the numbers by which ids are evicted, and counters.

    Args:
        rows: of this module, in whole buckets.
        edges: the first row of each bucket of the table, and its rows.
        first_bucket: the first one of this module.
        numbers: names of the numbers that each row has, at most two.
        device: where the state is stored.
        name: of the table, for errors.

    Attributes:
        counters: what has happened so far, see `Counters`. ``evictions`` counts rows that had another owner.
        pinned_from: rows looked up in this step or a later one keep their owner, because their backward is to come.
            None: rows of this step.
        step: the number of batches so far.
        offset: the table's number of the first row here.
    """

    _raw_ids: Tensor
    _owned: Tensor
    _row_numbers: Tensor
    _current_iter_tensor: Tensor
    _touched: Tensor

    def __init__(
        self,
        rows: int,
        edges: Sequence[int],
        first_bucket: int,
        numbers: Sequence[str],
        device: torch.device | str,
        name: str | None,
    ) -> None:
        super().__init__(device, edges)
        self._name, self._numbers = name, list(numbers)
        self.register_load_state_dict_post_hook(_validate)
        self._allocate(rows, edges, first_bucket, self._device)

    def _allocate(self, rows: int, edges: Sequence[int], first_bucket: int, device: torch.device) -> None:
        """Rows without owners, for some buckets of a table."""
        self._rows, self._device, self._output_segments = rows, device, list(edges)
        self._buckets, self._bucket_rows = len(edges) - 1, edges[1]
        self._first_bucket, self.offset = first_bucket, first_bucket * edges[1]
        new: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.register_buffer("_raw_ids", torch.zeros(rows, **new))
        self.register_buffer("_owned", torch.zeros(rows, dtype=torch.uint8, device=device))
        self.register_buffer("_row_numbers", torch.zeros(rows, max(2, len(self._numbers)), **new))
        self.register_buffer("_current_iter_tensor", torch.zeros(1, **new))
        self.register_buffer("_touched", torch.full((rows,), -1, **new), persistent=False)
        self._indexed: list[tuple[Any, int]] = [(None, 0)]  # ids and owned that `_index` has, and their versions
        self._index: ScoredIndex
        self._row_of: Tensor  # [slots of the index + 1] the row of each slot; the last one is -1
        self._reset: list[Tensor] = []
        self.pinned_from: int | None = None
        self.step, self.counters = 0, Counters()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int] | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """As of `ManagedCollisionModule`.

        Raises:
            ValueError: a range of other than whole buckets.
        """
        edges = self._output_segments if output_segments is None else output_segments
        first, end = output_id_range
        if first not in edges or end not in edges:
            raise ValueError(
                f"{self._of_table}rows {output_id_range} of a shard are not whole buckets of {edges[1]} rows. "
                f"Fix: row_wise(num_buckets={len(edges) - 1})"
            )
        twin = copy(self)  # with the same settings, and separate buffers
        twin._buffers = dict(self._buffers)
        twin._allocate(end - first, edges, edges.index(first), device or self._device)
        twin._begin()
        return twin

    def _begin(self) -> None:
        """Checks the settings for the size of a bucket. No batch was counted yet."""

    # ---- the table ----

    @property
    def row_numbers(self) -> dict[str, Tensor]:
        """Name -> ``[E]`` int64, the numbers of each row; views of the state."""
        return {name: self._row_numbers[:, at] for at, name in enumerate(self._numbers)}

    def output_size(self) -> int:
        """Rows of this module."""
        return self._rows

    def buckets(self) -> int:
        """Buckets of the table."""
        return self._buckets

    def owners_of(self, rows: Tensor) -> Tensor:
        """``[M]`` the ids of rows ``[M]``, as the table numbers them."""
        return self._raw_ids[rows - self.offset]

    def bucket_of(self, ids: Tensor) -> Tensor:
        """``[N]`` the bucket of each id here, from 0."""
        return partitions_of(ids, self._buckets) - self._first_bucket

    def tensors(self) -> dict[str, Tensor]:
        """The state, which moves with the rows: ids, owners and two numbers by row, and the iteration ``[1]``."""
        return {
            "raw_ids": self._raw_ids,
            "owned": self._owned,
            "row_numbers": self._row_numbers,
            "current_iter": self._current_iter_tensor,
        }

    def validate_state(self) -> None:
        """Checks that each id is in its bucket.

        Raises:
            ValueError: the state is of a module with other buckets.
        """
        problem = bucket_fault(self._raw_ids, self._owned, self.offset, self._buckets, self._bucket_rows)
        if problem is not None:
            raise ValueError(f"{self._of_table}{problem}")

    @property
    def _of_table(self) -> str:
        return f"table {self._name!r}: " if self._name else ""

    # ---- lookups ----

    def find(self, ids: Tensor) -> Tensor:
        """``[N]`` the rows here of ids ``[N]``, -1 for ids without one. Counts nothing.

        Raises:
            ValueError: as `validate_state`, if something else has written the state: a checkpoint, a move.
        """
        now = zip((self._raw_ids, self._owned), self._indexed, strict=False)
        if any(own is not known or own._version != version for own, (known, version) in now):
            self.validate_state()
            rows = (self._owned == 1).nonzero().squeeze(1)
            self._index = ScoredIndex(self._rows + self._rows // 4 + 1, 8 * self._rows + 256, device=self._owned.device)
            self._row_of = rows.new_full((self._index.capacity + 1,), -1)
            self._add_to_index(self._raw_ids[rows], rows)
        return self._row_of[self._index.find(ids)]

    def _add_to_index(self, ids: Tensor, rows: Tensor) -> None:
        """Indexes the owners of some rows, and with them all owners are indexed."""
        before = self._row_of
        found = self._index.find_or_insert(ids)
        if found.moved is not None:
            self._row_of = before.new_full((self._index.capacity + 1,), -1)
            self._row_of[found.moved[1]] = before[found.moved[0]]
        lost = len(found.evicted_ids) + int((found.slots < 0).sum())
        if lost:
            raise RuntimeError(
                f"{lost:,} of {len(ids):,} ids have no place in the index: too many of their hashes are equal. "
                f"Fix: pass input_hash_func, a function that gives these ids other values"
            )
        self._row_of[found.slots] = rows
        self._indexed = [(own, own._version) for own in (self._raw_ids, self._owned)]

    def rows_of(self, ids: Tensor, training: bool, counts: Sequence[int]) -> Tensor:
        """``[N]`` the row here that each id looks up; -1 for ids that look up none.

        Args:
            ids: ``[N]`` int64, after `preprocess`.
            training: whether ids may get rows.
            counts: ids of each feature, of which the table may have several.
        """
        raise NotImplementedError

    @torch.no_grad()
    def shard_rows(self, ids: Tensor, training: bool, counts: Sequence[int]) -> Tensor:
        """`rows_of`, after the module has counted the ids in training."""
        if training:
            self._count([ids])
        return self.rows_of(ids, training, counts)

    def _count(self, batch: Sequence[Tensor]) -> None:
        """Counts the ids of a batch, and may give rows to some."""

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The batch with its ids hashed by ``input_hash_func``, if there is one."""
        return {name: _with_ids(feature, self.hashed(feature.values())) for name, feature in features.items()}

    def hashed(self, ids: Tensor) -> Tensor:
        """``[N]`` int64, the ids by which rows are owned."""
        return ids.long()

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Counts a batch in training, where rows are given by counts. Returns the batch."""
        if self.training:
            self._count([feature.values() for feature in features.values()])
        return features

    @torch.no_grad()
    def remap(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """As of `ManagedCollisionModule`."""
        found = {}
        for name, feature in features.items():
            counts = feature.weights_or_none()
            ids = feature.values()
            parts = [len(ids)] if counts is None else [int(count) for count in counts.tolist()]
            rows = self.rows_of(ids, self.training, parts)
            missed = rows < 0
            rows = torch.where(missed, rows, rows + self.offset)
            if mutate_miss_lengths and bool(missed.any()):
                found[name] = JaggedTensor._unchecked(rows[~missed], counts, _lengths_of(feature, ~missed))
            else:
                found[name] = _with_ids(feature, rows)
        return found

    def _looked_up(self, rows: Tensor, misses: Tensor, training: bool) -> None:
        """Counts lookups, and pins their rows."""
        missed = int(misses.sum())
        self.counters.lookups += len(rows)
        self.counters.misses += missed
        self.counters.hits += len(rows) - missed
        if training:
            self._touched[rows[rows >= 0]] = self.step

    # ---- owners ----

    def _free_to_take(self) -> Tensor:
        """``[E]`` bool: rows that no batch needs whose backward is to come."""
        first = self.step if self.pinned_from is None else min(self.pinned_from, self.step)
        return self._touched < first

    def _give(self, rows: Tensor, ids: Tensor) -> None:
        """Makes distinct ids ``[M]``, which `find` did not find, the owners of rows ``[M]``, which must be reset."""
        taken = rows[self._owned[rows] == 1]
        self._index.erase(self._raw_ids[taken])
        self._raw_ids[rows] = ids
        self._owned[rows], self._touched[rows] = 1, -1
        self._add_to_index(ids, rows)
        self.counters.inserts += len(rows)
        self.counters.evictions += len(taken)
        if len(rows):
            self._reset.append(rows)

    def evict(self) -> Tensor | None:
        """Rows that have other owners since the last call, ascending. A first owner counts. None if there are none."""
        if not self._reset:
            return None
        rows, self._reset = torch.cat(self._reset).unique(), []
        return rows + self.offset

    @property
    def size(self) -> int:
        """Rows that have an owner."""
        return int(self._owned.sum())


def _validate(module: Any, incompatible: Any) -> None:
    module.validate_state()


def bucket_fault(ids: Tensor, owned: Tensor, first_row: int, buckets: int, bucket_rows: int) -> str | None:
    """What is wrong if ids are outside of their buckets.

    Args:
        ids, owned: of rows ``[M]``, whole buckets; ``owned`` is 1 where the row has an owner.
        first_row: the table's number of the first of them.
        buckets, bucket_rows: of the table.
    """
    rows = (owned == 1).nonzero().squeeze(1)
    wrong = int((partitions_of(ids[rows], buckets) != (rows + first_row) // bucket_rows).sum())
    if not wrong:
        return None
    return (
        f"the state has {wrong:,} ids outside of their buckets: it was saved with another number of buckets than "
        f"{buckets}. Fix: build the module with the number it had"
    )


def bucket_edges(rows: int, buckets: int, segments: Sequence[int] | None, name: str | None) -> list[int]:
    """The first row of each bucket of a table, and its rows: those of ``segments``, or ``rows`` in equal buckets.

    Raises:
        ValueError: buckets of different sizes, or no bucket.
    """
    if segments is not None and len(segments) < 2:
        raise ValueError(f"output_segments={segments} have no bucket. Fix: pass the first row of each, then the rows")
    rows = rows if segments is None else segments[-1]
    if not 1 <= rows < 2**48 or buckets < 1 or rows % buckets:
        raise ValueError(
            f"{f'table {name!r}: ' if name else ''}zch_size={rows} rows are not {buckets} equal buckets. "
            f"Fix: make the rows a multiple of the buckets"
        )
    return [bucket * (rows // buckets) for bucket in range(buckets + 1)]


def _with_ids(feature: JaggedTensor, ids: Tensor) -> JaggedTensor:
    return JaggedTensor._unchecked(ids, feature.weights_or_none(), feature.lengths())


def _lengths_of(feature: JaggedTensor, kept: Tensor) -> Tensor:
    """The lengths of bags that lose ids."""
    lengths = feature.lengths()
    bags = torch.arange(len(lengths), device=lengths.device)
    bag = torch.repeat_interleave(bags, lengths, output_size=len(kept))
    return torch.zeros_like(lengths).scatter_add_(0, bag, kept.to(lengths.dtype))


@checks_arguments
class MCHManagedCollisionModule(RowOwners):
    """Gives rows to the ids that an eviction policy ranks highest. All other ids share the last row of their bucket.

    In training, batches are counted, and every ``eviction_interval`` batches ids get rows. A row that gets another
    owner is reset: see `ManagedCollisionEmbeddingBagCollection`. Ids counted since the last eviction are not in the
    state dict.

    Args:
        zch_size: rows.
        device: where the state is stored.
        eviction_policy: which ids have rows.
        eviction_interval: batches from one eviction to the next.
        input_hash_size: passed to ``input_hash_func``.
        input_hash_func: called with ids ``[N]`` and ``input_hash_size``. Rows are owned by what it returns.
        name: of the table, for errors.
        output_global_offset: the table's number of the first row. Set for a shard.
        output_segments: the first row of each bucket of the table, and its rows. Set for a shard.
        buckets: of rows. Each has a last row for its ids without a row, and ids compete within a bucket.

    Raises:
        ValueError: rows that cannot form equal buckets of at least two rows, or an interval below 1.

    >>> from recshard_lab.embedding.managed_collision import LFU_EvictionPolicy
    >>> module = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
    >>> ids = JaggedTensor(torch.tensor([10**12, 10**12, 7]), lengths=torch.tensor([3]))
    >>> module({"user": ids})["user"].values().tolist()
    [1, 1, 2]
    >>> module.eval()({"user": JaggedTensor(torch.tensor([8]), lengths=torch.tensor([1]))})["user"].values().tolist()
    [3]
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: HashFunction | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        buckets = buckets if output_segments is None else len(output_segments) - 1
        edges = bucket_edges(zch_size, buckets, output_segments, name)
        if eviction_interval < 1:
            raise ValueError(f"eviction_interval={eviction_interval} is below 1. Fix: eviction_interval=1")
        numbers = [info.metadata_name for info in eviction_policy.metadata_info if info.is_mch_metadata]
        super().__init__(zch_size, edges, output_global_offset // edges[1], numbers, device, name)
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._input_hash_size, self._input_hash_func = input_hash_size, input_hash_func
        self._begin()

    def _begin(self) -> None:
        if self._bucket_rows < self.least_bucket_rows:
            raise ValueError(
                f"zch_size={self._output_segments[-1]} in {self._buckets} buckets: a bucket needs 2 rows. "
                f"Fix: use fewer buckets"
            )
        self._history: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._batches_since = 0

    @property
    def least_bucket_rows(self) -> int:
        """2: a bucket has a last row for its ids without a row."""
        return 2

    def input_size(self) -> int:
        """The ``input_hash_size`` argument."""
        return self._input_hash_size

    def hashed(self, ids: Tensor) -> Tensor:
        """``[N]`` int64, the ids by which rows are owned."""
        return ids.long() if self._input_hash_func is None else self._input_hash_func(ids, self._input_hash_size).long()

    def open_slots(self) -> Tensor:
        """``[1]`` rows without an owner. The last row of each bucket is not counted."""
        return (self._rows - self._rows // self._bucket_rows - self._owned.sum(dtype=torch.int64)).view(1)

    # ---- counting and evicting ----

    def _count(self, batch: Sequence[Tensor]) -> None:
        self._current_iter_tensor += 1
        self.step += 1
        self._batches_since += 1
        now, policy = int(self._current_iter_tensor), self._eviction_policy
        names = [info.metadata_name for info in policy.metadata_info if info.is_history_metadata]
        for ids in batch:
            numbers = {name: torch.zeros_like(ids) for name in names}
            policy.record_history_metadata(now, ids, numbers)
            self._history.append((ids.clone(), numbers))
        if self._batches_since < self._eviction_interval:
            return
        every = torch.cat([ids for ids, _ in self._history])
        history = {name: torch.cat([numbers[name] for _, numbers in self._history]) for name in names}
        self._history, self._batches_since = [], 0
        bucket = self.bucket_of(every)
        for number in bucket.unique().tolist():
            mine, rows = bucket == number, slice(number * self._bucket_rows, (number + 1) * self._bucket_rows)
            own = {name: values[mine] for name, values in history.items()}
            self._give_rows_of(now, rows, every[mine], own)

    def _give_rows_of(self, now: int, rows: slice, history: Tensor, numbers: dict[str, Tensor]) -> None:
        """The policy's decisions about the ids of one bucket since the last eviction."""
        policy = self._eviction_policy
        ids, inverse, counts = history.unique(return_inverse=True, return_counts=True)
        admitted = None
        if policy._threshold_filtering_func is not None:
            admitted, _ = policy._threshold_filtering_func(counts)
        own = policy.coalesce_history_metadata(now, numbers, counts, inverse, threshold_mask=admitted)
        if admitted is not None:
            ids, counts = ids[admitted], counts[admitted]
        order = counts.argsort(descending=True, stable=True)
        sorted_ids = ids[order]
        found = self.find(sorted_ids)
        present = found >= 0
        # rows in the order of their ids, those without an owner last
        keys = torch.where(self._owned[rows] == 1, self._raw_ids[rows], torch.iinfo(torch.int64).max)
        of_place = keys.argsort(stable=True)
        stored = {name: values[rows] for name, values in self.row_numbers.items()}
        by_id = {name: values[of_place] for name, values in stored.items()}
        places = of_place.argsort()[found[present] - rows.start]
        evicted, chosen = policy.update_metadata_and_generate_eviction_scores(
            now, self._bucket_rows, order, counts[order], present, places, by_id, own
        )
        taken = of_place[evicted]
        free = self._free_to_take()[rows][taken]
        for name, values in stored.items():
            before = values[taken[~free]]
            values[of_place] = by_id[name]
            values[taken[~free]] = before  # a batch needs these rows: they keep their owner
        self._give(taken[free] + rows.start, sorted_ids[~present][chosen[free]])

    def rows_of(self, ids: Tensor, training: bool, counts: Sequence[int]) -> Tensor:
        """``[N]`` the row of each id, or the last row of its bucket."""
        rows = self.find(ids)
        misses = rows < 0
        self._looked_up(rows, misses, training)
        return torch.where(misses, (self.bucket_of(ids) + 1) * self._bucket_rows - 1, rows)


@checks_arguments
class ManagedCollisionCollection(nn.Module):
    """A `ManagedCollisionModule` for each table of a collection.

    Args:
        managed_collision_modules: table -> its module.
        embedding_configs: the tables, as of the collection.
        need_preprocess: accepted as in TorchRec. Modules preprocess their own batches.

    Raises:
        ValueError: a table without a module, a module with another number of rows, or a feature of several tables.

    >>> table = BaseEmbeddingConfig(4, 8, "t", feature_names=["user"])
    >>> from recshard_lab.embedding.managed_collision import LFU_EvictionPolicy
    >>> module = MCHManagedCollisionModule(4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
    >>> modules = ManagedCollisionCollection({"t": module}, [table])
    >>> modules(KeyedJaggedTensor(["user"], torch.tensor([10**12]), lengths=torch.tensor([1]))).values().tolist()
    [2]
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._embedding_configs, self.need_preprocess = list(embedding_configs), need_preprocess
        seen: dict[str, str] = {}
        for table in embedding_configs:
            if table.name not in managed_collision_modules:
                raise ValueError(f"table {table.name!r} has no module. Fix: add it to managed_collision_modules")
            rows = managed_collision_modules[table.name].output_size()
            if rows != table.num_embeddings:
                raise ValueError(
                    f"table {table.name!r} has {table.num_embeddings:,} rows, and its module {rows:,}. "
                    f"Fix: zch_size={table.num_embeddings}"
                )
            for feature in table.feature_names:
                if feature in seen:
                    raise ValueError(
                        f"feature {feature!r} is read by tables {seen[feature]!r} and {table.name!r}, which have "
                        f"different rows for an id. Fix: give each table separate features"
                    )
                seen[feature] = table.name
        self._managed_collision_modules = nn.ModuleDict(
            {table.name: managed_collision_modules[table.name] for table in embedding_configs}
        )

    def modules_by_table(self) -> dict[str, ManagedCollisionModule]:
        """Table -> its module."""
        return cast(dict[str, ManagedCollisionModule], dict(self._managed_collision_modules.items()))

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """The tables."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Table -> its buckets of rows."""
        return {name: module.buckets() for name, module in self.modules_by_table().items()}

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """The features of the tables, in their order, with rows in place of ids.

        Args:
            features: has every feature of the tables; others are left out.
            mutate_miss_lengths: whether ids that look up no row leave their bags. Otherwise they are -1.

        Raises:
            ValueError: ids leave a batch that has weights.
        """
        keys = [feature for table in self._embedding_configs for feature in table.feature_names]
        numbers = [features.keys().index(key) for key in keys]
        features = features.permute(numbers) if numbers != list(range(len(features.keys()))) else features
        values, lengths = [], []
        parts = features.split([len(table.feature_names) for table in self._embedding_configs])
        for (name, module), part in zip(self.modules_by_table().items(), parts, strict=True):
            counts = torch.tensor(part.length_per_key())
            own = JaggedTensor._unchecked(part.values(), counts, part.lengths().reshape(-1))
            found = module({name: own}, mutate_miss_lengths=mutate_miss_lengths)[name]
            values.append(found.values())
            lengths.append(found.lengths())
        rows, weights = torch.cat(values), features.weights_or_none()
        if weights is not None and len(rows) != len(weights):
            raise ValueError(
                f"{len(weights) - len(rows):,} ids look up no row, and the batch has weights. "
                f"Fix: disable_fallback=False"
            )
        variable = features.variable_stride_per_key()
        return KeyedJaggedTensor(
            keys,
            rows,
            weights,
            torch.cat(lengths),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def evict(self) -> dict[str, Tensor | None]:
        """Table -> the rows that must be reset, None if there are none."""
        return {name: module.evict() for name, module in self.modules_by_table().items()}

    def open_slots(self) -> dict[str, Tensor]:
        """Table -> ``[1]`` rows without an owner."""
        return {name: module.open_slots() for name, module in self.modules_by_table().items()}


# A table of fixed size whose ids have any value, as plans cut it and as ranks store it.


@dataclass
class ManagedEmbeddingConfig(EmbeddingBagConfig):
    """A table of fixed size whose ids have any value. A sequence table has ``PoolingType.NONE``.

    Args:
        partitions: buckets of rows. Shards have whole ones.
        least_equal_rows: of a module with one bucket, whose row shards become buckets. See `BaseEmbeddingConfig`.
        module: the module of the unsharded table, whose settings those of shards have. Plans need none.
    """

    dynamic: ClassVar[bool] = True

    partitions: int = 1
    least_equal_rows: int = 0
    module: Any = None

    @staticmethod
    def of(table: BaseEmbeddingConfig, module: ManagedCollisionModule) -> ManagedEmbeddingConfig:
        """A table with the cuts that its module allows."""
        given = {f.name: getattr(table, f.name) for f in fields(EmbeddingBagConfig) if hasattr(table, f.name)}
        given.setdefault("pooling", PoolingType.NONE)
        least = module.least_bucket_rows if module.buckets() == 1 else 0
        return ManagedEmbeddingConfig(**given, partitions=module.buckets(), least_equal_rows=least)

    @property
    def row_unit(self) -> int:
        """Rows of a bucket: row shards have whole buckets. 1 if row shards become buckets."""
        return 1 if self.least_equal_rows else self.num_embeddings // self.partitions

    @property
    def index_bytes_per_row(self) -> int:
        """Bytes of the owner of a row: its id, whether there is one, and two numbers."""
        return 8 + 1 + 16

    @property
    def edges(self) -> list[int]:
        """The first row of each bucket, and the number of rows."""
        return [self.row_unit * bucket for bucket in range(self.partitions + 1)]
