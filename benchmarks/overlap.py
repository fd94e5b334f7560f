"""Share of a slow link that a plain training loop hides behind its dense part, on 2 ranks over Gloo.

Each exchange of embeddings takes at least 8 ms (an emulated link, ``recshard_lab.comm.wire``). The dense part that
does not need the embeddings takes 10 ms forward and 10 ms backward (an emulated one: it waits, as a host waits for a
device). Steps with and without the dense part take turns. The hidden time is ``link + dense - both``: the step over the
link without the dense part, plus the time of the dense part, less the step with both. At most the output exchange and
the gradient exchange can be hidden: 16 ms a step. CPU ranks only, because the emulated link delays the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import Figure
from benchmarks.apparatus.step_case import ROWWISE, StepCase
from benchmarks.apparatus.step_ours import batch_of, collection_of
from recshard_lab.comm.wire import LATENCY_VARIABLE
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.sharding import ShardingPlan
from recshard_lab.sparse import KeyedJaggedTensor

LINK_MS, DENSE_MS = 8.0, 10.0
ROUNDS, QUICK_ROUNDS, STEPS = 15, 5, 3
LAYOUTS = {"table_wise": "direct", "row_wise": "direct", "row_wise, two_hop": "two_hop"}
"""Name of a layout -> its output path."""
TARGETS = {f"hidden share of the smaller, {layout}": 0.8 for layout in LAYOUTS}


def figures(*, quick: bool = False) -> list[Figure]:
    """The hidden share for each layout, beside it the times of a step. ``quick``: 5 rounds, not 15."""
    from recshard_lab.launcher import launch

    found = []
    with launch(2, nodes=2, backend="gloo") as ranks:
        for layout, route in LAYOUTS.items():
            case = StepCase(layout.split(",")[0], ROWWISE, "zipf", batch=128, ranks=2, local_ranks=1)
            found.append(figure_of(layout, ranks.run(measure, case, route, QUICK_ROUNDS if quick else ROUNDS)))
    return found


def figure_of(layout: str, taken: Sequence[Sequence[dict[str, float]]]) -> Figure:
    """The figure of a layout. ``taken``: by rank and round, milliseconds a step.

    >>> ms = {"link": 37.0, "dense": 20.0, "both": 41.0}
    >>> figure_of("row_wise", [[ms], [ms]]).value
    1.0
    """
    rounds = [{kind: max(own[kind] for own in ranks) for kind in ranks[0]} for ranks in zip(*taken, strict=True)]
    hidden = median(own["link"] + own["dense"] - own["both"] for own in rounds)
    beside = {f"{kind} ms": median(own[kind] for own in rounds) for kind in rounds[0]}
    share = hidden / (2 * min(LINK_MS, DENSE_MS))
    return Figure(f"hidden share of the smaller, {layout}", share, "", at_most=False, beside=beside)


class _Dense(torch.autograd.Function):
    """Waits `DENSE_MS` in forward and again in backward, if ``on``."""

    on, waited_s = True, 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _Dense.wait()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        _Dense.wait()
        return grads[0]

    @classmethod
    def wait(cls) -> None:
        begun = time.perf_counter()
        time.sleep(cls.on * DENSE_MS / 1e3)
        cls.waited_s += time.perf_counter() - begun


class _Model(nn.Module):
    """Embeddings, a dense part beside them, and a layer that needs both."""

    def __init__(self, collection: nn.Module, width: int) -> None:
        super().__init__()
        self.sparse, self.bottom, self.over = collection, nn.Linear(13, 16), nn.Linear(16 + width, 1)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        pooled = self.sparse(features)
        beside = _Dense.apply(self.bottom(dense))
        loss: Tensor = self.over(torch.cat([beside, pooled.values()], 1)).square().mean()
        return loss


def measure(case: StepCase, route: str, rounds: int) -> list[dict[str, float]]:
    """On a rank, for each round: milliseconds of a step over the link, with the dense part, and of the dense part."""
    sharder = EmbeddingBagCollectionSharder({"optimizer": case.optimizer, "learning_rate": 0.01})
    plan = ShardingPlan({"sparse": case.plan().with_route(route).plan[""]})
    dmp = DistributedModelParallel(_Model(collection_of(case), case.tables * case.dim), plan=plan, sharders=[sharder])
    optimizer = torch.optim.SGD(dmp.dense_parameters(), lr=0.01)
    features, dense = batch_of(case, "cpu", dist.get_rank()), torch.rand(case.batch, 13)
    found = []
    with patch.dict(os.environ, {LATENCY_VARIABLE: repr(LINK_MS)}):
        for _ in range(rounds + 1):  # the first warms up
            taken = {}
            for kind, _Dense.on in (("link", False), ("both", True)):
                dist.barrier()
                begun, _Dense.waited_s = time.perf_counter(), 0.0
                for _ in range(STEPS):
                    optimizer.zero_grad()
                    dmp(features, dense).backward()
                    optimizer.step()
                taken[kind] = 1e3 * (time.perf_counter() - begun) / STEPS
            found.append(taken | {"dense": 1e3 * _Dense.waited_s / STEPS})
    return found[1:]
