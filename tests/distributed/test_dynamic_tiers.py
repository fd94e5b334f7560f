"""Sharded dynamic tables with tiers against the unsharded collection. Each shard has its own part of each tier."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import DistributedModelParallel, KeyedJaggedTensor, ParameterSharding, PlanError, Shard, ShardingPlan
from recshard_lab.distributed.sharders import DynamicEmbeddingBagCollectionSharder
from recshard_lab.distributed.state.checkpoint import (
    CheckpointError,
    async_save_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from recshard_lab.distributed.state.dumps import TierRows
from recshard_lab.embedding import EmbOptimType, EmulatedCost, Tier
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from recshard_lab.train.pipelines import PrefetchTrainPipelineSparseDist
from tests.distributed.cached_jobs import world
from tests.distributed.test_dynamic import (
    OPTIMIZERS,
    batch_of,
    batches,
    collection,
    compared,
    plan_of,
    rows_of,
    tables,
)
from tests.embedding.dynamic.redis_server import redis_server

Counts = dict[str, dict[str, int]]


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
    rank, many = world()
    for parts in batches(3, many, 2):  # ids of all tiers
        mine = dmp(batch_of(parts, range(rank, rank + 1))).values()
        whole = reference(batch_of(parts, range(many))).values()[rank * len(mine) : (rank + 1) * len(mine)]
        torch.testing.assert_close(mine, whole, rtol=1e-9, atol=1e-9)
    return reference.counters()["user"], counted(dmp)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("scheme", "optimizer"), [("row_wise", "adam"), ("table_wise", "sgd"), ("column_wise", "adagrad")]
)
def test_shards_with_tiers_train_as_the_whole_table(two: Any, scheme: str, optimizer: str, tmp_path: Path) -> None:
    disks = [Tier("disk", path=tmp_path / name) for name in ("sharded", "whole")]
    # every rank has its own unsharded collection: only one may open its folder
    results = two.run(trained, scheme, optimizer, disks[0], Tier("host", capacity=1 << 14, name="disk"))
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


def in_columns(right: list[tuple[int, int]], **more: Any) -> dict[str, ParameterSharding]:
    """Both tables in one process: two row shards of the left columns, and these of the right ones, in eighths."""
    plan = {}
    for table in tables(**more):
        middle, unit = table.embedding_dim // 2, table.num_embeddings // 8
        cut = [(span, (0, middle)) for span in ((0, 4), (4, 8))]
        cut += [(span, (middle, table.embedding_dim)) for span in right]
        shards = [Shard(0, (first * unit, end * unit), columns) for (first, end), columns in cut]
        plan[table.name] = ParameterSharding("custom", shards=shards)
    return plan


@pytest.mark.parametrize("kind", ["pooled", "sequence"])
@pytest.mark.parametrize("optimizer", ["row-wise adagrad", "lamb"])
def test_row_wise_optimizers_train_ids_without_a_slot_over_column_shards(
    optimizer: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "lamb", (EmbOptimType.LAMB, {"lr": 0.01}))
    more: dict[str, Any] = {"tiers": [Tier("host", capacity=1 << 15)]}
    reference, module = (collection(kind, optimizer, **more) for _ in range(2))
    plan = EmbeddingModuleShardingPlan(in_columns([(0, 4), (4, 8)]))
    dmp = DistributedModelParallel(module, plan=ShardingPlan({"": plan}))
    rng = torch.Generator().manual_seed(0)
    for step in range(8):
        ids = (torch.randn(2 * 1800, generator=rng) * 4000).long() * 7919
        batch = KeyedJaggedTensor(["u", "v"], ids, lengths=torch.full((2 * 600,), 3))
        if step == 7:
            reference.eval(), dmp.eval()
        whole, own = rows_of(reference(batch)), rows_of(dmp(batch))
        for one, other in zip(whole, own, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-9)
        if step < 7:
            sum(rows.pow(2).sum() for rows in whole).backward()
            sum(rows.pow(2).sum() for rows in own).backward()
    assert reference.counters()["user"]["fast"]["overflows"] > 1000


@pytest.mark.parametrize("more", [{"tiers": [Tier("host", capacity=1 << 15)]}, {"max_capacity": 1 << 14}])
def test_row_wise_optimizers_refuse_columns_that_are_split_at_other_rows(more: dict[str, Any]) -> None:
    module, why = collection("pooled", "row-wise adagrad", **more), "has tiers" if "tiers" in more else "grows"
    with pytest.raises(PlanError, match=f"table 'user' {why}, and has column shards of rows .* Fix: split"):
        DynamicEmbeddingBagCollectionSharder().shard(module, in_columns([(0, 8)], **more))


@pytest.mark.needs("redis-server")
def test_shards_share_a_redis_server(two: Any) -> None:
    with redis_server() as url:
        last, other = Tier("redis", url=url), Tier("host", capacity=1 << 14, name="redis")
        (whole, *_), shards = zip(*two.run(trained, "row_wise", "row-wise adagrad", last, other), strict=True)
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
    rank, many = world()
    data = [batch_of(parts, range(rank, rank + 1)) for parts in batches(20, many, 4)]
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


def test_a_pipeline_moves_the_rows_of_tiers_one_batch_ahead(two: Any) -> None:
    for difference, prefetched, counts in two.run(piped):
        assert difference == 0.0
        assert prefetched > 10
        assert counts["host"]["hits"] > 100
        assert counts["fast"]["overflows"] == 0


# ---- moves and checkpoints ----


def tiered(optimizer: str, tiers: list[Tier], **more: Any) -> Any:
    return collection("pooled", optimizer, tiers=tiers, **more)


def two_tiers(tier: Tier | None) -> list[Tier]:
    return [Tier("host", capacity=1024, mode="cache"), tier or Tier("host", capacity=1 << 14, name="last")]


def rows_of_all_tiers(dmp: Any) -> list[tuple[int, int, Tensor]]:
    """Id, score and row of this rank's shards of table ``user``, in the order of ids."""
    found = []
    for table in dmp.collections[""].dynamic_tables().values():
        if table.config.name == "user":
            rows = [row for rows in table.export_batches() for row in zip(*rows[:2], rows.weight, strict=True)]
            found += [(int(id), int(score), weight.clone()) for id, score, weight in rows]
    return sorted(found, key=lambda row: row[0])


