"""Weights of ids that are learned: their gradients come home from wherever the rows lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab.embedding.kernels import available
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases, processor_jobs
from tests.distributed.processor_jobs import Job

MIXED = ["row_wise", "column_wise", "data_parallel", "table_wise"]


@pytest.fixture(scope="module", params=[1, 2, 4], ids=lambda n: f"W{n}")
def some(request: pytest.FixtureRequest) -> Iterator[Any]:
    with recshard_lab.launch(request.param) as ranks:
        yield ranks


def job(ranks: Any, schemes: list[str], seed: int = 0, **own: Any) -> Job:
    steps = cases.random_steps(seed, cases.TABLES, ranks.world_size, 5, 4)
    kernel = own.pop("kernel", "fused")
    return Job(steps, cases.plan_of(cases.TABLES, schemes, ranks.world_size, kernel).to_json(), **own)


def check(job: Job, ranks: Any) -> None:
    losses, weights = processor_jobs.plain(job)
    learned = [name for name in weights if "position_weights" in name]
    assert len(learned) == len(processor_jobs.LEARNED)
    for ours, found in ranks.run(processor_jobs.sharded, job):
        assert ours == pytest.approx(losses, rel=1e-5)
        assert set(found) == set(weights)
        for name, weight in weights.items():
            assert float((found[name] - weight).abs().max()) < 1e-5, name


@pytest.mark.parametrize("scheme", scheme_names())
def test_under_every_scheme_they_learn_as_on_one_process(some: Any, scheme: str) -> None:
    check(job(some, [scheme]), some)


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
def test_under_a_mixed_plan_too(some: Any, optimizer: str) -> None:
    check(job(some, MIXED, 1, optimizer=optimizer), some)


def test_in_a_variable_batch_a_shared_bags_gradient_is_that_of_all_its_samples(some: Any) -> None:
    made = job(some, MIXED, 2)
    made.inverse = cases.random_inverses(2, made.steps)
    check(made, some)


def test_ids_that_are_left_out_leave_the_others_places_as_they_are(some: Any) -> None:
    made = job(some, MIXED, 3, out_of_range="ignore")
    for step in made.steps:
        for bags in step:
            for feature, own in bags.items():
                bags[feature] = [
                    [10_000 if (row + place) % 4 == 0 else row for place, row in enumerate(bag)] for bag in own
                ]
    check(made, some)


@pytest.mark.parametrize("backend", [name for name in available() if name != "fbgemm"])
def test_with_every_kernel(some: Any, backend: str) -> None:
    check(job(some, MIXED, 4, backend=backend, optimizer="exact_sgd"), some)


def exchanges(job: Job) -> tuple[list[int], list[int]]:
    """On a rank: the exchanges of a training step, and of one with weights that nobody learns."""
    import torch.distributed as dist

    from recshard_lab import DistributedModelParallel, ShardingPlan
    from recshard_lab.comm import trace
    from tests.distributed.jobs import batch_of

    plan = ShardingPlan({processor_jobs.PATH: ShardingPlan.from_json(job.plan).plan[cases.PATH]})
    dmp = DistributedModelParallel(processor_jobs.Processed("error"), plan=plan)
    batch = batch_of(job.steps[0][dist.get_rank()])
    counts = []
    for learned in (True, False):
        for name, parameter in dmp.named_parameters():
            if "position_weights" in name:
                parameter.requires_grad_(learned)
        with trace() as traced:
            dmp._bare.tables(batch).values().sum().backward()
        labels = [event.label for event in traced.events]
        counts.append([labels.count("input_dist_backward/weights"), len(labels)])
    return counts[0], counts[1]


def test_they_cost_one_message_and_only_where_they_are_learned(some: Any) -> None:
    for learned, fixed in some.run(exchanges, job(some, MIXED)):
        assert learned[0] == 1
        assert fixed[0] == 0
        if some.world_size > 1:  # one rank without learned weights needs no input exchange
            assert learned[1] == fixed[1] + 1


def test_the_comparison_can_fail(some: Any) -> None:
    made = job(some, MIXED)
    before = processor_jobs.Processed("error").state_dict()
    after = processor_jobs.plain(made)[1]
    for name, weight in after.items():
        assert float((weight - before[name]).abs().max()) > 1e-3, name
    torch.testing.assert_close(before["dense.bias"], processor_jobs.Processed("error").state_dict()["dense.bias"])


def test_a_pipeline_does_not_send_ahead_what_the_next_step_will_change(some: Any) -> None:
    made = job(some, MIXED)
    plain, piped = (some.run(processor_jobs.through, pipelined, made) for pipelined in (False, True))
    for (losses, weights, _), (ours, found, left) in zip(plain, piped, strict=True):
        assert ours == losses
        assert all(torch.equal(found[name], weight) for name, weight in weights.items())
        assert "weights are learned" in left[f"model.{processor_jobs.PATH}"]


def asked_by(asking: list[int], scheme: str) -> tuple[list[float] | None, list[float]]:
    """On a rank: the gradient of its weights, where it is one of those that ask for theirs, and what it should be."""
    import torch.distributed as dist

    from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

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


@pytest.mark.parametrize("scheme", ["row_wise", "column_wise", "table_wise", "data_parallel"])
def test_a_rank_gets_its_gradient_whoever_else_asks(some: Any, scheme: str) -> None:
    world = some.world_size
    for asking in ([], [0], [world - 1], list(range(world))):
        for rank, (found, expected) in enumerate(some.run(asked_by, asking, scheme)):
            assert found == (pytest.approx(expected) if rank in asking else None)
