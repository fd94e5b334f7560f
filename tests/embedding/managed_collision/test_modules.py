"""Managed collision modules alone: TorchRec's decisions, rows without collisions, eviction, admission, state."""

import copy
import json
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recshard_lab import JaggedTensor, KeyedJaggedTensor
from recshard_lab.compat import torchrec as shim
from recshard_lab.embedding import BaseEmbeddingConfig
from recshard_lab.embedding import managed_collision as mc
from tests.embedding.managed_collision import peer_facts

CPU = torch.device("cpu")
LRU, LFU = mc.HashZchEvictionPolicyName.LRU_EVICTION, mc.HashZchEvictionPolicyName.LFU_EVICTION
SINGLE_TTL = mc.HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
FACTS = json.loads((Path(__file__).parent / "peer_facts.json").read_text())


def rows_of(module: Any, *ids: int) -> list[int]:
    """The row of each id, which is a bag of its own."""
    batch = JaggedTensor(torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    return module({"t": batch})["t"].values().tolist()  # type: ignore[no-any-return]


def zch(rows: int, buckets: int = 1, **more: Any) -> mc.HashZchManagedCollisionModule:
    return mc.HashZchManagedCollisionModule(rows, CPU, buckets, **more)


def mch(rows: int, policy: Any = None, interval: int = 1, **more: Any) -> mc.MCHManagedCollisionModule:
    return mc.MCHManagedCollisionModule(rows, CPU, policy or mc.LRU_EvictionPolicy(), interval, **more)


# ---- the decisions of TorchRec 1.8, from `peer_facts.py` under its environment ----


@pytest.fixture(scope="module")
def ours() -> Any:
    shim.install(shadow=True)
    try:
        return peer_facts.facts()
    finally:
        shim.uninstall()


@pytest.mark.parametrize("case", FACTS)
def test_the_same_ids_have_rows_as_in_torchrec(ours: Any, case: str) -> None:
    assert ours[case] == FACTS[case]


# ---- no collisions ----


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=30), max_size=8),
    buckets=st.sampled_from([1, 2, 4]),
    policy=st.sampled_from([None, LRU, LFU]),
)
def test_no_two_ids_share_a_row_until_their_bucket_is_full(batches: list[list[int]], buckets: int, policy: Any) -> None:
    module = zch(32, buckets, eviction_policy_name=policy, disable_fallback=True)
    owner: dict[int, int] = {}
    for batch in batches:
        ids = torch.tensor(batch, dtype=torch.int64)
        rows = module.rows_of(ids, True, [len(ids)])
        now = dict(zip(batch, rows.tolist(), strict=True))
        assert all(now[one] == row for one, row in zip(batch, rows.tolist(), strict=True)), "one row an id"
        taken = [row for row in now.values() if row >= 0]
        assert len(set(taken)) == len(taken)
        bucket = dict(zip(batch, module.bucket_of(ids).tolist(), strict=True))
        full = module._owned.view(buckets, -1).all(dim=1).tolist()
        for one, row in now.items():
            assert row >= 0 or full[bucket[one]], "an id without a row is one of a full bucket"
            assert row < 0 or row // (32 // buckets) == bucket[one]
        owner = {row: one for one, row in owner.items() if row not in taken}
        owner = {one: row for row, one in owner.items()} | {one: row for one, row in now.items() if row >= 0}
        owned = module._owned.nonzero().squeeze(1)
        assert owner == dict(zip(module._raw_ids[owned].tolist(), owned.tolist(), strict=True))
        counters = module.counters
        assert counters.hits + counters.misses == counters.lookups
        assert counters.inserts - counters.evictions == module.size


@pytest.mark.parametrize("extra", [0, 3])
def test_a_batch_is_a_multiset(extra: int) -> None:
    ids = torch.tensor([5, 9, 5, -2, 10**15, 9] + [77] * extra)
    one, other = zch(8), zch(8)
    first = one.rows_of(ids, True, [len(ids)])
    assert torch.equal(other.rows_of(ids.flip(0), True, [len(ids)]).flip(0), first)


# ---- eviction ----


