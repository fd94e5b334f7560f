"""What ranks run for the optimizers' tests: many (optimizer, scheme, backend) in one job, results as plain tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    ShardingPlan,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.embedding.optimizers import OptimizerSpec
from tests.distributed.jobs import Bags, batch_of, join
from tests.embedding.lookups import dense_twin


@dataclass
class Outcome:
    """Weights and states after training: table -> tensor, table -> state name -> tensor."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def plan_at(path: str, plan: str) -> ShardingPlan:
    """The plan of one collection, for a model that has it at another path."""
    (entries,) = ShardingPlan.from_json(plan).plan.values()
    return ShardingPlan({path: entries})


def configs_of(tables: list[dict[str, Any]]) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(**table) for table in tables]


def collection_of(tables: list[dict[str, Any]]) -> EmbeddingBagCollection:
    """Weights away from zero, so that trust ratios are ordinary numbers."""
    generator = torch.Generator().manual_seed(5)
    collection = EmbeddingBagCollection(configs_of(tables))
    for parameter in collection.parameters():
        torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return collection


def mixing(samples: int, columns: int, first: int) -> Tensor:
    """The gradient of the outputs of a run of samples of the global batch."""
    generator = torch.Generator().manual_seed(11)
    return torch.rand(first + samples, columns, generator=generator)[first:] - 0.5  # rows do not depend on how many


def train_sharded(
    tables: list[dict[str, Any]], steps: list[list[Bags]], runs: list[tuple[dict[str, Any], str, str | None]]
) -> list[Outcome]:
    """Runs on every rank: for each (fused params, plan as JSON, backend) what this rank ends with, whole tables."""
    return [_train_one(tables, steps, *run) for run in runs]


def _train_one(
    tables: list[dict[str, Any]], steps: list[list[Bags]], fused: dict[str, Any], plan: str, backend: str | None
) -> Outcome:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sharder = EmbeddingBagCollectionSharder(fused_params=fused, backend=backend)
    dmp = DistributedModelParallel(collection_of(tables), plan=plan_at("", plan), sharders=[sharder])
    for ranks in steps:
        sizes = [len(next(iter(bags.values()))) for bags in ranks]
        out = dmp(batch_of(ranks[rank])).values()
        # times world: gradients are averaged over ranks
        (out * mixing(sizes[rank], out.shape[1], sum(sizes[:rank]))).sum().mul(world).backward()
    outcome = Outcome()
    for name, weight in dmp.full_state_dict().items():
        outcome.weights[name.split(".")[-2]] = weight.clone()
    (collection,) = dmp.collections.values()
    for name, shards in collection.table_shards().items():
        config = shards.config
        shapes = OptimizerSpec.from_fused_params(fused).state_shapes(config.num_embeddings, config.embedding_dim)
        outcome.states[name] = {part: torch.full(shape, float("nan")) for part, shape in shapes.items()}
        for position, own in shards.states.items():
            shard = shards.sharding.shards[position]
            for part, state in own.items():
                where = (slice(*shard.rows), slice(*shard.cols))[: len(shapes[part])]
                where = (slice(0, 1),) if part == "iter" else where
                outcome.states[name][part][where] = state.reshape(outcome.states[name][part][where].shape)
    return outcome


def merged(outcomes: list[Outcome]) -> Outcome:
    """Every rank's part of the states put together; where several hold a number, they must agree."""
    whole = outcomes[0]
    for other in outcomes[1:]:
        for name, states in other.states.items():
            for part, state in states.items():
                known, given = whole.states[name][part], ~state.isnan()
                both = given & ~known.isnan()
                torch.testing.assert_close(known[both], state[both], rtol=1e-6, atol=1e-8)
                known[given] = state[given]
    return whole


def train_fused(tables: list[dict[str, Any]], steps: list[list[Bags]], fused: dict[str, Any]) -> Outcome:
    """One process, the global batch, the native kernel."""
    given = dict(fused)
    collection = FusedEmbeddingBagCollection(configs_of(tables), given.pop("optimizer"), given, backend="native")
    collection.load_state_dict(collection_of(tables).state_dict())
    for ranks in steps:
        out = collection(batch_of(join(ranks))).values()
        (out * mixing(out.shape[0], out.shape[1], 0)).sum().backward()
    weights = {name: bag.weight.detach() for name, bag in collection.embedding_bags.items()}
    return Outcome(weights, collection.optimizer_states())


def train_dense(tables: list[dict[str, Any]], steps: list[list[Bags]], fused: dict[str, Any]) -> Outcome:
    """One process, the global batch, plain autograd and a dense optimizer whose step on untouched rows is undone."""
    collection = collection_of(tables)
    optimizer = dense_twin(OptimizerSpec.from_fused_params(fused), list(collection.parameters()))
    for ranks in steps:
        out = collection(batch_of(join(ranks))).values()
        (out * mixing(out.shape[0], out.shape[1], 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Outcome({name: bag.weight.detach() for name, bag in collection.embedding_bags.items()})
