"""Any number of ranks sees one process's samples in its order, and a loader that is stopped goes on where it stood."""

from collections.abc import Iterator
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.data import Batch, BatchLoader, SamplePart, SampleSource, SyntheticClicks, SyntheticRatings
from recshard_lab.data.order import SampleOrder


class Numbered(SyntheticClicks):
    """Clicks whose first dense feature is the sample's own number."""

    def batch(self, samples: object) -> Batch:
        batch = super().batch(samples)  # type: ignore[arg-type]
        batch.dense_features[:, 0] = torch.from_numpy(np.asarray(samples, np.int64)).float()
        return batch


def numbers(batches: Iterator[Batch] | BatchLoader) -> list[list[int]]:
    return [batch.dense_features[:, 0].int().tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


SOURCES = {
    "clicks": lambda: SyntheticClicks(103, rows=[5, 700]),
    "part of clicks": lambda: SamplePart(SyntheticClicks(300, rows=[5, 700]), 90, 193),
    "ratings": lambda: SyntheticRatings(103, 40, 50),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("shuffle", [False, True])
def test_pieces_of_all_ranks_are_the_batches_of_one(source: object, shuffle: bool) -> None:
    data = source()  # type: ignore[operator]
    assert isinstance(data, SampleSource)
    alone = list(BatchLoader(data, 10, shuffle=shuffle, seed=4))
    ranks = [list(BatchLoader(data, 10, rank, 3, shuffle=shuffle, seed=4)) for rank in range(3)]
    assert [len(each) for each in ranks] == [len(alone)] * 3 == [11] * 3
    for whole, *pieces in zip(alone, *ranks, strict=True):
        assert torch.equal(whole.labels, torch.cat([piece.labels for piece in pieces]))
        assert torch.equal(whole.dense_features, torch.cat([piece.dense_features for piece in pieces]))
        assert {(piece.global_size, piece.world_size) for piece in pieces} == {(len(whole), 3)}
        for key in data.features:
            told = [piece.sparse_features[key] for piece in pieces]
            assert torch.equal(whole.sparse_features[key].values(), torch.cat([own.values() for own in told]))
            assert torch.equal(whole.sparse_features[key].lengths(), torch.cat([own.lengths() for own in told]))


@given(
    size=st.integers(0, 400),
    window=st.integers(1, 500),
    seed=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 400), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_an_order_visits_every_sample_once_with_any_cuts(size: int, window: int, seed: int, cuts: list[int]) -> None:
    order = SampleOrder(size, seed, 2, window=window)
    ends = sorted({0, size, *(min(cut, size) for cut in cuts)})
    pieces = [list(order.stretch(a, b)) for a, b in pairwise(ends)]
    whole = [sample for piece in pieces for sample in piece]
    assert sorted(whole) == list(range(size))
    assert whole == list(SampleOrder(size, seed, 2, window=window).stretch(0, size))


@pytest.mark.parametrize("seed", range(4))
def test_windows_hold_the_samples_between_their_ends(seed: int) -> None:
    order = SampleOrder(100, seed, 0, window=48)  # 34 blocks of 3 samples, the last of 1, 16 to a window
    assert [len(order._window(n)) for n in range(len(order.ends))] == np.diff(order.ends, prepend=0).tolist()
    assert order.ends[-1] == 100


def whole_epochs(count: int, batch_size: int = 8) -> list[int]:
    loader = BatchLoader(Numbered(50, rows=[3]), batch_size, shuffle=True, seed=1)
    return [number for _ in range(count) for number in flat(numbers(loader))]


@pytest.mark.parametrize("stop", range(8))
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_resumes_after_any_batch_at_any_world_size_and_batch_size(
    stop: int, world: int, prefetch: int
) -> None:
    before = BatchLoader(Numbered(50, rows=[3]), 8, shuffle=True, seed=1, prefetch=prefetch)
    seen = flat(numbers(islice(before, stop)))
    state = before.state_dict()
    ranks = [BatchLoader(Numbered(50, rows=[3]), 5, rank, world, shuffle=True, seed=1) for rank in range(world)]
    for rank in ranks:
        rank.load_state_dict(state)
        assert rank.state_dict() == state
    rest = [piece for pieces in zip(*map(numbers, ranks), strict=True) for piece in flat(list(pieces))]
    if len(seen) < 50:
        assert seen + rest == whole_epochs(1)
        rest = [piece for pieces in zip(*map(numbers, ranks), strict=True) for piece in flat(list(pieces))]
    assert rest == whole_epochs(2)[50:]


def test_batches_that_a_pipeline_still_holds_come_again() -> None:
    loader = BatchLoader(Numbered(50, rows=[3]), 8)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    again = BatchLoader(Numbered(50, rows=[3]), 8)
    again.load_state_dict(loader.state_dict(batches_ahead=2))
    assert numbers(again)[0] == list(range(24, 32))
    for _ in batches:
        pass
    assert loader.state_dict()["epoch"] == 1
    again.load_state_dict(loader.state_dict(batches_ahead=1))
    assert numbers(again) == [[48, 49]]
    with pytest.raises(ValueError, match="batches_ahead must be from 0 to the batches handed out"):
        BatchLoader(Numbered(50, rows=[3]), 8).state_dict(batches_ahead=1)


def test_a_short_last_batch_is_dropped_when_asked_for() -> None:
    loader = BatchLoader(Numbered(50, rows=[3]), 8, drop_last=True)
    assert [len(batch) for batch in numbers(loader)] == [8] * 6
    assert len(loader) == 6
    assert loader.total == 48


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"seed": 2}, "the state has seed 1, this loader 2"),
        ({"shuffle": False}, "the state has shuffle True"),
        ({"window": 9}, "window"),
    ],
)
def test_a_state_of_another_order_is_refused_and_changes_nothing(other: dict[str, object], says: str) -> None:
    given = {"shuffle": True, "seed": 1}
    state = BatchLoader(Numbered(50, rows=[3]), 8, **given).state_dict()  # type: ignore[arg-type]
    loader = BatchLoader(Numbered(50, rows=[3]), 8, **{**given, **other})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        loader.load_state_dict(state)
    with pytest.raises(ValueError, match="the state has size 50, this loader 51"):
        BatchLoader(Numbered(51, rows=[3]), 8, **given).load_state_dict(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stands at epoch 0, sample 51 of 50"):
        BatchLoader(Numbered(50, rows=[3]), 8, **given).load_state_dict({**state, "samples": 51})  # type: ignore[arg-type]
    assert loader.position.samples == 0


def test_what_a_source_raises_ahead_is_raised_in_its_place() -> None:
    class Breaking(Numbered):
        def batch(self, samples: object) -> Batch:
            if 24 in samples:  # type: ignore[operator]
                raise ValueError("sample 24 is broken")
            return super().batch(samples)

    batches = iter(BatchLoader(Breaking(50, rows=[3]), 8, prefetch=2))
    assert flat(numbers(islice(batches, 3))) == list(range(24))
    with pytest.raises(ValueError, match="sample 24 is broken"):
        next(batches)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no CUDA device")
def test_pinned_memory_without_a_cuda_device_is_refused() -> None:
    with pytest.raises(ValueError, match="pin_memory=True needs a CUDA device"):
        BatchLoader(Numbered(50, rows=[3]), 8, pin_memory=True)
