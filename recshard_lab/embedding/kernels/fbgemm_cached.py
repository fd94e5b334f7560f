"""fbgemm's cache on a GPU: rows in unified memory, and a cache of rows in device memory (``MANAGED_CACHING``).

It serves compute kernel "fused_uvm_caching" on CUDA ranks. Elsewhere, and with an emulated cost, `CachedKernel` does.
It was written without a GPU, and has not run on one yet: tests marked ``cuda`` compare it with the fused kernel.

fbgemm assumes one batch at a time, and counts for a whole TBE. Here each table has a TBE, with the capacity of its
`CacheParams`, and each batch keeps its cache locations, so that several can be under way.

Shape letters: N ids, E rows of a shard, C slots of its cache.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.base import KernelInput, KernelSpec, RowNorms, ShardSpec
from recshard_lab.embedding.kernels.fbgemm import FbgemmKernel, _fbgemm


class FbgemmCache(NamedTuple):
    """The cache of one shard.

    Attributes:
        load_factor: C / E. fbgemm rounds C up to sets of 32 slots.
        evict: ``"lru"`` or ``"lfu"``. fbgemm prefetches with ``"lru"`` only.
    """

    load_factor: float
    evict: str


class _Looked(NamedTuple):
    """A lookup of one TBE: its ids and offsets, and ``[N]`` int32 where the cache has its rows, -1 for absent ones."""

    ids: Tensor
    offsets: Tensor
    locations: Tensor


class FbgemmCachedKernel(FbgemmKernel):
    """A `FbgemmKernel` whose rows are in unified memory, and cached in device memory.

    `weights` and `optimizer_states` are in unified memory. Call `flush` before you read or write them.

    Args:
        spec: as of `LookupKernel`.
        caches: of each shard.
    """

    def __init__(self, spec: KernelSpec, caches: Sequence[FbgemmCache]) -> None:
        self._caches = list(caches)
        self._lock = threading.RLock()  # `prefetch` may run in another thread
        self._written: set[int] = set()  # TBEs whose weights others may have written
        self._ahead: list[tuple[int, Tensor]] = []
        self._looked: list[_Looked] = []
        self._lookups = [0] * len(spec.shards)
        super().__init__(spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._lock = threading.RLock()

    def _key_of(self, index: int, shard: ShardSpec) -> tuple[DataType, int]:
        """A TBE for each shard."""
        return shard.data_type, index

    def _memory(self, indices: Sequence[int]) -> dict[str, Any]:
        """Where a TBE stores the rows of its shard, as arguments of its constructor."""
        f, (index,) = _fbgemm(), indices
        cache, shard = self._caches[index], self.shards[index]
        recent = cache.evict == "lru"
        where = f.EmbeddingLocation.MANAGED_CACHING, f.ComputeDevice.CUDA
        return {
            "embedding_specs": [(shard.num_rows, shard.num_cols, *where)],
            "cache_algorithm": f.CacheAlgorithm.LRU if recent else f.CacheAlgorithm.LFU,
            "cache_load_factor": cache.load_factor,
            "prefetch_pipeline": recent,
            "gather_uvm_cache_stats": recent,
            "record_cache_metrics": f.RecordCacheMetrics(not recent, False),
        }

    # ---- lookups ----

    def prefetch(self, batch: KernelInput) -> list[tuple[int, Tensor]] | None:
        """As of `LookupKernel`. None with ``"lfu"``, and if others may be writing to the weights."""
        if any(cache.evict != "lru" for cache in self._caches):
            return None
        with self._lock:
            if self._written:
                return None
            ids, offsets = batch.ids.contiguous(), batch.offsets.contiguous()
            spans, samples = self._features.spans(offsets, self.pooled, batch.counts)
            forward, found = torch.cuda.default_stream(self.device), []
            here = torch.cuda.current_stream(self.device)
            for index, tbe in enumerate(self._tbes):
                own_offsets = self._features.take_offsets(offsets, index, samples)
                tbe.prefetch(self._features.take(ids, index, spans), own_offsets, None if here == forward else forward)
                # forward takes them by batch, not in the order of prefetches
                found.append((tbe.timesteps_prefetched.pop(), tbe.lxu_cache_locations_list.pop()))
            return found

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        """As of `LookupKernel`. Lookups of evaluation lock no rows in the cache."""
        with self._lock:
            self._reload()
            self._ahead, self._looked = list(batch.prefetched or ()), []
            rows, saved = super().forward(batch, train)
            looked, self._looked = self._looked, []
            if not train:
                for tbe, own in zip(self._tbes, looked, strict=True):
                    if tbe.prefetch_pipeline:
                        torch.ops.fbgemm.lxu_cache_locking_counter_decrement(
                            tbe.lxu_cache_locking_counter, own.locations
                        )
            return rows, (saved, looked)

    def _look_up(self, index: int, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        tbe = self._tbes[index]
        if self._ahead:
            timestep, locations = self._ahead[index]
            tbe.timesteps_prefetched.append(timestep)
            tbe.lxu_cache_locations_list.append(locations)
        out = super()._look_up(index, ids, offsets, weights)
        self._lookups[index] += ids.numel()
        self._looked.append(_Looked(tbe._indices, tbe._offsets, tbe.lxu_cache_locations))
        return out

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """As of `LookupKernel`."""
        with self._lock:
            self._reload()
            of_tbes, looked = saved
            for tbe, own in zip(self._tbes, looked, strict=True):
                # what its backward finds the rows with: of the last lookup otherwise
                tbe._indices, tbe._offsets, tbe.lxu_cache_locations = own
                if not tbe.prefetch_pipeline:  # no locks: other lookups may have evicted the rows
                    _locate(tbe, own)
            return super().backward(of_tbes, grad, row_norms)

    # ---- memory ----

    def flush(self, shard: int) -> None:
        """As of `LookupKernel`."""
        for index, (own,) in enumerate(self._members):
            if own == shard:
                with self._lock:
                    tbe = self._tbes[index]
                    if tbe.prefetch_stream is not None:
                        torch.cuda.current_stream(self.device).wait_stream(tbe.prefetch_stream)
                    tbe.flush()
                    self._written.add(index)

    def _reload(self) -> None:
        """Reads the cached rows anew if others may have written to the weights. Rows keep their slots."""
        for index in self._written:
            tbe, (shard,) = self._tbes[index], self._members[index]
            rows, weight = tbe.lxu_cache_state.view(-1), self._weights[shard]
            places = (rows >= 0).nonzero().squeeze(1)
            tbe.lxu_cache_weights[places, : weight.shape[1]] = weight[rows[places]]
        self._written.clear()

    def fast_bytes(self) -> tuple[int, int]:
        """Bytes of cached rows. States are not cached."""
        return sum(tbe.lxu_cache_weights.nbytes for tbe in self._tbes), 0

    def counters(self) -> list[dict[str, float]]:
        """Per shard what fbgemm has counted. Waits for the device.

        ``lookups``: ids, duplicates included. ``misses``: distinct ids of batches that were not cached; the other
        ``lookups`` are ``hits``. With ``"lru"`` also ``admissions`` and ``evictions`` of rows, and ``staged``: distinct
        ids that found no slot. ``slots`` and ``slots_in_use``: C, and how many have a row.
        """
        found: list[dict[str, float]] = [{} for _ in self.shards]
        for tbe, (shard,), lookups in zip(self._tbes, self._members, self._lookups, strict=False):
            in_use, slots = int((tbe.lxu_cache_state >= 0).sum()), tbe.lxu_cache_state.numel()
            if tbe.prefetch_pipeline:
                _, asked, _, misses, staged, _ = tbe.get_uvm_cache_stats().tolist()
                own = {"lookups": asked, "misses": misses, "staged": staged, "admissions": misses - staged}
                own["evictions"] = own["admissions"] - in_use
            else:
                own = {"lookups": lookups, "misses": int(tbe.get_cache_miss_counter()[1])}
            found[shard] = own | {"hits": own["lookups"] - own["misses"], "slots": slots, "slots_in_use": in_use}
        return found


def _locate(tbe: Any, looked: _Looked) -> None:
    """Writes where the cache has the rows now to ``looked.locations``."""
    ops = torch.ops.fbgemm
    rows = ops.linearize_cache_indices(tbe.cache_hash_size_cumsum, looked.ids, looked.offsets, None, -1)
    ops.lxu_cache_lookup(
        rows, tbe.lxu_cache_state, tbe.total_cache_hash_size, False, lxu_cache_locations_output=looked.locations
    )
