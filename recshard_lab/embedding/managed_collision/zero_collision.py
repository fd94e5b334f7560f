"""A table of fixed size in which no two ids share a row until it is full. The names are TorchRec's.

Shape letters: N ids, M distinct ids without a row, E rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import ceil

import torch
from torch import Tensor

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.dynamic.admission import stream_of, uniform
from recshard_lab.embedding.dynamic.index_rounds import hashes
from recshard_lab.embedding.managed_collision.modules import RowOwners, bucket_edges

_HOUR = 3600
_LOW = 0xFFFFFFFF
_NUMBERS = ("metadata", "counts")


class HashZchEvictionPolicyName(Enum):
    """Which ids lose their rows to new ones.

    Attributes:
        SINGLE_TTL_EVICTION: those not seen for ``single_ttl`` hours.
        PER_FEATURE_TTL_EVICTION: the same, with hours of each feature.
        LRU_EVICTION: the least recently used ones of the bucket. TorchRec's counts hours, this one batches.
        LFU_EVICTION: the least frequently used ones of the bucket. TorchRec lacks it.
    """

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"
    LFU_EVICTION = "LFU_EVICTION"


_SINGLE_TTL = HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
_PER_FEATURE_TTL = HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION


@dataclass
class HashZchEvictionConfig:
    """Settings of eviction by time.

    Args:
        features: features of the table.
        single_ttl: hours for which an id that is not seen keeps its row.
        per_feature_ttl: the same for each feature.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None


