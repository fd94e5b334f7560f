"""Batches compared by what they hold, and buffers that batches are copied into."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given

from recshard_lab import sparse
from tests.refusals import not_refused
from tests.sparse.jagged_batches import Batch, assert_holds, batches

IDS = torch.arange(4)


@given(batches())
def test_a_batch_equals_itself_however_it_was_given(batch: Batch) -> None:
    cut = batch.cut()
    by_lengths = sparse.KeyedJaggedTensor(
        batch.keys, batch.flat(), batch.flat_weights(), lengths=batch.lengths(), **cut
    )
    by_offsets = sparse.KeyedJaggedTensor(
        batch.keys, batch.flat(), batch.flat_weights(), offsets=batch.offsets(), **cut
    )
    assert sparse.kjt_is_equal(by_lengths, by_offsets)
    for key in batch.keys:
        assert sparse.jt_is_equal(by_lengths[key], by_offsets[key])


def one(**parts: Any) -> sparse.KeyedJaggedTensor:
    given = {"keys": ["a", "b"], "values": IDS, "lengths": torch.tensor([1, 2, 1, 0]), **parts}
    return sparse.KeyedJaggedTensor(**given)


def test_a_batch_differs_from_one_that_holds_something_else() -> None:
    others: list[dict[str, Any]] = [
        {"keys": ["a", "c"]}, {"keys": ["b", "a"]}, {"values": IDS + 1}, {"lengths": torch.tensor([2, 1, 1, 0])},
        {"values": torch.arange(5), "lengths": torch.tensor([1, 2, 1, 1])}, {"weights": torch.ones(4)},
        {"stride_per_key_per_rank": [[1], [3]]}, {"inverse_indices": (["a"], torch.tensor([[0, 1]]))},
    ]  # fmt: skip
    assert sparse.kjt_is_equal(one(), one())
    for other in (*(one(**parts) for parts in others), "no batch"):
        assert not sparse.kjt_is_equal(one(), other), other  # type: ignore[arg-type]
        assert not sparse.kjt_is_equal(other, one()), other  # type: ignore[arg-type]


@given(batches())
def test_buffers_made_like_a_batch_take_another_of_its_shape_in_place(batch: Batch) -> None:
    kjt = batch.kjt()
    buffers = sparse.KeyedJaggedTensor.empty_like(kjt, torch.device("cpu"))
    memory = buffers.values().data_ptr()
    assert buffers.copy_(kjt) is buffers
    assert buffers.values().data_ptr() == memory
    assert_holds(buffers, batch.keys, batch.rows, batch.weights, batch.stride)
    assert sparse.kjt_is_equal(buffers, kjt)
    if batch.keys:
        bags = kjt[batch.keys[0]]
        assert sparse.jt_is_equal(sparse.JaggedTensor.empty_like(bags, torch.device("cpu")).copy_(bags), bags)
        empty = sparse.JaggedTensor.empty_like(bags)
        assert (empty.to_dense(), empty.values().dtype) == ([], bags.values().dtype)


@given(batches())
def test_dicts_of_features_go_through_the_modules_and_back(batch: Batch) -> None:
    kjt = batch.kjt()
    features = sparse.ComputeKJTToJTDict()(kjt)
    assert list(features) == batch.keys
    assert all(part.offsets_or_none() is not None for part in features.values())
    if batch.keys:
        again = sparse.ComputeJTDictToKJT()(features)
        assert_holds(again, batch.keys, batch.rows, batch.weights, max(map(len, batch.rows)))


def test_sizes_count_every_tensor_that_is_there() -> None:
    assert sparse.JaggedTensor(IDS, lengths=torch.tensor([4])).size_in_bytes() == 4 * 8 + 8
    assert one(weights=torch.ones(4)).size_in_bytes() == 4 * 8 + 4 * 8 + 4 * 4
    assert one(inverse_indices=(["a"], torch.tensor([[0, 1]]))).size_in_bytes() == 4 * 8 + 4 * 8 + 2 * 8
    assert sparse.KeyedTensor(["a"], [2], torch.ones(3, 2)).size_in_bytes() == 3 * 2 * 4


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "other keys": (lambda: one().copy_(one(keys=["a", "c"])), r"same keys and samples, here \['a', 'b'\] x 2"),
    "shape": (lambda: one().copy_(one(values=torch.arange(5), lengths=torch.tensor([1, 2, 1, 1]))), "of one shape"),
    "weights in one": (lambda: one().copy_(one(weights=torch.ones(4))), r"weights .* here None, given \[4\]"),
    "something else": (lambda: one().copy_(one()["a"]), "copy_ takes a KeyedJaggedTensor, got JaggedTensor"),  # type: ignore
    "like something else": (lambda: sparse.KeyedJaggedTensor.empty_like(IDS), "kjt must be a KeyedJagged"),  # type: ignore
}


def test_a_copy_that_does_not_fit_is_refused() -> None:
    assert not_refused(BAD) == []
