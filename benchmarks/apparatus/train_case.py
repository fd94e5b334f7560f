"""A whole training step for both sides: tables, a dense part of plain torch, batches, a link that may be slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.apparatus.step_case import ROWWISE, StepCase

DENSE_FEATURES = 13


@dataclass(frozen=True)
class TrainCase:
    """The settings of a step.

    Args:
        step: tables, batch, plan and optimizer of the tables.
        link_ms: the least time of every exchange of embeddings (an emulated slow link); ours only.
        hidden: width of the dense layers.
        collections: number of collections that share the tables.
        batch_tables, fuse_exchanges, threads, compiled: switches; ours only.
    """

    step: StepCase = field(default_factory=lambda: StepCase("table_wise", ROWWISE, "zipf"))
    link_ms: float = 0.0
    hidden: int = 256
    collections: int = 1
    batch_tables: bool = True
    fuse_exchanges: bool = True
    threads: bool = True
    compiled: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return asdict(self)


def from_dict(data: Mapping[str, Any]) -> TrainCase:
    """Reads `TrainCase.to_dict`."""
    return TrainCase(**{**data, "step": StepCase(**data["step"])})


def dealt(case: TrainCase) -> list[list[int]]:
    """The numbers of each collection's tables.

    >>> from dataclasses import replace
    >>> dealt(TrainCase(replace(TrainCase().step, tables=4), collections=2))
    [[0, 1], [2, 3]]
    """
    each = case.step.tables // case.collections
    return [list(range(n * each, (n + 1) * each)) for n in range(case.collections)]


class Clicks(nn.Module):
    """Two small MLPs around the collections, the same on both sides.

    Args:
        collections: pooled collections, sharded later.
        case: the sizes.
    """

    def __init__(self, collections: list[nn.Module], case: TrainCase) -> None:
        super().__init__()
        for number, collection in enumerate(collections):
            setattr(self, f"ebc{number}", collection)
        self.count = len(collections)
        width, sparse = case.hidden, case.step.tables * case.step.dim
        self.bottom = nn.Sequential(nn.Linear(DENSE_FEATURES, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU())
        self.over = nn.Sequential(nn.Linear(64 + sparse, width), nn.ReLU(), nn.Linear(width, 1))
        self.loss = nn.BCEWithLogitsLoss()

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch."""
        pooled = [getattr(self, f"ebc{number}")(batch.sparse_features).values() for number in range(self.count)]
        logits = self.over(torch.cat([self.bottom(batch.dense_features), *pooled], 1)).squeeze(1)
        loss: Tensor = self.loss(logits, batch.labels)
        return loss, logits.detach()


def dense_part(case: TrainCase, rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Dense features ``[B, 13]`` and labels ``[B]`` of a rank's batch."""
    draw = torch.Generator()
    draw.manual_seed(1000 * rank + number)
    features = torch.rand(case.step.batch, DENSE_FEATURES, generator=draw)
    return features, torch.randint(2, (case.step.batch,), generator=draw).float()
