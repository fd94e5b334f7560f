"""`ScoredIndex` against dictionaries with the same rules, and its two backends against each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.embedding.dynamic.index import EVICT, ScoredIndex
from recshard_lab.embedding.kernels import available
from tests.embedding.dynamic.reference import ReferenceIndex
from tests.grid import examples

BACKENDS = ["native", pytest.param("numba", marks=pytest.mark.skipif("numba" not in available(), reason="needs numba"))]
#: few distinct ids, so that batches repeat them; the extremes of int64 among them
POOL = [-(1 << 63), (1 << 63) - 1, 0, -1, *((i * 0x9E3779B97F4A7C15) % (1 << 62) for i in range(900))]


@settings(deadline=None, max_examples=examples(13, 40))
@given(st.data())
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_is_dictionaries_with_the_same_rules(backend: str, data: Any) -> None:
    evict, choices = data.draw(st.sampled_from(EVICT)), data.draw(st.sampled_from([1, 2]))
    index = ScoredIndex(data.draw(st.sampled_from([128, 256, 512])), evict=evict, choices=choices, backend=backend)
    reference = ReferenceIndex(index.partitions, index.buckets, evict, choices)
    for _ in range(data.draw(st.integers(1, 8))):
        seed, size, reach = data.draw(
            st.tuples(st.integers(0, 1 << 20), st.integers(0, 300), st.integers(1, len(POOL)))
        )
        rng = torch.Generator().manual_seed(seed)
        batch = [POOL[i] for i in torch.randint(0, reach, (size,), generator=rng).tolist()]
        scores = torch.randint(-50, 50, (size,), generator=rng) if evict == "custom" else None
        match data.draw(st.sampled_from(["insert", "insert", "insert", "pinned", "refuse", "erase", "epoch", "find"])):
            case "erase":
                index.erase(torch.tensor(batch, dtype=torch.int64))
                reference.erase(batch)
            case "epoch":
                index.epoch = reference.epoch = index.epoch + 1
            case "find":
                before = index.scores.clone()
                found = index.find(torch.tensor(batch, dtype=torch.int64))
                assert [slot >= 0 for slot in found.tolist()] == [reference.entry(key) is not None for key in batch]
                assert torch.equal(index.scores, before)
                hits = sum(reference.entry(key) is not None for key in batch)
                reference.counters.update(lookups=size, hits=hits, misses=size - hits)
            case kind:
                pinned = max(0, index.step - 1) if kind == "pinned" else None
                rule = (lambda key, times: key % 3 > 0) if kind == "refuse" else (lambda key, times: True)
                found = index.find_or_insert(
                    torch.tensor(batch, dtype=torch.int64),
                    scores,
                    admit=(lambda ids, counts: ids % 3 > 0) if kind == "refuse" else None,
                    pinned_from=pinned,
                )
                evicted = reference.find_or_insert(batch, scores.tolist() if scores is not None else None, rule, pinned)
                assert found.evicted_ids.tolist() == evicted
                slots = {}
                for key, slot in zip(batch, found.slots.tolist(), strict=True):
                    assert slots.setdefault(key, slot) == slot
                    assert (slot >= 0) == (reference.entry(key) is not None)
                present = [slot for slot in slots.values() if slot >= 0]
                assert len(set(present)) == len(present)
        assert index.counters.as_dict() == {name: reference.counters[name] for name in index.counters.as_dict()}
        slots = index.slots()
        assert dict(zip(index.keys[slots].tolist(), index.scores[slots].tolist(), strict=True)) == reference.ids()
        assert index.size == len(slots)


@pytest.mark.skipif("numba" not in available(), reason="needs numba")
@pytest.mark.parametrize("evict", EVICT)
def test_both_backends_choose_the_same_slots_and_the_order_of_a_batch_does_not_matter(evict: str) -> None:
    first, second = (ScoredIndex(1000, 4000, evict=evict, backend=backend) for backend in ("numba", "native"))
    torch.manual_seed(1)
    for step in range(40):
        ids = (torch.randn(400) * 3000).long() * 7919
        scores = torch.randint(0, 100, (400,)) if evict == "custom" else None
        order = torch.randperm(400)
        found = first.find_or_insert(ids, scores)
        other = second.find_or_insert(ids[order], None if scores is None else scores[order])
        assert torch.equal(found.slots[order], other.slots)
        for name in ("keys", "tags", "scores", "touched"):
            assert torch.equal(getattr(first, name), getattr(second, name)), (step, name)
        assert first.counters == second.counters
        if step % 7 == 3:
            assert torch.equal(first.erase(ids[:50]), second.erase(ids[:50]))
    assert first.counters.evictions > 1000
    assert first.capacity == 4096


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_index_grows_before_it_evicts_and_every_id_keeps_its_score(backend: str) -> None:
    index = ScoredIndex(256, 1 << 14, evict="lfu", backend=backend)
    ids = torch.arange(9000) * 1_000_003
    slots = torch.full((9000,), -1)
    for first in range(0, 9000, 300):
        batch = ids[: first + 300]
        found = index.find_or_insert(batch)
        if found.moved is not None:
            before, after = found.moved
            assert torch.equal(before.unique(), before.sort().values)
            moved = dict(zip(before.tolist(), after.tolist(), strict=True))
            slots = torch.tensor([moved.get(slot, -1) for slot in slots.tolist()])
        old = slots >= 0
        assert torch.equal(index.find(ids)[old], slots[old])
        slots[: first + 300] = found.slots
    assert index.counters.evictions == 0
    assert index.size == 9000
    assert index.scores[slots[0]] == 30
    assert index.scores[slots[-1]] == 1


def test_an_index_grows_around_a_pinned_batch_and_never_evicts_it() -> None:
    index = ScoredIndex(1024, 2048)
    index.find_or_insert(torch.arange(900))
    second = index.find_or_insert(torch.arange(900, 1500), pinned_from=1)
    assert second.moved is not None
    assert bool((second.slots >= 0).all())
    third = index.find_or_insert(torch.arange(1500, 3000), pinned_from=1)
    assert index.counters.evictions == 0
    assert index.counters.overflows == int((third.slots < 0).sum()) > 800
    assert bool(index.contains(torch.arange(1500)).all())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, "capacity=0 must be from 1 to max_capacity=0"),
        ({"capacity": 9, "max_capacity": 8}, "capacity=9 must be from 1 to max_capacity=8"),
        ({"capacity": 9, "evict": "fifo"}, "evict='fifo' is not supported. Fix: use one of lru"),
        ({"capacity": 9, "choices": 3}, "choices=3 is not supported"),
        ({"capacity": 9, "backend": "cuda"}, "backend='cuda' is not supported"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoredIndex(**arguments)


def test_ids_and_scores_of_other_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids must be int64 or int32 of one axis, got torch.float32 \[2\]"):
        ScoredIndex(128).find(torch.zeros(2))
    with pytest.raises(ValueError, match=r"id \d+ is not of the partitions of this shard"):
        ScoredIndex(1024, shard=(0, 2)).find(torch.arange(100))
    with pytest.raises(ValueError, match="evict='custom' needs scores"):
        ScoredIndex(128, evict="custom").find_or_insert(torch.tensor([1]))
    with pytest.raises(ValueError, match="evict='lru' computes scores"):
        ScoredIndex(128).find_or_insert(torch.tensor([1]), torch.tensor([1]))
