"""Every scheme tiles every table on every topology, and TorchRec's helpers give TorchRec's geometry."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig
from recshard_lab.planner import plan
from recshard_lab.sharding import (
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
    Shard,
    ShardingPlan,
    ShardingType,
    Topology,
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    register_scheme,
    row_wise,
    scheme_named,
    scheme_names,
    table_column_wise,
    table_row_wise,
    table_wise,
    tiling,
    unregister_scheme,
)
from recshard_lab.sharding.schemes import place_default
from tests.refusals import not_refused


def table(rows: int = 10, cols: int = 8, name: str = "movies") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=cols, feature_names=[name])


ONE_NODE = ("table_row_wise", "table_column_wise")
topologies = st.builds(
    lambda local, nodes: Topology(local * nodes, local_world_size=local), st.integers(1, 5), st.integers(1, 4)
)


@pytest.mark.parametrize("name", scheme_names())
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), topology=topologies, data=st.data())
def test_every_proposal_is_a_valid_plan(
    name: str, rows: int, cols: int, topology: Topology, data: st.DataObject
) -> None:
    config, scheme, world_size = table(rows, cols), scheme_named(name), topology.world_size
    pin = data.draw(st.none() | st.lists(st.integers(0, world_size - 1), min_size=1, unique=True))
    least = data.draw(st.none() | st.integers(1, 20))
    wish = ParameterConstraints(ranks=pin, min_partition=least)
    for proposal in scheme.propose(config, topology, wish):
        usable = pin or list(range(world_size))
        dealt = tuple(usable[i % len(usable)] for i in range(len(proposal.rects)))
        for ranks in proposal.assignments or (dealt,):
            assert set(ranks) <= set(usable)
            plan = ShardingPlan({"": {"movies": proposal.placed(ranks)}})
            plan.validate([config], world_size)
            if name in ONE_NODE:
                assert len({topology.node_of(rank) for rank in ranks}) == 1
        narrowest = min(c1 - c0 for _, (c0, c1) in proposal.rects)
        assert narrowest == cols or least is None or narrowest >= least


@pytest.mark.parametrize("name", scheme_names())
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), topology=topologies)
def test_every_default_is_a_valid_plan(name: str, rows: int, cols: int, topology: Topology) -> None:
    config = table(rows, cols)
    made = scheme_named(name).default(config, topology)
    assert made.sharding_type == name
    ShardingPlan({"": {"movies": made}}).validate([config], topology.world_size)
    bare = ParameterSharding(name).resolved(config, topology.world_size, topology.local_world_size)
    assert bare.shards == made.shards


def test_row_wise_blocks_are_torchrecs_and_leave_late_ranks_empty() -> None:
    made = scheme_named("row_wise").default(table(rows=5), Topology(4))
    assert [(s.rank, s.rows) for s in made.shards] == [(0, (0, 2)), (1, (2, 4)), (2, (4, 5))]


@pytest.mark.parametrize("listed", [[0, 1, 2, 3], [0, 2, 3]])
def test_row_wise_with_listed_ranks_has_a_shard_on_each_and_without_them_the_cheapest_number(listed: list[int]) -> None:
    small = EmbeddingBagConfig(1_682, 64, name="movie", feature_names=["movie"])
    for name in ("row_wise", ShardingType.ROW_WISE):
        made = plan([small], 4, movie=ParameterConstraints([name], ranks=listed))
        assert [shard.rank for shard in made.tables()["movie"].shards] == listed
        assert "stopped near the best" not in str(made.explain("movie"))  # fewer ranks were not asked for
    assert len(plan([small], 4, movie="row_wise").tables()["movie"].shards) == 2


def test_column_wise_shards_have_at_least_four_columns() -> None:
    made = scheme_named("column_wise").default(table(cols=20), Topology(3))
    assert [s.num_cols for s in made.shards] == [8, 8, 4]
    assert [s.num_cols for s in scheme_named("column_wise").default(table(cols=6), Topology(4)).shards] == [2, 2, 1, 1]
    with pytest.raises(PlanError, match=r"cannot be split into 3 shards.*at most 2 ranks"):
        scheme_named("column_wise").default(table(cols=8), Topology(4), ranks=[0, 1, 2])


def test_on_one_node_node_aware_schemes_are_what_they_refine() -> None:
    config, topology = table(rows=11, cols=24), Topology(4)
    refined = {"table_row_wise": "row_wise", "table_column_wise": "column_wise", "grid_shard": "row_wise"}
    for aware, plain in ((scheme_named(name), scheme_named(other)) for name, other in refined.items()):
        assert aware.default(config, topology).shards == plain.default(config, topology).shards
        assert aware.on_one_node == plain.name
        of_plain = {tuple(proposal.rects): proposal.assignments for proposal in plain.propose(config, topology)}
        for proposal in aware.propose(config, topology):
            assert of_plain[tuple(proposal.rects)] in (None, proposal.assignments)


def test_node_aware_schemes_on_two_nodes() -> None:
    config, topology = table(rows=10, cols=12), Topology(4, local_world_size=2)

    def made(name: str, ranks: list[int] | None = None) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        return [(s.rank, s.rows, s.cols) for s in scheme_named(name).default(config, topology, ranks).shards]

    assert made("table_row_wise", [2, 3]) == [(2, (0, 5), (0, 12)), (3, (5, 10), (0, 12))]
    assert made("table_column_wise", [3, 2]) == [(3, (0, 10), (0, 8)), (2, (0, 10), (8, 12))]
    grid = [(0, (0, 5), (0, 8)), (1, (5, 10), (0, 8)), (2, (0, 5), (8, 12)), (3, (5, 10), (8, 12))]
    assert made("grid_shard") == grid
    assert made("grid_shard", [0, 1, 2]) == [*grid[:2], (2, (0, 10), (8, 12))]
    spread = [scheme_named("table_row_wise").default(table(name=f"t{i}"), topology) for i in range(20)]
    assert {topology.node_of(sharding.shards[0].rank) for sharding in spread} == {0, 1}


def test_node_aware_schemes_refuse_what_nodes_do_not_allow() -> None:
    topology = Topology(6, local_world_size=3)
    for name in ONE_NODE:
        with pytest.raises(PlanError, match=r"ranks=\[1, 4\] are on 2 nodes of 3 ranks.*ranks=\[1\]"):
            scheme_named(name).default(table(), topology, [1, 4])
    with pytest.raises(PlanError, match=r"8 columns, which cannot be split into 3 shards.*at most 2 ranks"):
        scheme_named("table_column_wise").default(table(), topology, [0, 1, 2])
    with pytest.raises(PlanError, match=r"4 columns, which cannot be split into 2 shards .one per node. of at least 4"):
        scheme_named("grid_shard").default(table(cols=4), topology, [0, 3])
    narrow = scheme_named("grid_shard").default(table(cols=4), topology)
    assert len(narrow.shards) == 3  # one node then
    with pytest.raises(ValueError, match="Fix: world_size=6"):
        Topology(5, local_world_size=3)


def test_pins_keep_node_aware_schemes_on_their_ranks() -> None:
    topology, pin = Topology(8, local_world_size=4), [1, 2, 3, 6]
    wish = ParameterConstraints(ranks=pin)
    (first, second) = scheme_named("table_row_wise").propose(table(rows=12), topology, wish)
    assert (first.assignments, len(first.rects)) == (((1, 2, 3),), 3)
    assert (second.assignments, len(second.rects)) == (((6,),), 1)
    (grid,) = scheme_named("grid_shard").propose(table(rows=12), topology, wish)
    assert grid.assignments == ((1, 2, 3, 6),)


def test_torchrecs_helpers_build_a_module_plan() -> None:
    tables = [table(name=name) for name in ("a", "b", "c", "d", "e")]
    module = SimpleNamespace(embedding_bag_configs=lambda: tables)
    generators = {"a": table_wise(rank=1), "b": row_wise(), "c": column_wise(ranks=[1, 0]), "d": data_parallel()}
    generators["e"] = row_wise(sizes_placement=([0, 10], "cpu"))
    plan = construct_module_sharding_plan(module, generators, world_size=2)
    assert plan["a"].shards == (Shard(1, (0, 10), (0, 8)),)
    assert plan["c"].shards == (Shard(1, (0, 10), (0, 4)), Shard(0, (0, 10), (4, 8)))
    assert plan["d"].replicated
    assert plan["e"].shards == (Shard(1, (0, 10), (0, 8)),)
    assert plan["b"].sharding_spec is not None
    assert plan["d"].sharding_spec is None


def test_helpers_that_know_nodes_and_uneven_cuts() -> None:
    generators = {
        "twrw": table_row_wise(host_index=1),
        "twcw": table_column_wise(host_index=0, size_per_rank=[2, 6]),
        "grid": grid_shard(host_indexes=[1, 0], route="two_hop"),
        "bounds": row_wise(boundaries=[0, 1, 9], ranks=[3, 0, 2]),
        "sizes": row_wise(sizes=[4, 0, 6], compute_kernel="dense"),
        "buckets": row_wise(num_buckets=5),
        "widths": column_wise(ranks=[2, 2], size_per_rank=[3, 5]),
        "drawn": tiling([(0, (0, 4), None), (1, (4, 10), (0, 4)), Shard(0, (4, 10), (4, 8))], route="reduce_scatter"),
    }
    tables = [table(name=name) for name in generators]
    module = SimpleNamespace(embedding_bag_configs=lambda: tables)
    plan = construct_module_sharding_plan(module, generators, local_size=2, world_size=4)

    def spans(name: str) -> list[tuple[int, tuple[int, int], tuple[int, int]]]:
        return [(s.rank, s.rows, s.cols) for s in plan[name].shards]

    assert spans("twrw") == [(2, (0, 5), (0, 8)), (3, (5, 10), (0, 8))]
    assert spans("twcw") == [(0, (0, 10), (0, 2)), (1, (0, 10), (2, 8))]
    assert spans("grid")[::2] == [(2, (0, 5), (0, 4)), (0, (0, 5), (4, 8))]
    assert spans("bounds") == [(3, (0, 1), (0, 8)), (0, (1, 9), (0, 8)), (2, (9, 10), (0, 8))]
    assert spans("sizes") == [(0, (0, 4), (0, 8)), (2, (4, 10), (0, 8))]
    assert [s.num_rows for s in plan["buckets"].shards] == [4, 2, 2, 2]
    assert spans("widths") == [(2, (0, 10), (0, 3)), (2, (0, 10), (3, 8))]
    assert len(spans("drawn")) == 3
    kinds = [plan[name].sharding_type for name in ("twcw", "bounds", "drawn")]
    assert kinds == ["table_column_wise", "row_wise", "custom"]
    assert plan["sizes"].compute_kernel == "dense"
    assert [plan[name].route for name in ("grid", "drawn", "twrw")] == ["two_hop", "reduce_scatter", "direct"]
    everywhere = construct_module_sharding_plan(module, apply_to_all(module, row_wise()), world_size=4)
    assert {sharding.sharding_type for sharding in everywhere.values()} == {"row_wise"}


def test_the_launchers_ranks_a_node_are_those_of_a_hand_written_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    module = SimpleNamespace(embedding_bag_configs=lambda: [table()])
    plan = construct_module_sharding_plan(module, {"movies": table_row_wise(host_index=1)}, world_size=4)
    assert plan["movies"].ranks == [2, 3]


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"movies": table_row_wise(1)}, "host_index 1 does not exist"),
    ({"movies": grid_shard([0, 0, 0])}, "cannot be split into 3 shards .one per node. of at least 4"),
    ({"movies": row_wise(boundaries=[7, 3])}, r"cannot be split at boundaries=\[7, 3\]"),
    ({"movies": row_wise(boundaries=[3, 3])}, "ascending, distinct rows"),
    ({"movies": row_wise(boundaries=[3, 5])}, "3 sizes for 2 ranks"),
    ({"movies": row_wise(sizes=[10], ranks=[0, 1])}, "1 sizes for 2 ranks"),
    ({"movies": row_wise(num_buckets=3)}, "a divisor of the rows"),
    ({"movies": tiling([(0, (0, 4), None)])}, r"no shard covers rows \[4, 10\)"),
    ({"movies": tiling([(0, 4)])}, r"a tile must be a Shard or"),  # type: ignore[list-item]
    ({"movies": row_wise(ranks=[])}, "ranks is empty"),
    ({}, "table 'movies' has no sharding"),
    ({"movie": table_wise(0)}, "did you mean 'movies'"),
    ({"movies": table_wise(5)}, "rank 5 does not exist with world_size 2"),
    ({"movies": column_wise(size_per_rank=[4, 5])}, "sum to 9"),
    ({"movies": row_wise(([1, 2], "cpu"))}, "sum to 3"),
]


def test_module_plans_and_helpers_that_contradict_themselves_are_refused() -> None:
    module = SimpleNamespace(embedding_configs=lambda: [table()])
    made = partial(construct_module_sharding_plan, module, world_size=2)
    assert not_refused(((partial(made, sharding), said) for sharding, said in IMPOSSIBLE), PlanError) == []
    helpers = [
        (lambda: row_wise(boundaries=[1], sizes=[1, 9]), r"one of .* got boundaries and sizes"),
        (lambda: column_wise(device_types=["cpu", "cuda"]), "all ranks of a plan have one device type"),
        (lambda: grid_shard([]), "host_indexes is empty"),
    ]
    assert not_refused(helpers, PlanError) == []


class Halves:
    """A scheme as a reader would write it in a cell."""

    name, label, replicated = "halves", "HALF", False

    def propose(
        self, config: BaseEmbeddingConfig, topology: Topology, constraints: ParameterConstraints | None = None
    ) -> Iterator[Proposal]:
        middle, end = config.num_embeddings // 2, config.num_embeddings
        if middle:
            columns = (0, config.embedding_dim)
            yield Proposal(self.name, (((0, middle), columns), ((middle, end), columns)))

    def default(
        self, config: BaseEmbeddingConfig, topology: Topology, ranks: list[int] | None = None
    ) -> ParameterSharding:
        return place_default(self, config, topology, ranks)  # type: ignore[arg-type]


def test_a_scheme_from_a_notebook_cell_is_known_until_forgotten_and_half_a_scheme_is_refused() -> None:
    register_scheme(Halves())  # type: ignore[arg-type]
    try:
        assert "halves" in scheme_names()
        made = scheme_named("halves").default(table(), Topology(2))
        assert [(s.rank, s.rows) for s in made.shards] == [(0, (0, 5)), (1, (5, 10))]
        with pytest.raises(PlanError, match="cannot be sharded halves"):
            scheme_named("halves").default(table(rows=1), Topology(2))
    finally:
        unregister_scheme("halves")
    refusals: list[tuple[Any, str]] = [
        (lambda: scheme_named("halves"), "no scheme 'halves'"),
        (lambda: register_scheme(Halves), r"register_scheme\(Halves\(\)\)"),  # type: ignore[arg-type]
        (lambda: register_scheme(object()), "lacks 'name'"),  # type: ignore[arg-type]
    ]
    assert not_refused(refusals, PlanError) == []


def test_impossible_topologies_are_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"world_size": 0}, "world_size must be a positive integer"),
        ({"world_size": 6, "local_world_size": 4}, "Fix: world_size=8"),
        ({"world_size": 2, "compute_device": "tpu"}, "'cpu' or 'cuda'"),
        ({"world_size": 2, "intra_host_bw": 0}, "intra_host_bw must be positive"),
        ({"world_size": 2, "reserve_fraction": 1.5}, r"\[0, 1\)"),
    ]
    assert not_refused((partial(Topology, **arguments), said) for arguments, said in wrong) == []


def test_cpu_ranks_share_this_machines_memory() -> None:
    two, four = Topology(2), Topology(4)
    assert two.memory_cap_bytes == pytest.approx(2 * four.memory_cap_bytes, rel=1e-6)
    assert Topology(4, local_world_size=2).node_of(3) == 1
