"""Weights of ids that are learned: their gradients come home from wherever the rows lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)
from recshard_lab.comm import trace
from recshard_lab.embedding.kernels import available
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case, Model, batch_of, sharded_model
from tests.distributed.test_parity import MIXED, check
from tests.grid import on_ranks


def case_of(world: int, schemes: list[str], seed: int = 0, **own: Any) -> Case:
    steps = cases.random_steps(seed, cases.TABLES, world, 5, 4)
    plan = cases.plan_of(cases.TABLES, schemes, world).to_json()
    return Case(cases.TABLES, plan, steps, learned=("liked", "user", "genre"), eps=1e-2, learning_rate=0.2, **own)


@on_ranks(1, 2, 4, scheme=scheme_names())
def test_under_every_scheme_they_learn_as_on_one_process(ranks: Any, scheme: str) -> None:
    case = case_of(ranks.world_size, [scheme])
    moved = {name: value for name, value in check(case, ranks)[0].weights.items() if "position_weights" in name}
    assert len(moved) == len(case.learned)
    first = Model(case).state_dict()
    assert all(float((value - first[name]).abs().max()) > 1e-4 for name, value in moved.items())


@pytest.mark.parametrize(
    ("backend", "optimizer"),
    [(None, "exact_row_wise_adagrad"), *((own, "exact_sgd") for own in available() if own != "fbgemm")],
)
def test_with_every_kernel_and_in_a_mixed_plan(two: Any, backend: str | None, optimizer: str) -> None:
    check(case_of(2, MIXED, 1, backend=backend, optimizer=optimizer), two)


def test_in_a_variable_batch_a_shared_bags_gradient_is_that_of_all_its_samples(ranks: Any) -> None:
    case = case_of(ranks.world_size, MIXED, 2)
    case.inverse = cases.random_inverses(2, case.steps)
    check(case, ranks)


def test_ids_that_are_left_out_leave_the_others_places_as_they_are(ranks: Any) -> None:
    case = case_of(ranks.world_size, MIXED, 3, out_of_range="ignore")
    for bags in (bags for step in case.steps for bags in step):
        for feature, own in bags.items():
            bags[feature] = [
                [10_000 if (row + place) % 4 == 0 else row for place, row in enumerate(bag)] for bag in own
            ]
    check(case, ranks)


def exchanges(case: Case) -> tuple[list[int], list[int]]:
    """On a rank: the exchanges of a training step, and of one with weights that nobody learns."""
    _, model = sharded_model(case)
    batch = batch_of(case.steps[0][dist.get_rank()])
    counts = []
    for learned in (True, False):
        model.places.requires_grad_(learned)
        with trace() as traced:
            model.collection(model.places(batch)).values().sum().backward()
        labels = [event.label for event in traced.events]
        counts.append([labels.count("input_dist_backward/weights"), len(labels)])
    return counts[0], counts[1]


def test_they_cost_one_message_and_only_where_they_are_learned(two: Any) -> None:
    for learned, fixed in two.run(exchanges, case_of(2, MIXED)):
        assert learned == [1, fixed[1] + 1]
        assert fixed[0] == 0


def asked_by(asking: list[int], scheme: str) -> tuple[list[float] | None, list[float]]:
    """On a rank: the gradient of its weights, where it is one of those that ask for theirs, and what it should be."""
    rank, world = dist.get_rank(), dist.get_world_size()
    config = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, "feature_names": ["f"]}
    collection = EmbeddingBagCollection([EmbeddingBagConfig(**config)], is_weighted=True)
    rows = torch.arange(80.0).view(10, 8)
    collection.load_state_dict({"embedding_bags.t.weight": rows})
    plan = cases.plan_of([config], [scheme], world)
    plan.plan = {"": plan.plan[cases.PATH]}
    dmp = DistributedModelParallel(collection, plan=plan)
    ids = [9, rank, 5, 0, 9]
    weights = torch.full((5,), 0.5, requires_grad=rank in asking)
    batch = KeyedJaggedTensor(["f"], torch.tensor(ids), weights, lengths=torch.tensor([2, 3]))
    dmp(batch).values().sum().backward()
    return None if weights.grad is None else weights.grad.tolist(), rows[ids].sum(1).tolist()


@pytest.mark.parametrize("scheme", MIXED)
def test_a_rank_gets_its_gradient_whoever_else_asks(ranks: Any, scheme: str) -> None:
    world = ranks.world_size
    for asking in ([], [0], [world - 1], list(range(world))):
        for rank, (found, expected) in enumerate(ranks.run(asked_by, asking, scheme)):
            assert found == (pytest.approx(expected) if rank in asking else None)
