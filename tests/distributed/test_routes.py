"""Routes: every way home gives the same rows, and each costs the messages and bytes that it promises."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recshard_lab import ParameterSharding, RankError, Shard, ShardingPlan
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry, trace
from recshard_lab.sharding import ROUTES, EmbeddingModuleShardingPlan
from tests.distributed import cases
from tests.distributed.jobs import Case, batch_of, sharded_model, train_sharded
from tests.distributed.test_parity import check

WORLD, LOCAL = 4, 2
OTHERS = [route for route in ROUTES if route != "direct"]
SPLIT = [table for table in cases.TABLES if table["num_embeddings"] > 3]


def stripes(table: dict[str, Any], ranks: list[int], cols: tuple[int, int] | None = None) -> list[Shard]:
    """Row stripes of some columns, one a rank."""
    rows = table["num_embeddings"]
    edges = [rows * n // len(ranks) for n in range(len(ranks) + 1)]
    return [Shard(rank, (edges[n], edges[n + 1]), cols or (0, table["embedding_dim"])) for n, rank in enumerate(ranks)]


def shards_of(table: dict[str, Any], tiling: str, number: int) -> list[Shard]:
    """A tiling; the node or rank where it begins goes round with the table's number."""
    first, dim, rows = number % 2 * LOCAL, table["embedding_dim"], table["num_embeddings"]
    if tiling == "rows on all ranks":
        return stripes(table, list(range(WORLD)))
    if tiling == "rows inside a node":
        return stripes(table, [first, first + 1])
    if tiling == "a grid":
        halves = [(0, dim // 2), (dim // 2, dim)]
        return [s for n, cols in enumerate(halves) for s in stripes(table, [n * LOCAL, n * LOCAL + 1], cols)]
    if tiling == "columns":
        return [Shard(n, (0, rows), (n * dim // WORLD, (n + 1) * dim // WORLD)) for n in range(WORLD)]
    if tiling == "one rank":
        return [Shard(number % WORLD, (0, rows), (0, dim))]
    return list(cases.pinwheel(table, WORLD).shards)


TILINGS = ["rows on all ranks", "rows inside a node", "a grid", "columns", "one rank", "a pinwheel"]


def plan_of(tilings: list[str], routes: list[str]) -> ShardingPlan:
    """Table i under ``tilings[i]`` and ``routes[i]``, both going round."""
    entries = {}
    for number, table in enumerate(SPLIT):
        tiling, route = tilings[number % len(tilings)], routes[number % len(routes)]
        if tiling == "replicas":
            entries[table["name"]] = ParameterSharding("data_parallel")
        else:
            shards = shards_of(table, tiling, number)
            entries[table["name"]] = ParameterSharding("custom", shards=shards, route=route)
    return ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)})


def case_of(plan: ShardingPlan, steps: int = 6, **settings: Any) -> Case:
    return Case(SPLIT, plan.to_json(), cases.random_steps(1, SPLIT, WORLD, steps, samples=5), **settings)


@pytest.mark.parametrize("route", OTHERS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_every_route_equals_the_unsharded_model(nodes: Any, tiling: str, route: str) -> None:
    check(case_of(plan_of([tiling], [route]), optimizer="exact_row_wise_adagrad"), nodes)


@pytest.mark.parametrize("route", ROUTES)
def test_gradients_of_tables_that_are_all_summed_are_averaged_over_ranks(nodes: Any, route: str) -> None:
    """Where one table is averaged, the whole gradient is scaled before it is sent; here each route scales its own."""
    summed = [table for table in SPLIT if "pooling" not in table]
    entries = {
        table["name"]: ParameterSharding("custom", shards=shards_of(table, "rows on all ranks", 0), route=route)
        for table in summed
    }
    plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)})
    check(Case(summed, plan.to_json(), cases.random_steps(1, summed, WORLD, 3, samples=5)), nodes)


def test_each_table_of_a_plan_goes_its_own_route(nodes: Any) -> None:
    tilings = ["rows on all ranks", "a grid", "rows inside a node"]
    results = check(case_of(plan_of(tilings, ["reduce_scatter", "two_hop", "direct"]), weighted=True), nodes)
    # two of input; forward and backward: one of direct, two hops (the reduce-scatter is no all-to-all)
    assert {count for result in results for count in result.collectives} == {2 + 2 * (1 + 2)}


