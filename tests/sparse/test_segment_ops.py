"""Offsets and reordered segments against plain lists."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.sparse import complete_cumsum, gather_segments, ops

LENGTHS = st.lists(st.integers(0, 5), max_size=12)
INTEGERS = st.sampled_from([torch.int32, torch.int64])


@given(LENGTHS, st.sampled_from([torch.uint8, torch.int32, torch.int64]))
def test_offsets_are_the_running_sum_in_int64(lengths: list[int], dtype: torch.dtype) -> None:
    offsets = complete_cumsum(torch.tensor(lengths, dtype=dtype))
    assert offsets.dtype == torch.int64
    assert offsets.tolist() == [0, *accumulate(lengths)]


def test_offsets_of_small_integers_do_not_overflow() -> None:
    assert complete_cumsum(torch.full((3,), 200, dtype=torch.uint8)).tolist() == [0, 200, 400, 600]
    assert complete_cumsum(torch.full((2,), 2**31 - 1, dtype=torch.int32))[-1].item() == 2**32 - 2


@pytest.fixture(params=["torch", "slices", "fbgemm"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way of copying, for all sizes; fbgemm where it is installed."""
    if request.param == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    monkeypatch.setattr(ops, "USE_FBGEMM", request.param == "fbgemm")
    monkeypatch.setattr(ops, "_IDS_PER_SLICE", 0 if request.param == "slices" else 10**9)
    return request.param


@st.composite
def reorderings(draw: st.DrawFn) -> tuple[list[list[int]], list[int], dict[str, Any]]:
    lengths = draw(LENGTHS)
    values = iter(range(100, 200))
    segments = [[next(values) for _ in range(length)] for length in lengths]
    place = st.integers(0, len(lengths) - 1)
    order = draw(st.lists(place, max_size=15)) if lengths else []
    return segments, order, {"ids": draw(INTEGERS), "lengths": draw(INTEGERS), "order": draw(INTEGERS)}


def test_segments_come_in_the_order_asked_for(path: str) -> None:
    @given(reorderings(), st.booleans(), st.booleans())
    def check(case: tuple[list[list[int]], list[int], dict[str, Any]], weighted: bool, sized: bool) -> None:
        segments, order, dtypes = case
        values = torch.tensor([value for segment in segments for value in segment], dtype=dtypes["ids"])
        lengths = torch.tensor([len(segment) for segment in segments], dtype=dtypes["lengths"])
        weights = values.float() / 3 if weighted else None
        wanted = [value for place in order for value in segments[place]]
        new_values, new_lengths, new_weights = gather_segments(
            values,
            lengths,
            torch.tensor(order, dtype=dtypes["order"]),
            weights,
            output_size=len(wanted) if sized else None,
        )
        assert new_values.tolist() == wanted
        assert new_values.dtype == dtypes["ids"]
        assert new_lengths.tolist() == [len(segments[place]) for place in order]
        assert new_lengths.dtype == dtypes["lengths"]
        if weighted:
            assert new_weights is not None
            assert torch.equal(new_weights, torch.tensor(wanted).float() / 3)
        else:
            assert new_weights is None

    check()


def test_gradients_of_weights_flow_back_and_add_up(path: str) -> None:
    weights = torch.ones(4, dtype=torch.float32, requires_grad=True)
    _, _, got = gather_segments(torch.arange(4), torch.tensor([1, 2, 1]), torch.tensor([1, 1, 2]), weights)
    got.sum().backward()
    assert weights.grad.tolist() == [0, 2, 2, 1]


@pytest.mark.parametrize(
    ("lengths", "order", "message"),
    [
        ([2, 2], [0, 2], r"order\[1\] is 2, but there are 2 segments"),
        ([2, 2], [-1], r"order\[0\] is -1, but there are 2 segments"),
        ([2, 3], [0], "lengths sum to 5, but values has 4"),
        ([5, -1], [0], r"lengths\[1\] is -1"),
    ],
)
def test_reads_beyond_the_values_are_refused(path: str, lengths: list[int], order: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_segments(torch.arange(4), torch.tensor(lengths), torch.tensor(order))
