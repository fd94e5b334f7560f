"""A small model on the ranks whose steps are recorded, and the same model unsharded."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from recshard_lab.lab.live.recorded_step import (
    BlockInfo,
    RankRecord,
    RecordedStep,
    ShardFeatureRecord,
    ShardInfo,
    SourceRows,
)
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
)

RATE = 0.1
SETUP = """
import torch
import recshard_lab as rs

def tables():
    return [
        rs.EmbeddingBagConfig(name="movie", num_embeddings=12, embedding_dim=8, feature_names=["liked", "seen"]),
        rs.EmbeddingBagConfig(name="user", num_embeddings=9, embedding_dim=4, feature_names=["user"],
                              pooling=rs.PoolingType.MEAN),
    ]

def batch_of(rank):
    bags = [
        [[[3, 7], [5], [], [3, 11]], [[7, 1, 7], [0], [9], [2]], [[4, 1], [8], [4], [0, 2]]],
        [[[7], [3, 2], [10]], [[6], [], [11, 7]], [[1], [8, 4], [5]]],
    ][rank % 2]
    lengths = torch.tensor([len(bag) for key in bags for bag in key])
    values = torch.tensor([i for key in bags for bag in key for i in bag])
    return rs.KeyedJaggedTensor(["liked", "seen", "user"], values, lengths=lengths)

class Scores(torch.nn.Module):
    def __init__(self, collection):
        super().__init__()
        self.tables, self.over = collection, torch.nn.Linear(20, 1)
    def forward(self, kjt):
        return self.over(self.tables(kjt).values())

def fresh():
    torch.manual_seed(3)
    return Scores(rs.EmbeddingBagCollection(tables()))

def loss_of(output):
    return (output - 1).square().mean()
"""
BUILD = f"""
kind = rs.distributed.EmbeddingBagCollectionSharder
sharder = kind(fused_params={{"optimizer": "exact_sgd", "learning_rate": {RATE}}})
model = rs.DistributedModelParallel(fresh(), plan=rs.ShardingPlan.from_json(PLAN), sharders=[sharder])
dense = torch.optim.SGD(model.dense_parameters(), lr={RATE})
batch = batch_of(rank)
"""


def here() -> dict[str, Any]:
    """The names of `SETUP` in this process."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    return names


def plan_of(scheme: str, ranks: int = 2, kernel: str = "fused", route: str = "direct") -> ShardingPlan:
    """Both tables under one scheme."""
    topology, entries = Topology(ranks), EmbeddingModuleShardingPlan()
    for number, table in enumerate(here()["tables"]()):
        chosen = [number % ranks] if scheme == "table_wise" else None
        shards = scheme_named(scheme).default(table, topology, chosen).shards
        entries[table.name] = ParameterSharding(scheme, kernel, shards=shards)
    plan = ShardingPlan({"tables": entries})
    return plan if route == "direct" else plan.with_route(route)


def build(ranks: Any, plan: ShardingPlan, space: str = "") -> None:
    """Builds the model under a plan on the ranks, as `model`, with its batch, dense optimizer and loss.

    With ``space`` these are entries of a dict of that name.
    """
    ranks.push({"PLAN": plan.to_json(), "SOURCE": SETUP + BUILD})
    ranks.exec(f"{space} = dict(PLAN=PLAN, rank=rank); exec(SOURCE, {space})" if space else SETUP + BUILD)


class Truth:
    """The same step on the unsharded model, by plain torch: gradients are averaged over ranks."""

    def __init__(self, ranks: int = 2) -> None:
        names = here()
        model = names["fresh"]()
        self.batches = [names["batch_of"](rank) for rank in range(ranks)]
        self.before = {key: value.detach().clone() for key, value in model.state_dict().items()}
        self.pooled = [model.tables(batch).values() for batch in self.batches]
        for own in self.pooled:
            own.retain_grad()
        self.losses = [names["loss_of"](model.over(own)) for own in self.pooled]
        torch.stack(self.losses).mean().backward()
        self.grads = [own.grad * ranks for own in self.pooled]  # of each rank's own loss
        torch.optim.SGD(model.parameters(), lr=RATE).step()
        self.after = {key: value.detach().clone() for key, value in model.state_dict().items()}

    def table(self, name: str, after: bool = False) -> torch.Tensor:
        """A table's weights."""
        return (self.after if after else self.before)[f"tables.embedding_bags.{name}.weight"]


def recorded_step(ranks: int = 2, samples: int = 3, value: float | None = None, tables: int = 2) -> RecordedStep:
    """A step as row-wise ranks would record it, of made-up rows; with ``value``, one number of each kind is it.

    All tables have 4 rows on each rank and 6 columns. Sample s reads row s of rank s.
    """
    rng = np.random.default_rng(5)
    names = [f"table{n}" if n else "movie" for n in range(tables)]
    blocks = tuple(BlockInfo(name, f"f_{name}", 6 * n, 6, False) for n, name in enumerate(names))
    spans = [(4 * rank, 4 * rank + 4) for rank in range(ranks)]
    entries = {
        name: ParameterSharding("row_wise", shards=[Shard(rank, span, (0, 6)) for rank, span in enumerate(spans)])
        for name in names
    }
    infos = [[ShardInfo(n, rank, spans[rank], (0, 6), False) for n in range(tables)] for rank in range(ranks)]
    ids = np.array([4 * (s % ranks) + s % 4 for s in range(samples)], dtype=np.int64)
    found = []
    for rank in range(ranks):
        own = [s for s in range(samples) if s % ranks == rank]
        local = ids[own] - 4 * rank
        lengths = np.array([int(s in own) for s in range(samples)])
        features = []
        for info in infos[rank]:
            before, touched = rng.normal(size=(4, 6)).astype(np.float32), np.unique(local)
            rows = np.zeros((samples, 6), dtype=np.float32)
            rows[own] = before[local]
            grads = rng.normal(size=(samples, 6)).astype(np.float32) * 1e-3
            if value is not None:
                rows[-1:, -1:] = value
            sources = tuple(SourceRows(local, lengths, rows, grads) for _ in range(ranks))
            features.append(ShardFeatureRecord(info, sources, touched, before[touched], before[touched] - 0.01))
        output = rng.normal(size=(samples, 6 * tables)).astype(np.float32)
        if value is not None:
            output[:1, :1] = value
        found.append(
            RankRecord(
                samples,
                {block.feature: (np.ones(samples, dtype=np.int64), ids) for block in blocks},
                tuple((info, ids[k::ranks] - 4 * k) for k in range(ranks) for info in infos[k]) if ranks > 1 else (),
                tuple(features),
                output,
                np.full_like(output, 1e-4),
                0.5 if value is None else value,
                (("input_dist/ids", (8,) * ranks, 1.0), ("output_dist/rows", (96,) * ranks, 1.0)),
                {"lookup": 0.25, "output": 1.5 if value is None else value},
            )
        )
    plan = ShardingPlan({"tables": EmbeddingModuleShardingPlan(entries)})
    return RecordedStep(plan, "tables", blocks, tuple(found), 21, True)
