"""A `StepCase` in this library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.apparatus.step_case import StepCase
from recshard_lab.comm import CommType, QCommsConfig, Registry, get_qcomm_codecs_registry
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.embedding import (
    EmbeddingBagCollection,
    EmbOptimType,
    FusedEmbeddingBagCollection,
)
from recshard_lab.sparse import KeyedJaggedTensor


def codecs_of(case: StepCase) -> Registry | None:
    """What sharders take for the case's messages."""
    kind = CommType(case.wire)
    return None if kind is CommType.FP32 else get_qcomm_codecs_registry(QCommsConfig(kind, kind))


def collection_of(case: StepCase) -> EmbeddingBagCollection:
    """The case's tables, without memory."""
    return EmbeddingBagCollection(case.configs(), device=torch.device("meta"))


def sharded(case: StepCase, device: str, **fused: Any) -> DistributedModelParallel:
    """The case's tables under its plan. ``fused``: what the optimizer takes, besides its kind."""
    fused = {"optimizer": EmbOptimType(case.optimizer), "learning_rate": 0.01, **fused}
    sharder = EmbeddingBagCollectionSharder(fused, codecs_of(case), backend=case.kernel or None)
    return DistributedModelParallel(
        collection_of(case), device=torch.device(device), plan=case.plan(), sharders=[sharder]
    )


def batch_of(case: StepCase, device: str = "cpu", rank: int = 0, number: int = 0) -> KeyedJaggedTensor:
    """A rank's batch."""
    ids = torch.from_numpy(case.bag_ids(rank, number))
    lengths = torch.full((case.tables * case.batch,), case.pooling)
    return KeyedJaggedTensor([f"f{i}" for i in range(case.tables)], ids.to(device), lengths=lengths.to(device))


class Ours:
    """The model of one rank."""

    def __init__(
        self,
        case: StepCase,
        weights: Mapping[str, NDArray[Any]] | None,
        learning_rate: float,
        eps: float,
        rectangles: Mapping[str, Any],
        backend: str | None = None,
        device: str = "cpu",
    ) -> None:
        self.case = case
        case = replace(case, kernel=backend or case.kernel)
        self.model: nn.Module
        if case.layout == "fused":
            self.model = FusedEmbeddingBagCollection(
                case.configs(),
                EmbOptimType(case.optimizer),
                {"lr": learning_rate, "eps": eps},
                device=device,
                backend=case.kernel or None,
            )
        else:
            self.model = sharded(case, device, learning_rate=learning_rate, eps=eps)
        if weights is not None:
            self.model.load_state_dict(
                {f"embedding_bags.{name}.weight": torch.from_numpy(weight) for name, weight in weights.items()}
            )

    def batch(self, ids: Tensor, lengths: Tensor) -> Any:
        """The library's own jagged batch; `lengths` are table by table."""
        return KeyedJaggedTensor([f"f{i}" for i in range(self.case.tables)], ids, lengths=lengths)

    def forward(self, batch: Any, ordered: bool = False) -> Tensor:
        """Pooled rows, [B, tables * dim]; `ordered` as the features are, otherwise as they come."""
        pooled = self.model(batch)
        return torch.cat([pooled[f"f{i}"] for i in range(self.case.tables)], 1) if ordered else pooled.values()

    def lookups_as_operators(self) -> Any:
        """Kernel ``ledger`` counts itself."""
        return nullcontext()

    def step(self) -> None:
        """Every table's optimizer runs in backward."""

    def pieces(self) -> Iterator[tuple[str, int, int, Tensor]]:
        """This rank's part of the weights: table, first row, first column, values."""
        if isinstance(self.model, DistributedModelParallel):
            for name, weight in self.model.full_state_dict().items():
                yield name.split(".")[1], 0, 0, weight
        else:
            for name, weight in self.model.state_dict().items():
                yield name.split(".")[1], 0, 0, weight
