"""The rank side of `LiveCounters`: counts lookups and, between two steps, reads weights and optimizer states.

The rank's main thread takes a sample before a forward and after every cell, and posts it to `launcher.board`. The
kernel reads it from there at any time, so a computing rank is never interrupted. Within a cell, no sample follows one
that took t ms for 20 t. So samples take at most 5% of the time.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from recshard_lab.embedding import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.kernel import DynamicKernel
from recshard_lab.lab.live.row_cache import RowCache
from recshard_lab.launcher.board import at_rest, post
from recshard_lab.sharding.plan.types import DDR

BOARD = "counters"
SHARE = 20  # pause after a sample, in multiples of its time
_watching: dict[str, Watch] = {}


def start(model: Any, every_s: float, cache_rows: int) -> dict[str, Any] | None:
    """Watches a `DistributedModelParallel` instead of the one before, and returns the first sample."""
    stop()
    watch = _watching[BOARD] = Watch(model, every_s, cache_rows)
    at_rest(BOARD, watch.sample)
    return watch.sample()


def stop() -> None:
    """Stops watching."""
    at_rest(BOARD, None)
    watch = _watching.pop(BOARD, None)
    if watch is not None:
        watch.let_go()
        post(BOARD, None)


class Watch:
    """Counts the lookups of one model; does not keep it alive.

    Args:
        model: a `DistributedModelParallel`.
        every_s: minimum seconds between two samples.
        cache_rows: rows of the simulated cache per table and rank; 0 for none.
    """

    def __init__(self, model: Any, every_s: float, cache_rows: int) -> None:
        self.model, self.every_s, self.cache_rows = ref(model), every_s, cache_rows
        self.steps = self.samples = 0
        self.next_at = 0.0
        self.lookups: dict[str, Lookups] = {}
        self.before: dict[str, dict[str, float]] = {}
        self.rates: dict[str, dict[str, float]] = {}
        self.before_steps = 0
        self._hook = model.register_forward_pre_hook(self._before_forward)
        for collection in model.collections.values():
            collection.listen(self._lookup)

    def let_go(self) -> None:
        """Removes all hooks from the model."""
        self._hook.remove()
        model = self.model()
        for collection in model.collections.values() if model is not None else ():
            collection.listen(None)

    def _before_forward(self, model: Any, arguments: Any) -> None:
        if perf_counter() >= self.next_at and self.steps:
            post(BOARD, self.sample())
        self.steps += int(torch.is_grad_enabled() and model.training)

    def _lookup(self, group: Any, batch: Tensor, counts: list[int]) -> None:
        """The ids of one kernel's shard features."""
        where = 0
        rows = batch.detach().cpu().numpy()
        by_slot: dict[int, list[Any]] = {}
        for slot, count in zip(group.kernel.features, counts, strict=True):
            by_slot.setdefault(slot, []).append(rows[where : where + count])
            where += count
        is_cached = group.kind.cache is not None
        tier = "ddr" if group.kind.host else "cache" if is_cached else "hbm"
        for slot, parts in by_slot.items():
            one = group.kernel.shards[slot]
            lookups = self.lookups.setdefault(one.table, Lookups())
            kind = "replica" if group.first_copy is not None else tier
            ids = np.concatenate(parts)
            if isinstance(group.kernel, DynamicKernel):  # its ids are not rows, and it counts hits itself
                lookups.count(kind, ids)
            else:
                cache_rows = 0 if is_cached else self.cache_rows  # a real cache counts itself
                lookups.record(kind, (one.first_row, one.num_rows, group.shards[slot]), ids, cache_rows)

    @torch.no_grad()
    def sample(self) -> dict[str, Any] | None:
        """The report of this rank on every table; None once the model is gone."""
        model = self.model()
        if model is None:
            stop()
            return None
        begun = perf_counter()
        tables = {}
        for collection in model.collections.values():
            own = _own_counters(collection)
            outside = collection.out_of_range_counts()
            for name, shards in collection.table_shards().items():
                tables[name] = _table(shards) | {
                    "kernel": collection.backends[name],
                    "counted": own.get(name, {}),
                    "out_of_range": outside.get(name, 0),
                    **self.lookups.get(name, Lookups()).report(
                        [] if _is_dynamic(shards) else [s for s, _ in shards.shards()]
                    ),
                }
        self._add_rates(tables)
        took = perf_counter() - begun
        self.next_at = perf_counter() + max(self.every_s, SHARE * took)
        self.samples += 1
        return {"step": self.steps, "number": self.samples, "ms": 1000 * took, "tables": tables}

    def _add_rates(self, tables: dict[str, dict[str, Any]]) -> None:
        """Adds ``a_step``: the counts of each table's kernels per step since the last sample."""
        steps = self.steps - self.before_steps
        for name, table in tables.items():
            counted = table["counted"]
            if steps > 0:
                before = self.before.get(name, {})
                if any(value < before.get(kind, 0) for kind, value in counted.items() if kind != "slots_in_use"):
                    before = {}  # the table has moved to a new kernel
                self.rates[name] = {kind: (value - before.get(kind, 0)) / steps for kind, value in counted.items()}
                self.before[name] = dict(counted)
            table["a_step"] = self.rates.get(name, {})
        self.before_steps = self.steps