def bytes_of_a_step(case: Case) -> dict[str, tuple[int, int, int, int]]:
    """label -> (events, bytes, inter-node bytes, intra-node bytes) of the first step, on this rank."""
    dmp, _ = sharded_model(case)
    rank = torch.distributed.get_rank()
    with trace() as traced:
        dmp(batch_of(case.steps[0][rank]))[1].sum().backward()
    found: dict[str, tuple[int, int, int, int]] = {}
    for event in traced.events:
        assert sum(event.bytes_to) == event.bytes_to[rank] + event.inter_node_bytes + event.intra_node_bytes
        old = found.get(event.label, (0, 0, 0, 0))
        new = (1, event.bytes_sent, event.inter_node_bytes, event.intra_node_bytes)
        found[event.label] = tuple(a + b for a, b in zip(old, new, strict=True))  # type: ignore[assignment]
    return found


def even_case(plan: ShardingPlan, samples: int = 6, **settings: Any) -> Case:
    import random

    bags = [cases.random_bags(random.Random(rank), SPLIT, samples) for rank in range(WORLD)]
    return Case(SPLIT, plan.to_json(), [bags], **settings)


def output_bytes(nodes: Any, tiling: str, route: str) -> tuple[int, int]:
    """Bytes of all ranks that cross nodes, and that stay inside, both passes."""
    found = nodes.run(bytes_of_a_step, even_case(plan_of([tiling], [route])))
    rows = [value for each in found for label, value in each.items() if label.startswith("output_dist")]
    return sum(value[2] for value in rows), sum(value[3] for value in rows)


@pytest.mark.parametrize(("tiling", "saving"), [("rows inside a node", LOCAL), ("a grid", LOCAL), ("columns", 1)])
def test_two_hops_send_a_nodes_stripes_across_nodes_once(nodes: Any, tiling: str, saving: int) -> None:
    across, _ = output_bytes(nodes, tiling, "direct")
    across_by_two, _ = output_bytes(nodes, tiling, "two_hop")
    assert across > 0
    assert across_by_two * saving == across


