"""Sharded training equals unsharded training: outputs, losses, dense gradients, weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recshard_lab import ShardingPlan
from recshard_lab.sharding import ROUTES, EmbeddingModuleShardingPlan
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case, Result, train_sharded, train_unsharded
from tests.grid import NIGHT, on_ranks

TOLERANCE = 1e-5
OPTIMIZERS = ["exact_sgd", "exact_row_wise_adagrad"]
STEPS = 20 if NIGHT else 5


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference relative to the largest true value."""
    assert found.shape == truth.shape
    if truth.numel() == 0:
        return 0.0
    return float((found - truth).abs().max() / truth.abs().max().clamp(min=1e-6))


def flatten(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def join_outputs(case: Case, results: list[Result], step: int) -> torch.Tensor:
    """All ranks' outputs in the order of the unsharded one."""
    if not case.sequence:
        return torch.cat([result.outputs[step] for result in results])
    parts = []  # flat, for each feature the rows of every rank in turn
    positions = [0] * len(results)
    for table in case.tables:
        for feature in table["feature_names"]:
            for rank, result in enumerate(results):
                size = sum(len(bag) for bag in case.steps[step][rank][feature]) * table["embedding_dim"]
                parts.append(result.outputs[step][positions[rank] : positions[rank] + size])
                positions[rank] += size
    return torch.cat(parts)


def check(case: Case, ranks: Any) -> list[Result]:
    results = ranks.run(train_sharded, case)
    truth = train_unsharded(case)
    for step, expected in enumerate(truth.outputs):
        assert error(join_outputs(case, results, step), expected) <= TOLERANCE, f"output of step {step}"
    for result in results:
        assert result.keys == truth.keys
        assert result.losses == pytest.approx(truth.losses, rel=TOLERANCE)
        for found, expected in zip(result.dense_grads, truth.dense_grads, strict=True):
            assert error(flatten(found), flatten(expected)) <= TOLERANCE
        assert result.weights.keys() == truth.weights.keys()
        for name, expected in truth.weights.items():
            assert error(result.weights[name], expected) <= TOLERANCE, name
        for name, value in results[0].weights.items():
            assert torch.equal(value, result.weights[name]), f"replicas of {name} differ"
    return results


@on_ranks(1, 2, 3, 4, scheme=scheme_names(), optimizer=OPTIMIZERS)
def test_every_scheme_equals_the_unsharded_model(ranks: Any, scheme: str, optimizer: str) -> None:
    check(every_scheme(ranks.world_size, scheme, optimizer, None), ranks)


@on_ranks(1, 2, 3, 4, scheme=scheme_names(), optimizer=OPTIMIZERS)
def test_every_scheme_on_the_native_kernel_equals_the_unsharded_model(ranks: Any, scheme: str, optimizer: str) -> None:
    check(every_scheme(ranks.world_size, scheme, optimizer, "native"), ranks)


def every_scheme(world_size: int, scheme: str, optimizer: str, backend: str | None) -> Case:
    """Every table under one scheme; the last of five steps has an empty batch on one rank."""
    plan = cases.plan_of(cases.TABLES, [scheme], world_size)
    steps = cases.random_steps(1, cases.TABLES, world_size, steps=STEPS, samples=6)
    return Case(cases.TABLES, plan.to_json(), steps, optimizer, backend=backend)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_mixed_plan_equals_the_unsharded_model(ranks: Any, optimizer: str) -> None:
    names = ["row_wise", "column_wise", "data_parallel", "table_wise"]
    plan = cases.plan_of(cases.TABLES, names, ranks.world_size)
    steps = cases.random_steps(8, cases.TABLES, ranks.world_size, steps=STEPS, samples=6)
    check(Case(cases.TABLES, plan.to_json(), steps, optimizer), ranks)


def test_a_mixed_plan_costs_one_input_and_one_output_exchange(ranks: Any) -> None:
    names = ["row_wise", "column_wise", "data_parallel", "table_wise"]
    plan = cases.plan_of(cases.TABLES, names, ranks.world_size)
    steps = cases.random_steps(3, cases.TABLES, ranks.world_size, steps=4, samples=6)
    results = check(Case(cases.TABLES, plan.to_json(), steps), ranks)
    # input_dist sends sizes, then ids; output_dist sends rows; backward sends gradients. One rank sends nothing ahead
    expected = {2} if ranks.world_size == 1 else {4}
    assert {count for result in results for count in result.collectives} == expected


@pytest.mark.parametrize("scheme", scheme_names())
def test_sequence_collections_equal_the_unsharded_model(ranks: Any, scheme: str) -> None:
    tables = cases.sequence_tables()
    plan = cases.plan_of(tables, [scheme], ranks.world_size)
    steps = cases.random_steps(4, tables, ranks.world_size, steps=6, samples=4)
    check(Case(tables, plan.to_json(), steps, "exact_row_wise_adagrad", sequence=True), ranks)


@pytest.mark.parametrize("scheme", scheme_names())
def test_distinct_ids_of_sequences_equal_the_unsharded_model(ranks: Any, scheme: str) -> None:
    """Ids repeat within bags, between bags and between ranks; the squares of row-wise Adagrad see their sum."""
    tables = [{**table, "num_embeddings": min(table["num_embeddings"], 5)} for table in cases.sequence_tables()]
    steps = cases.random_steps(4, tables, ranks.world_size, steps=4, samples=6)
    plan = cases.plan_of(tables, [scheme], ranks.world_size)
    check(Case(tables, plan.to_json(), steps, "exact_row_wise_adagrad", sequence=True, dedup=True), ranks)


@pytest.mark.parametrize("scheme", scheme_names())
def test_the_dense_kernel_leaves_gradients_to_a_torch_optimizer(ranks: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size, kernel="dense")
    steps = cases.random_steps(5, cases.TABLES, ranks.world_size, steps=5, samples=6)
    check(Case(cases.TABLES, plan.to_json(), steps, "exact_sgd"), ranks)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, "exact_adagrad"])
