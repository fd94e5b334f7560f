"""`use_index_dedup`: what travels is each distinct id of a shard feature, its row, and the sum of its gradients."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import (
    DistributedModelParallel,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    RankError,
)
from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry, trace
from tests.distributed import cases
from tests.distributed.jobs import Case, batch_of, train_sharded
from tests.distributed.views import plan_of

LABELS = {"input_dist/ids": 4, "output_dist/rows": 4 * 8, "output_dist_backward/rows": 4 * 8}  # bytes of an id
TABLES = [{"name": name, "num_embeddings": 12, "embedding_dim": 8, "feature_names": [name]} for name in "ab"]


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    with recshard_lab.launch(2) as launched:
        yield launched


def bags(rank: int) -> dict[str, list[list[int]]]:
    """Ids that repeat inside a bag, between bags, and between ranks; one table has none on rank 1."""
    return {"a": [[3, 3, 11], [3, 0], []], "b": [[5, 5], [5], [rank]] if rank == 0 else [[], [], []]}


def sent(scheme: str, dedup: bool) -> dict[str, int]:
    """Bytes that this rank sends, by label."""
    tables = [EmbeddingConfig(**table) for table in TABLES]
    sharder = EmbeddingCollectionSharder({"optimizer": "exact_sgd"}, use_index_dedup=dedup)
    dmp = DistributedModelParallel(EmbeddingCollection(tables), plan=plan_of(2, tables, scheme), sharders=[sharder])
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
    DistributedModelParallel(EmbeddingCollection(tables), plan=plan_of(2, tables, "row_wise"), sharders=[sharder])


def test_ranks_that_differ_are_refused(two: Any) -> None:
    with pytest.raises(RankError, match="use_index_dedup of EmbeddingCollectionSharder"):
        two.run(refused)


def test_only_bools_are_accepted() -> None:
    with pytest.raises(ValueError, match="use_index_dedup must be True or False, got 1"):
        EmbeddingCollectionSharder(use_index_dedup=1)


@pytest.mark.parametrize("policy", ["error", "clamp", "ignore"])
def test_codecs_and_ids_out_of_range_give_the_same_outputs(two: Any, policy: str) -> None:
    """FP16 messages carry the same rows; with the first step's weights outputs are equal bit for bit."""
    stray = [] if policy == "error" else [-1, 40, 40]
    steps = [[{"a": [[3, 3, 11], stray], "b": [[5, 5, *stray], [5]]} for _ in range(2)]]
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.FP16))
    plan = cases.plan_of(TABLES, ["row_wise", "column_wise"], 2).to_json()
    case = Case(TABLES, plan, steps, sequence=True, codecs=codecs, out_of_range=policy)
    results = [two.run(train_sharded, replace(case, dedup=dedup)) for dedup in (False, True)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.outputs, other.outputs, rtol=0.0, atol=0.0)
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-3, atol=1e-5)
        assert one.out_of_range == other.out_of_range
