"""How long what-if sweeps take: 1,000 tables on 2,048 ranks, and all of MLPerf's DLRM-DCNv2."""

from __future__ import annotations

import random
import time

from benchmarks import Figure
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import Workload, mlperf_example, sweep

TABLES, RANKS = 1000, 2048
TARGET_S = 30.0  # of a plan of that size


def random_tables(count: int = TABLES, seed: int = 1) -> tuple[list[EmbeddingBagConfig], Workload]:
    """Rows log-uniform from 1e3 to 2e7, dims 32 to 256, 1 to 50 ids a bag."""
    draw = random.Random(seed)
    tables = [
        EmbeddingBagConfig(
            name=f"t{i}",
            num_embeddings=int(10 ** draw.uniform(3, 7.3)),
            embedding_dim=draw.choice([32, 64, 128, 256]),
            feature_names=[f"f{i}"],
        )
        for i in range(count)
    ]
    return tables, Workload(pooling_factors={f"f{i}": draw.uniform(1, 50) for i in range(count)})


def figures(quick: bool = False) -> list[Figure]:
    """Simulated, on this machine's cores; nothing is launched."""
    tables, load = random_tables()
    found = sweep(tables, load, topology="h100", world_size=RANKS, codecs=["fp32"] if quick else ["fp32", "fp16/bf16"])
    rows = [
        Figure(
            f"{TABLES:,} tables x {RANKS:,} ranks, {point.codecs}",
            point.plan_s,
            "s",
            target=TARGET_S,
            beside={"simulated step ms": point.step_ms, "bound ms": point.lower_bound or 0.0},
        )
        for point in found.points
    ]
    begun = time.perf_counter()
    steps = mlperf_example().steps
    seconds = time.perf_counter() - begun
    rows.append(
        Figure(
            "MLPerf DLRM-DCNv2 on 8, 64 and 128 H100s, six ways each",
            seconds,
            "s",
            beside={"simulated step ms": steps[128]["before"].overlap.step_ms},
        )
    )
    return rows
