"""A training step with cached tables beside one with all rows in fast memory.

8 tables of 100,000 rows x 64, pooling 10, batch 4096, Zipf 1.2 ids, SGD, one process with one torch thread. The cache
has 10% of the rows. The rows below it have an emulated cost: each access takes at least 20 us, and passes at a tenth of
the measured bandwidth of memory.

The model is a DLRM with dense layers 512-256-64 and 512-512-256-1. A step of lookups alone is shown beside it: it has
less compute behind which rows can be moved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import Figure
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ParameterSharding,
    Shard,
    ShardingPlan,
)
from recshard_lab.data import Batch
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.embedding import EmulatedCost
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.sharding import CacheParams, EmbeddingModuleShardingPlan
from recshard_lab.train.pipelines import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

TABLES, ROWS, DIM, POOLING, BATCH, ZIPF = 8, 100_000, 64, 10, 4096, 1.2
SHARE, LATENCY_US, SLOWER = 0.1, 20.0, 10.0
BATCHES, WARM_UP, ROUNDS, TURN = 24, 12, 6, 4
DENSE = 13
CACHED = "cached training step over all rows in fast memory, prefetched, slow tier emulated"
FEATURES = [f"f{number}" for number in range(TABLES)]


class Lookups(nn.Module):
    """A model without dense layers."""

    def __init__(self, collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = collection

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        out = self.embedding_bag_collection(batch.sparse_features).values()
        return out.sum() * 1e-4, out.detach()[:1]


@dataclass
class Side:
    """A pipeline and the times of its steps in ms."""

    model: DistributedModelParallel
    pipeline: Any
    source: Iterator[Batch]
    taken: list[float] = field(default_factory=list)

    def turn(self, steps: int, timed: bool) -> None:
        for number in range(steps):
            begun = time.perf_counter()
            self.pipeline.progress(self.source)
            if timed and number:  # the first one also waits for what other sides left in the processor's caches
                self.taken.append(1e3 * (time.perf_counter() - begun))


def cached_figures() -> Iterator[Figure]:
    """One figure. Sides take turns, a few steps each."""
    torch.manual_seed(0)
    bandwidth = memory_gb_per_s()
    cache = CacheParams(load_factor=SHARE, cost=EmulatedCost(LATENCY_US, bandwidth / SLOWER))
    batches = _batches()
    kinds = {
        "fast": (None, PrefetchTrainPipelineSparseDist),
        "prefetched": (cache, PrefetchTrainPipelineSparseDist),
        "not prefetched": (cache, TrainPipelineSparseDist),
    }
    found: dict[str, dict[str, float]] = {}
    hits = 0.0
    for model in ("DLRM", "lookups alone"):
        sides = {name: _side(model == "DLRM", *kind, batches) for name, kind in kinds.items()}
        for side in sides.values():
            side.turn(WARM_UP, False)
        before = _counted(sides["prefetched"])
        for _ in range(ROUNDS):
            for side in sides.values():
                side.turn(TURN, True)
        after = _counted(sides["prefetched"])
        hits = (after["hits"] - before["hits"]) / (after["lookups"] - before["lookups"])
        for side in sides.values():
            side.pipeline.close()
        found[model] = {name: median(side.taken) for name, side in sides.items()}
    ms, bare = found["DLRM"], found["lookups alone"]
    beside = {
        **{f"{name} ms": value for name, value in ms.items()},
        "not prefetched, x": ms["not prefetched"] / ms["fast"],
        "lookups alone, prefetched, x": bare["prefetched"] / bare["fast"],
        "lookups alone, not prefetched, x": bare["not prefetched"] / bare["fast"],
        "hit rate": hits,
        "measured GB/s": bandwidth,
    }
    yield Figure(CACHED, ms["prefetched"] / ms["fast"], "x", beside=beside)


def memory_gb_per_s() -> float:
    """Bandwidth of a copy of 128 MB, bytes read and written."""
    source = torch.randn(1 << 25)
    target = torch.empty_like(source)
    taken = []
    for _ in range(7):
        begun = time.perf_counter()
        target.copy_(source)
        taken.append(time.perf_counter() - begun)
    return 2 * source.nbytes / median(taken) / 1e9


def _batches() -> list[Batch]:
    """The same rows of a table are frequent in all batches."""
    ends = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
    places = [torch.randperm(ROWS) for _ in FEATURES]
    lengths, found = torch.full((TABLES * BATCH,), POOLING), []
    for _ in range(BATCHES):
        ranks = torch.searchsorted(ends, torch.rand(TABLES, BATCH * POOLING, dtype=torch.float64) * ends[-1])
        ids = torch.cat([place[own.clamp(max=ROWS - 1)] for place, own in zip(places, ranks, strict=True)])
        features = KeyedJaggedTensor(FEATURES, ids, lengths=lengths)
        found.append(Batch(torch.randn(BATCH, DENSE), features, torch.randint(0, 2, (BATCH,)).float()))
    return found


def _side(dense: bool, cache: CacheParams | None, pipeline: Any, batches: list[Batch]) -> Side:
    tables = [EmbeddingBagConfig(ROWS, DIM, f"t{name}", feature_names=[name]) for name in FEATURES]
    collection = EmbeddingBagCollection(tables)
    model: nn.Module = Lookups(collection)
    path = "embedding_bag_collection"
    if dense:
        model, path = DLRMTrain(DLRM(collection, DENSE, [512, 256, DIM], [512, 512, 256, 1])), f"model.{path}"
    kernel, whole = "fused" if cache is None else "fused_uvm_caching", [Shard(0, (0, ROWS), (0, DIM))]
    entries = {table.name: ParameterSharding("table_wise", kernel, None, None, cache, shards=whole) for table in tables}
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.01})
    plan = ShardingPlan({path: EmbeddingModuleShardingPlan(entries)})
    dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder])
    parameters = list(dmp.dense_parameters()) or [nn.Parameter(torch.zeros(1))]
    made = pipeline(dmp, torch.optim.SGD(parameters, lr=0.01), torch.device("cpu"), threads=True)

    def forever() -> Iterator[Batch]:
        while True:
            yield from batches

    return Side(dmp, made, forever())


def _counted(side: Side) -> dict[str, float]:
    """What the caches of all tables counted."""
    collection = next(iter(side.model.collections.values()))
    kernels = [group.kernel.counters() for group in collection.executor.lookup.groups]
    return {name: sum(own[name] for counted in kernels for own in counted) for name in ("lookups", "hits")}
