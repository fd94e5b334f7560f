"""Step time and bytes where each distinct id is sent once, over those where every id is sent.

Sequence collections with ``use_index_dedup``, and pooled tables by the route "distinct_rows" beside the direct one.
8 tables x 100k x 64, batch 1024, 10 ids or 1 id a sample, row-wise Adagrad, 2 ranks over Gloo. Both sides are sharded
alike and step in turn on the same batches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from benchmarks import Figure, torch_threads
from benchmarks.apparatus.step_case import ROWWISE, StepCase
from benchmarks.apparatus.step_ours import batch_of, sharded
from recshard_lab.comm import trace
from recshard_lab.distributed import DistributedModelParallel, EmbeddingCollectionSharder
from recshard_lab.embedding import EmbeddingCollection, EmbeddingConfig

ROUNDS, QUICK_ROUNDS, WARM_UP = 30, 8, 2
SEQUENCES = [StepCase(layout, ROWWISE, ids) for ids in ("zipf", "uniform") for layout in ("table_wise", "row_wise")]
POOLED = [StepCase("row_wise", ROWWISE, "zipf", pooling=n, route="distinct_rows") for n in (1, 10)]
BYTES = "bytes with distinct ids over all ids"
TARGETS = {f"sequences, {layout}, zipf: {BYTES}": 0.5 for layout in ("table_wise", "row_wise")}


@dataclass(frozen=True)
class Side:
    """What one rank measures of one side: bytes sent to ranks a step, and milliseconds of each step."""

    sent: int
    ms: list[float]


def figures(*, quick: bool = False) -> list[Figure]:
    """For each layout and distribution of ids, bytes and time as shares. ``quick``: 8 rounds, not 30."""
    from recshard_lab.launcher import launch

    with launch(2, backend="gloo") as ranks:
        cases = SEQUENCES + POOLED
        measured = [ranks.run(measure, case, QUICK_ROUNDS if quick else ROUNDS) for case in cases]
    return [figure for case, sides in zip(cases, measured, strict=True) for figure in figures_of(case, sides)]


def figures_of(case: StepCase, ranks: Sequence[dict[bool, Side]]) -> list[Figure]:
    """Both figures of a case. ``ranks``: dedup -> what each rank measured."""
    kind = "sequences" if case.route == "direct" else f"pooled, {case.pooling} a bag"
    name = f"{kind}, {case.layout}, {case.ids}"
    sent = {dedup: sum(own[dedup].sent for own in ranks) / 1e6 for dedup in (False, True)}
    ms = {
        dedup: median(max(times) for times in zip(*(own[dedup].ms for own in ranks), strict=True))
        for dedup in (False, True)
    }
    return [
        Figure(
            f"{name}: {unit}",
            by[True] / by[False],
            "x",
            beside={f"all {short}": by[False], f"distinct {short}": by[True]},
        )
        for unit, short, by in ((BYTES, "MB", sent), ("time with distinct ids over all ids", "ms", ms))
    ]


def measure(case: StepCase, rounds: int) -> dict[bool, Side]:
    """On a rank. Both sides step in turn."""
    models = {dedup: _model(case, dedup) for dedup in (False, True)}
    taken: dict[bool, list[float]] = {False: [], True: []}
    sent = {}
    with torch_threads(case.threads):
        for number in range(WARM_UP + rounds):
            batch = batch_of(case, rank=dist.get_rank(), number=number)
            for dedup, model in models.items():
                dist.barrier()
                begun = time.perf_counter()
                with trace() as traced:
                    out = model(batch)
                    rows = out.values()
                    if case.route == "direct":
                        rows = torch.cat([own.values() for own in rows])
                    rows.sum().backward()
                taken[dedup].append(1e3 * (time.perf_counter() - begun))
                sent[dedup] = traced.bytes_sent()
    return {dedup: Side(sent[dedup], taken[dedup][WARM_UP:]) for dedup in models}


def _model(case: StepCase, dedup: bool) -> DistributedModelParallel:
    if case.route != "direct":
        return sharded(case if dedup else replace(case, route="direct"), "cpu")
    tables = [
        EmbeddingConfig(own.num_embeddings, own.embedding_dim, own.name, feature_names=own.feature_names)
        for own in case.configs()
    ]
    sharder = EmbeddingCollectionSharder({"optimizer": case.optimizer}, use_index_dedup=dedup)
    whole = EmbeddingCollection(tables, device=torch.device("meta"))
    return DistributedModelParallel(whole, device=torch.device("cpu"), plan=case.plan(), sharders=[sharder])
