"""Moving tilings: every cell of every target, exactly once, from a source that holds it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ParameterSharding,
    ShardingPlan,
)
from recshard_lab.comm import ShardingEnv, trace
from recshard_lab.distributed.state.moves import Move, Tiles, move
from recshard_lab.sharding import EmbeddingModuleShardingPlan, Shard
from tests.distributed import cases, state_jobs
from tests.distributed.jobs import Case
from tests.grid import examples


def messages(sources: list[Shard], targets: list[Shard], round_bytes: int) -> list[list[int]]:
    """On a rank: the bytes that it sends to each rank, round after round, of a table of 64 x 8."""
    env = ShardingEnv.default()
    held = {n: torch.zeros(s.num_rows, s.num_cols) for n, s in enumerate(sources) if s.rank == env.rank}
    wanted = {n: torch.zeros(s.num_rows, s.num_cols) for n, s in enumerate(targets) if s.rank == env.rank}
    with trace() as traced:
        tiles = Tiles(torch.float32, sources, held), Tiles(torch.float32, targets, wanted)
        move([Move(*tiles)], env, torch.device("cpu"), round_bytes)
    return [[0 if to == env.rank else n for to, n in enumerate(event.bytes_to)] for event in traced.events]


@pytest.mark.parametrize("gathers", [True, False], ids=["all ranks to one", "one rank to all"])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_what_a_rank_receives_from_all_others_is_bounded_as_well_as_what_it_sends(ranks: Any, gathers: bool) -> None:
    world, bound = ranks.world_size, 256
    edges = [64 * n // world for n in range(world + 1)]
    spread = [Shard(n, (edges[n], edges[n + 1]), (0, 8)) for n in range(world)]
    whole = [Shard(0, (0, 64), (0, 8))]
    found = ranks.run(messages, *((spread, whole) if gathers else (whole, spread)), bound)
    rounds = list(zip(*found, strict=True))
    total = 4 * 8 * (64 - edges[1])
    assert sum(sum(map(sum, each)) for each in rounds) == total
    for each in rounds:  # [source][target]
        assert max(sum(sent) for sent in each) <= bound
        assert max(sum(sent[target] for sent in each) for target in range(world)) <= bound
    assert len(rounds) >= total / bound


# ---- a running model ----


def case_of(world_size: int, optimizer: str, scheme: str = "row_wise", steps: int = 20, **more: Any) -> Case:
    return Case(
        tables=cases.TABLES,
        plan=cases.plan_of(cases.TABLES, [scheme], world_size).to_json(),
        steps=cases.random_steps(1, cases.TABLES, world_size, steps, 4),
        optimizer=optimizer,
        eps=1e-3,
        **more,
    )


def plan_named(name: str, world_size: int, kernel: str = "fused") -> str:
    if name != "pinwheel":
        return cases.plan_of(cases.TABLES, [name], world_size, kernel).to_json()
    entries = {table["name"]: cases.pinwheel(table, world_size) for table in cases.TABLES}
    return ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()


@pytest.mark.parametrize(
    ("optimizer", "kernel"), [("exact_row_wise_adagrad", "fused"), ("exact_adagrad", "fused"), ("exact_sgd", "dense")]
)
def test_a_model_that_moves_learns_as_one_that_never_moved(ranks: Any, optimizer: str, kernel: str) -> None:
    """With what its optimizers keep, those of torch for tables on the dense kernel too."""
    world = ranks.world_size
    case = case_of(world, optimizer)
    case.plan = plan_named("row_wise", world, kernel)
    plans = ["column_wise", *(["pinwheel"] if kernel == "fused" else []), "data_parallel", "table_wise"]
    moves = [plan_named(name, world, kernel) for name in plans]
    for wrong, moved, still, state, truth in ranks.run(state_jobs.train_moving, case, moves, 10):
        assert not wrong
        assert moved == pytest.approx(still, abs=1e-5)
        torch.testing.assert_close(state, truth, atol=1e-5, rtol=1e-5)


@st.composite
def two_plans(draw: Any, world_size: int) -> tuple[Case, str]:
    case = draw(cases.cases(world_size))
    entries = {table["name"]: draw(cases.tilings(table, world_size)) for table in case.tables}
    return case, ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()


@settings(max_examples=examples(10, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_plan_moves_to_any_other_and_back_bit_for_bit(ranks: Any, data: st.DataObject) -> None:
    case, plan = data.draw(two_plans(ranks.world_size))
    bound = data.draw(st.sampled_from([None, 4096]))
    before, after = (ShardingPlan.from_json(text).tables() for text in (case.plan, plan))
    must = [moved_bytes(case, before, after), moved_bytes(case, after, before)]
    for wrong, moved, peaks in ranks.run(state_jobs.move_scrambled, case, [plan, case.plan], bound):
        assert not wrong
        assert moved == must
        assert bound is None or max(peaks) <= bound


def moved_bytes(case: Case, before: Any, after: Any) -> int:
    """Cells of weights and states that a target needs and its rank does not hold, counted cell by cell."""
    total = 0
    for table in case.tables:
        rows, cols = table["num_embeddings"], table["embedding_dim"]
        extents = {"exact_sgd": [cols], "exact_adagrad": [cols, cols], "exact_row_wise_adagrad": [cols, 1]}
        for width in extents[case.optimizer]:
            for target in after[table["name"]].shards:
                missing = torch.ones(rows, width, dtype=torch.bool)
                for source in before[table["name"]].shards:
                    if source.rank == target.rank:
                        span = slice(*source.cols) if width == cols else slice(None)
                        missing[slice(*source.rows), span] = False
                span = slice(*target.cols) if width == cols else slice(None)
                total += 4 * int(missing[slice(*target.rows), span].sum())
    return total


@pytest.mark.parametrize("bound", [None, 1 << 20], ids=["beside", "parked"])
def test_old_kernels_are_freed(two: Any, bound: int | None) -> None:
    case = case_of(2, "exact_row_wise_adagrad", steps=0)
    assert two.run(state_jobs.old_kernels_left, case, plan_named("pinwheel", 2), bound) == [0, 0]


@pytest.mark.gate
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_bound_on_extra_memory_holds_for_the_process(two: Any) -> None:
    rows, bound = 200_000, 4 << 20
    tables = [{"name": f"t{n}", "num_embeddings": rows, "embedding_dim": 64, "feature_names": ["f"]} for n in range(4)]
    plans = []
    for scheme in ("row_wise", "column_wise"):
        plans.append(ShardingPlan({"": cases.plan_of(tables, [scheme], 2).plan[cases.PATH]}).to_json())
    for peak, told, held in two.run(state_jobs.measured_peak, plans, rows, bound):
        assert told <= bound
        assert peak <= bound + (32 << 20)  # the allocators keep some; old and new together would be over 100 MB
        assert held > 100e6
    for _, told, held in two.run(state_jobs.measured_peak, plans, rows, None):
        assert 0.9 * held < told < 1.3 * held  # beside: old and new together


# ---- what is refused ----


@pytest.mark.parametrize(
    ("plan", "named"),
    [
        ('{"elsewhere": {}}', "elsewhere"),
        ("hole", "no shard covers"),
        ("kernel", "does not change a table's optimizer"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_before_anything_moves(two: Any, plan: str, named: str) -> None:
    case = case_of(2, "exact_row_wise_adagrad", steps=0)
    bad = {
        '{"elsewhere": {}}': ShardingPlan({"elsewhere": EmbeddingModuleShardingPlan()}),
        "hole": ShardingPlan({cases.PATH: {"users": ParameterSharding("custom", shards=[Shard(0, (0, 50), (0, 16))])}}),
        "kernel": cases.plan_of(cases.TABLES, ["column_wise"], 2, "dense"),
    }[plan]
    for error, changed in two.run(state_jobs.refused_reshard, case, [bad.to_json()]):
        assert error.startswith("PlanError")
        assert named in error
        assert not changed


@pytest.mark.parametrize("bound", [None, 1 << 14], ids=["beside", "parked"])
def test_a_batch_that_a_move_overtakes_is_refused_by_name(two: Any, bound: int | None) -> None:
    case = case_of(2, "exact_row_wise_adagrad", steps=1)
    for said, wrong in two.run(state_jobs.overtaken, case, plan_named("column_wise", 2), bound):
        assert "moved (dmp.reshard) since this batch was sent" in said[0]
        assert "moved (dmp.reshard) since this batch was looked up" in said[1]
        assert not wrong


def test_ranks_with_different_plans_are_told_so_and_nothing_moves(two: Any) -> None:
    case = case_of(2, "exact_sgd", steps=0)
    plans = [plan_named("column_wise", 2), plan_named("table_wise", 2)]
    for error, changed in two.run(state_jobs.refused_reshard, case, plans):
        assert "disagree about the plan: sharding_type of table 'movies'" in error
        assert not changed


def halves(kernel: str = "fused", whole: bool = False) -> ShardingPlan:
    """A table of 10 rows in one process: in two shards, or in one."""
    shards = [Shard(0, rows, (0, 64)) for rows in ([(0, 10)] if whole else [(0, 5), (5, 10)])]
    return ShardingPlan({"": {"t": ParameterSharding("custom", kernel, shards=shards)}})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("kernel", "options", "error", "named"),
    [
        ("fused", {"max_extra_bytes": 100}, ValueError, "512 bytes"),
        ("dense", {}, ValueError, "optimizers="),
        ("fused", {"max_extra_bytes": 1024, "park_dir": "/absent"}, OSError, "cannot park 2,560 .*Nothing was moved"),
    ],
    ids=["a bound below one row", "a dense table without its optimizer", "a full disk for parking"],
)
def test_options_that_cannot_be_are_refused_and_nothing_moves(
    kernel: str, options: dict[str, Any], error: type[Exception], named: str
) -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=64, feature_names=["f"])
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=[table]), plan=halves(kernel, whole=True))
    before = dmp.full_state_dict()
    with pytest.raises(error, match=named):
        dmp.reshard(halves(kernel), **options)
    assert state_jobs.same(before, dmp.full_state_dict()) == []


@pytest.mark.parametrize("order", [["large", "small"], ["small", "large"]])
def test_the_peak_of_a_move_is_that_of_the_collection_that_needs_most(order: list[str]) -> None:
    rows = {"large": 1000, "small": 10}
    model = {
        name: EmbeddingBagCollection([EmbeddingBagConfig(rows[name], 8, name, feature_names=[name])]) for name in order
    }
    dmp = DistributedModelParallel(torch.nn.ModuleDict(model))
    plans: dict[str, Any] = {}
    for name, n in rows.items():
        shards = [Shard(0, (0, n // 2), (0, 8)), Shard(0, (n // 2, n), (0, 8))]
        plans[name] = {name: ParameterSharding("custom", shards=shards)}
    done = dmp.reshard(ShardingPlan(plans))
    assert done.peak_extra_bytes >= 4 * 8 * rows["large"]
    assert done.peak_extra_bytes < 4 * 8 * sum(rows.values()) * 1.5