def test_lru_evicts_the_id_that_was_used_longest_ago() -> None:
    module = zch(3, eviction_policy_name=LRU)
    old = {one: rows_of(module, one)[0] for one in (10, 11, 12)}
    rows_of(module, 10)
    module.evict()
    assert rows_of(module, 13) == [old[11]]
    assert module.evict().tolist() == [old[11]]  # type: ignore[union-attr]
    assert module.counters.evictions == 1


def test_lfu_evicts_the_id_that_was_used_least() -> None:
    module = zch(3, eviction_policy_name=LFU)
    old = dict(zip((10, 11, 12), rows_of(module, 10, 11, 12), strict=True))
    rows_of(module, 10, 12)
    assert rows_of(module, 13) == [old[11]]


def test_ids_expire_after_their_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [1000]
    monkeypatch.setattr(time, "time", lambda: hours[0] * 3600)
    config = mc.HashZchEvictionConfig(["f"], single_ttl=5)
    module = zch(2, eviction_policy_name=SINGLE_TTL, eviction_config=config, disable_fallback=True)
    old = dict(zip((10, 11), rows_of(module, 10, 11), strict=True))
    hours[0] += 5
    assert module.rows_of(torch.tensor([12]), True, [1]).tolist() == [-1], "nothing has expired"
    rows_of(module, 10)
    hours[0] += 1
    assert rows_of(module, 12) == [old[11]]


def test_hours_of_each_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [1000]
    monkeypatch.setattr(time, "time", lambda: hours[0] * 3600)
    config = mc.HashZchEvictionConfig(["a", "b"], per_feature_ttl=[2, 9])
    policy = mc.HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
    module = zch(3, eviction_policy_name=policy, eviction_config=config)
    table = BaseEmbeddingConfig(3, 4, "t", feature_names=["a", "b"])
    modules = mc.ManagedCollisionCollection({"t": module}, [table])
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    old = dict(zip((1, 2, 3), modules(batch).values().tolist(), strict=True))
    hours[0] += 3
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([4, 5]), lengths=torch.tensor([0, 2]))
    assert set(modules(batch).values().tolist()) == {old[1], old[2]}
    with pytest.raises(ValueError, match="a batch of 1 features, and per_feature_ttl has 2"):
        rows_of(module, 1)


@pytest.mark.parametrize("make", [lambda: zch(4, eviction_policy_name=LRU), lambda: mch(5)], ids=["zch", "mch"])
def test_rows_of_a_batch_whose_backward_is_to_come_keep_their_owners(make: Any) -> None:
    module = make()
    held = rows_of(module, 1, 2, 3, 4)
    module.pinned_from = module.step
    rows_of(module, 5, 6, 7, 8)
    module.eval()
    assert rows_of(module, 1, 2, 3, 4) == held
    module.train()
    module.pinned_from = None
    rows_of(module, 5, 6, 7, 8)
    module.eval()
    assert sorted(rows_of(module, 5, 6, 7, 8)) == sorted(held)


# ---- admission, and ids without a row ----


def test_ids_that_are_not_admitted_share_reserved_rows() -> None:
    module = zch(10, opt_in_prob=0, percent_reserved_slots=20)
    assert set(rows_of(module, *range(100))) == {8, 9}
    assert module.size == 0
    assert module.counters.refusals == 100
    everyone = zch(10, opt_in_prob=100, percent_reserved_slots=20)
    assert sorted(rows_of(everyone, *range(8))) == list(range(8))
    assert int(everyone.open_slots()) == 0


def test_each_occurrence_is_admitted_with_the_probability() -> None:
    module = zch(20_000, opt_in_prob=25, percent_reserved_slots=5)
    rows_of(module, *range(10_000))
    assert 2300 < module.size < 2700


def test_ids_without_a_row_leave_their_bags_or_share_a_row() -> None:
    batch = JaggedTensor(torch.tensor([1, 9, 2, 9]), lengths=torch.tensor([2, 0, 2]))
    module = zch(4, disable_fallback=True)
    known = dict(zip((1, 2), rows_of(module, 1, 2), strict=True))
    module.eval()
    found = module({"t": batch})["t"]
    assert found.values().tolist() == [known[1], known[2]]
    assert found.lengths().tolist() == [1, 0, 1]
    kept = module({"t": batch}, mutate_miss_lengths=False)["t"]
    assert kept.values().tolist() == [known[1], -1, known[2], -1]
    sharing = zch(4).eval()
    assert set(rows_of(sharing, *range(100))) == {0, 1, 2, 3}