def check_counts(dmp: Any) -> None:
    for tiers in dmp.module.tier_counters().values():
        for own in tiers.values():
            assert own["inserts"] - own["evictions"] - own["erasures"] == own["size"]


def walked(optimizer: str, last: Tier | None, plans: list[str], max_extra_bytes: int | None) -> list[int]:
    """Trains on each plan in turn beside the unsharded collection. Returns the hits of the last tier on each."""
    module = tiered(optimizer, two_tiers(last))
    dmp = DistributedModelParallel(module, plan=plan_of(module, plans[0]))
    reference, hits = tiered(optimizer, two_tiers(None)), []
    for number, plan in enumerate(plans):
        if number:
            before = rows_of_all_tiers(dmp)
            dmp.reshard(plan_of(module, plan), max_extra_bytes=max_extra_bytes)
            check_counts(dmp)
            if plan == plans[number - 1]:
                assert [row[:2] for row in before] == [row[:2] for row in rows_of_all_tiers(dmp)]
        compared(reference, dmp, 12, number)
        hits.append(sum(own["hits"] for name, own in counted(dmp).items() if name not in ("fast", "host")))
        check_counts(dmp)
    return hits


@pytest.mark.gate
@pytest.mark.parametrize(
    ("optimizer", "last", "max_extra_bytes"),
    [
        ("adam", "host", None),
        ("row-wise adagrad", "disk", None),
        pytest.param("adagrad", "redis", 1 << 16, marks=pytest.mark.needs("redis-server")),
    ],
)
def test_a_table_moves_with_the_rows_of_its_tiers(
    two: Any, tmp_path: Path, optimizer: str, last: str, max_extra_bytes: int | None
) -> None:
    with redis_server() if last == "redis" else nullcontext() as url:
        where = {"disk": {"path": tmp_path}, "redis": {"url": url}}
        tier = Tier(last, **where[last]) if last in where else None
        plans = ["row_wise", "table_wise", "column_wise", "row_wise"]
        results = two.run(walked, optimizer, tier, plans, max_extra_bytes)
        assert sum(sum(hits[1:]) for hits in results) > 20


