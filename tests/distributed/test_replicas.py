"""Data-parallel tables: replicas stay equal to the last bit, and what travels is never the table."""

from typing import Any

import pytest
import torch

from recshard_lab.comm import trace
from tests.distributed import cases
from tests.distributed.jobs import Case, batch_of, sharded_model

TABLES: list[dict[str, Any]] = [
    {"name": "tiny", "num_embeddings": 3, "embedding_dim": 8, "feature_names": ["a", "b"]},
    {"name": "large", "num_embeddings": 5000, "embedding_dim": 4, "feature_names": ["c"]},
]


def without_pooling(tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in table.items() if k != "pooling"} for table in tables]


def held_after_training(case: Case) -> dict[str, torch.Tensor]:
    """Runs on every rank: this rank's own replicas, weights and optimizer state, after all steps."""
    rank = torch.distributed.get_rank()
    dmp, _ = sharded_model(case)
    for ranks in case.steps:
        _, logits, _ = dmp(batch_of(ranks[rank], case.weighted))
        logits.square().sum().backward()
    held = {}
    for name, table in dmp.collections[cases.PATH].table_shards().items():
        for position, weight in table.local_weights.items():
            held[f"{name}/weight"] = weight.clone()
            held |= {f"{name}/{state}": value.clone() for state, value in table.states[position].items()}
    return held


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad", "exact_adagrad"])
@pytest.mark.parametrize("sequence", [False, True])
def test_replicas_are_bit_identical_after_training_on_different_batches(
    ranks: Any, sequence: bool, optimizer: str
) -> None:
    tables = without_pooling(cases.TABLES) if sequence else cases.TABLES
    plan = cases.plan_of(tables, ["data_parallel"], ranks.world_size)
    steps = cases.random_steps(1, tables, ranks.world_size, steps=20, samples=9)
    case = Case(tables, plan.to_json(), steps, optimizer, sequence=sequence)
    first, *others = ranks.run(held_after_training, case)
    assert len(first) >= len(tables)
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


def brought_together(case: Case) -> bool:
    """Moves this rank's replicas apart, copies the first one to all, and compares. Runs on every rank."""
    rank = torch.distributed.get_rank()
    dmp, _ = sharded_model(case)
    tensors = [
        matrix
        for shards in dmp.table_shards().values()
        for part in shards.parts()
        for matrix in shards.matrices(part).values()
    ]
    firsts = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor += rank
    dmp.sync_replicas()
    return all(torch.equal(tensor, first) for tensor, first in zip(tensors, firsts, strict=True))


def test_replicas_that_differ_can_be_copied_from_the_first(ranks: Any) -> None:
    plan = cases.plan_of(TABLES, ["data_parallel"], ranks.world_size)
    case = Case(TABLES, plan.to_json(), [], "exact_row_wise_adagrad")
    assert all(ranks.run(brought_together, case))


def bytes_of_a_step(case: Case) -> tuple[int, int]:
    """Bytes of ids, and of gradients, that this rank sends to one rank."""
    dmp, _ = sharded_model(case)
    batch = batch_of(case.steps[0][torch.distributed.get_rank()])
    with trace() as traced:
        out, _, _ = dmp(batch)
        out.sum().backward()
    world = torch.distributed.get_world_size()
    return traced.bytes_sent("input_dist/ids") // world, traced.bytes_sent("output_dist_backward") // world


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_of_equal_ids_are_added_before_they_travel(two: Any, sequence: bool) -> None:
    table = {"name": "t", "num_embeddings": 3, "embedding_dim": 8, "feature_names": ["a"]}
    plan = cases.plan_of([table], ["data_parallel"], 2)
    steps = [[{"a": [[0, 2, 2]] * 100} for _ in range(2)]]
    sent = two.run(bytes_of_a_step, Case([table], plan.to_json(), steps, sequence=sequence))
    distinct = 2
    assert sent == [(distinct * 4, distinct * 8 * 4)] * 2


def test_pooled_rows_travel_where_they_are_fewer_than_distinct_ids(two: Any) -> None:
    table = {"name": "t", "num_embeddings": 1000, "embedding_dim": 8, "feature_names": ["a"]}
    plan = cases.plan_of([table], ["data_parallel"], 2)
    steps = [[{"a": [list(range(50 * b, 50 * b + 50)) for b in range(10)]} for _ in range(2)]]
    sent = two.run(bytes_of_a_step, Case([table], plan.to_json(), steps))
    assert sent == [((10 + 500) * 4, 10 * 8 * 4)] * 2
