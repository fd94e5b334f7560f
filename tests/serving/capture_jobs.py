"""Models and batches for the tests of inference at fixed shapes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor, ShardingPlan
from recshard_lab.serving.inference import ShardedInference, shard_for_inference
from tests.distributed import cases
from tests.distributed.jobs import Case, Model, batch_of


def collection(kind: str) -> Any:
    """A collection of several tables: pooled, pooled with weights, or of sequences."""
    return Model(_case(kind, [1])).collection


def batches(kind: str, sizes: Sequence[int], dtype: torch.dtype = torch.int64) -> list[KeyedJaggedTensor]:
    """Random batches of these numbers of samples."""
    found = []
    for number, size in enumerate(sizes):
        (bags,) = _case(kind, [size], number).steps[0]
        batch = batch_of(bags, kind == "weighted")
        found.append(
            KeyedJaggedTensor(
                batch.keys(), batch.values().to(dtype), batch.weights_or_none(), lengths=batch.lengths().to(dtype)
            )
        )
    return found


def bags(lists: Sequence[Sequence[int]], keys: Sequence[str]) -> KeyedJaggedTensor:
    """A batch in which every feature has these ids."""
    ids = [number for bag in lists for number in bag]
    lengths = torch.tensor([len(bag) for bag in lists] * len(keys))
    return KeyedJaggedTensor(list(keys), torch.tensor(ids * len(keys)), lengths=lengths)


def served_by(
    whole: EmbeddingBagCollection | EmbeddingCollection, scheme: str, devices: list[str], dtype: str | None = None
) -> ShardedInference:
    """A collection under one scheme over devices."""
    pooled = isinstance(whole, EmbeddingBagCollection)
    configs = whole.embedding_bag_configs() if pooled else whole.embedding_configs()
    tables = [
        {"name": one.name, "num_embeddings": one.num_embeddings, "embedding_dim": one.embedding_dim} for one in configs
    ]
    plan = cases.plan_of(tables, [scheme], len(devices))
    (shardings,) = plan.plan.values()
    return shard_for_inference(whole, ShardingPlan({"": shardings}), devices, dtype=dtype)


class Ranker(nn.Module):
    """Dense numbers and tables into one logit a sample."""

    def __init__(self, tables: EmbeddingBagCollection) -> None:
        super().__init__()
        self.tables = tables
        width = sum(one.embedding_dim * len(one.feature_names) for one in tables.embedding_bag_configs())
        self.over = nn.Sequential(nn.Linear(width + 3, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense: Tensor, batch: KeyedJaggedTensor) -> Tensor:
        return self.over(torch.cat([dense, self.tables(batch).values()], 1))


def _case(kind: str, sizes: Sequence[int], seed: int = 0) -> Case:
    sequence = kind == "sequence"
    tables = cases.sequence_tables() if sequence else cases.TABLES
    steps = cases.random_steps(seed, tables, 1, steps=1, samples=sizes[0])
    plan = cases.plan_of(tables, ["table_wise"], 1).to_json()
    return Case(tables, plan, steps, sequence=sequence, weighted=kind == "weighted")
