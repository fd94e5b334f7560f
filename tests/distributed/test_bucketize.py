"""Sorting ids by row stripe: fbgemm and plain torch agree with a loop over bags."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.distributed.step.route import RowSplits, has_fbgemm

WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not has_fbgemm(), reason="fbgemm is not installed"))]


@st.composite
def batches(draw: Any) -> tuple[list[int], list[list[int]], list[list[list[int]]]]:
    """(rows of each feature's table, its stripes' first rows, its bags)."""
    rows, starts, features = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 40))
        cuts = draw(st.sets(st.integers(1, count - 1), max_size=12)) if count > 1 else set()
        rows.append(count)
        starts.append([0, *sorted(cuts)])
        bag = st.lists(st.integers(0, count - 1), max_size=4)
        features.append(draw(st.lists(bag, min_size=0, max_size=5)))
    return rows, starts, features


@pytest.mark.parametrize("use_fbgemm", WAYS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@settings(max_examples=60, deadline=None)
@given(batch=batches(), even=st.booleans())
def test_ids_go_to_their_stripe_in_order(use_fbgemm: bool, dtype: torch.dtype, batch: Any, even: bool) -> None:
    rows, starts, features = batch
    if even:
        starts = [list(range(0, count, -(-count // 3))) for count in rows]
    bags = [len(own) for own in features]
    stripes = RowSplits(rows, starts, bags, torch.empty(0, dtype=dtype), use_fbgemm)
    flat = [bag for own in features for bag in own]
    lengths = torch.tensor([len(bag) for bag in flat], dtype=dtype)
    ids = torch.tensor([i for bag in flat for i in bag], dtype=dtype)
    weights = torch.arange(ids.numel(), dtype=torch.float32)
    made = stripes.sort(lengths, ids, weights, True)

    expected_lengths, expected_ids, expected_order = [], [], []
    for stripe in range(stripes.count):
        place = 0
        for feature, own in enumerate(features):
            cuts = [*starts[feature], rows[feature]]
            for bag in own:
                here = []
                for i in bag:
                    if stripe + 1 < len(cuts) and cuts[stripe] <= i < cuts[stripe + 1]:
                        here.append(i - cuts[stripe])
                        expected_order.append(place)
                    place += 1
                expected_lengths.append(len(here))
                expected_ids += here
    assert made.lengths.tolist() == expected_lengths
    assert made.ids.tolist() == expected_ids
    assert made.order is not None
    assert made.order.tolist() == expected_order
    assert made.weights is not None
    assert made.weights.tolist() == expected_order
    assert made.lengths.dtype == made.ids.dtype == dtype


def test_a_batch_without_bags_does_not_reach_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CUDA kernel refuses a grid of size 0."""
    monkeypatch.setattr(RowSplits, "_with_fbgemm", None)
    nothing = torch.empty(0, dtype=torch.int64)
    made = RowSplits([10, 4], [[0, 5], [0]], [0, 0], nothing, use_fbgemm=True).sort(nothing, nothing, None, True)
    assert [made.lengths.tolist(), made.ids.tolist()] == [[], []]
