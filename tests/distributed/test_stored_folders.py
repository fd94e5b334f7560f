"""A checkpoint, a dump and its delta that an earlier build wrote, in `stored`. The row of n * 10**15 - 7 is all n."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding.dynamic.config import Tier
from recshard_lab.embedding.dynamic.stores.base import joined

STORED = Path(__file__).parent / "stored"


@pytest.mark.parametrize("kind", ["checkpoint", "dumps"])
def test_folders_of_an_earlier_build_are_read(kind: str) -> None:
    users = [rs.DynamicEmbeddingConfig("user", 4, 128, tiers=[Tier("host", capacity=128)])]
    movies = [rs.EmbeddingBagConfig(3, 4, name="movie", feature_names=["m"])]
    dmp: Any = rs.DistributedModelParallel(
        nn.ModuleDict(
            {
                "users": rs.DynamicEmbeddingBagCollection(users, torch.optim.Adagrad, {"lr": 0.5}),
                "movies": rs.EmbeddingBagCollection(movies),
            }
        )
    )
    if kind == "checkpoint":
        assert rs.load_checkpoint(STORED / "checkpoint", dmp).extra == {"epoch": 3}
    else:
        assert dmp.load([STORED / "full", STORED / "delta"]).lost == {"user": 0, "movie": 0}
    (table,) = dmp.collections["users"].dynamic_tables().values()
    rows = joined(list(table.export_batches()))
    assert torch.equal(rows.weight, ((rows.ids + 7) // 10**15)[:, None].expand(-1, 4).float())
    assert rows.ids.sort()[0].tolist() == [n * 10**15 - 7 for n in range(5, 200)]
    movie = dmp.collections["movies"].table_shards()["movie"].local_weights[0]
    whole = torch.arange(12.0).view(3, 4)
    assert torch.equal(movie, whole) if kind == "checkpoint" else torch.equal(movie[::2], whole[::2])
