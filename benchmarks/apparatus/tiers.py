"""CPU time of a training step of a dynamic table with a slower tier, beside one with all rows in the fast tier.

A table of 100,000 ids x 64, pooling 10, batch 1024, Zipf 1.2 ids, Adagrad, one torch thread. The fast tier of tables
with tiers has 10% of the rows. Tables take turns on the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks import Figure
from recshard_lab import DynamicEmbeddingBagCollection, DynamicEmbeddingConfig, KeyedJaggedTensor
from recshard_lab.embedding import Tier

ROWS, DIM, POOLING, BATCH, ZIPF, SHARE = 100_000, 64, 10, 1024, 1.2, 0.1
BATCHES, WARM_UP = 60, 20


def collection(tiers: list[Tier]) -> DynamicEmbeddingBagCollection:
    """All rows fit in the fast tier without tiers, else a tenth of them."""
    capacity = int(ROWS * (SHARE if tiers else 1.2))
    table = DynamicEmbeddingConfig("t", DIM, capacity, feature_names=["f"], tiers=tiers)
    return DynamicEmbeddingBagCollection([table], torch.optim.Adagrad, {"lr": 0.1})


def tier_figures() -> Iterator[Figure]:
    """CPU ms a step of each kind of tier beyond those of a table without tiers."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.full((BATCH,), POOLING)
    with TemporaryDirectory() as folder:
        sides = {
            "all rows in the fast tier": collection([]),
            "host": collection([Tier("host", capacity=2 * ROWS)]),
            "host, copies kept": collection([Tier("host", capacity=2 * ROWS, mode="cache")]),
            "disk": collection([Tier("disk", path=Path(folder, "disk"))]),
        }
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for ids in torch.randperm(ROWS, generator=draw).split(ROWS // 20):  # every id gets a row
            for side in sides.values():
                side(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int64)))
        ends = torch.arange(1, ROWS + 1, dtype=torch.float64).pow(-ZIPF).cumsum(0)
        for number in range(BATCHES):
            drawn = torch.rand(BATCH * POOLING, dtype=torch.float64, generator=draw) * ends[-1]
            ids = torch.searchsorted(ends, drawn).clamp(max=ROWS - 1)
            for name, side in sides.items():
                begun = time.process_time()
                side(KeyedJaggedTensor(["f"], ids, lengths=lengths)).values().sum().backward()
                if number >= WARM_UP:
                    taken[name].append(1e3 * (time.process_time() - begun))
        middle = {name: median(times) for name, times in taken.items()}
        fast = middle.pop("all rows in the fast tier")
        for name, ms in middle.items():
            counts = sides[name].counters()["t"]
            moved = sum(counts["fast"][kind] for kind in ("inserts", "evictions")) / (BATCHES + 20)
            yield Figure(
                f"tier {name!r}: CPU time of its accesses in a step",
                ms - fast,
                "ms",
                beside={"step ms": ms, "step ms without tier": fast, "rows moved a step": moved},
            )
