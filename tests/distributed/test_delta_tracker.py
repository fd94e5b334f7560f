"""ModelDeltaTracker: its ids are those of the batches, and their rows replayed on an older copy give equal tables."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab import (
    DistributedModelParallel,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    KeyedJaggedTensor,
    ParameterSharding,
    ShardingPlan,
    Topology,
    flex_shard,
)
from recshard_lab.distributed import (
    DMPCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModelDeltaTracker,
    TrackingMode,
)
from recshard_lab.embedding import (
    FusedEmbeddingCollection,
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
)
from recshard_lab.sharding import CacheParams
from recshard_lab.sharding.schemes import scheme_named, scheme_names
from tests.distributed.cached_jobs import world
from tests.distributed.jobs import attempted
from tests.refusals import not_refused

ROWS, FEATURES = {"a": 400, "b": 120}, {"a": ["fa", "fb"], "b": ["fc"]}
VARIANTS: dict[str, tuple[str, str]] = {
    **{f"{scheme}, pooled": (scheme, "pooled") for scheme in scheme_names()},
    **{f"{scheme}, sequences": (scheme, "sequence") for scheme in ("row_wise", "column_wise", "data_parallel")},
    "distinct ids": ("row_wise", "dedup"),
    "distinct rows": ("row_wise", "distinct_rows"),
    "hot rows": ("flex_shard", "hot"),
    "host memory": ("grid_shard", "fused_uvm"),
    "cached": ("row_wise", "cached"),
    "cached columns": ("column_wise", "cached"),
    "deferred": ("row_wise", "deferred"),
}


def plan_of(scheme: str, variant: str) -> ShardingPlan:
    size = world()[1]
    topology = Topology(size)
    cache = CacheParams("lru", 0.5) if variant == "cached" else None
    kernel = "fused_uvm_caching" if cache else "fused_uvm" if variant == "fused_uvm" else "fused"
    entries = {}
    for name, rows in ROWS.items():
        table = EmbeddingBagConfig(rows, 16, name, feature_names=FEATURES[name])
        if variant == "hot":
            entries[name] = flex_shard(hot_rows=9)(table, topology)
            continue
        shards = scheme_named(scheme).default(table, topology).shards
        entries[name] = ParameterSharding(scheme, kernel, None, None, cache, shards=shards)
    plan = ShardingPlan({"bags": entries})  # type: ignore[dict-item]
    return plan.with_route("distinct_rows") if variant == "distinct_rows" else plan


def model_of(plan: ShardingPlan, variant: str) -> DistributedModelParallel:
    """With the same weights each time."""
    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.05}
    torch.manual_seed(5)
    sequence = variant in ("sequence", "dedup")
    config, kind = (EmbeddingConfig, EmbeddingCollection) if sequence else (EmbeddingBagConfig, EmbeddingBagCollection)
    tables: Any = [config(rows, 16, name, feature_names=FEATURES[name]) for name, rows in ROWS.items()]
    sharder: Any = EmbeddingCollectionSharder(fused, use_index_dedup=variant == "dedup")
    sharders = [sharder if sequence else EmbeddingBagCollectionSharder(fused)]
    return DistributedModelParallel(torch.nn.ModuleDict({"bags": kind(tables)}), plan=plan, sharders=sharders)


def batch(number: int, rank: int) -> KeyedJaggedTensor:
    """One of few bags, some empty, with ids that repeat."""
    rng = torch.Generator().manual_seed(100 * number + rank)
    lengths = torch.randint(0, 4, (3, 5), generator=rng)
    ids = [
        (torch.rand(int(own.sum()), generator=rng) ** 2 * rows).long()
        for own, rows in zip(lengths, (ROWS["a"], ROWS["a"], ROWS["b"]), strict=True)
    ]
    return KeyedJaggedTensor(["fa", "fb", "fc"], torch.cat(ids), lengths=lengths.flatten())


def rows_of(numbers: list[int], ranks: range) -> dict[str, set[int]]:
    """Table -> the ids of these batches of these ranks."""
    found: dict[str, set[int]] = {name: set() for name in ROWS}
    for number in numbers:
        for rank in ranks:
            own = batch(number, rank)
            for name, features in FEATURES.items():
                for feature in features:
                    found[name] |= set(own[feature].values().tolist())
    return found


def train(model: Any, number: int) -> None:
    out = (model.module["bags"] if isinstance(model, DistributedModelParallel) else model)(batch(number, world()[0]))
    parts = [out[key].values() for key in out] if isinstance(out, dict) else [out.values()]
    torch.cat([part.flatten() for part in parts]).pow(2).sum().backward()


def on_rank(plan: ShardingPlan, rows: dict[str, set[int]]) -> dict[str, list[int]]:
    """Those that this rank stores, ascending."""
    rank = world()[0]
    found = {}
    for name, ids in rows.items():
        spans = [shard.rows for shard in plan.plan["bags"][name].shards if shard.rank == rank]  # type: ignore[index]
        found[name] = sorted(row for row in ids if any(start <= row < end for start, end in spans))
    return found


def named(found: dict[str, Tensor]) -> dict[str, list[int]]:
    """By the names of tables."""
    assert all(ids.dtype == torch.int64 for ids in found.values())
    return {key.split(".")[-2]: ids.tolist() for key, ids in found.items()}


tracker_of = partial(ModelDeltaTracker, records="steps")


def tracked(variant: str) -> list[str]:
    """Trains and reads at two paces. Returns what differs from the batches."""
    every, wrong = range(world()[1]), []
    scheme, kind = VARIANTS[variant]
    plan = plan_of(scheme, kind)
    dmp = model_of(plan, kind)
    if kind == "deferred":
        dmp.fused_optimizer.defer_steps()
    tracker = tracker_of(dmp, consumers=["fast", "slow"])

    def check(what: str, consumer: str, numbers: list[int]) -> None:
        found, expected = named(tracker.get_unique_ids(consumer)), on_rank(plan, rows_of(numbers, every))
        if found != expected:
            wrong.append(f"{what}: {found}, expected {expected}")

    for number in range(4):
        train(dmp, number)
        if kind == "deferred":
            check(f"before step {number}", "fast", [])
            dmp.fused_optimizer.step()
        check(f"fast {number}", "fast", [number])
        if number == 2:
            check("slow at 2", "slow", [0, 1, 2])
            check("slow again", "slow", [])
            with torch.no_grad():
                dmp.module["bags"](batch(9, world()[0]))  # type: ignore[index]
            list(dmp.eval().state_dict())
            dmp.train()
            check("evaluation", "fast", [])
    check("slow at the end", "slow", [3])
    train(dmp, 4)
    if kind == "deferred":
        train(dmp, 5)
        dmp.fused_optimizer.step()
        check("two batches", "fast", [4, 5])
        return wrong
    tracker.clear("fast")
    check("cleared", "fast", [])
    check("not cleared", "slow", [4])
    tracker.close()
    train(dmp, 5)
    check("closed", "fast", [])
    return wrong


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_rank_has_the_rows_of_its_shards_that_were_trained_since_a_read(two: Any, variant: str) -> None:
    assert two.run(tracked, variant) == [[], []]


def replayed(folder: str, scheme: str, other: str, kind: str) -> tuple[int, list[str]]:
    """Dumps of nothing but the rows that a consumer has not seen, in a model under another plan that has the others."""
    dmp, older = (model_of(plan_of(own, kind), kind) for own in (scheme, other))
    tracker, written, wrong = tracker_of(dmp), 0, []
    for number in range(3):
        train(dmp, 2 * number)
        train(dmp, 2 * number + 1)
        before = older.full_state_dict()
        done = dmp.dump(f"{folder}/{number}", rows=tracker.get_unique_ids())
        written += sum(done.rows.values())
        older.load(f"{folder}/{number}")
        found, expected = older.full_state_dict(), dmp.full_state_dict()
        wrong += [f"{key} at {number}" for key in expected if not torch.equal(found[key], expected[key])]
        wrong += [f"{key} was equal" for key in expected if torch.equal(before[key], expected[key])]
    train(dmp, 8)  # equal after another step: optimizer states were equal too
    train(older, 8)
    found, expected = older.full_state_dict(), dmp.full_state_dict()
    wrong += [f"{key} later" for key in expected if not torch.allclose(found[key], expected[key])]
    return written, wrong


@pytest.mark.parametrize(
    ("scheme", "other", "kind"),
    [
        ("row_wise", "column_wise", "pooled"),
        ("column_wise", "data_parallel", "pooled"),
        ("row_wise",) * 2 + ("cached",),
    ],
)
def test_rows_since_the_last_read_bring_an_older_copy_up_to_date(
    two: Any, scheme: str, other: str, kind: str, tmp_path: Path
) -> None:
    trained_rows = [rows_of([2 * n, 2 * n + 1], range(2)) for n in range(3)]
    expected = sum(len(ids) for own in trained_rows for ids in own.values())
    assert two.run(replayed, str(tmp_path), scheme, other, kind) == [(expected, [])] * 2


def test_tables_that_have_moved_are_not_read() -> None:
    dmp = model_of(plan_of("row_wise", "pooled"), "pooled")
    tracker = tracker_of(dmp)
    train(dmp, 0)
    dmp.reshard(plan_of("column_wise", "pooled"))
    with pytest.raises(ValueError, match=r"the tables have moved.*read before dmp\.reshard"):
        tracker.get_unique_ids()
    tracker.close()
    later = tracker_of(dmp)
    train(dmp, 1)
    assert named(later.get_unique_ids()) == {name: sorted(ids) for name, ids in rows_of([1], range(1)).items()}


def fused(sequence: bool = False) -> Any:
    config: Any = EmbeddingConfig if sequence else EmbeddingBagConfig
    tables = [config(rows, 16, name, feature_names=FEATURES[name]) for name, rows in ROWS.items()]
    return (FusedEmbeddingCollection if sequence else FusedEmbeddingBagCollection)(tables, torch.optim.SGD, {"lr": 0.1})


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequences"])
def test_unsharded_tables_are_tracked_when_they_are_stepped(sequence: bool) -> None:
    module = fused(sequence)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    tracker = tracker_of(module, consumers=["fast", "slow"])
    module(batch(7, 0))  # without a backward
    other = copy.deepcopy(module)
    train(other, 3)
    tracker_of(other)  # the copy had none
    for number in range(3):
        train(module, number)
        expected = {name: sorted(ids) for name, ids in rows_of([number], range(1)).items()}
        assert named(tracker.get_unique_ids("fast")) == expected
    found = tracker.get_unique_ids("slow")
    assert named(found) == {name: sorted(ids) for name, ids in rows_of([0, 1, 2], range(1)).items()}
    for name, weight in module.state_dict().items():
        changed = (weight != before[name]).any(1).nonzero().squeeze(1)
        assert torch.equal(found[name], changed)


def test_names_are_those_of_weights_in_state_dicts() -> None:
    model = torch.nn.ModuleDict({"x": fused(), "y": DynamicEmbeddingBagCollection([DYNAMIC], torch.optim.SGD)})
    tracker = tracker_of(model)
    assert list(tracker.get_unique_ids()) == list(model["x"].state_dict(prefix="x."))
    assert tracker.fqn_to_feature_names() == {
        f"x.embedding_bags.{name}.weight": features for name, features in FEATURES.items()
    }
    assert tracker.get_tracked_modules() == {"x": model["x"]}


def test_a_skipped_table_is_not_tracked() -> None:
    module = fused()
    tracker = tracker_of(module, fqns_to_skip=["a"])
    train(module, 0)
    assert named(tracker.get_unique_ids()) == {"b": sorted(rows_of([0], range(1))["b"])}
    dmp = model_of(plan_of("row_wise", "pooled"), "pooled")
    sharded = tracker_of(dmp, fqns_to_skip=["b"])
    train(dmp, 0)
    assert named(sharded.get_unique_ids()) == {"a": sorted(rows_of([0], range(1))["a"])}


DYNAMIC = DynamicEmbeddingConfig("d", 4, capacity=128, feature_names=["f"])
BAGS = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])


def managed() -> ManagedCollisionEmbeddingBagCollection:
    module = HashZchManagedCollisionModule(10, "cpu", 1)
    inner = FusedEmbeddingBagCollection([BAGS], torch.optim.SGD, {"lr": 0.1})
    return ManagedCollisionEmbeddingBagCollection(inner, ManagedCollisionCollection({"t": module}, [BAGS]))


def dense() -> DistributedModelParallel:
    entry = {"t": ParameterSharding("data_parallel", "dense", [0])}
    return DistributedModelParallel(EmbeddingBagCollection([BAGS]), plan=ShardingPlan({"": entry}))  # type: ignore[dict-item]


def replicas() -> str:
    module = FusedEmbeddingBagCollection([BAGS], torch.optim.SGD, {"lr": 0.1})
    return attempted(lambda: tracker_of(DMPCollection(module, "cpu", None, 2, 1, None)))


def test_what_would_give_wrong_rows_is_refused(two: Any) -> None:
    assert all("a DMPCollection of 2 replicas" in own and "sync also changes rows" in own for own in two.run(replicas))
    first = tracker_of(tracked := fused())
    unfused = [EmbeddingBagCollection([BAGS]), dense()]
    owned = [managed(), DistributedModelParallel(managed())]
    calls: list[tuple[Any, str]] = [
        (
            lambda: tracker_of(fused(), mode=TrackingMode.EMBEDDING),
            "EMBEDDING is not supported: a step would co",
        ),
        (lambda: tracker_of(fused(), mode="id_only"), "mode must be TrackingMode"),  # type: ignore[arg-type]
        (lambda: tracker_of(fused(), consumers=["x", "x"]), "two consumers have one name"),
        (lambda: tracker_of(fused(), consumers="x"), "consumers must be"),
        (lambda: tracker_of(tracked), r"has a tracker\. Fix: call its close"),
        (lambda: first.get_unique_ids("other"), r"consumer 'other' is unknown\. Fix: use 'default'"),
        *((lambda one=one: tracker_of(one), "'embedding_bags.t.weight' is stepped by a torch") for one in unfused),
        *((lambda one=one: tracker_of(one), "managed collision, which also resets rows") for one in owned),
    ]
    assert not_refused(calls) == []
    for one in (*unfused, *owned):
        assert tracker_of(one, fqns_to_skip=["t"]).get_unique_ids() == {}
    first.close()
    tracker_of(tracked)
