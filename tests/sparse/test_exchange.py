"""A batch taken apart for an exchange between ranks, and put together again from what every rank sent."""

from typing import Any

import pytest
import torch
from torch import Tensor

from recshard_lab.sparse import KeyedJaggedTensor, kjt_is_equal

KEYS = ["a", "b", "c"]


def local(rank: int, weighted: bool, variable: bool) -> KeyedJaggedTensor:
    """A batch of `rank + 2` samples; if variable, feature f has `f + rank + 1` bags."""
    generator = torch.Generator().manual_seed(rank)
    bags = [number + rank + 1 for number in range(3)] if variable else [rank + 2] * 3
    lengths = torch.randint(0, 4, (sum(bags),), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        KEYS,
        torch.randint(0, 100, (count,), generator=generator),
        torch.rand(count, generator=generator) if weighted else None,
        lengths,
        stride_per_key_per_rank=[[number] for number in bags] if variable else None,
    )


def received(batches: list[KeyedJaggedTensor], key_splits: list[int], rank: int) -> list[Tensor]:
    """What `rank` receives of each tensor, rank after rank, by the splits alone."""
    parts = []
    for batch in batches:
        tensors, splits = batch.dist_tensors(), batch.dist_splits(key_splits)
        parts.append([tensor.split(sizes)[rank] for tensor, sizes in zip(tensors, splits, strict=True)])
    return [torch.cat(pieces) for pieces in zip(*parts, strict=True)]


@pytest.mark.parametrize("variable", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_gets_its_features_of_all_ranks(world_size: int, weighted: bool, variable: bool) -> None:
    batches = [local(rank, weighted, variable) for rank in range(world_size)]
    key_splits = [3] if world_size == 1 else [1, 0, 2]
    names = ["lengths", "values", *(["strides"] if variable else []), *(["weights"] if weighted else [])]
    assert batches[0].dist_labels() == names
    for rank, count in enumerate(key_splits):
        keys = KEYS[sum(key_splits[:rank]) :][:count]
        if not keys:
            continue
        strides = None if variable else [batch.stride() for batch in batches]
        found = KeyedJaggedTensor.dist_init(
            keys,
            received(batches, key_splits, rank),
            variable,
            world_size,
            recat_of(len(keys), strides, world_size),
            strides,
        )
        for key in keys:
            parts = [batch[key] for batch in batches]
            assert torch.equal(found[key].lengths(), torch.cat([part.lengths() for part in parts]))
            assert torch.equal(found[key].values(), torch.cat([part.values() for part in parts]))
            if weighted:
                assert torch.equal(found[key].weights(), torch.cat([part.weights() for part in parts]))
        if variable:
            index = KEYS.index(keys[0])
            assert found.stride_per_key_per_rank()[0] == [batch.stride_per_key()[index] for batch in batches]


def recat_of(features: int, strides: list[int] | None, ranks: int) -> Tensor:
    """Segments, or bags if ranks have different samples, feature after feature."""
    segments = torch.arange(ranks * features).reshape(ranks, features)
    if strides is None or len(set(strides)) == 1:
        return segments.T.reshape(-1)
    bags = torch.arange(features * sum(strides)).split([stride for stride in strides for _ in range(features)])
    return torch.cat([bags[int(place)] for place in segments.T.reshape(-1)])


def test_a_received_order_that_is_right_stays() -> None:
    batch = local(0, weighted=True, variable=False)
    again = KeyedJaggedTensor.dist_init(KEYS, batch.dist_tensors(), False, 1, None, [batch.stride()])
    assert kjt_is_equal(again, batch)
    assert again.length_per_key_or_none() == batch.length_per_key()


def test_staggered_ranks_are_put_back_into_groups() -> None:
    strides = torch.tensor([0, 1, 2, 3, 4, 5])
    tensors = [torch.ones(15, dtype=torch.int64), torch.arange(15), strides]
    found = KeyedJaggedTensor.dist_init(["a"], tensors, True, 6, None, None, stagger=2)
    assert found.stride_per_key_per_rank() == [[0, 3, 1, 4, 2, 5]]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "one tensor": ({"tensors": [torch.ones(1)]}, "tensors has 1 entries, expected 2, or 3 with weights"),
    "no samples": ({"stride_per_rank": None}, "stride_per_rank is None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name: str) -> None:
    changed, message = WRONG[name]
    batch = local(0, weighted=False, variable=False)
    right = {"tensors": batch.dist_tensors(), "recat": None, "stride_per_rank": [2]}
    with pytest.raises(ValueError, match=message):
        KeyedJaggedTensor.dist_init(KEYS, variable_stride_per_key=False, num_workers=1, **{**right, **changed})
    with pytest.raises(ValueError, match=r"key_splits \[1, 1\] sum to 2, but there are 3 keys"):
        batch.dist_splits([1, 1])


def test_cleared_storage_is_freed_for_every_view() -> None:
    batch = local(0, weighted=True, variable=False)
    view = batch.values()[1:]
    batch.clear_storage()
    assert view.untyped_storage().nbytes() == batch.lengths().untyped_storage().nbytes() == 0
    assert batch.keys() == KEYS
