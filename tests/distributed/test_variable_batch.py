"""Batches of another size for each feature (VBE), sharded: equal to the full batch, and only true bags travel."""

from typing import Any

import pytest
import torch

from recshard_lab.comm import trace
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case
from tests.distributed.test_parity import MIXED, check
from tests.grid import on_ranks


def variable_case(tables: list[dict[str, Any]], schemes: list[str], world_size: int, seed: int, **kwargs: Any) -> Case:
    plan = cases.plan_of(tables, schemes, world_size)
    steps = cases.random_steps(seed, tables, world_size, steps=6, samples=7)
    inverse = cases.random_inverses(seed, steps)
    return Case(tables, plan.to_json(), steps, inverse=inverse, **kwargs)


@on_ranks(2, 3, night=[4], scheme=scheme_names())
def test_every_scheme_equals_the_full_batch(ranks: Any, scheme: str) -> None:
    check(variable_case(cases.TABLES, [scheme], ranks.world_size, 1, optimizer="exact_row_wise_adagrad"), ranks)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_mixed_plan_equals_the_full_batch_in_four_exchanges(ranks: Any, weighted: bool) -> None:
    results = check(variable_case(cases.TABLES, MIXED, ranks.world_size, 2, weighted=weighted), ranks)
    assert {count for result in results for count in result.collectives} == {4}


def test_ranks_may_disagree_on_whether_their_batch_is_variable(ranks: Any) -> None:
    case = variable_case(cases.TABLES, ["row_wise", "table_wise", "data_parallel"], ranks.world_size, 4)
    assert case.inverse is not None
    for number, (step, inverses) in enumerate(zip(case.steps, case.inverse, strict=True)):
        odd = number % ranks.world_size
        step[odd] = cases.random_bags(cases.random.Random(number), cases.TABLES, 5)
        inverses[odd] = None  # type: ignore[call-overload]
    check(case, ranks)


def count_rows(case: Case) -> tuple[int, int]:
    """Bytes of pooled rows sent by this rank in the first step, and what its true bags weigh."""
    import torch.distributed as dist

    from recshard_lab import DistributedModelParallel, ShardingPlan
    from tests.distributed.jobs import Model, batch_of

    rank, inverses = dist.get_rank(), case.inverses(0)
    dmp = DistributedModelParallel(Model(case), plan=ShardingPlan.from_json(case.plan))
    with trace() as traced, torch.no_grad():
        dmp(batch_of(case.steps[0][rank], inverse=inverses[rank]))
    return traced.bytes_sent("output_dist/rows"), traced.bytes_sent("input_dist/ids")


def test_only_true_bags_travel(ranks: Any) -> None:
    table = {"name": "t", "num_embeddings": 50, "embedding_dim": 8, "feature_names": ["a", "b"]}
    one_bag, many = [[1, 2, 3]], [[n] for n in range(40)]
    steps = [[{"a": one_bag, "b": many} for _ in range(ranks.world_size)]]
    inverse = [[{"a": [0] * 40, "b": list(range(40))} for _ in range(ranks.world_size)]]
    plan = cases.plan_of([table], ["table_wise"], ranks.world_size)
    sent = ranks.run(count_rows, Case([table], plan.to_json(), steps, inverse=inverse))
    rows = 41 * ranks.world_size  # of everybody's bags, all pooled by rank 0
    assert [own[0] for own in sent] == [rows * 8 * 4] + [0] * (ranks.world_size - 1)
    lengths, ids = 41, 43
    assert all(own[1] == (lengths + ids) * 4 for own in sent)