def test_bytes_of_a_route_are_those_of_its_formula(nodes: Any) -> None:
    samples, width = 6, 4 * sum(table["embedding_dim"] * len(table["feature_names"]) for table in SPLIT)
    # rows on all ranks: each rank sends the width of all tables to each home, whichever way they are added
    for route in ("direct", "reduce_scatter"):
        across, inside = output_bytes(nodes, "rows on all ranks", route)
        assert across == 2 * WORLD * samples * width * (WORLD - LOCAL)
        assert inside == 2 * WORLD * samples * width * (LOCAL - 1)
    # two hops: inside for both places' homes on both nodes; across the sum, to the other node
    across, inside = output_bytes(nodes, "rows on all ranks", "two_hop")
    assert across == 2 * WORLD * samples * width * (WORLD // LOCAL - 1)
    assert inside == 2 * WORLD * samples * width * (LOCAL - 1) * (WORLD // LOCAL)


def test_reduce_scatter_is_one_collective_a_pass_and_leaves_whole_tables_to_direct(nodes: Any) -> None:
    plan = plan_of(["rows on all ranks", "one rank"], ["reduce_scatter"])
    for found in nodes.run(traced_operations, even_case(plan)):
        assert found == ["all_to_all", "reduce_scatter", "all_to_all", "all_gather"]


def traced_operations(case: Case) -> list[str]:
    dmp, _ = sharded_model(case)
    with trace() as traced:
        dmp(batch_of(case.steps[0][torch.distributed.get_rank()]))[1].sum().backward()
    return [event.op for event in traced.events if event.label.startswith("output_dist")]


@pytest.mark.parametrize("route", OTHERS)
def test_a_sequence_collection_refuses_routes_that_add(nodes: Any, route: str) -> None:
    tables = cases.sequence_tables()
    plan = cases.plan_of(tables, ["row_wise"], WORLD).with_route(route)
    case = Case(tables, plan.to_json(), cases.random_steps(3, tables, WORLD, 1, 3), sequence=True)
    with pytest.raises(RankError, match=rf"{route}.*'movies'.*sequence.*route='direct'"):
        nodes.run(traced_operations, case)


def registry(forward: CommType, backward: CommType) -> Any:
    return get_qcomm_codecs_registry(QCommsConfig(forward, backward))


@pytest.mark.parametrize("kind", [CommType.FP16, CommType.BF16, CommType.INT8])
@pytest.mark.parametrize("route", ROUTES)
def test_coded_rows_differ_by_no_more_than_their_codec_allows(nodes: Any, route: str, kind: CommType) -> None:
    forward = CommType.FP16 if route == "reduce_scatter" and kind is CommType.INT8 else kind
    plan = plan_of(["rows on all ranks", "a grid"], [route])
    exact = nodes.run(train_sharded, case_of(plan, 1))
    coded = nodes.run(train_sharded, replace(case_of(plan, 1), codecs=registry(forward, kind)))
    # partial sums of up to 5 ids of weights below 0.5, rounded on at most 2 hops and in W additions
    size = 2.5
    step = {CommType.FP16: 2.0**-11, CommType.BF16: 2.0**-8, CommType.INT8: 2 / 255 / 2}
    for one, other in zip(exact, coded, strict=True):
        gap = (one.outputs[0] - other.outputs[0]).abs()
        assert gap.numel() == 0 or 0 < float(gap.max()) <= 2 * WORLD * size * step[forward]
        for name, weight in one.weights.items():  # gradients are rounded: an SGD step of lr 0.05 differs by little
            assert float((weight - other.weights[name]).abs().max()) <= 0.05 * 20 * step[kind], name
        assert any(not torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", [CommType.FP16, CommType.BF16, CommType.INT8])
def test_the_trace_counts_coded_bytes(nodes: Any, route: str, kind: CommType) -> None:
    forward = CommType.FP16 if route == "reduce_scatter" and kind is CommType.INT8 else kind
    plan = plan_of(["rows on all ranks"], [route])
    plain = nodes.run(bytes_of_a_step, even_case(plan))
    coded = nodes.run(bytes_of_a_step, even_case(plan, codecs=registry(forward, kind)))
    dims = [table["embedding_dim"] for table in SPLIT for _ in table["feature_names"]]
    share = dict.fromkeys(CommType, 0.5) | {CommType.INT8: sum(dim + 8 for dim in dims) / (4 * sum(dims))}
    for one, other in zip(plain, coded, strict=True):
        assert one.keys() == other.keys()
        for label, (_, sent, _, _) in one.items():
            ratio = 1.0 if not label.startswith("output") else share[kind if "backward" in label else forward]
            assert other[label][1] == sent * ratio, label


def test_columns_of_one_node_that_touch_cross_nodes_as_one_coded_row(nodes: Any) -> None:
    table, samples = next(table for table in SPLIT if table["name"] == "users"), 6
    rows, dim = table["num_embeddings"], table["embedding_dim"]
    halves = [Shard(rank, (0, rows), (rank * dim // 2, (rank + 1) * dim // 2)) for rank in range(LOCAL)]
    sharding = ParameterSharding("custom", shards=halves, route="two_hop")
    plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan({"users": sharding})})
    steps = [cases.random_steps(1, [table], WORLD, 1, samples)[0]]
    case = Case([table], plan.to_json(), steps, codecs=registry(CommType.INT8, CommType.INT8))
    sizes = [len(bags["user"]) for bags in steps[0]]
    found = nodes.run(bytes_of_a_step, case)
    across = sum(own["output_dist/rows/across"][2] for own in found)
    assert across == sum(sizes[LOCAL:]) * (dim + 8)  # to the homes on the other node: one scale and offset a row


def test_int8_rows_cannot_be_added_on_the_way(nodes: Any) -> None:
    plan = plan_of(["rows on all ranks"], ["reduce_scatter"])
    with pytest.raises(RankError, match=r"reduce_scatter.*int8 cannot be added.*FP16"):
        nodes.run(bytes_of_a_step, even_case(plan, codecs=registry(CommType.INT8, CommType.FP32)))
