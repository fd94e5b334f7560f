"""JaggedTensor against plain lists and torch's own padding."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from recshard_lab.sparse import JaggedTensor
from tests.refusals import not_refused

BAGS = st.lists(st.lists(st.integers(0, 999), max_size=4), max_size=6)


def build(bags: list[list[int]], weighted: bool = False, by_offsets: bool = False) -> JaggedTensor:
    values = torch.tensor([value for bag in bags for value in bag], dtype=torch.int64)
    weights = values.double() / 7 if weighted else None
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    if by_offsets:
        return JaggedTensor(values, weights, offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]))
    return JaggedTensor(values, weights, lengths)


@given(BAGS, st.booleans(), st.booleans())
def test_bags_come_out_as_they_went_in(bags: list[list[int]], weighted: bool, by_offsets: bool) -> None:
    jagged = build(bags, weighted, by_offsets)
    dense_weights = jagged.to_dense_weights()
    copies = [pickle.loads(pickle.dumps(jagged)), copy.deepcopy(jagged), pytree.tree_map(torch.clone, jagged)]
    for again in (jagged, *copies, jagged.to("cpu")):
        assert [bag.tolist() for bag in again.to_dense()] == bags
        weights = again.to_dense_weights()
        assert (weights is None) == (not weighted)
        if weights is not None:
            assert [bag.tolist() for bag in weights] == [[value / 7 for value in bag] for bag in bags]
    if bags:
        again = JaggedTensor.from_dense(jagged.to_dense(), dense_weights)
        assert [bag.tolist() for bag in again.to_dense()] == bags


@given(BAGS.filter(bool))
def test_padding_is_torchs_own_padding(bags: list[list[int]]) -> None:
    padded = build(bags).to_padded_dense(padding_value=-1)
    tensors = [torch.tensor(bag, dtype=torch.int64) for bag in bags]
    assert torch.equal(padded, pad_sequence(tensors, batch_first=True, padding_value=-1))


@given(BAGS, st.integers(0, 6))
def test_a_desired_length_pads_the_short_and_keeps_the_first_of_the_long(bags: list[list[int]], width: int) -> None:
    jagged = build(bags, weighted=True)
    assert jagged.to_padded_dense(width, 5).tolist() == [([*bag, *[5] * width])[:width] for bag in bags]
    weights = jagged.to_padded_dense_weights(width, 0.5)
    assert weights.tolist() == [([*(value / 7 for value in bag), *[0.5] * width])[:width] for bag in bags]


@given(BAGS)
def test_padded_rows_and_lengths_give_the_bags_back(bags: list[list[int]]) -> None:
    jagged = build(bags, weighted=True)
    again = JaggedTensor.from_dense_lengths(
        jagged.to_padded_dense(5), jagged.lengths(), jagged.to_padded_dense_weights(5)
    )
    assert torch.equal(again.values(), jagged.values())
    assert torch.equal(again.weights(), jagged.weights())


def test_vectors_pad_as_vectors_and_carry_gradients() -> None:
    values = torch.arange(6.0).view(3, 2).requires_grad_()
    jagged = JaggedTensor(values, lengths=torch.tensor([2, 0, 1]))
    padded = jagged.to_padded_dense()
    assert padded.tolist() == [[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[4, 5], [0, 0]]]
    padded[0].sum().backward()
    assert values.grad.tolist() == [[1, 1], [1, 1], [0, 0]]


T, IDS = torch.tensor, torch.arange(3)
BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: JaggedTensor(IDS), "needs lengths or offsets"),
    (lambda: JaggedTensor(IDS, lengths=T([1, 4])), "lengths sum to 5, but values has 3: row 1 would end at 5"),
    (lambda: JaggedTensor(IDS, lengths=T([4, -1])), "negative length -1 at row 1"),
    (lambda: JaggedTensor(IDS, offsets=T([0, 2, 1, 3])), "offsets fall from 2 to 1 at row 1"),
    (lambda: JaggedTensor(IDS, offsets=T([])), "offsets is empty, but values has 3"),
    (lambda: JaggedTensor(IDS, lengths=T([[1, 2]])), r"lengths must have one dimension, got shape \[1, 2\]"),
    (lambda: JaggedTensor(IDS, lengths=T([3]), offsets=T([0, 1, 3])), "offsets has 3 entries for 1 lengths"),
    (lambda: JaggedTensor(T(3), lengths=T([1])), "values must be a tensor of at least one dimension"),
    (lambda: JaggedTensor.from_dense([]), "values is an empty list"),
    (lambda: JaggedTensor.from_dense([IDS], [torch.ones(2)]), r"weights has bags of \[2\], values of \[3\]"),
    (lambda: JaggedTensor.from_dense_lengths(torch.ones(2, 3), T([1, 4])), "4 at row 1 is not between 0 and 3"),
    (lambda: JaggedTensor.from_dense_lengths(torch.ones(2, 3), T([1])), r"got \[2, 3\] and \[1\]"),
    (lambda: JaggedTensor.from_dense_lengths(torch.ones(2, 3), T([1, 1]), torch.ones(2, 2)), "weights must be"),
    (lambda: build([[1]]).to_padded_dense(-2), "desired_length must be .* got -2"),
    (lambda: build([[1]]).to_padded_dense(2, 0.5), "padding_value 0.5 does not fit torch.int64"),
    (lambda: build([[1]]).weights(), "JaggedTensor has no weights"),
]


def test_bad_input_is_refused_naming_what_was_given() -> None:
    assert not_refused(BAD) == []
