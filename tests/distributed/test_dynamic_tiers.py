"""Sharded dynamic tables with tiers against the unsharded collection. Each shard has its own part of each tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import recshard_lab
from recshard_lab import DistributedModelParallel, EmulatedCost, Tier
from recshard_lab.distributed.state.checkpoint import save_checkpoint
from recshard_lab.train.pipelines import PrefetchTrainPipelineSparseDist
from tests.distributed.test_dynamic import batch_of, batches, collection, compared, dmp_ranks, plan_of
from tests.embedding.dynamic.redis_server import redis_server

Counts = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with recshard_lab.launch(2) as launched:
        yield launched


def counted(dmp: Any) -> Counts:
    """What the tiers of table ``user`` on this rank have counted."""
    counts: Counts = dmp.module.tier_counters().get("user", {})
    return counts


def trained(scheme: str, optimizer: str, last: Tier, other: Tier) -> tuple[Counts, Counts]:
    """Trains both. ``other`` is the last tier of the unsharded collection."""

    def tiers(tier: Tier) -> list[Tier]:
        return [Tier("host", capacity=1024, mode="cache", cost=EmulatedCost(1)), tier]

    module, reference = (collection("pooled", optimizer, tiers=tiers(tier)) for tier in (last, other))
    dmp = DistributedModelParallel(module, plan=plan_of(module, scheme))
    evictions = compared(reference, dmp, 25, 1)
    assert evictions > 300
    dmp.eval()
    reference.eval()
    rank, world = dmp_ranks()
    for parts in batches(3, world, 2):  # ids of all tiers
        mine = dmp(batch_of(parts, range(rank, rank + 1))).values()
        whole = reference(batch_of(parts, range(world))).values()[rank * len(mine) : (rank + 1) * len(mine)]
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9)
    return reference.counters()["user"], counted(dmp)


@pytest.mark.parametrize(
    ("scheme", "optimizer"), [("row_wise", "adam"), ("table_wise", "sgd"), ("column_wise", "adagrad")]
)
def test_shards_with_tiers_train_as_the_whole_table(ranks: Any, scheme: str, optimizer: str, tmp_path: Path) -> None:
    disks = [Tier("disk", path=tmp_path / name) for name in ("sharded", "whole")]
    # every rank has its own unsharded collection: only one may open its folder
    results = ranks.run(trained, scheme, optimizer, disks[0], Tier("host", capacity=1 << 14, name="disk"))
    (whole, *_), shards = zip(*results, strict=True)
    assert whole["disk"]["hits"] > 20
    assert whole["host"]["hits"] > 100
    if scheme == "row_wise":
        added = {tier: {name: sum(own[tier][name] for own in shards) for name in whole[tier]} for tier in whole}
        assert added == whole
    folders = sorted(folder.name for folder in (tmp_path / "sharded" / "user").iterdir())
    expected = {
        "row_wise": ["partitions-0-4_columns-0-8", "partitions-4-8_columns-0-8"],
        "table_wise": ["partitions-0-8_columns-0-8"],
        "column_wise": ["partitions-0-8_columns-0-4", "partitions-0-8_columns-4-8"],
    }
    assert folders == expected[scheme]


def test_shards_share_a_redis_server(ranks: Any) -> None:
    with redis_server() as url:
        last, other = Tier("redis", url=url), Tier("host", capacity=1 << 14, name="redis")
        (whole, *_), shards = zip(*ranks.run(trained, "row_wise", "row-wise adagrad", last, other), strict=True)
        assert whole["redis"]["hits"] > 20
        assert sum(own["redis"]["size"] for own in shards) == whole["redis"]["size"]


class Loss(nn.Module):
    """A model for pipelines: the squares of the outputs."""

    def __init__(self, dmp: DistributedModelParallel) -> None:
        super().__init__()
        self.dmp = dmp

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        rows = self.dmp(batch).values()
        return rows.pow(2).sum(), rows.detach()


def piped() -> tuple[float, int, Counts]:
    """The largest difference between outputs with and without a prefetch pipeline, and what it did."""
    rank, world = dmp_ranks()
    data = [batch_of(parts, range(rank, rank + 1)) for parts in batches(20, world, 4)]
    models = []
    for _ in range(2):
        module = collection("pooled", "adam", tiers=[Tier("host", capacity=1 << 14, cost=EmulatedCost(200))])
        models.append(DistributedModelParallel(module, plan=plan_of(module, "row_wise")))
    dmp, other = models
    expected = []
    for batch in data:
        rows = other(batch).values()
        rows.pow(2).sum().backward()
        expected.append(rows.detach())
    optimizer, source = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), iter(data)
    with PrefetchTrainPipelineSparseDist(Loss(dmp), optimizer, torch.device("cpu"), threads=True) as pipeline:
        found = [pipeline.progress(source) for _ in data]
        prefetched = sum(event.stage == "prefetch" for event in pipeline.events)
    differences = [(mine - own).abs().max().item() for mine, own in zip(found, expected, strict=True)]
    return max(differences), prefetched, dmp.module.tier_counters()["user"]


def test_a_pipeline_moves_the_rows_of_tiers_one_batch_ahead(ranks: Any) -> None:
    for difference, prefetched, counts in ranks.run(piped):
        assert difference == 0.0
        assert prefetched > 10
        assert counts["host"]["hits"] > 100
        assert counts["fast"]["overflows"] == 0


def refused(path: str) -> list[str]:
    module = collection("pooled", "sgd", tiers=[Tier("host", capacity=1024)])
    dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
    found = []
    for action in (
        lambda: dmp.reshard(plan_of(module, "table_wise")),
        lambda: save_checkpoint(path, dmp),
        lambda: dmp.state_dict(),
    ):
        try:
            action()
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_would_lose_the_rows_of_tiers_is_refused(ranks: Any, tmp_path: Path) -> None:
    for errors in ranks.run(refused, str(tmp_path / "run")):
        assert len(errors) == 3
        for error in errors:
            assert "table 'user' has tiers" in error
            assert "Fix: " in error
    assert not (tmp_path / "run").exists()
