"""Every scheme tiles every table on every topology, and TorchRec's helpers give TorchRec's geometry."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig
from recshard_lab.sharding import (
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Proposal,
    Shard,
    ShardingPlan,
    Topology,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    register_scheme,
    row_wise,
    scheme_named,
    scheme_names,
    table_wise,
    unregister_scheme,
)
from recshard_lab.sharding.schemes import place_default


def table(rows: int = 10, cols: int = 8, name: str = "movies") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=cols, feature_names=[name])


@pytest.mark.parametrize("name", scheme_names())
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), world_size=st.integers(1, 9), data=st.data())
def test_every_proposal_is_a_valid_plan(name: str, rows: int, cols: int, world_size: int, data: st.DataObject) -> None:
    config, topology, scheme = table(rows, cols), Topology(world_size), scheme_named(name)
    pin = data.draw(st.none() | st.lists(st.integers(0, world_size - 1), min_size=1, unique=True))
    for proposal in scheme.propose(config, topology, ParameterConstraints(ranks=pin)):
        usable = pin or list(range(world_size))
        dealt = tuple(usable[i % len(usable)] for i in range(len(proposal.rects)))
        for ranks in proposal.assignments or (dealt,):
            assert set(ranks) <= set(usable)
            plan = ShardingPlan({"": {"movies": proposal.placed(ranks)}})
            plan.validate([config], world_size)


@pytest.mark.parametrize("name", scheme_names())
@given(rows=st.integers(1, 40), cols=st.integers(1, 40), world_size=st.integers(1, 9))
def test_every_default_is_a_valid_plan(name: str, rows: int, cols: int, world_size: int) -> None:
    config = table(rows, cols)
    made = scheme_named(name).default(config, Topology(world_size))
    assert made.sharding_type == name
    ShardingPlan({"": {"movies": made}}).validate([config], world_size)


def test_row_wise_blocks_are_torchrecs_and_leave_late_ranks_empty() -> None:
    made = scheme_named("row_wise").default(table(rows=5), Topology(4))
    assert [(s.rank, s.rows) for s in made.shards] == [(0, (0, 2)), (1, (2, 4)), (2, (4, 5))]


def test_column_wise_keeps_to_four_columns_and_refuses_more_pieces() -> None:
    made = scheme_named("column_wise").default(table(cols=20), Topology(3))
    assert [s.num_cols for s in made.shards] == [8, 8, 4]
    assert [s.num_cols for s in scheme_named("column_wise").default(table(cols=6), Topology(4)).shards] == [2, 2, 1, 1]
    with pytest.raises(PlanError, match=r"cannot be cut into 3 pieces.*2 ranks or fewer"):
        scheme_named("column_wise").default(table(cols=8), Topology(4), ranks=[0, 1, 2])


def test_min_partition_is_respected() -> None:
    wish = ParameterConstraints(min_partition=12)
    for proposal in scheme_named("column_wise").propose(table(cols=64), Topology(8), wish):
        assert min(c1 - c0 for _, (c0, c1) in proposal.rects) >= 12


def test_torchrecs_helpers_build_a_module_plan() -> None:
    tables = [table(name=name) for name in ("a", "b", "c", "d", "e")]
    module = SimpleNamespace(embedding_bag_configs=lambda: tables)
    plan = construct_module_sharding_plan(
        module,
        {
            "a": table_wise(rank=1),
            "b": row_wise(),
            "c": column_wise(ranks=[1, 0]),
            "d": data_parallel(),
            "e": row_wise(sizes_placement=([0, 10], "cpu")),
        },
        world_size=2,
    )
    assert plan["a"].shards == (Shard(1, (0, 10), (0, 8)),)
    assert plan["c"].shards == (Shard(1, (0, 10), (0, 4)), Shard(0, (0, 10), (4, 8)))
    assert plan["d"].replicated
    assert plan["e"].shards == (Shard(1, (0, 10), (0, 8)),)
    assert plan["b"].sharding_spec is not None
    assert plan["d"].sharding_spec is None


@pytest.mark.parametrize(
    ("sharding", "said"),
    [
        ({}, "table 'movies' has no sharding"),
        ({"movie": table_wise(0)}, "did you mean 'movies'"),
        ({"movies": table_wise(5)}, "rank 5 does not exist with world_size 2"),
        ({"movies": column_wise(size_per_rank=[4, 5])}, "sum to 9"),
        ({"movies": row_wise(([1, 2], "cpu"))}, "sum to 3"),
    ],
)
def test_impossible_module_plans_are_refused(sharding: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(PlanError, match=said):
        construct_module_sharding_plan(SimpleNamespace(embedding_configs=lambda: [table()]), sharding, world_size=2)


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


def test_a_scheme_from_a_notebook_cell_is_known_until_forgotten() -> None:
    register_scheme(Halves())  # type: ignore[arg-type]
    try:
        assert "halves" in scheme_names()
        made = scheme_named("halves").default(table(), Topology(2))
        assert [(s.rank, s.rows) for s in made.shards] == [(0, (0, 5)), (1, (5, 10))]
        with pytest.raises(PlanError, match="cannot be cut halves"):
            scheme_named("halves").default(table(rows=1), Topology(2))
    finally:
        unregister_scheme("halves")
    with pytest.raises(PlanError, match="no scheme 'halves'"):
        scheme_named("halves")


def test_registering_a_class_or_half_a_scheme_is_refused() -> None:
    with pytest.raises(PlanError, match=r"register_scheme\(Halves\(\)\)"):
        register_scheme(Halves)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="lacks 'name'"):
        register_scheme(object())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 0}, "world_size must be a positive integer"),
        ({"world_size": 6, "local_world_size": 4}, "next world_size that does is 8"),
        ({"world_size": 2, "compute_device": "tpu"}, "'cpu' or 'cuda'"),
        ({"world_size": 2, "intra_host_bw": 0}, "intra_host_bw must be positive"),
        ({"world_size": 2, "reserve_fraction": 1.5}, r"\[0, 1\)"),
    ],
)
def test_impossible_topologies_are_refused(arguments: dict, said: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=said):
        Topology(**arguments)


def test_cpu_ranks_share_this_machines_memory() -> None:
    two, four = Topology(2), Topology(4)
    assert two.memory_cap_bytes == pytest.approx(2 * four.memory_cap_bytes, rel=1e-6)
    assert Topology(4, local_world_size=2).node_of(3) == 1
