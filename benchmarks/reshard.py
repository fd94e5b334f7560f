"""Live resharding, row-wise to column-wise on 4 ranks: what moves, and how fast beside Gloo's own all-to-all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks import Figure

TABLES, ROWS, DIM, RANKS, ROUNDS = 8, 100_000, 64, 4, 9
_SIZE = f"live resharding of {TABLES} tables, row_wise to column_wise, {RANKS} ranks"
_BEYOND, _SHARE = f"{_SIZE}: bytes moved beyond the least", f"{_SIZE}: share of the all-to-all's bandwidth"
TARGETS = {_BEYOND: 0.0, _SHARE: 0.5}


def figures() -> list[Figure]:
    """Both are measured in turn, in the same ranks; the exchange alone sends what the resharding sends.

    A machine's other work hits both of a pair alike: the ratio is the median of the pairs' ratios.
    """
    from recshard_lab.launcher import launch

    with launch(RANKS) as ranks:
        runs = ranks.run(_measure, ROUNDS)
    moved, must = runs[0].bytes, _must_move()
    extra = max(run.extra for run in runs)
    resharded, exchanged = ([max(each) for each in zip(*times, strict=True)] for times in _by_kind(runs))
    ratio = median(alone / both for alone, both in zip(exchanged, resharded, strict=True))
    seconds = median(resharded)
    return [
        Figure(_BEYOND, moved - must, "bytes"),
        Figure(f"resharded, {TABLES} tables x {ROWS:,} x {DIM} with row-wise state", moved / 1e6, "MB"),
        Figure("live resharding, row-wise to column-wise", seconds * 1e3, "ms"),
        Figure("Gloo's all-to-all of the same bytes", median(exchanged) * 1e3, "ms"),
        Figure("bandwidth of the resharding", moved / seconds / 1e9, "GB/s"),
        Figure(_SHARE, ratio, "", at_most=False),
        Figure("peak of extra memory on a rank", extra / 1e6, "MB"),
    ]


def _must_move() -> int:
    """Every rank needs the rows of the others in its columns, and the states of their rows."""
    rows = ROWS * (RANKS - 1) // RANKS
    return TABLES * RANKS * rows * (DIM // RANKS + 1) * 4


@dataclass(frozen=True)
class Run:
    """On a rank: seconds of each resharding and of the exchange after it, bytes of all ranks, extra bytes here."""

    resharded: list[float]
    exchanged: list[float]
    bytes: int
    extra: int


def _by_kind(runs: Sequence[Run]) -> tuple[list[list[float]], list[list[float]]]:
    return [run.resharded for run in runs], [run.exchanged for run in runs]


def _measure(rounds: int) -> Run:
    """Pairs of times. The first pair, which allocates, is dropped."""
    from recshard_lab import DistributedModelParallel, EmbeddingBagCollection
    from recshard_lab.distributed import EmbeddingBagCollectionSharder
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
    resharded, exchanged = [], []
    extra = total = 0
    for _ in range(1 + rounds):
        torch.distributed.barrier()
        done = dmp.reshard(plans[1])
        resharded.append(done.seconds)
        total, extra = done.bytes_moved, max(extra, done.peak_extra_bytes)
        message = torch.ones(sum(sizes))
        torch.distributed.barrier()
        begun = time.perf_counter()
        received = torch.empty(sum(sizes))
        torch.distributed.all_to_all_single(received, message, sizes, sizes)
        exchanged.append(time.perf_counter() - begun)
        del message, received
        dmp.reshard(plans[0])
    return Run(resharded[1:], exchanged[1:], total, extra)


def _plan(construct: Any, model: Any, scheme: str) -> Any:
    import recshard_lab
    from recshard_lab.sharding import ShardingPlan

    make = getattr(recshard_lab, scheme)
    names = [config.name for config in model.embedding_bag_configs()]
    return ShardingPlan({"": construct(model, {name: make() for name in names}, world_size=RANKS)})
