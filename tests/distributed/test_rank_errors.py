"""A mistake on one rank: named, and the others are free again."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    RankError,
    Shard,
    ShardingPlan,
)
from tests.distributed.jobs import batch_of

ONE = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]


def bad_id_on_rank_1() -> None:
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("row_wise"))})
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE), plan=plan)
    dmp(batch_of({"f": [[10 if torch.distributed.get_rank() == 1 else 0]]}))


def test_an_id_out_of_range_on_one_rank_frees_the_others_and_is_named() -> None:
    with recshard_lab.launch(2) as launched:
        with pytest.raises(RankError, match=r"(?s)rank 1.*feature 'f', sample 0: id 10 is not a row"):
            launched.run(bad_id_on_rank_1)
        assert launched.run(torch.distributed.get_rank) == [0, 1]


# ---- inside a step, where code catches the error ----

LATER = pytest.mark.xfail(
    strict=True,
    raises=(AssertionError, pytest.fail.Exception),
    reason="errors after the ids have left are not shared yet",
)
ON_RANK_1 = [
    "bad id",
    "missing feature",
    *(pytest.param(name, marks=LATER) for name in ("NaN gradient", "out of memory in the lookup", "error in backward")),
]


def step_with(mistake: str | None) -> str:
    """A step that goes wrong on rank 1 alone: the error that this rank gets. Runs on every rank."""
    halves = [Shard(rank, (0, 10), (2 * rank, 2 * rank + 2)) for rank in range(2)]
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("column_wise", shards=halves))})
    fused = {"optimizer": "exact_row_wise_adagrad", "check_gradients": True}  # a message in the middle of backward
    sharder = EmbeddingBagCollectionSharder(fused)
    dmp = DistributedModelParallel(EmbeddingBagCollection(tables=ONE), plan=plan, sharders=[sharder])
    wrong = mistake if torch.distributed.get_rank() == 1 else None
    batch = batch_of({"other" if wrong == "missing feature" else "f": [[10 if wrong == "bad id" else 0]]})
    (kernel,) = (group.kernel for c in dmp.collections.values() for group in c.executor.lookup.exchanged)

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("the allocator has no 1 GB left")

    if wrong == "out of memory in the lookup":
        kernel.forward = fail  # type: ignore[method-assign]
    if wrong == "error in backward":
        kernel.backward = fail  # type: ignore[method-assign]
    try:
        factors = torch.tensor([torch.nan, 1, 1, 1] if wrong == "NaN gradient" else [1.0] * 4)  # of rank 0's columns
        (dmp(batch).values() * factors).sum().backward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    with recshard_lab.launch(2) as launched:
        assert launched.run(step_with, None) == ["no error", "no error"]
        yield launched


@pytest.mark.parametrize("mistake", ON_RANK_1)
def test_an_error_of_one_rank_inside_a_step_is_raised_on_all_ranks(two: Any, mistake: str) -> None:
    try:
        errors = two.call(step_with, (mistake,), timeout_s=1.5)
    except RankError as error:
        if "stopped at its time limit" not in error.note:
            raise
        pytest.fail(f"ranks {error.ranks} were still waiting after 1.5 s")
    assert all(re.search(r"rank \d", error) for error in errors), errors