def test_evaluation_changes_nothing() -> None:
    for module in (zch(8, eviction_policy_name=LRU), mch(8)):
        rows_of(module, 1, 2, 3)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        module.eval()
        rows_of(module, *range(50))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


# ---- buckets ----


@pytest.mark.parametrize(
    "make",
    [lambda: mch(64, mc.LFU_EvictionPolicy(), 2, buckets=4), lambda: zch(64, 4, eviction_policy_name=LRU)],
    ids=["mch", "zch"],
)
def test_modules_of_whole_buckets_decide_as_the_whole_one(make: Any) -> None:
    whole = make()
    parts = [whole.rebuild_with_output_id_range((32 * n, 32 * n + 32), [0, 16, 32, 48, 64], CPU) for n in range(2)]
    rng = torch.Generator().manual_seed(3)
    for _ in range(12):
        ids = (torch.randn(60, generator=rng) * 40).long()
        expected, found = run(whole, ids), torch.full_like(ids, -1)
        shard = whole.bucket_of(ids) // 2
        for number, part in enumerate(parts):
            found[shard == number] = run(part, ids[shard == number])
        assert torch.equal(found, expected)
    assert whole.counters.evictions > 10


def run(module: Any, ids: Tensor) -> Tensor:
    return module({"t": JaggedTensor(ids, lengths=torch.ones_like(ids))})["t"].values()  # type: ignore[no-any-return]


# ---- state ----


@pytest.mark.parametrize("make", [lambda: zch(16, eviction_policy_name=LFU), lambda: mch(16)], ids=["zch", "mch"])
def test_a_loaded_module_goes_on_as_the_saved_one(make: Any) -> None:
    module, loaded, rng = make(), make(), torch.Generator().manual_seed(1)
    rows_of(loaded, 5, 6)
    for _ in range(5):
        run(module, (torch.randn(20, generator=rng) * 12).long())
    loaded.load_state_dict(module.state_dict())
    copies = [loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for _ in range(5):
        ids = (torch.randn(20, generator=rng) * 12).long()
        expected = run(module, ids)
        assert all(torch.equal(run(other, ids), expected) for other in copies)


def test_a_state_of_other_buckets_is_refused_unless_its_ids_are_in_theirs() -> None:
    module = zch(16, 2)
    rows = rows_of(module, *range(8))
    with pytest.raises(ValueError, match="ids outside of their buckets"):
        zch(16, 4).load_state_dict(module.state_dict())
    joined = zch(16, 1).eval()
    joined.load_state_dict(module.state_dict())
    assert rows_of(joined, *range(8)) == rows


# ---- arguments ----


def collection_of(modules: Any, *names: str) -> mc.ManagedCollisionCollection:
    tables = [BaseEmbeddingConfig(4, 4, name, feature_names=["f"]) for name in names]
    return mc.ManagedCollisionCollection(modules, tables)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zch(10, 3), "zch_size=10 rows are not 3 equal buckets"),
        (lambda: mch(4, buckets=4), "a bucket needs 2 rows"),
        (lambda: mch(4, interval=0), "eviction_interval=0 is below 1"),
        (lambda: zch(10, opt_in_prob=5), "needs reserved rows"),
        (lambda: zch(10, percent_reserved_slots=100), "is not in"),
        (lambda: zch(10, eviction_policy_name=SINGLE_TTL), "needs eviction_config with single_ttl"),
        (lambda: zch(8, 4).rebuild_with_output_id_range((0, 3)), r"row_wise\(num_buckets=4\)"),
        (lambda: collection_of({}, "t"), "table 't' has no module"),
        (lambda: collection_of({"t": zch(5)}, "t"), "has 4 rows, and its module 5. Fix: zch_size=4"),
        (lambda: collection_of({"t": zch(4), "u": zch(4)}, *"tu"), "feature 'f' is read by tables 't' and 'u'"),
    ],
)
def test_wrong_arguments_are_named(make: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_weights_of_ids_without_a_row_are_refused() -> None:
    modules = collection_of({"t": zch(4, disable_fallback=True)}, "t").eval()
    batch = KeyedJaggedTensor(["f"], torch.tensor([1]), torch.tensor([0.5]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match="1 ids look up no row, and the batch has weights"):
        modules(batch)
