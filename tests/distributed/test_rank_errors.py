"""A mistake on one rank: named, and the others are free again."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ParameterSharding,
    RankError,
    Shard,
    ShardingPlan,
)
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from tests.distributed import cases
from tests.distributed.jobs import Case, attempted, batch_of
from tests.distributed.step_failure_jobs import PLACES, fail_everywhere, pipeline_failing
from tests.patience import scaled

ONE = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]


def bad_id_on_rank_1() -> None:
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("row_wise"))})
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE), plan=plan)
    dmp(batch_of({"f": [[10 if torch.distributed.get_rank() == 1 else 0]]}))


@pytest.mark.gate
def test_an_id_out_of_range_on_one_rank_frees_the_others_and_is_named() -> None:
    with recshard_lab.launch(2) as launched:
        with pytest.raises(RankError, match=r"(?s)rank 1.*feature 'f', sample 0: id 10 is not a row"):
            launched.run(bad_id_on_rank_1)
        assert launched.run(torch.distributed.get_rank) == [0, 1]


# ---- inside a step, where code catches the error ----


def step_with(mistake: str) -> str:
    """A step that goes wrong on rank 1 alone: the error that this rank gets. Runs on every rank."""
    halves = [Shard(rank, (0, 10), (2 * rank, 2 * rank + 2)) for rank in range(2)]
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("column_wise", shards=halves))})
    fused = {"optimizer": "exact_row_wise_adagrad", "check_gradients": True}  # a message in the middle of backward
    dmp = DistributedModelParallel(
        EmbeddingBagCollection(tables=ONE), plan=plan, sharders=[EmbeddingBagCollectionSharder(fused)]
    )
    wrong = mistake if torch.distributed.get_rank() == 1 else None
    batch = batch_of({"other" if wrong == "missing feature" else "f": [[10 if wrong == "bad id" else 0]]})
    factors = torch.tensor([torch.nan, 1, 1, 1] if wrong == "NaN gradient" else [1.0] * 4)  # of rank 0's columns
    return attempted(lambda: (dmp(batch).values() * factors).sum().backward())


@pytest.mark.parametrize("mistake", ["bad id", "missing feature", "NaN gradient"])
def test_an_error_of_one_rank_inside_a_step_is_raised_on_all_ranks(two: Any, mistake: str) -> None:
    errors = two.call(step_with, (mistake,), timeout_s=scaled(20))
    assert all(re.search(r"rank \d", error) for error in errors), errors


# ---- every place of a step ----

FLAT = ["table_wise", "row_wise", "column_wise", "data_parallel"]
SPLIT = [table for table in cases.TABLES if table["num_embeddings"] > 3]
INT8 = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.INT8, backward_precision=CommType.INT8))
FP16 = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.FP16))


def case_of(schemes: list[str], tables: Any = cases.TABLES, route: str | None = None, **more: Any) -> Case:
    plan = cases.plan_of(tables, schemes, 2)
    if route is not None:
        entries = {name: replace(entry, route=route) for name, entry in plan.tables().items()}
        plan = ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)})
    return Case(tables, plan.to_json(), cases.random_steps(5, tables, 2, steps=2, samples=6), **more)


STEPS = {
    "all schemes": case_of(FLAT, optimizer="exact_row_wise_adagrad"),
    "two numbers a row": case_of(["column_wise"], optimizer="lamb"),
    "added on the network": case_of(["row_wise"], SPLIT, "reduce_scatter", codecs=FP16),
    "added in nodes": case_of(["row_wise"], SPLIT, "two_hop", codecs=INT8),
    "distinct rows": case_of(["row_wise"], SPLIT, "distinct_rows"),
    "sequences": case_of(FLAT, cases.sequence_tables(), sequence=True),
    "learned weights": case_of(FLAT, weighted=True),
}


@pytest.mark.gate
@pytest.mark.parametrize("name", STEPS)
def test_an_error_at_any_place_of_a_step_is_raised_on_all_ranks_at_the_latest_with_the_next_batch(
    two: Any, name: str
) -> None:
    for (place, *own), (_, *other) in zip(
        *two.call(fail_everywhere, (STEPS[name],), timeout_s=scaled(20)), strict=True
    ):
        (errors, unchanged), (errors_of_1, unchanged_on_1) = own, other
        assert re.search("rank 1: .*says the test", errors_of_1[0]), place
        assert re.search("rank 1: .*says the test", errors[0] or errors[1]), place
        assert errors[2] == errors_of_1[2] == "", place
        if place.startswith(("ids", "lookup", "message")):  # the other rank knows before tables step
            assert errors[0], place
            assert unchanged, place
            assert unchanged_on_1, place


@pytest.mark.parametrize(
    ("place", "stage"),
    [("lookup", "forward"), ("row norms", "backward"), ("ids", "forward"), ("ids' arrival", "forward")],
)
def test_a_pipeline_names_the_rank_of_an_error_inside_a_step(two: Any, place: str, stage: str) -> None:
    for errors in two.call(pipeline_failing, (STEPS["all schemes"], PLACES[place]), timeout_s=scaled(20)):
        (error,) = [error for error in errors if error]
        assert re.match(rf"StageError: stage '{stage}' of batch \d failed on rank 1: MemoryError: rank 1: ", error)
