"""Plans: JSON round trip, refusals by name, validation messages, text of at most 100 columns."""

import json
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.sharding import ROUTES, ParameterSharding, PlanError, Shard, ShardingPlan, ShardingType
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from tests.refusals import not_refused

MOVIES = EmbeddingBagConfig(name="movies", num_embeddings=100, embedding_dim=8, feature_names=["movie"])


def plan_of(*shards: Shard, sharding_type: str = "custom") -> ShardingPlan:
    return ShardingPlan({"": {"movies": ParameterSharding(sharding_type, shards=shards)}})


shards_drawn = st.builds(
    Shard,
    st.integers(0, 4000),
    st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)),
    st.tuples(st.integers(0, 512), st.integers(0, 512)),
)
sharding_drawn = st.builds(
    lambda name, kernel, shards, bare, route: ParameterSharding(
        name, kernel, bare if not shards else None, shards=shards, route="direct" if name == "data_parallel" else route
    ),
    st.sampled_from(["table_wise", "data_parallel", "drawn by händ"]),
    st.sampled_from(["fused", "dense"]),
    st.lists(shards_drawn, max_size=4),
    st.none() | st.lists(st.integers(0, 7), min_size=1, unique=True),
    st.sampled_from((*ROUTES, DISTINCT_ROWS)),
)


@given(
    st.dictionaries(st.text(max_size=5), st.dictionaries(st.text(max_size=5), sharding_drawn, max_size=3), max_size=3)
)
def test_json_round_trip_is_exact(modules: dict[str, dict[str, ParameterSharding]]) -> None:
    plan = ShardingPlan(modules)  # type: ignore[arg-type]
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan
    assert [list(tables) for tables in again.plan.values()] == [list(tables) for tables in plan.plan.values()]
    assert again.to_json() == plan.to_json()


def test_a_direct_plan_is_written_as_before_there_were_routes() -> None:
    entry = json.loads(plan_of(Shard(0, (0, 100), (0, 8))).to_json())["modules"][""]["movies"]
    assert list(entry) == ["sharding_type", "compute_kernel", "ranks", "shards"]


def test_a_route_is_part_of_what_a_sharding_is() -> None:
    bare = ParameterSharding("row_wise", route="two_hop")
    assert bare.resolved(MOVIES, 2).route == "two_hop"
    assert bare != ParameterSharding("row_wise")
    assert len({bare, ParameterSharding("row_wise"), ParameterSharding("row_wise", route="two_hop")}) == 2
    plan = ShardingPlan({"": {"movies": bare, "users": ParameterSharding("data_parallel")}})
    assert [s.route for s in plan.with_route("reduce_scatter").tables().values()] == ["reduce_scatter", "direct"]
    assert "two_hop" in str(plan)
    assert "route" not in str(plan.with_route("direct"))


def test_a_route_that_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match=r"route 'twohop' does not exist \(did you mean 'two_hop'"):
        ParameterSharding("row_wise", route="twohop")
    with pytest.raises(PlanError, match="known: direct, reduce_scatter, two_hop, distinct_rows"):
        plan_of().with_route("x")
    with pytest.raises(PlanError, match="data_parallel with route 'two_hop': every rank stores all rows"):
        ParameterSharding("data_parallel", route="two_hop")


def broken(**changes: object) -> str:
    document = json.loads(plan_of(Shard(0, (0, 100), (0, 8))).to_json())
    entry = document["modules"][""]["movies"]
    for name, value in changes.items():
        target = document if name in document or name == "extra" else entry
        if value is ...:
            del target[name]
        else:
            target[name] = value
    return json.dumps(document)


JSON = [
    ("{", "not JSON"),
    ("[]", "the document must be an object"),
    (broken(schema="other"), "field 'schema'"),
    (broken(route="x"), r"\['movies'\]: route 'x' does not exist"),
    (broken(route=2), r"\['movies'\].route must be a string"),
    (broken(version=2), "format version 2, but this recshard_lab reads version 1.*Fix: update recshard_lab"),
    (broken(version=...), "version None"),
    (broken(version=True), "version True"),
    (broken(extra=1), "unknown field 'extra'"),
    (broken(modules=[]), "modules must be an object"),
    (broken(shards=...), r"\['movies'\] lacks the field 'shards'"),
    (broken(shards=[[0, 0, 100, 0]]), r"shards\[0\] must be \[rank, r0, r1, c0, c1\]"),
    (broken(shards=[[0, 0, 100.5, 0, 8]]), r"shards\[0\] must hold whole numbers"),
    (broken(shards=[[-1, 0, 100, 0, 8]]), r"shards\[0\] must hold whole numbers"),
    (broken(ranks=[1]), "a shard is on rank 0"),
    (broken(sharding_type=3), "sharding_type must be a string"),
    ('{"schema": 1, "schema": 2}', "'schema' occurs twice"),
]


