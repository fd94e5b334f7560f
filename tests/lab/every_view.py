"""What every registered view is drawn from in the worst cases, by the names of its arguments.

A view whose required arguments are all named here is swept by `test_every_view.py`; a new one that asks for something
else needs a line in every case below.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from recshard_lab.comm import CodecError
from recshard_lab.lab.compare.formats import FormatComparison, FormatResult
from recshard_lab.lab.compare.plan_comparison import PlanComparison
from recshard_lab.lab.compare.question import Answer, Question
from recshard_lab.lab.live.memory_history import MemoryEvent, MemoryHistory
from recshard_lab.lab.live.recorded_step import RecordedStep
from recshard_lab.lab.live.samples import Sample
from recshard_lab.lab.views.wire_formats import codec_errors
from recshard_lab.planner import (
    AccessProfile,
    EmbeddingShardingPlanner,
    Estimate,
    ServerComparison,
    Sweep,
    SweepPoint,
    Workload,
    compare_servers,
    estimate,
)
from recshard_lab.planner.search.trace import SearchTrace
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.train.stages import StageEvent
from tests.lab.plans import many, plan_of, table
from tests.lab.recorded import recorded_step

NAN, INF = float("nan"), float("inf")
LONG = "a_table_with_a_name_that_nobody_would_type_twice_but_that_generators_write"


def nothing() -> dict[str, Any]:
    """No table, no rank, no batch, no event."""
    flat = np.zeros((0, 0))
    found = Estimate((), flat, (), flat, np.zeros(0), np.zeros(0), flat)
    ids = torch.zeros(0, dtype=torch.long)
    return {
        "plan": ShardingPlan({}),
        "tables": [],
        "topology": Topology(1),
        "estimate": found,
        "measured": measured(found),
        "losses": {},
        "events": [],
        "access": {},
        "kjt": KeyedJaggedTensor([], ids, lengths=ids),
        "feature": "f",
        "id": 0,
        "sweep": Sweep((), 0),
        "search": SearchTrace((), None, {}, None, 0.0, 0, 1, ()),
        "changes": {},
        "history": [],
        "comparison": PlanComparison([], {}),
        "servers": ServerComparison((), "", 1.0, 1),
        "formats": FormatComparison(()),
        "step": RecordedStep(ShardingPlan({}), "", (), ()),
        "memory_history": MemoryHistory(0, "counted", np.zeros(0), {}),
        "sharding_groups": [[0]],
        "workload": Workload(),
        "codec_errors": {},
    }


def one() -> dict[str, Any]:
    """One table on one rank, one batch of one bag, one step."""
    tables = [table(LONG, 1)]
    return drawn(tables, plan_of(tables, 1, ("table_wise",)), Topology(1), steps=1, bags=1)


@cache
def large() -> dict[str, Any]:
    """1,000 tables on 128 ranks, and as much of everything else."""
    tables, topology = many(1000), Topology(128, "cuda", local_world_size=8, hbm_cap=10**13)
    return drawn(tables, plan_of(tables, 128, ("table_wise", "row_wise")), topology, steps=1000, bags=1000)


def not_a_number(value: float = NAN) -> dict[str, Any]:
    """Small, and one number of each kind is none."""
    found = drawn(
        tables := [table(LONG, 1000), table("b", 10)], plan_of(tables, 2, ("table_wise", "row_wise")), Topology(2), 8, 4
    )
    good: Estimate = found["estimate"]
    kjt: KeyedJaggedTensor = found["kjt"]
    search: SearchTrace = found["search"]
    sweep: Sweep = found["sweep"]
    bad = replace(good, ms=spoilt(good.ms, value), memory_bytes=spoilt(good.memory_bytes, value))
    lost = [replace(each, step_ms=value, memory_bytes=value) for each in search.candidates[:2]]
    return found | {
        "estimate": replace(
            good,
            ms=spoilt(good.ms, value),
            memory_bytes=spoilt(good.memory_bytes, value),
            capacity_bytes=spoilt(good.capacity_bytes, value),
            usable_bytes=spoilt(good.usable_bytes, value),
            traffic_bytes=spoilt(good.traffic_bytes, value),
        ),
        "losses": {name: [0.7, value, 0.5] for name in found["losses"]},
        "events": [*found["events"], StageEvent(0, "forward", 2, value, value), StageEvent(1, "wait", 3, 0.0, value)],
        "access": AccessProfile(uses=(1.0, 5.0), rows=(3.0, 1.0)),
        "kjt": KeyedJaggedTensor(
            kjt.keys(), kjt.values(), lengths=kjt.lengths(), weights=torch.full(kjt.values().shape, value)
        ),
        "sweep": replace(sweep, points=(replace(sweep.points[0], step_ms=value), *sweep.points)),
        "search": replace(search, candidates=(*lost, *search.candidates), lower_bound=value),
        "changes": {"first": 7.0, "then": value},
        "history": samples([table(LONG, 1000)], 2, 3, value),
        "comparison": compared(found["plan"], found["tables"], found["topology"], bad),
        "servers": spoilt_servers(found["servers"], value),
        "formats": formats(value),
        "step": recorded_step(value=value),
        "memory_history": memory_history(3),
        "codec_errors": codecs(value),
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": nothing,
    "one": one,
    "large": large,
    "nan": not_a_number,
    "infinite": lambda: not_a_number(INF),
}


def drawn(tables: list[Any], plan: ShardingPlan, topology: Topology, steps: int, bags: int) -> dict[str, Any]:
    """Everything that a view may ask for, of one plan."""
    ranks = topology.world_size
    found = estimate(plan, tables, topology)
    small = tables[:40]
    planner = EmbeddingShardingPlanner(replace(topology, world_size=min(ranks, 8), local_world_size=min(ranks, 8)))
    planner.keep_search = True
    search = planner.plan_tables(small).search
    lengths = torch.arange(bags * min(len(tables), 50)) % 4
    keys = [each.feature_names[0] for each in tables[:50]]
    stages = ("forward", "backward", "optimizer", "input_dist", "wait")
    return {
        "plan": plan,
        "tables": tables,
        "topology": topology,
        "estimate": found,
        "measured": measured(found),
        "losses": {name: list(1 / np.arange(1.0, steps + 1)) for name in ("row_wise", "table_wise", LONG)},
        "events": [
            StageEvent(rank, stage, step, step * 0.01 + at * 0.002, step * 0.01 + at * 0.002 + 0.0015)
            for rank in range(min(ranks, 16))
            for step in range(steps)
            for at, stage in enumerate(stages)
        ],
        "access": {each.name: AccessProfile(uses=(1.0, 97.0), rows=(3.0, 1.0)) for each in tables},
        "kjt": KeyedJaggedTensor(keys, torch.arange(int(lengths.sum())), lengths=lengths),
        "feature": tables[-1].feature_names[0],
        "id": 0,
        "sweep": Sweep(tuple(points(steps)), len(tables)),
        "search": search,
        "changes": {f"{LONG}_{n}": 10.0 / (n + 1) for n in range(steps)},
        "history": samples(tables, ranks, min(steps, 3), 9.0),
        "comparison": compared(plan, tables, topology, found),
        "servers": compare_servers(tables, Workload(64, 3.0), workers=[2**n for n in range(min(steps, 12))]),
        "formats": formats(),
        "memory_history": memory_history(10 * steps),
        "sharding_groups": [list(range(first, first + ranks)) for first in range(0, 12 * ranks, ranks)],
        "codec_errors": codecs(),
        "workload": Workload(),
        "step": recorded_step(min(ranks, 128), min(bags, 200), tables=min(len(tables), 50)),
    }


def memory_history(count: int) -> MemoryHistory:
    """Half of the allocations of a step are freed within it."""
    kinds = ("exchange_buffers", "activations", "gradients")
    events = [MemoryEvent(0.1 * n, n, 1000 + n, kinds[n % 3], f"mm in {LONG}") for n in range(count)]
    events += [MemoryEvent(0.1 * n + 0.05, n, -1000 - n, kinds[n % 3]) for n in range(0, count, 2)]
    return MemoryHistory.of(0, "counted", {"weights": 5000, "dense": 300}, events, 0.1 * count)


def codecs(value: float | None = None) -> dict[str, CodecError]:
    """All formats on a few rows; with a value, one error is it."""
    found = codec_errors(torch.linspace(-1, 1, 64).view(4, 16)) | {LONG: codec_errors(torch.ones(1, 1))["int8"]}
    if value is not None:
        found["fp16"] = replace(found["fp16"], max_abs=value, bound=value)
    return found


def formats(value: float | None = None) -> FormatComparison:
    """Four models; with a value, one time and one score are it."""
    sizes = {"FP32": 256_000, "FP16": 128_000, "INT8": 68_000, LONG: 36_000}
    found = [FormatResult(name, size, 0.7743 - size * 1e-9, 2.0, 0.1) for name, size in sizes.items()]
    if value is not None:
        found[1] = replace(found[1], ms=value, score=value)
    return FormatComparison(tuple(found))


def spoilt_servers(servers: ServerComparison, value: float) -> ServerComparison:
    """The same with one number that is none."""
    first, *others = servers.points
    name = next(iter(first.ms))
    return replace(servers, points=(replace(first, ms={**first.ms, name: value}), *others))


def compared(plan: ShardingPlan, tables: list[Any], topology: Topology, found: Estimate) -> PlanComparison:
    """The plan under two names, and one that there is not."""
    asked = Question({}, topology.world_size, 512, topology.memory_cap_bytes, plan=plan)
    shown = Answer(asked, topology, Workload(), plan, found)
    refused = replace(shown, plan=None, estimate=None, problem=f"table {LONG!r} does not fit")
    return PlanComparison(tables, {"row_wise": shown, LONG: shown, "none": refused})


def points(count: int) -> list[SweepPoint]:
    fixed = {"hbm_cap": 80 * 10**9, "codecs": "fp32/fp32", "optimizer": "exact_sgd", "pipeline": "none"}
    found = [
        SweepPoint("h100", n + 1, 512, 512 * (n + 1), fits=n % 7 != 6, step_ms=1 + 10 / (n + 1), **fixed)  # type: ignore[arg-type]
        for n in range(count)
    ]
    return [replace(p, step_ms=NAN, problem="does not fit", reason="no room") if not p.fits else p for p in found]


def samples(tables: list[Any], ranks: int, count: int, squares: float) -> list[Sample]:
    """What living ranks might have counted."""
    held = {"bytes": 40, "squares": squares, "held_squares": squares, "rows": 3}
    part = {"lookups": {"hbm": 30}, "rows": 10, "states": {"momentum1": held}, "weights": held}
    parts = {each.name: {**part, "touched_rows": 5, "rows_here": 10} for each in tables}
    return [Sample.of([{"step": n, "ms": 1.0, "number": n, "tables": parts}] * ranks) for n in range(count)]


def measured(found: Estimate) -> Any:
    """What ranks might have reported."""
    ranks = len(found.ms)
    steps = np.full(ranks, 2 * found.step_ms if found.ms.size else 1.0)
    return SimpleNamespace(
        step_ms_by_rank=steps,
        memory_categories=found.memory_categories,
        memory_bytes=found.memory_bytes * 1.1,
        traffic_bytes=found.traffic_bytes * 1.1,
        traffic_by_phase={"input_dist/ids": found.traffic_bytes * 1.1},
        waited_ms={"input_dist/ids": steps * np.arange(ranks) / max(1, 4 * ranks)},
        backends={},
        steps=3,
    )


def spoilt(values: np.ndarray, value: float) -> np.ndarray:
    """The same, the last one of them replaced."""
    found = np.array(values, dtype=float)
    found.reshape(-1)[-1:] = value
    return found
