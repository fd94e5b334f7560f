"""`DynamicTable`: rows that belong to ids, by the operations of HierarchicalKV."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.table import DynamicTable


def table(capacity: int = 128, **more: Any) -> DynamicTable:
    return DynamicTable(DynamicEmbeddingConfig("user", 4, capacity, **more))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_initial_rows_depend_on_seed_table_and_id_alone() -> None:
    first, second = table(), table(4096)
    config = DynamicEmbeddingConfig("user", 4, 128, weight_init_min=-1, weight_init_max=1)
    many = torch.arange(-5000, 5000)
    rows = DynamicTable(config).initial(many)
    a = first.find_or_insert(ids(3, 9))
    second.find_or_insert(ids(1, 2, 9))
    scale = (128 / 4096) ** 0.5  # the default range depends on the capacity
    torch.testing.assert_close(a[1] * scale, second.find(ids(9))[0][0])
    assert rows.unique().numel() > 39_000
    assert rows.mean().abs() < 0.02
    assert rows.std() == pytest.approx(3**-0.5, rel=0.02)
    assert torch.corrcoef(rows.T).fill_diagonal_(0).abs().max() < 0.04
    for other in ({"seed": 1}, {"name": "item"}):
        changed = DynamicEmbeddingConfig(**{"name": "user", "embedding_dim": 4, "capacity": 128} | other)
        assert not torch.equal(DynamicTable(changed).initial(ids(3)), first.initial(ids(3)))
    columns = DynamicTable(config, columns=(2, 4)).initial(many)
    assert torch.equal(columns, rows[:, 2:])


def test_insert_and_evict_returns_exactly_what_lost_its_slot() -> None:
    one = table()
    first = torch.arange(128)
    assert len(one.insert_and_evict(first, first[:, None].expand(-1, 4).float()).ids) == 0
    evicted = one.insert_and_evict(ids(500, 501, 500), torch.tensor([[1.0], [2.0], [3.0]]).expand(-1, 4))
    assert evicted.ids.tolist() == [0, 1]  # equal scores: the smallest ids
    assert evicted.weight[:, 0].tolist() == [0.0, 1.0]
    assert one.find(ids(500, 501))[0][:, 0].tolist() == [3.0, 2.0]
    assert one.size == 128


def test_export_gives_every_row_once_and_erase_removes_it() -> None:
    one = table(1000, evict="lfu")
    one.slots_for(torch.arange(600))
    one.slots_for(torch.arange(300))
    assert one.erase_if(lambda ids, scores: (scores == 1) & (ids % 2 == 0)) == 150
    assert one.erase(ids(599, 12345)) == 1
    batches = list(one.export_batches(100))
    assert [len(batch.ids) for batch in batches] == [100, 100, 100, 100, 49]
    exported = torch.cat([batch.ids for batch in batches])
    assert exported.sort().values.tolist() == [*range(300), *range(301, 599, 2)]
    assert torch.equal(torch.cat([batch.weight for batch in batches]), one.initial(exported))
    since = torch.cat([batch.ids for batch in one.export_batches(since=2)])
    assert since.sort().values.tolist() == list(range(300))


def test_a_table_admits_by_occurrences_by_probability_and_by_a_function() -> None:
    often = table(2048, admit=3)
    assert (often.slots_for(ids(1, 1, 2)) >= 0).tolist() == [False, False, False]
    assert (often.slots_for(ids(1, 2)) >= 0).tolist() == [True, False]
    assert (often.slots_for(ids(3, 3, 3)) >= 0).all()
    assert (often.size, often.counters.refusals) == (2, 3)
    odd = table(admit=lambda absent: absent % 2 == 1)
    assert (odd.slots_for(ids(1, 2, 3)) >= 0).tolist() == [True, False, True]
    half = table(1 << 14, admit=0.3)
    half.slots_for(torch.arange(10_000))
    assert half.size == pytest.approx(3000, rel=0.05)
    twin = table(1 << 14, admit=0.3)
    twin.slots_for(torch.arange(10_000).flip(0))
    assert torch.equal(half.index.keys, twin.index.keys)
    half.slots_for(torch.arange(10_000))
    assert half.size == pytest.approx(5100, rel=0.05)


def test_counts_of_absent_ids_have_the_steps_of_the_table() -> None:
    """Shards without absent ids in a batch would fall behind, and steps of moved counts could not be compared."""
    one = table(2048, admit=2)
    for batch in (ids(1, 1), ids(1), ids(1, 5)):
        one.slots_for(batch)
    assert one.admission_counts is not None
    assert one.admission_counts.step == one.index.step == 3


def test_a_function_scores_ids() -> None:
    one = table(evict=lambda batch: -batch)
    one.slots_for(torch.arange(128))
    one.slots_for(ids(200))
    assert one.slots_of(ids(127)).tolist() == [-1]
    assert one.slots_of(ids(0)).tolist() != [-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 1.5}, "table 'user': capacity must be a positive integer, got 1.5"),
        ({"capacity": 9, "max_capacity": 8}, "capacity 9 is above max_capacity 8. Fix: raise max_capacity"),
        ({"capacity": 9, "evict": "fifo"}, "evict='fifo' is not supported. Fix: use 'lru', 'lfu'"),
        ({"capacity": 9, "absent": "none"}, "absent='none' is not supported. Fix: use 'initial', 'zero'"),
        ({"capacity": 9, "admit": 0}, "admit=0 is not supported. Fix: use a probability between 0 and 1"),
        ({"capacity": 9, "admit": 2.5}, "admit=2.5 is not supported"),
    ],
)
def test_wrong_configs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicEmbeddingConfig("user", 4, **arguments)


def test_an_admission_that_returns_no_mask_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"table 'user': admit\(ids\) must return torch.bool \[2\], got torch.int64 \[2\]"
    ):
        table(admit=lambda absent: absent).slots_for(ids(1, 2))