def test_malformed_json_is_refused_by_name() -> None:
    assert not_refused(((partial(ShardingPlan.from_json, text), said) for text, said in JSON), PlanError) == []


TILINGS = [
    ([], "has no shards"),
    ([Shard(0, (0, 90), (0, 8))], r"no shard covers rows \[90, 100\) x cols \[0, 8\).*rows=\(0, 100\)"),
    (
        [Shard(0, (0, 60), (0, 8)), Shard(1, (50, 100), (0, 8))],
        r"ranks 0 and 1 overlap in rows \[50, 60\) x cols \[0, 8\).*rank 1 rows=\(60, 100\)",
    ),
    ([Shard(0, (0, 101), (0, 8))], r"partly outside the table.*rows=\(0, 100\)"),
    ([Shard(2, (0, 100), (0, 8))], "world_size is 2"),
    ([Shard(0, (0, 100), (0, 8)), Shard(1, (5, 5), (0, 8))], "is empty"),
]


def test_what_is_no_tiling_is_refused_with_the_rectangle_and_the_fix() -> None:
    refusals = [(partial(plan_of(*shards).validate, [MOVIES], 2), said) for shards, said in TILINGS]
    assert not_refused(refusals, PlanError) == []


def test_unknown_and_missing_tables_are_named() -> None:
    plan = plan_of(Shard(0, (0, 100), (0, 8)))
    users = EmbeddingBagConfig(name="users", num_embeddings=5, embedding_dim=4, feature_names=["user"])
    with pytest.raises(PlanError, match="'users' is not in the plan"):
        plan.validate([MOVIES, users], 1)
    film = EmbeddingBagConfig(name="movie", num_embeddings=5, embedding_dim=4, feature_names=["user"])
    plan.plan[""]["movie"] = plan.plan[""].pop("movies")
    plan.plan[""]["movis"] = plan.plan[""]["movie"]
    with pytest.raises(PlanError, match=r"entry 'movis'.*did you mean 'movie'"):
        plan.validate([film], 1)


def test_replicas_must_be_whole_and_on_every_rank() -> None:
    whole = [Shard(rank, (0, 100), (0, 8)) for rank in range(3)]
    plan_of(*whole, sharding_type="data_parallel").validate([MOVIES], 3)
    wrong = [(whole[:2], "rank 2 holds no replica"), ([*whole, whole[1]], "rank 1 holds it twice")]
    wrong.append(([Shard(0, (0, 50), (0, 8)), *whole[1:]], "rank 0 holds only"))
    plans = [(plan_of(*shards, sharding_type="data_parallel"), said) for shards, said in wrong]
    assert not_refused(((partial(plan.validate, [MOVIES], 3), said) for plan, said in plans), PlanError) == []


def test_bare_schemes_are_resolved() -> None:
    bare = ShardingPlan({"ebc": {"movies": ParameterSharding(ShardingType.DATA_PARALLEL, "dense", [0, 1])}})
    full = bare.resolved({"ebc": [MOVIES]}, 2)
    assert full.tables()["movies"].shards == (Shard(0, (0, 100), (0, 8)), Shard(1, (0, 100), (0, 8)))
    assert full.tables()["movies"].compute_kernel == "dense"
    rows = ShardingPlan({"": {"movies": ParameterSharding("row_wise")}}).resolved([MOVIES], 4)
    assert [shard.rows for shard in rows.tables()["movies"].shards] == [(0, 25), (25, 50), (50, 75), (75, 100)]


def test_torch_specs_become_the_same_rectangles() -> None:
    drawn = ParameterSharding("custom", shards=[Shard(1, (0, 100), (0, 4)), Shard(0, (0, 100), (4, 8))])
    again = ParameterSharding("custom", "fused", [1, 0], drawn.sharding_spec)
    assert again == drawn


def test_the_text_fits_100_columns() -> None:
    shards = [Shard(r, (r * 10**7, (r + 1) * 10**7 + (r % 3)), (0, 128)) for r in range(0, 4000, 7)]
    entry = ParameterSharding("a_scheme_with_a_very_long_name", shards=shards)
    plan = ShardingPlan({"model.sparse_arch.embedding_bag_collection": {"a" * 60: entry}, "b": {"b": entry}})
    assert max(len(line) for line in plan.show().splitlines()) <= 100
    assert "<table>" in plan._repr_html_()


def test_tables_that_share_one_sharding_are_cut_each_by_its_own_size() -> None:
    tables = [EmbeddingBagConfig(rows, 8, name=f"t{rows}", feature_names=[f"f{rows}"]) for rows in (10, 30)]
    shared = ParameterSharding("row_wise")
    plan = ShardingPlan({"ebc": {table.name: shared for table in tables}})  # type: ignore[dict-item]
    for configs in (tables, {"ebc": tables}):
        cut = plan.resolved(configs, 2).plan["ebc"]
        assert {name: max(shard.rows[1] for shard in own.shards) for name, own in cut.items()} == {"t10": 10, "t30": 30}