@checks_arguments
class HashZchManagedCollisionModule(RowOwners):
    """Gives each new id a free row of its bucket. In a full bucket the eviction policy frees rows.

    It trains on every device. A row that gets another owner is reset: see `ManagedCollisionEmbeddingBagCollection`.
    Rows that a batch looks up are not evicted before its backward.

    Args:
        zch_size: rows.
        device: where the state is stored.
        total_num_buckets: buckets of rows of the table. Row shards have whole buckets.
        max_probe: accepted as in TorchRec, where a lookup visits at most so many rows. Here it finds each row of the
            bucket in the same time.
        input_hash_size: the number of different ids, 0 if it is not known. It changes nothing here.
        output_segments: the first row of each bucket of the table, and its rows. Set for a shard.
        is_inference: whether ids get no rows in training mode either.
        name: of the table, for errors.
        eviction_policy_name: which ids lose their rows. Default: none.
        eviction_config: settings of eviction by time.
        start_bucket, end_bucket: the buckets of this module. Set for a shard. Default: all.
        opt_in_prob: the chance in percent that an occurrence of an id without a row gets it one. -1: each does.
        percent_reserved_slots: percent of each bucket's rows that ids without a row share, with ``opt_in_prob``.
        disable_fallback: whether an id without a row looks up none. Otherwise it shares that of another id, which its
            hash names: in evaluation, or while no row of its bucket can be evicted.
        track_id_freq: accepted as in TorchRec. Uses are always counted, see ``row_numbers["counts"]``.

    Raises:
        ValueError: rows that cannot form equal buckets, or settings that contradict each other.

    >>> from recshard_lab import JaggedTensor
    >>> module = HashZchManagedCollisionModule(4, torch.device("cpu"), total_num_buckets=1)
    >>> ids = JaggedTensor(torch.tensor([10**12, 7, 10**12]), lengths=torch.tensor([3]))
    >>> module({"user": ids})["user"].values().tolist()
    [1, 0, 1]
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device | str,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,
        name: str | None = None,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        disable_fallback: bool = False,
        track_id_freq: bool = False,
    ) -> None:
        edges = bucket_edges(zch_size, total_num_buckets, output_segments, name)
        own = (total_num_buckets if end_bucket is None else end_bucket) - start_bucket
        if own * edges[1] != zch_size or start_bucket < 0:
            raise ValueError(f"zch_size={zch_size}, but {own} buckets have {own * edges[1]} rows. Fix: pass as many")
        super().__init__(zch_size, edges, start_bucket, _NUMBERS, device, name)
        if not 0 <= percent_reserved_slots < 100:
            raise ValueError(f"{self._of_table}percent_reserved_slots={percent_reserved_slots} is not in [0, 100)")
        if not -1 <= opt_in_prob <= 100:
            raise ValueError(f"{self._of_table}opt_in_prob={opt_in_prob} is not in percent, nor -1. Fix: pass 0 to 100")
        self._max_probe, self._input_hash_size, self._is_inference = max_probe, input_hash_size, is_inference
        self._policy, self._config = eviction_policy_name, eviction_config or HashZchEvictionConfig([])
        self._opt_in_prob, self._percent_reserved = opt_in_prob, percent_reserved_slots
        self._disable_fallback = disable_fallback
        self._stream = stream_of(0, f"{name}/opt_in")
        self._check_times()
        self._begin()

    def _begin(self) -> None:
        self._reserved = int(self._bucket_rows * self._percent_reserved / 100) if self._opt_in_prob >= 0 else 0
        if self._opt_in_prob >= 0 and not self._reserved:
            raise ValueError(
                f"{self._of_table}opt_in_prob={self._opt_in_prob} needs reserved rows, and percent_reserved_slots="
                f"{self._percent_reserved} of {self._bucket_rows} rows is none. Fix: raise percent_reserved_slots"
            )

    def _check_times(self) -> None:
        hours, missing = self._config.per_feature_ttl, None
        if self._policy is _SINGLE_TTL and self._config.single_ttl is None:
            missing = "single_ttl"
        if self._policy is _PER_FEATURE_TTL and (hours is None or len(hours) != len(self._config.features)):
            missing = "per_feature_ttl of each feature"
        if missing is not None:
            raise ValueError(f"{self._of_table}{self._policy} needs eviction_config with {missing}. Fix: pass it")

    @property
    def least_bucket_rows(self) -> int:
        """Rows of which the reserved percentage is a row; 1 without reserved rows."""
        return ceil(100 / self._percent_reserved) if self._opt_in_prob >= 0 else 1

    @property
    def disable_fallback(self) -> bool:
        """Whether an id without a row looks up none."""
        return self._disable_fallback

    @property
    def max_probe(self) -> int:
        """The ``max_probe`` argument."""
        return self._max_probe

    def input_size(self) -> int:
        """The ``input_hash_size`` argument."""
        return self._input_hash_size

    def open_slots(self) -> Tensor:
        """``[1]`` rows without an owner, without reserved ones."""
        reserved = self._reserved * (self._rows // self._bucket_rows)
        return (self._rows - reserved - self._owned.sum(dtype=torch.int64)).view(1)

    def reset_inference_mode(self) -> None:
        """Stops giving rows to ids."""
        self.eval()
        self._is_inference = True

    def reset_training_mode(self) -> None:
        """Gives rows to ids again."""
        self.train()
        self._is_inference = False

    # ---- lookups ----

    def rows_of(self, ids: Tensor, training: bool, counts: Sequence[int]) -> Tensor:
        """``[N]`` the row of each id. Ids without one share a row or have -1, see ``disable_fallback``."""
        training = training and not self._is_inference
        rows = self.find(ids)
        misses = rows < 0
        if training:
            self._current_iter_tensor += 1
            self.step += 1
        self._looked_up(rows, misses, training)
        if training:
            expiry = self._expiry(ids, counts)
            missing = misses.nonzero().squeeze(1)
            if len(missing):
                rows[missing] = self._insert(ids[missing])
            self._record(rows, expiry)
        if self._reserved or not self._disable_fallback:
            without = (rows < 0).nonzero().squeeze(1)
            rows[without] = self._shared_rows(ids[without])
        if training:
            self._touched[rows[rows >= 0]] = self.step
        return rows

    def _shared_rows(self, ids: Tensor) -> Tensor:
        """The rows of ids without one: reserved rows if there are any, otherwise those of other ids."""
        first, many = self.bucket_of(ids) * self._bucket_rows, self._bucket_rows
        if self._reserved:
            first, many = first + self._bucket_rows - self._reserved, self._reserved
        return first + (((hashes(ids)[1] & _LOW) * many) >> 32)

    def _expiry(self, ids: Tensor, counts: Sequence[int]) -> Tensor | None:
        """``[N]`` or ``[1]`` the hour in which each id may be evicted; None without eviction by time."""
        hour, config = int(time.time() / _HOUR), self._config
        if self._policy is _SINGLE_TTL:
            assert config.single_ttl is not None
            return torch.tensor([hour + config.single_ttl], device=ids.device)
        if self._policy is not _PER_FEATURE_TTL:
            return None
        assert config.per_feature_ttl is not None
        if len(counts) != len(config.per_feature_ttl):
            raise ValueError(
                f"{self._of_table}a batch of {len(counts)} features, and per_feature_ttl has "
                f"{len(config.per_feature_ttl)}. Fix: give a number of hours for each feature of the table"
            )
        hours = torch.tensor(config.per_feature_ttl, device=ids.device) + hour
        return hours.repeat_interleave(torch.tensor(counts, device=ids.device))

    def _record(self, rows: Tensor, expiry: Tensor | None) -> None:
        """Updates the numbers of the rows that a batch looked up."""
        used = (rows >= 0).nonzero().squeeze(1)
        at, numbers = rows[used], self.row_numbers
        numbers["counts"].index_add_(0, at, torch.ones_like(at))
        if expiry is None:
            numbers["metadata"][at] = int(self._current_iter_tensor)
        else:
            hours = expiry.expand(len(rows))[used]
            numbers["metadata"].scatter_reduce_(0, at, hours, "amax")

    # ---- rows for new ids ----

    def _insert(self, ids: Tensor) -> Tensor:
        """``[M]`` the rows of ids without one, duplicates included; -1 for ids that get none."""
        new, inverse, times = ids.unique(return_inverse=True, return_counts=True)
        admitted = self._admitted(new, times)
        self.counters.refusals += int((~admitted).sum())
        bucket = self.bucket_of(new)
        some = admitted.nonzero().squeeze(1)
        some = some[bucket[some].argsort(stable=True)]  # by bucket, then by id
        rows = torch.full_like(new, -1)
        rows[some] = self._places(bucket[some])
        placed = (rows >= 0).nonzero().squeeze(1)
        self.counters.overflows += len(some) - len(placed)
        self._give(rows[placed], new[placed])
        self._row_numbers[rows[placed]] = 0
        return rows[inverse]

    def _admitted(self, ids: Tensor, times: Tensor) -> Tensor:
        """``[M]`` bool. The draws are a function of the table's name, the id and the batch."""
        if self._opt_in_prob < 0:
            return torch.ones_like(ids, dtype=torch.bool)
        batch = int(self._current_iter_tensor)
        draw = uniform(ids, self._stream, (batch, batch + 1)).squeeze(1)
        return draw < 1 - (1 - self._opt_in_prob / 100) ** times

    def _places(self, bucket: Tensor) -> Tensor:
        """Rows for new ids of these buckets, which ascend: free ones first, then those of evicted ids; or -1."""
        normal = self._bucket_rows - self._reserved
        in_bucket = torch.arange(self._rows, device=bucket.device) % self._bucket_rows
        usable = in_bucket < normal
        many = self._rows // self._bucket_rows
        free = ((self._owned == 0) & usable).nonzero().squeeze(1)
        free_of = torch.bincount(free // self._bucket_rows, minlength=many)
        new_of = torch.bincount(bucket, minlength=many)
        rank = torch.arange(len(bucket), device=bucket.device) - (new_of.cumsum(0) - new_of)[bucket]
        fits = rank < free_of[bucket]
        rows = torch.full_like(bucket, -1)
        rows[fits] = free[((free_of.cumsum(0) - free_of)[bucket] + rank)[fits]]
        if self._policy is not None:
            left = (~fits).nonzero().squeeze(1)
            candidates = (self._owned == 1) & usable & self._free_to_take()
            for number in bucket[left].unique().tolist():
                own = left[bucket[left] == number]
                victims = self._victims(number, candidates, len(own))
                rows[own[: len(victims)]] = victims
        return rows

    def _victims(self, bucket: int, candidates: Tensor, many: int) -> Tensor:
        """Up to ``many`` rows of a bucket whose owners are evicted: those with the lowest numbers, then the first."""
        first = bucket * self._bucket_rows
        rows = candidates[first : first + self._bucket_rows].nonzero().squeeze(1) + first
        frequent = self._policy is HashZchEvictionPolicyName.LFU_EVICTION
        scores = self.row_numbers["counts" if frequent else "metadata"][rows]
        if self._policy in (_SINGLE_TTL, _PER_FEATURE_TTL):
            expired = scores < int(time.time() / _HOUR)
            rows, scores = rows[expired], scores[expired]
        if many >= len(rows):
            return rows
        limit = scores.kthvalue(many).values
        below, equal = rows[scores < limit], rows[scores == limit]
        return torch.cat([below, equal[: many - len(below)]])
