"""The wiring of a plan: lanes, their order, and the runs that belong to a route."""

from itertools import groupby

from recshard_lab import EmbeddingBagConfig, ParameterSharding, Shard
from recshard_lab.distributed.sharded_collections import blocks_of
from recshard_lab.distributed.step.layout import Layout


def layout_of(routes: list[str], world_size: int = 2) -> Layout:
    """Row-wise tables of 4 columns, one a route, every second one of another kernel group."""
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=10, embedding_dim=4, feature_names=[f"f{n}"])
        for n in range(len(routes))
    ]
    shards = [Shard(k, (5 * k, 5 * k + 5), (0, 4)) for k in range(world_size)]
    shardings = {
        table.name: ParameterSharding("row_wise", shards=shards, route=route)
        for table, route in zip(tables, routes, strict=True)
    }
    groups = {(n, k): (n % 2,) for n in range(len(routes)) for k in range(world_size)}
    return Layout(tables, blocks_of(tables), shardings, groups, world_size)


def test_the_lanes_of_a_route_lie_side_by_side_and_those_of_a_group_inside_it() -> None:
    layout = layout_of(["two_hop", "direct", "reduce_scatter", "direct", "two_hop", "direct"])
    assert layout.routes == ["direct", "reduce_scatter", "two_hop"]
    for lanes in layout.exchanged_features:
        runs = [route for route, _ in groupby(lanes, key=lambda lane: lane.route)]
        assert runs == layout.routes
        pairs = [pair for pair, _ in groupby(lanes, key=lambda lane: (lane.route, lane.group))]
        assert len(pairs) == len(set(pairs))
    for rank in range(2):
        assert [
            lane for route in layout.routes for lane in layout.features_of(route)[rank]
        ] == layout.exchanged_features[rank]
