"""Live resharding, row-wise to column-wise on 4 ranks: what moves, and how fast beside Gloo's own all-to-all."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from recshard_lab.bench import Figure

TABLES, ROWS, DIM, RANKS, ROUNDS = 8, 100_000, 64, 4, 5


def figures() -> list[Figure]:
    """Both are measured in turn, in the same ranks; the exchange alone sends what the resharding sends."""
    from recshard_lab.launcher import launch

    with launch(RANKS) as ranks:
        ranks.run(_measure, 1)  # imports and first allocations
        runs: list[dict[str, float]] = ranks.run(_measure, ROUNDS)
    moved = runs[0]["bytes"]
    slowest = [max(run[key] for run in runs) for key in ("reshard", "exchange")]
    must = _must_move()
    extra = max(run["extra"] for run in runs)
    return [
        Figure("bytes moved beyond what must move", moved - must, "bytes", target=0.0),
        Figure(f"resharded, {TABLES} tables x {ROWS:,} x {DIM} with row-wise state", moved / 1e6, "MB"),
        Figure("live resharding, row-wise to column-wise", slowest[0] * 1e3, "ms"),
        Figure("Gloo's all-to-all of the same bytes", slowest[1] * 1e3, "ms"),
        Figure("bandwidth of the resharding", moved / slowest[0] / 1e9, "GB/s"),
        Figure("of the all-to-all's bandwidth", slowest[1] / slowest[0], "", target=0.5, at_most=False),
        Figure("peak of extra memory on a rank", extra / 1e6, "MB"),
    ]


def _must_move() -> int:
    """Every rank needs the rows of the others in its columns, and the states of their rows."""
    rows = ROWS * (RANKS - 1) // RANKS
    return TABLES * RANKS * rows * (DIM // RANKS + 1) * 4


def _measure(rounds: int) -> dict[str, float]:
    """On a rank: medians of seconds, bytes of all ranks, extra bytes here."""
    from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagConfig
    from recshard_lab.sharding import construct_module_sharding_plan

    rank = torch.distributed.get_rank()
    configs = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{n}"])
        for n in range(TABLES)
    ]
    model = EmbeddingBagCollection(tables=configs, device="meta")
    plans = [_plan(construct_module_sharding_plan, model, scheme) for scheme in ("row_wise", "column_wise")]
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_row_wise_adagrad"})
    dmp = DistributedModelParallel(model, plan=plans[0], sharders=[sharder])
    share = TABLES * ROWS // RANKS * (DIM // RANKS + 1)  # numbers from each rank to each other one
    sizes = [0 if other == rank else share for other in range(RANKS)]
    taken: dict[str, list[float]] = {"reshard": [], "exchange": []}
    extra = total = 0
    for _ in range(rounds):
        torch.distributed.barrier()
        done = dmp.reshard(plans[1])
        taken["reshard"].append(done.seconds)
        total, extra = done.bytes_moved, max(extra, done.peak_extra_bytes)
        message = torch.ones(sum(sizes))
        torch.distributed.barrier()
        begun = time.perf_counter()
        received = torch.empty(sum(sizes))
        torch.distributed.all_to_all_single(received, message, sizes, sizes)
        taken["exchange"].append(time.perf_counter() - begun)
        del message, received
        dmp.reshard(plans[0])
    return {name: median(times) for name, times in taken.items()} | {"bytes": total, "extra": extra}


def _plan(construct: Any, model: Any, scheme: str) -> Any:
    import recshard_lab
    from recshard_lab.sharding import ShardingPlan

    make = getattr(recshard_lab, scheme)
    names = [config.name for config in model.embedding_bag_configs()]
    return ShardingPlan({"": construct(model, {name: make() for name in names}, world_size=RANKS)})
