"""`use_index_dedup` and route "distinct_rows": what travels is each distinct id, its row, and its summed gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
    RankError,
    ShardingPlan,
)
from recshard_lab.comm import trace
from recshard_lab.distributed import EmbeddingCollectionSharder
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from tests.distributed import cases
from tests.distributed.jobs import Case, batch_of, sharded_model, train_sharded

LABELS = {"input_dist/ids": 4, "output_dist/rows": 4 * 8, "output_dist_backward/rows": 4 * 8}  # bytes of an id
TABLES = [{"name": name, "num_embeddings": 12, "embedding_dim": 8, "feature_names": [name]} for name in "ab"]


def bags(rank: int) -> dict[str, list[list[int]]]:
    """Ids that repeat inside a bag, between bags, and between ranks; one table has none on rank 1."""
    return {"a": [[3, 3, 11], [3, 0], []], "b": [[5, 5], [5], [rank]] if rank == 0 else [[], [], []]}


def sent(scheme: str, dedup: bool) -> dict[str, int]:
    """Bytes that this rank sends, by label."""
    tables = [EmbeddingConfig(**table) for table in TABLES]
    sharder = EmbeddingCollectionSharder({"optimizer": "exact_sgd"}, use_index_dedup=dedup)
    plan = cases.root_plan(tables, scheme, 2)
    dmp = DistributedModelParallel(EmbeddingCollection(tables), plan=plan, sharders=[sharder])
    with trace() as traced:
        out = dmp(batch_of(bags(torch.distributed.get_rank())))
        loss = torch.cat([own.values() for own in out.values()]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
    return {label: traced.bytes_sent(label) for label in LABELS}


@pytest.mark.parametrize("scheme", ["table_wise", "row_wise"])
def test_each_distinct_id_travels_once(two: Any, scheme: str) -> None:
    every, distinct = two.run(sent, scheme, False), two.run(sent, scheme, True)
    for rank in range(2):
        found = [own[rank]["input_dist/ids"] // 4 for own in (every, distinct)]
        lists = [[i for bag in own for i in bag] for own in bags(rank).values()]
        assert found == [sum(map(len, lists)), sum(len(set(ids)) for ids in lists)]
    for label, size in LABELS.items():  # rows and gradients travel as often as ids, between all ranks together
        assert [sum(own[label] for own in side) // size for side in (every, distinct)] == [14, 8], label


def refused() -> None:
    rank = torch.distributed.get_rank()
    tables = [EmbeddingConfig(**table) for table in TABLES]
    sharder = EmbeddingCollectionSharder(use_index_dedup=rank == 0)
    plan = cases.root_plan(tables, "row_wise", 2)
    DistributedModelParallel(EmbeddingCollection(tables), plan=plan, sharders=[sharder])


def test_ranks_that_differ_are_refused(two: Any) -> None:
    with pytest.raises(RankError, match="use_index_dedup of EmbeddingCollectionSharder"):
        two.run(refused)
    with pytest.raises(ValueError, match="use_index_dedup must be True or False, got 1"):
        EmbeddingCollectionSharder(use_index_dedup=1)


# ---- pooled collections: route "distinct_rows" ----


def pooled_plan(scheme: str, route: str = DISTINCT_ROWS) -> ShardingPlan:
    return cases.plan_of(TABLES, [scheme], 2).with_route(route)


def pooled_bytes(scheme: str) -> dict[str, int]:
    """Bytes that this rank sends, by label."""
    case = Case(TABLES, pooled_plan(scheme).to_json(), [])
    dmp, _ = sharded_model(case)
    with trace() as traced:
        dmp(batch_of(bags(torch.distributed.get_rank())))[0].sum().backward()
    labels = {event.label for event in traced.events if "/" in event.label}
    return {label: traced.bytes_sent(label) for label in labels}


@pytest.mark.parametrize("scheme", ["table_wise", "row_wise"])
def test_pooled_rows_travel_once_and_bags_not_at_all(two: Any, scheme: str) -> None:
    found = two.run(pooled_bytes, scheme)
    for rank in range(2):
        assert found[rank]["input_dist/ids"] == 4 * [5, 3][rank]
    for label in ("output_dist/rows", "output_dist_backward/rows"):
        assert sum(own[label] for own in found) == 8 * 4 * 8, label


@pytest.mark.parametrize("policy", ["clamp", "ignore"])
def test_pooled_rows_of_ids_out_of_range_equal_the_direct_route(two: Any, policy: str) -> None:
    stray = [-1, 40, 40]
    steps = [[{"a": [[3, *stray, 3, 11], stray, []], "b": [[5, 5, *stray], [5], [1, rank]]} for rank in range(2)]] * 2
    results = []
    for route in ("direct", DISTINCT_ROWS):
        plan = cases.plan_of(TABLES, ["row_wise", "column_wise"], 2).with_route(route)
        tables = [{**table, "pooling": PoolingType.MEAN} for table in TABLES]
        results.append(two.run(train_sharded, Case(tables, plan.to_json(), steps, out_of_range=policy)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.outputs, other.outputs)
        torch.testing.assert_close(one.weights, other.weights)
        assert one.out_of_range == other.out_of_range > 0


def test_per_sample_weights_and_variable_batches_are_refused(two: Any) -> None:
    steps = [[bags(rank) for rank in range(2)]]
    case = Case(TABLES, pooled_plan("row_wise").to_json(), steps)
    with pytest.raises(RankError, match="does not apply to table 'a': the collection has per-sample weights"):
        two.run(train_sharded, replace(case, weighted=True))
    inverse = [[{"a": [0, 1, 2], "b": [2, 1, 0]}, {"a": [0, 0, 0], "b": [0, 1, 2]}]]
    with pytest.raises(RankError, match="a variable batch arrived, but the plan has tables on route 'distinct_rows'"):
        two.run(train_sharded, replace(case, inverse=inverse))
