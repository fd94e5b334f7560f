"""The planner: always valid, the same every time, quick, for whole modules, with schemes of a reader's own."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig
from recshard_lab.planner import EmbeddingShardingPlanner, Workload, estimate
from recshard_lab.planner.planner import tables_of
from recshard_lab.sharding import (
    ParameterConstraints,
    PlanError,
    Proposal,
    Topology,
    register_scheme,
    scheme_names,
    unregister_scheme,
)
from tests.grid import examples
from tests.planner.problems import best_plan, random_tables, table


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], Topology, dict[str, ParameterConstraints], Workload]:
    local = draw(st.integers(1, 4))
    world_size = local * draw(st.integers(1, 3))
    tables = [
        table(f"t{i}", draw(st.integers(1, 5000)), draw(st.integers(1, 96)), data_type=draw(st.sampled_from(DataType)))
        for i in range(draw(st.integers(1, 7)))
    ]
    constraints = {}
    for config in tables:
        if draw(st.booleans()):
            constraints[config.name] = ParameterConstraints(
                sharding_types=draw(st.none() | st.lists(st.sampled_from(scheme_names()), min_size=1, unique=True)),
                ranks=draw(st.none() | st.lists(st.integers(0, world_size - 1), min_size=1, unique=True)),
                compute_kernels=draw(st.none() | st.just(["dense"])),
                min_partition=draw(st.none() | st.integers(1, 40)),
            )
    topology = Topology(
        world_size,
        draw(st.sampled_from(["cpu", "cuda"])),
        local_world_size=local,
        hbm_cap=draw(st.integers(10_000, 3_000_000)),
        ddr_cap=draw(st.integers(10_000, 3_000_000)),
    )
    optimizer = draw(st.sampled_from(["exact_sgd", "exact_row_wise_adagrad", "exact_adagrad"]))
    return tables, topology, constraints, Workload(draw(st.integers(1, 64)), optimizer=optimizer)


@settings(max_examples=examples(20, 150))
@given(problems())
def test_every_plan_tiles_fits_and_keeps_the_constraints(problem: Any) -> None:
    tables, topology, constraints, workload = problem
    try:
        plan = best_plan(tables, topology, constraints=constraints, workload=workload)
    except PlanError as error:
        text = str(error)
    else:
        text = ""
    if text:
        assert "Fix: " in text
        return
    plan.validate(tables, topology.world_size)
    found = estimate(plan, tables, topology, workload, constraints)
    assert found.fits
    np.testing.assert_allclose(plan.estimate.ms, found.ms, rtol=1e-9)
    np.testing.assert_allclose(plan.estimate.memory_bytes, found.memory_bytes, rtol=1e-9, atol=1e-3)
    for name, sharding in plan.tables().items():
        wish = constraints.get(name, ParameterConstraints())
        assert sharding.sharding_type in (wish.sharding_types or scheme_names())
        assert sharding.compute_kernel == (wish.compute_kernels or ["fused"])[0]
        assert {shard.rank for shard in sharding.shards} <= set(wish.ranks or range(topology.world_size))
        if sharding.sharding_type == "column_wise" and wish.min_partition:
            dim = next(config.embedding_dim for config in tables if config.name == name)  # a narrower table stays whole
            assert min(shard.num_cols for shard in sharding.shards) >= min(wish.min_partition, dim)


def test_the_same_input_gives_the_same_plan() -> None:
    tables, workload = random_tables(12, 3)
    plans = [best_plan(tables, Topology(4, "cuda"), workload=workload) for _ in range(2)]
    assert plans[0] == plans[1]


def fake_module() -> Any:
    """A model with two collections that both have a table 'movies'."""
    bags = SimpleNamespace(embedding_bag_configs=lambda: [table("movies", 100, 8)])
    rows = SimpleNamespace(embedding_configs=lambda: [table("movies", 50, 4)])
    model = SimpleNamespace()
    model.named_modules = lambda **_: [("", model), ("ebc", bags), ("towers.ec", rows), ("dense", SimpleNamespace())]
    return model


def test_every_collection_of_a_module_is_planned() -> None:
    model = fake_module()
    assert list(tables_of(model)) == ["ebc", "towers.ec"]
    plan = EmbeddingShardingPlanner(Topology(2)).plan(model)
    plan.validate(tables_of(model), 2)
    assert estimate(plan, tables_of(model), Topology(2)).fits
    assert EmbeddingShardingPlanner(Topology(2)).collective_plan(model) == plan
    only_bags = SimpleNamespace(module_type=type("Nothing", (), {}))
    with pytest.raises(PlanError, match="holds no embedding collection"):
        EmbeddingShardingPlanner(Topology(2)).plan(model, [only_bags])


class Thirds:
    """A notebook's scheme that the planner must pick, since nothing else is allowed."""

    name, label, replicated = "thirds", "3RD", False

    def propose(self, config: Any, topology: Topology, constraints: Any = None) -> Any:
        cuts = [config.num_embeddings * k // 3 for k in range(4)]
        rects = tuple(((a, b), (0, config.embedding_dim)) for a, b in itertools.pairwise(cuts))
        yield Proposal(self.name, rects)

    def default(self, config: Any, topology: Topology, ranks: Any = None) -> Any:
        raise NotImplementedError


def test_a_registered_scheme_is_planned_with() -> None:
    register_scheme(Thirds())
    try:
        wish = {"movies": ParameterConstraints(sharding_types=["thirds"])}
        plan = best_plan([table("movies", 99, 8)], Topology(2), constraints=wish)
        assert len(plan.tables()["movies"].shards) == 3
        plan.validate([table("movies", 99, 8)], 2)
    finally:
        unregister_scheme("thirds")


class Repeats:
    """Two halves, always both on rank 1 or on rank 0; and a scheme that forgets the last row."""

    label, replicated = "RE", False

    def __init__(self, name: str, forgets: int) -> None:
        self.name, self.forgets = name, forgets

    def propose(self, config: Any, topology: Topology, constraints: Any = None) -> Any:
        middle, end, cols = config.num_embeddings // 2, config.num_embeddings - self.forgets, (0, config.embedding_dim)
        yield Proposal(self.name, (((0, middle), cols), ((middle, end), cols)), ((1, 1), (0, 0)))

    def default(self, config: Any, topology: Topology, ranks: Any = None) -> Any:
        raise NotImplementedError


def test_a_schemes_own_assignments_are_kept_pinned_and_counted() -> None:
    register_scheme(Repeats("repeats", 0))
    register_scheme(Repeats("forgets", 1))
    movies = [table("movies", 99, 8)]
    try:
        wish = ParameterConstraints(sharding_types=["repeats"], ranks=[0])
        plan = best_plan(movies, Topology(2), constraints={"movies": wish})
        assert [shard.rank for shard in plan.tables()["movies"].shards] == [0, 0]
        np.testing.assert_allclose(plan.estimate.ms, estimate(plan, movies, Topology(2)).ms)
        wish = ParameterConstraints(sharding_types=["forgets"])
        with pytest.raises(PlanError, match=r"no shard covers rows \[98, 99\)"):
            best_plan(movies, Topology(2), constraints={"movies": wish})
    finally:
        unregister_scheme("repeats")
        unregister_scheme("forgets")


def test_a_collective_plan_is_the_first_ranks_plan_or_its_error(tmp_path: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        planner = EmbeddingShardingPlanner()
        assert planner.topology.world_size == 1
        plan = planner.collective_plan(fake_module(), pg=dist.group.WORLD)
        plan.validate(tables_of(fake_module()), 1)
        with pytest.raises(PlanError, match="holds no embedding collection"):
            planner.collective_plan(SimpleNamespace(named_modules=lambda **_: []))
    finally:
        dist.destroy_process_group()
