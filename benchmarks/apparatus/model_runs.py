"""A model trained twice on the same batches: sharded on ranks, and its plain twin in one process.

The plain side is written from the papers (``plain_models.py``) and stepped by torch's own Adagrad and Adam; the sharded
side has its tables' Adagrad fused into backward. Both start from the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.apparatus.plain_models import twin_of
from recshard_lab.data import BatchLoader, build_dataset
from recshard_lab.embedding import EmbeddingBagConfig, PoolingType
from recshard_lab.models import TwoTower, build_model
from recshard_lab.train import batch_loss
from recshard_lab.train.metrics import AUCMetric

TABLE_LR, DENSE_LR, EPS, DIM, INIT = 0.05, 0.002, 1e-10, 16, 0.05
SCHEMES = ("row_wise", "column_wise", "table_wise", "data_parallel")


@dataclass(frozen=True)
class Course:
    """What is trained, on what.

    Args:
        model: name in the registry; settings: its settings.
        data: config of `build_dataset`.
        batch_size: of all ranks together.
        epochs: passes over the training part.
    """

    model: str
    data: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 512
    epochs: int = 2


@dataclass(frozen=True)
class Curve:
    """Mean loss of each step's global batch, and the AUC of the test part."""

    losses: list[float]
    auc: float


class TowerScore(nn.Module):
    """Two towers, called as a click model: the score is the logit."""

    def __init__(self, two_tower: TwoTower) -> None:
        super().__init__()
        self.two_tower = two_tower

    def forward(self, dense_features: Tensor, sparse_features: Any) -> Tensor:
        query, candidate = self.two_tower(sparse_features)
        return (query * candidate).sum(1, keepdim=True)


class Both:
    """Two optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def tables_of(features: Mapping[str, int]) -> list[EmbeddingBagConfig]:
    """One table a feature, named after it."""
    return [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=[name],
            pooling=PoolingType.MEAN,
            weight_init_min=-INIT,
            weight_init_max=INIT,
        )
        for name, rows in features.items()
    ]


def untrained(course: Course, features: Mapping[str, int], num_dense: int) -> nn.Module:
    """The model, the same at every call."""
    settings = dict(course.settings)
    if course.model != "two_tower":
        settings["dense_in_features"] = num_dense
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_model(course.model, tables_of(features), settings)


def plain(course: Course) -> Curve:
    """The plain twin, on this process."""
    data: Any = build_dataset(course.data)
    twin = twin_of(untrained(course, data.train.features, data.train.num_dense_features))
    tables = torch.optim.Adagrad(twin.tables(), lr=TABLE_LR, eps=EPS)
    return _train(course, twin, Both(tables, torch.optim.Adam(twin.others(), lr=DENSE_LR)), data, 0, 1)


def sharded(course: Course, schemes: Sequence[str] = SCHEMES) -> Curve:
    """The model on this rank and its peers, table i under ``schemes[i % len(schemes)]``."""
    import torch.distributed as dist

    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder

    data: Any = build_dataset(course.data)
    model = untrained(course, data.train.features, data.train.num_dense_features)
    if isinstance(model, TwoTower):
        model = TowerScore(model)
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_adagrad", "learning_rate": TABLE_LR, "eps": EPS},
    )
    plan = mixed_plan(model, schemes, dist.get_world_size())
    dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder])
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=DENSE_LR)
    return _train(course, dmp, dense, data, dist.get_rank(), dist.get_world_size())


def mixed_plan(model: nn.Module, schemes: Sequence[str], world_size: int) -> Any:
    """Tables of the model's one collection under the schemes in turn."""
    import recshard_lab as rl

    generators: dict[str, Any] = {
        "row_wise": rl.row_wise,
        "column_wise": lambda: rl.column_wise(ranks=list(range(world_size))),
        "table_wise": lambda: rl.table_wise(rank=world_size - 1),
        "data_parallel": rl.data_parallel,
    }
    ((path, ebc),) = [
        (name, part) for name, part in model.named_modules() if isinstance(part, rl.EmbeddingBagCollection)
    ]
    per_table = {
        table.name: generators[schemes[number % len(schemes)]]()
        for number, table in enumerate(ebc.embedding_bag_configs())
    }
    plan = rl.sharding.construct_module_sharding_plan(ebc, per_table, world_size=world_size, device_type="cpu")
    return rl.ShardingPlan({path: plan})


def _train(course: Course, model: nn.Module, optimizer: Any, data: Any, rank: int, world_size: int) -> Curve:
    import torch.distributed as dist

    loader = BatchLoader(data.train, course.batch_size, rank, world_size, shuffle=True, seed=0)
    losses = []
    for _ in range(course.epochs):
        for batch in loader:
            loss = batch_loss(model(batch.dense_features, batch.sparse_features), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    parts = torch.stack(losses).double()
    if world_size > 1:
        dist.all_reduce(parts)
    return Curve((parts / world_size).tolist(), _auc(course, model, data, rank, world_size))


@torch.no_grad()
def _auc(course: Course, model: nn.Module, data: Any, rank: int, world_size: int) -> float:
    """Of the test part, all ranks' samples together."""
    metric = AUCMetric(world_size, rank, course.batch_size, window_size=max(1, len(data.test)) * 2 * world_size)
    model.eval()
    for batch in BatchLoader(data.test, course.batch_size * world_size, rank, world_size):
        logits = model(batch.dense_features, batch.sparse_features)
        metric.update(predictions=logits, labels=batch.labels)
    model.train()
    return float(metric.compute()["auc-DefaultTask|window_auc"])
