"""Share of the slower link that a plain training loop hides behind its dense part, on 2 ranks over Gloo.

Each exchange of embeddings takes at least 8 ms (an emulated link, ``recshard_lab.comm.emulation``). The dense part that
does not need the embeddings takes 10 ms forward and 10 ms backward (an emulated one: it waits, as a host waits for a
device). Four kinds of step take turns: with neither, with the dense part, with the link, with both. The hidden time is
``dense + link - neither - both``. At most the output exchange and the gradient exchange can be hidden: 16 ms a step.
CPU ranks only, because the emulated link delays the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import Figure
from benchmarks.apparatus.step_case import ROWWISE, StepCase
from benchmarks.apparatus.step_ours import batch_of, collection_of
from recshard_lab.comm.emulation import LATENCY_VARIABLE
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.sharding import ShardingPlan
from recshard_lab.sparse import KeyedJaggedTensor

LINK_MS, DENSE_MS = 8.0, 10.0
KINDS = {"neither": (0.0, 0.0), "dense": (DENSE_MS, 0.0), "link": (0.0, LINK_MS), "both": (DENSE_MS, LINK_MS)}
ROUNDS, QUICK_ROUNDS, STEPS = 15, 5, 3
LAYOUTS = ("table_wise", "row_wise")
TARGETS = {f"hidden share of the smaller, {layout}": 0.8 for layout in LAYOUTS}


def figures(*, quick: bool = False) -> list[Figure]:
    """The hidden share for each layout, beside it the time of each kind of step. ``quick``: 5 rounds, not 15."""
    from recshard_lab.launcher import launch

    found = []
    with launch(2, nodes=2, backend="gloo") as ranks:
        for layout in LAYOUTS:
            case = StepCase(layout, ROWWISE, "zipf", batch=128, ranks=2, local_ranks=1)
            found.append(figure_of(layout, ranks.run(measure, case, QUICK_ROUNDS if quick else ROUNDS)))
    return found


def figure_of(layout: str, taken: Sequence[Sequence[dict[str, float]]]) -> Figure:
    """The figure of a layout. ``taken``: by rank and round, the milliseconds of each kind of step.

    >>> ms = {"neither": 5.0, "dense": 25.0, "link": 37.0, "both": 41.0}
    >>> figure_of("row_wise", [[ms], [ms]]).value
    1.0
    """
    rounds = [{kind: max(own[kind] for own in ranks) for kind in KINDS} for ranks in zip(*taken, strict=True)]
    hidden = median(own["dense"] + own["link"] - own["neither"] - own["both"] for own in rounds)
    beside = {f"{kind} ms": median(own[kind] for own in rounds) for kind in KINDS}
    share = hidden / (2 * min(LINK_MS, DENSE_MS))
    return Figure(f"hidden share of the smaller, {layout}", share, "", at_most=False, beside=beside)


class _Dense(torch.autograd.Function):
    """Waits so many milliseconds in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        time.sleep(ms / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.ms / 1e3)
        return grads[0], None


class _Model(nn.Module):
    """Embeddings, a dense part of ``dense_ms`` beside them, and a layer that needs both."""

    dense_ms = 0.0

    def __init__(self, collection: nn.Module, width: int) -> None:
        super().__init__()
        self.sparse, self.bottom, self.over = collection, nn.Linear(13, 16), nn.Linear(16 + width, 1)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.sparse(features)
        beside = _Dense.apply(self.bottom(dense), self.dense_ms)
        loss: Tensor = self.over(torch.cat([beside, pooled.values()], 1)).square().mean()
        return loss


def measure(case: StepCase, rounds: int) -> list[dict[str, float]]:
    """On a rank: for each round the milliseconds of each kind of step."""
    sharder = EmbeddingBagCollectionSharder({"optimizer": case.optimizer, "learning_rate": 0.01})
    plan = ShardingPlan({"sparse": case.plan().plan[""]})
    dmp = DistributedModelParallel(_Model(collection_of(case), case.tables * case.dim), plan=plan, sharders=[sharder])
    optimizer = torch.optim.SGD(dmp.dense_parameters(), lr=0.01)
    features, dense = batch_of(case, "cpu", dist.get_rank()), torch.rand(case.batch, 13)
    found = []
    try:
        for _ in range(rounds + 1):  # the first warms up
            taken = {}
            for kind, (_Model.dense_ms, link_ms) in KINDS.items():
                os.environ[LATENCY_VARIABLE] = repr(link_ms)
                dist.barrier()
                begun = time.perf_counter()
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    dmp(features, dense).backward()
                    optimizer.step()
                taken[kind] = 1e3 * (time.perf_counter() - begun) / STEPS
            found.append(taken)
    finally:
        del os.environ[LATENCY_VARIABLE]
    return found[1:]
