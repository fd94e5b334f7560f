"""A model whose ids have learned weights by place, sharded, and the same in plain loops on one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType, ShardingPlan
from recshard_lab.data import Batch
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.models import FeatureProcessedEmbeddingBagCollection, PositionWeightedModuleCollection
from recshard_lab.optim import RowWiseAdagrad
from recshard_lab.train import TrainPipelineBase, TrainPipelineSparseDist
from tests.distributed import cases
from tests.distributed.jobs import Bags, Inverse, batch_of, expand

LONGEST, LR = 7, 0.2
LEARNED = ("liked", "user", "genre")  # the others have weight 1
PATH = "tables._embedding_bag_collection"


@dataclass
class Job:
    """Batches by step and rank, and how they are trained on."""

    steps: list[list[Bags]]
    plan: str
    optimizer: str = "exact_sgd"
    inverse: list[list[Inverse]] | None = None
    out_of_range: str = "error"
    backend: str | None = None

    def inverses(self, step: int) -> list[Any]:
        return [None] * len(self.steps[step]) if self.inverse is None else list(self.inverse[step])


class Processed(nn.Module):
    """Unaware of sharding."""

    def __init__(self, out_of_range: str) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(**table) for table in cases.TABLES]
        ebc = EmbeddingBagCollection(configs, is_weighted=True, out_of_range=out_of_range)
        learned = PositionWeightedModuleCollection(dict.fromkeys(LEARNED, LONGEST))
        self.tables = FeatureProcessedEmbeddingBagCollection(ebc, learned)
        self.dense = nn.Linear(sum(c.embedding_dim * len(c.feature_names) for c in configs), 1)
        draw = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=draw)

    def forward(self, features: Any) -> Tensor:
        logits: Tensor = self.dense(torch.tanh(self.tables(features).values()))
        return logits.flatten()


def losses_of(logits: Tensor) -> Tensor:
    """``[B]``, other for every sample."""
    return (logits - torch.arange(len(logits)) % 3).square()


def sharded(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    fused: dict[str, Any] = {"optimizer": job.optimizer, "learning_rate": LR}
    if "ada" in job.optimizer:
        fused["eps"] = 1e-2
    sharder = EmbeddingBagCollectionSharder(fused, backend=job.backend)
    plan = ShardingPlan({PATH: ShardingPlan.from_json(job.plan).plan[cases.PATH]})
    dmp = DistributedModelParallel(Processed(job.out_of_range), plan=plan, sharders=[sharder])
    dense = torch.optim.SGD(dmp.dense_parameters(), lr=LR)
    losses = []
    for step, ranks in enumerate(job.steps):
        samples = sum(_samples(bags, inverse) for bags, inverse in zip(ranks, job.inverses(step), strict=True))
        each = losses_of(dmp(batch_of(ranks[rank], inverse=job.inverses(step)[rank])))
        loss = each.sum() * (world / samples)
        dense.zero_grad()
        loss.backward()
        dense.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses, dmp.full_state_dict()


def plain(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    """Sample by sample, id by id."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in Processed(job.out_of_range).named_parameters()}
    tables = [weight for name, weight in weights.items() if "embedding_bags" in name]
    others = [weight for name, weight in weights.items() if "embedding_bags" not in name]
    optimizers = [torch.optim.SGD(others, lr=LR)]
    optimizers.append(
        RowWiseAdagrad(tables, lr=LR, eps=1e-2) if "ada" in job.optimizer else torch.optim.SGD(tables, lr=LR)
    )
    losses = []
    for step, ranks in enumerate(job.steps):
        each = []
        for bags, inverse in zip(ranks, job.inverses(step), strict=True):
            whole = expand(bags, inverse)
            samples = len(next(iter(whole.values())))
            rows = [_row({feature: own[n] for feature, own in whole.items()}, weights) for n in range(samples)]
            if rows:
                x = torch.tanh(torch.stack(rows))
                each.append(losses_of((x @ weights["dense.weight"].T + weights["dense.bias"]).flatten()))
        loss = torch.cat(each).mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in weights.items()}


def _row(bags: dict[str, list[int]], weights: dict[str, Tensor]) -> Tensor:
    parts = []
    for table in cases.TABLES:
        weight = weights[f"{PATH}.embedding_bags.{table['name']}.weight"]
        for feature in table["feature_names"]:
            places = weights.get(f"tables._feature_processors.position_weights.{feature}")
            pooled = torch.zeros(table["embedding_dim"])
            for place, row in enumerate(bags[feature]):
                if row < len(weight):
                    pooled = pooled + weight[row] * (1.0 if places is None else places[place])
            if table.get("pooling") is PoolingType.MEAN:
                pooled = pooled / max(1, len(bags[feature]))
            parts.append(pooled)
    return torch.cat(parts)


def _samples(bags: Bags, inverse: Inverse | None) -> int:
    return len(next(iter(expand(bags, inverse).values())))


class _Task(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Processed("error")

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = losses_of(self.model(batch.sparse_features)).sum()
        return loss, loss.detach()


def through(pipelined: bool, job: Job) -> tuple[list[float], dict[str, Tensor], dict[str, str]]:
    """Losses, weights, and the collections that a pipeline does not feed ahead, with the reason."""
    import torch.distributed as dist

    plan = ShardingPlan({f"model.{PATH}": ShardingPlan.from_json(job.plan).plan[cases.PATH]})
    dmp = DistributedModelParallel(_Task(), plan=plan)
    dense = torch.optim.SGD(dmp.dense_parameters(), lr=LR)
    made = [batch_of(ranks[dist.get_rank()]) for ranks in job.steps]
    batches = iter([Batch(torch.zeros(kjt.stride(), 0), kjt, torch.zeros(kjt.stride())) for kjt in made])
    kind = TrainPipelineSparseDist if pipelined else TrainPipelineBase
    pipeline = kind(dmp, dense, torch.device("cpu"))
    losses = [float(pipeline.progress(batches)) for _ in job.steps]
    left = dict(pipeline.report().left) if pipelined else {}
    return losses, dmp.full_state_dict(), left
