"""Sharded training equals unsharded training: outputs, losses, dense gradients, weights."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import recshard_lab as rs
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.embedding.kernels import available
from recshard_lab.sharding import ROUTES
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case, Result, batch_of, train_sharded, train_unsharded
from tests.grid import NIGHT, examples, grid, on_ranks

TOLERANCE = 1e-5
OPTIMIZERS = ["exact_sgd", "exact_row_wise_adagrad"]
STEPS = 20 if NIGHT else 5
MIXED = ["row_wise", "column_wise", "data_parallel", "table_wise"]


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


@on_ranks(2, 3, 4, scheme=scheme_names(), optimizer=OPTIMIZERS, backend=[None, "native"])
def test_every_scheme_equals_the_unsharded_model(ranks: Any, scheme: str, optimizer: str, backend: str | None) -> None:
    """Every table under one scheme; the last of five steps has an empty batch on one rank."""
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size)
    steps = cases.random_steps(1, cases.TABLES, ranks.world_size, steps=STEPS, samples=6)
    check(Case(cases.TABLES, plan.to_json(), steps, optimizer, backend=backend), ranks)


@pytest.mark.parametrize(*grid(scheme=scheme_names(), backend=available()))
def test_every_scheme_and_kernel_on_one_rank_equals_the_unsharded_module(scheme: str, backend: str) -> None:
    torch.manual_seed(0)
    plain = rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(100, 16, "movies", feature_names=["seen"])])
    scheme_alone = {"movies": rs.ParameterConstraints(sharding_types=[scheme])}
    plan = rs.EmbeddingShardingPlanner(rs.Topology(1), constraints=scheme_alone).plan(plain)
    assert [entry.sharding_type for entry in plan.tables().values()] == [scheme]
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_sgd", "learning_rate": 0.5}, backend=backend)
    model = rs.DistributedModelParallel(copy.deepcopy(plain), plan=plan, sharders=[sharder])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(2):
        expected, found = (own(batch_of({"seen": [[1, 2], [], [99, 1]]})).values() for own in (plain, model))
        torch.testing.assert_close(found, expected)
        optimizer.zero_grad()
        expected.square().sum().backward()
        optimizer.step()
        found.square().sum().backward()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_mixed_plan_costs_one_input_and_one_output_exchange(ranks: Any, optimizer: str) -> None:
    plan = cases.plan_of(cases.TABLES, MIXED, ranks.world_size)
    steps = cases.random_steps(8, cases.TABLES, ranks.world_size, steps=STEPS, samples=6)
    results = check(Case(cases.TABLES, plan.to_json(), steps, optimizer), ranks)
    # input_dist sends sizes, then ids; output_dist sends rows; backward sends gradients. One rank sends nothing ahead
    expected = 2 if ranks.world_size == 1 else 4 + ("row_wise" in optimizer)  # squares of columns
    assert {count for result in results for count in result.collectives} == {expected}


@on_ranks(2, 3, 4, scheme=scheme_names(), dedup=[False, True])
def test_sequences_equal_the_unsharded_model(ranks: Any, scheme: str, dedup: bool) -> None:
    """Ids repeat within bags, between bags and between ranks; the squares of row-wise Adagrad see their sum."""
    tables = [{**table, "num_embeddings": min(table["num_embeddings"], 5)} for table in cases.sequence_tables()]
    steps = cases.random_steps(4, tables, ranks.world_size, steps=STEPS, samples=6)
    plan = cases.plan_of(tables, [scheme], ranks.world_size)
    check(Case(tables, plan.to_json(), steps, "exact_row_wise_adagrad", sequence=True, dedup=dedup), ranks)


@on_ranks(2, 3, 4, scheme=scheme_names())
def test_the_dense_kernel_leaves_gradients_to_a_torch_optimizer(ranks: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size, kernel="dense")
    steps = cases.random_steps(5, cases.TABLES, ranks.world_size, steps=STEPS, samples=6)
    check(Case(cases.TABLES, plan.to_json(), steps, "exact_sgd"), ranks)


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@settings(max_examples=examples(12, 60), deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_tiling_on_any_jagged_batch_equals_the_unsharded_model(
    ranks: Any, sequence: bool, data: st.DataObject
) -> None:
    check(data.draw(cases.cases(ranks.world_size, sequence)), ranks)


@pytest.mark.parametrize("route", [*ROUTES, DISTINCT_ROWS])
def test_every_route_on_a_single_node_equals_the_unsharded_model(two: Any, route: str) -> None:
    plan = cases.plan_of(cases.TABLES, ["row_wise", "column_wise"], 2).with_route(route)
    check(Case(cases.TABLES, plan.to_json(), cases.random_steps(2, cases.TABLES, 2, steps=5, samples=5)), two)


def test_the_comparison_can_fail(two: Any) -> None:
    plan = cases.plan_of(cases.TABLES, ["row_wise"], 2)
    case = Case(cases.TABLES, plan.to_json(), cases.random_steps(7, cases.TABLES, 2, steps=3, samples=6))
    results = two.run(train_sharded, replace(case, learning_rate=0.0501))
    truth = train_unsharded(case)
    assert max(error(results[0].weights[name], truth.weights[name]) for name in truth.weights) > TOLERANCE