class Lookups:
    """The lookups of one table on this rank."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.seen: dict[Any, Any] = {}
        self.caches: dict[Any, RowCache] = {}
        self.past = dict.fromkeys(("hits", "misses", "evictions"), 0)  # of caches whose rows have moved to other ranks

    def count(self, kind: str, ids: Any) -> None:
        """Lookups of ids ``[N]``."""
        self.counts[kind] = self.counts.get(kind, 0) + len(ids)

    def record(self, kind: str, part: tuple[int, int, Any], ids: Any, cache_rows: int) -> None:
        """Lookups of rows ``[N]``, relative to the first row of `part`: first row, number of rows, shard."""
        self.count(kind, ids)
        rows = part[1]
        if part not in self.seen:
            self.seen[part] = np.zeros(rows, dtype=bool)
        self.seen[part][ids] = True
        if cache_rows:
            self.caches.setdefault(part, RowCache(rows, cache_rows)).use(ids)

    def report(self, held: list[Any]) -> dict[str, Any]:
        """The counts; rows only of the shards that are still on this rank."""
        spans = {(shard.rows[0], shard.num_rows) for shard in held}
        touched = {span: np.zeros(span[1], dtype=bool) for span in spans}
        for (first, rows, _), seen in self.seen.items():
            if (first, rows) in touched:
                touched[first, rows] |= seen
        found: dict[str, Any] = {"lookups": dict(self.counts)}
        found["touched_rows"] = int(sum(np.count_nonzero(seen) for seen in touched.values()))
        found["rows_here"] = sum(rows for _, rows in spans)
        for part in [part for part in self.caches if part[:2] not in spans]:  # moved to other ranks
            gone = self.caches.pop(part)
            self.past = {name: count + getattr(gone, name) for name, count in self.past.items()}
        caches = list(self.caches.values())
        if caches or any(self.past.values()):
            found["cache"] = {
                "capacity": sum(cache.capacity for cache in caches),
                "held": sum(len(cache.held_rows) for cache in caches),
                **{name: count + sum(getattr(c, name) for c in caches) for name, count in self.past.items()},
            }
        return found


def _table(shards: Any) -> dict[str, Any]:
    """Bytes, and sums of squares over primary shards, so that the sum over ranks counts every element once."""
    weight, *states = shards.parts()
    found: dict[str, Any] = {
        "rows": shards.config.num_embeddings,
        "cols": shards.config.embedding_dim,
        "tiers": sorted({_tier(shards, shard) for shard, _ in shards.shards()}),
        "weights": _part(shards.matrices(weight), shards.tiles(weight).primary(weight.extent).tensors),
        "states": {},
    }
    for part in states:
        if _is_dynamic(shards) and not part.dtype.is_floating_point and part.name != "iter":
            continue  # belongs to the index, not to the optimizer
        matrices, primary = shards.matrices(part), shards.tiles(part).primary(part.extent).tensors
        if part.extent == "table":
            found["steps"] = max((int(matrix.max()) for matrix in matrices.values()), default=0)
            continue
        stepped = sum(int((matrix != 0).any(1).sum()) for matrix in primary.values())
        found["states"][part.name] = _part(matrices, primary) | {"rows": stepped}
    return found


def _tier(shards: Any, shard: Any) -> str:
    if shards.sharding.cache_params is not None:
        return "cache"
    return "ddr" if shard.tier == DDR else "hbm"


def _part(held: Any, primary: Any) -> dict[str, float]:
    """Bytes stored; squares summed over all stored shards, and over the primary ones."""
    own = _squares(held)
    same = sum(m.numel() for m in held.values()) == sum(m.numel() for m in primary.values())
    return {"bytes": _bytes(held), "held_squares": own, "squares": own if same else _squares(primary)}


def _bytes(matrices: Any) -> int:
    return sum(matrix.numel() * matrix.element_size() for matrix in matrices.values())


def _squares(matrices: Any) -> float:
    return float(sum(float(torch.linalg.vector_norm(m, dtype=torch.float64)) ** 2 for m in matrices.values()))


def _is_dynamic(shards: Any) -> bool:
    return isinstance(shards.config, DynamicEmbeddingConfig)


def _own_counters(collection: Any) -> dict[str, dict[str, float]]:
    """Table -> counters of its kernels. For dynamic tables also ``slots`` and ``slots_in_use``."""
    found: dict[str, dict[str, float]] = {}
    for group in collection.executor.lookup.groups:
        kernel = group.kernel
        sizes: list[dict[str, float]] = [{} for _ in kernel.shards]
        if isinstance(kernel, DynamicKernel):
            sizes = [{"slots": table.capacity, "slots_in_use": table.size} for table in kernel.tables]
        for slot, counted, size in zip(kernel.shards, kernel.counters(), sizes, strict=False):
            sums = found.setdefault(slot.table, {})
            for name, value in (counted | size).items():
                sums[name] = sums.get(name, 0.0) + value
    return found