def test_a_pinwheel_equals_the_unsharded_model(ranks: Any, optimizer: str) -> None:
    tables = [table for table in cases.TABLES if table["num_embeddings"] > 3]
    entries = {table["name"]: cases.pinwheel(table, ranks.world_size) for table in tables}
    plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)})
    steps = cases.random_steps(6, tables, ranks.world_size, steps=5, samples=6)
    check(Case(tables, plan.to_json(), steps, optimizer), ranks)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tiling_on_any_jagged_batch_equals_the_unsharded_model(ranks: Any, data: st.DataObject) -> None:
    check(data.draw(cases.cases(ranks.world_size)), ranks)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tiling_of_a_sequence_collection_equals_the_unsharded_model(ranks: Any, data: st.DataObject) -> None:
    check(data.draw(cases.cases(ranks.world_size, sequence=True)), ranks)


@pytest.mark.parametrize("route", [*ROUTES, DISTINCT_ROWS])
def test_every_route_on_a_single_node_equals_the_unsharded_model(ranks: Any, route: str) -> None:
    plan = cases.plan_of(cases.TABLES, ["row_wise", "column_wise"], ranks.world_size).with_route(route)
    steps = cases.random_steps(2, cases.TABLES, ranks.world_size, steps=5, samples=5)
    check(Case(cases.TABLES, plan.to_json(), steps), ranks)


def test_the_comparison_can_fail(ranks: Any) -> None:
    plan = cases.plan_of(cases.TABLES, ["row_wise"], ranks.world_size)
    steps = cases.random_steps(7, cases.TABLES, ranks.world_size, steps=3, samples=6)
    case = Case(cases.TABLES, plan.to_json(), steps)
    results = ranks.run(train_sharded, replace(case, learning_rate=0.0501))
    truth = train_unsharded(case)
    assert max(error(results[0].weights[name], truth.weights[name]) for name in truth.weights) > TOLERANCE
