"""Models that the command line is asked to plan for."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import recshard_lab as rs

HUGE = 10**10  # rows: 5 TB, which only meta can hold


@dataclass
class Sizes:
    """A dataclass looks its module up by name when it is made."""

    dim: int = 16


def tables(rows: int = 1000) -> list[rs.EmbeddingBagConfig]:
    return [rs.EmbeddingBagConfig(rows, Sizes().dim, name=name, feature_names=[name]) for name in ("movies", "users")]


def dlrm(rows: int = 1000) -> rs.DLRM:
    return rs.DLRM(rs.EmbeddingBagCollection(tables(rows)), 13, [32, 16], [8, 1])


def huge() -> rs.DLRM:
    return dlrm(HUGE)


def not_on_meta() -> rs.DLRM:
    model = dlrm()
    assert float(model.over_arch.out.weight.sum()) < HUGE  # asks a weight for its value
    return model


class TwoTowers(nn.Module):
    """Two collections, each with a table of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.query = rs.EmbeddingBagCollection(tables()[:1])
        self.item = rs.EmbeddingBagCollection(tables(50_000)[:1])
        self.top = nn.Linear(32, 1)

    def forward(self, ids: rs.KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.query(ids).values(), self.item(ids).values()], dim=1))


class Unannotated(TwoTowers):
    def forward(self, what, ever):  # type: ignore[no-untyped-def, override]
        return None


def bare() -> rs.EmbeddingBagCollection:
    return dlrm().embedding_bag_collection


def plain() -> nn.Module:
    return nn.Linear(2, 1)


def broken() -> nn.Module:
    raise KeyError("no such layer")


ready = dlrm()
listed = tables()
