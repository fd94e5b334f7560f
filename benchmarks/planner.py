"""How near the planner's plans are to the best, from 2 to 2,048 ranks, and how long large ones take.

``recshard bench plan`` measures 26 to 500 tables on 8 ranks. ``--with-torchrec`` instead runs TorchRec's planner on the
same models, in a temporary environment, and scores both plans with both cost models.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

from benchmarks import Figure, note, plan
from benchmarks.apparatus import plan_beside
from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner import CostModel, EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.search.bounds import strong_bound
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology, scheme_names

SPEED_SIZES = ((1_000, 64), (1_000, 2_048))
GAP_SIZES = ((125, 256), (250, 512), (1_000, 2_048))
CONSTRAINED_SIZES = ((26, 8), (26, 64), (125, 256))
"""Tables, ranks."""
DRAWN = (
    *((2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (12, 4), (20, 4), (8, 8), (16, 8), (30, 8)),
    *((8, 16), (16, 16), (40, 16), (26, 32), (60, 32), (26, 64), (80, 64), (60, 128), (120, 128)),
)
"""Tables and ranks of the random models."""
EXACT_RANKS = 8  # up to so many, the exact solver is the reference
MODELS, QUICK_MODELS = 200, 8
EXACT_S, QUICK_S = 10.0, 0.5  # seconds for each exact plan


def gap_name(tables: int, ranks: int) -> str:
    """The name of the figure of a size.

    >>> gap_name(125, 256)
    'gap to the proved bound, 125 tables x 256 ranks'
    """
    return f"{_GAP}, {tables:,} tables x {ranks:,} ranks"


_GAP = "gap to the proved bound"
_DRAWN = f"{_GAP}, random models of 2 to 128 ranks"
_SHORTER = "a plan is shortened by forbidding a scheme, at most"
TARGETS = {
    plan.name_of(26, 8): 20.0,
    plan.name_of(100, 8): 100.0,
    plan.name_of(500, 8): 400.0,
    plan.name_of(1_000, 64): 1_500.0,
    plan.name_of(1_000, 2_048): 5_000.0,
    f"{_DRAWN}, median": 1.0,
    f"{_DRAWN}, worst": 8.0,
    **{gap_name(*size): 15.0 for size in GAP_SIZES},
    _SHORTER: 1.0,
}


@dataclass(frozen=True)
class Gap:
    """How far one model's greedy plan is from the best.

    Args:
        ranks: of the model.
        bound: % above the proved bound. Infinite if the greedy search refuses what the exact solver fits.
        best: % above the best plan found, by the exact solver up to `EXACT_RANKS`.
        refused: no solver found a plan.
    """

    ranks: int
    bound: float = 0.0
    best: float = 0.0
    refused: bool = False


def random_model(seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """A model of 2 to 120 tables for 2 to 128 ranks, on GPUs or CPUs, with memory from ample to hardly enough."""
    draw = random.Random(seed)
    count, ranks = draw.choice(DRAWN)
    tables, workload = plan.ads_tables(count, seed)
    fair = sum(table.weight_bytes for table in tables) / ranks
    cap = int(draw.choice([100, 2, 1.3]) * (1.05 * fair + 3e8))
    local = min(8, draw.choice([ranks, ranks, ranks // 2]))
    device = draw.choice(["cuda", "cuda", "cpu"])
    optimizer = draw.choice(["exact_sgd", "exact_row_wise_adagrad"])
    workload = Workload(draw.choice([256, 1024]), workload.pooling_factors, optimizer=optimizer)
    top = Topology(ranks, device, hbm_cap=cap, ddr_cap=cap, local_world_size=local, cores_per_host=local)
    return tables, top, workload


def proved_gap(made: ShardingPlan, tables: Sequence[EmbeddingBagConfig], top: Topology, workload: Workload) -> float:
    """% between a plan's step and its proved bound.

    Raises:
        AssertionError: the plan does not tile a table, or does not fit.
    """
    made.validate(tables, top.world_size)
    found = estimate(made, tables, top, workload)
    assert found.fits, "the plan does not fit"
    model = CostModel(tables, top, workload)
    return 100 * (found.step_ms / strong_bound(Problem(model, options_of(model, tables, {})), found.step_ms) - 1)


def gap_of(seed: int, seconds: float = EXACT_S) -> Gap:
    """The gap of one random model. The exact solver is the reference up to `EXACT_RANKS`, a bound beyond."""
    tables, top, workload = random_model(seed)
    greedy, exact = (
        EmbeddingShardingPlanner(top, workload=workload, solver=solver, time_limit_s=seconds)
        for solver in ("greedy", "exact")
    )
    try:
        made = greedy.plan_tables(tables, explain=False)
    except PlanError:
        try:
            exact.plan_tables(tables, explain=False)
        except PlanError:
            return Gap(top.world_size, refused=True)
        return Gap(top.world_size, bound=float("inf"), best=float("inf"))
    if top.world_size > EXACT_RANKS:
        return Gap(top.world_size, proved_gap(made, tables, top, workload))
    step_ms = estimate(made, tables, top, workload).step_ms
    best = exact.plan_tables(tables, explain=False)
    best_ms = estimate(best, tables, top, workload).step_ms
    proved_ms = best.estimate.lower_bound
    assert proved_ms is not None
    own = proved_gap(made, tables, top, workload)
    return Gap(top.world_size, min(own, 100 * (step_ms / proved_ms - 1)), 100 * (step_ms / best_ms - 1))


def gaps(seeds: Iterable[int], seconds: float = EXACT_S, workers: int = 1) -> list[Gap]:
    """The gaps of random models; `workers` processes plan side by side."""
    if workers == 1:
        return [gap_of(seed, seconds) for seed in seeds]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(gap_of, seeds, itertools.repeat(seconds)))


def gap_figures(found: Sequence[Gap]) -> list[Figure]:
    """Median and worst of all models, and of those with the exact solver as reference and beyond."""
    counts = {"models": len(found), "refused": sum(gap.refused for gap in found)}
    fits = [gap for gap in found if not gap.refused]
    small = [gap for gap in fits if gap.ranks <= EXACT_RANKS]
    large = [gap for gap in fits if gap.ranks > EXACT_RANKS]
    figures = []
    for name, some in ((_DRAWN, fits), (f"  {_GAP}, 2 to 8 ranks", small), (f"  {_GAP}, 16 to 128 ranks", large)):
        each = [gap.bound for gap in some]
        beside = counts if some is fits else {"models": len(some)}
        figures += [
            Figure(f"{name}, {which}", value(each), "%", beside=beside) for which, value in _STATISTICS.items() if each
        ]
    worst = max((gap.best for gap in small), default=float("nan"))
    return [*figures, Figure("  gap to the best plan found, 2 to 8 ranks, worst", worst, "%")]


_STATISTICS: dict[str, Callable[[list[float]], float]] = {"median": median, "worst": max}


def gap_at(count: int, ranks: int) -> Figure:
    """The gap of one model of a size."""
    tables, top, workload = plan.fitting(count, ranks, 0)
    made = EmbeddingShardingPlanner(top, workload=workload).plan_tables(tables, explain=False)
    beside = {"step ms": estimate(made, tables, top, workload).step_ms}
    return Figure(gap_name(count, ranks), proved_gap(made, tables, top, workload), "%", beside=beside)


def shortened(sizes: Iterable[tuple[int, int]]) -> Figure:
    """By how many % forbidding one scheme to all tables shortens a plan; 0 if it never does."""
    most = 0.0
    for count, ranks in sizes:
        tables, top, workload = plan.fitting(count, ranks, 0)
        steps = {}
        for scheme in (None, *scheme_names()):
            wish = ParameterConstraints(forbidden_sharding_types=[scheme] if scheme else None)
            planner = EmbeddingShardingPlanner(top, workload=workload, constraints={t.name: wish for t in tables})
            try:
                made = planner.plan_tables(tables, explain=False)
            except PlanError:
                continue
            steps[scheme] = estimate(made, tables, top, workload).step_ms
        most = max(most, 100 * (1 - min(steps.values()) / steps[None]))
    return Figure(_SHORTER, most, "%", beside={"models": len(list(sizes))})


PARTS = ("seconds", "random models", "large models", "forbidding")


def figures(quick: bool = False, *, with_torchrec: bool = False, only: Sequence[str] = ()) -> list[Figure]:
    """Plans of large models, and gaps.

    Args:
        quick: fewer models and less time for each bound; none beyond 256 ranks.
        only: parts of the names in `PARTS`: seconds to plan, gaps of random and of large models, forbidden schemes.
        with_torchrec: instead, both planners side by side; quick: only 26 and 100 tables on 8 ranks.
    """
    if with_torchrec:
        sizes = plan_beside.QUICK_SIZES if quick else plan_beside.SIZES
        limit_s = plan_beside.QUICK_LIMIT_S if quick else plan_beside.LIMIT_S
        return plan_beside.beside_torchrec(sizes, plan.fitting, limit_s)
    if quick:
        found = gap_figures(gaps(range(QUICK_MODELS), QUICK_S))
        return [*found, gap_at(*GAP_SIZES[0]), shortened(CONSTRAINED_SIZES[:1])]
    chosen = [part for part in PARTS if not only or any(word in part for word in only)]
    if not chosen:
        raise ValueError(f"no part has {only[0]!r} in its name. Fix: use one of {', '.join(PARTS)}")
    found = list[Figure]()
    if "seconds" in chosen:
        note("plans of 26 to 1,000 tables ...")
        found += plan.times((*plan.SIZES, *SPEED_SIZES))
    if "random models" in chosen:
        note(f"{MODELS} random models ...")
        found += gap_figures(gaps(range(MODELS), workers=os.cpu_count() or 1))
    for size in GAP_SIZES if "large models" in chosen else ():
        note(f"gap of {size[0]:,} tables on {size[1]:,} ranks ...")
        found.append(gap_at(*size))
    return [*found, *([shortened(CONSTRAINED_SIZES)] if "forbidding" in chosen else [])]