def failed_move(folder: str, park: bool) -> None:
    """A move that fails when one rank stores rows in the new tiers changes nothing."""
    tiers = two_tiers(Tier("disk", path=folder))
    module, reference = tiered("adam", tiers), tiered("adam", two_tiers(None))
    dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
    compared(reference, dmp, 12, 0)
    before = rows_of_all_tiers(dmp)
    fill = TierRows.fill

    def failing(self: TierRows) -> None:
        fill(self)
        if world()[0] == 1:
            raise OSError("disk full")

    TierRows.fill = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(Exception, match="disk full"):
            dmp.reshard(plan_of(module, "table_wise"), max_extra_bytes=1 << 16 if park else None)
    finally:
        TierRows.fill = fill  # type: ignore[method-assign]
    after = rows_of_all_tiers(dmp)
    assert [row[:2] for row in before] == [row[:2] for row in after]
    assert all(torch.equal(row[2], other[2]) for row, other in zip(before, after, strict=True))
    compared(reference, dmp, 6, 1)


@pytest.mark.parametrize("park", [False, True])
def test_a_failed_move_leaves_the_rows_of_tiers(two: Any, tmp_path: Path, park: bool) -> None:
    two.run(failed_move, str(tmp_path), park)


def saved(folder: str) -> None:
    module = tiered("adam", two_tiers(None))
    dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
    compared(tiered("adam", two_tiers(None)), dmp, 20, 0)
    save_checkpoint(f"{folder}/run", dmp)
    async_save_checkpoint(f"{folder}/later", dmp).result()


def loaded(folder: str, many: int, scheme: str) -> None:
    """Continues beside a collection that was trained on the batches of ``many`` ranks."""
    for name in ("run", "later"):
        module, reference = (tiered("adam", two_tiers(None)) for _ in range(2))
        for parts in batches(20, many, 0):
            reference(batch_of(parts, range(many))).values().pow(2).sum().backward()
        dmp = DistributedModelParallel(module, plan=plan_of(module, scheme))
        compared(tiered("adam", two_tiers(None)), dmp, 3, 8)  # rows that the load removes
        load_checkpoint(f"{folder}/{name}", dmp)
        check_counts(dmp)
        hits = reference.counters()["user"]["last"]["hits"]
        compared(reference, dmp, 8, 5)
        assert reference.counters()["user"]["last"]["hits"] > hits + 10
    module = collection("pooled", "adam")
    without = DistributedModelParallel(module, plan=plan_of(module, scheme))
    with pytest.raises(CheckpointError, match=r"rows of tiers of .*user\.weight, and the model's table has no tiers"):
        load_checkpoint(f"{folder}/run", without)


@pytest.mark.parametrize("scheme", ["table_wise", "column_wise"])
def test_a_checkpoint_has_the_rows_of_tiers(two: Any, tmp_path: Path, scheme: str) -> None:
    two.run(saved, str(tmp_path))
    two.run(loaded, str(tmp_path), 2, scheme)
    if scheme == "table_wise":
        loaded(str(tmp_path), 2, scheme)  # one process


def refused() -> str:
    module = tiered("sgd", [Tier("host", capacity=1024)])
    dmp = DistributedModelParallel(module, plan=plan_of(module, "row_wise"))
    with pytest.raises(ValueError, match="table 'user' has tiers") as error:
        dmp.state_dict()
    return str(error.value)


def test_a_state_dict_that_would_lose_the_rows_of_tiers_is_refused(two: Any) -> None:
    for error in two.run(refused):
        assert "Fix: save_checkpoint and load_checkpoint, or dmp.dump and dmp.load" in error
