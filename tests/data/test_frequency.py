"""Ids renumbered by use: a permutation, invertible, the same lookups as before."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from recshard_lab.data import FrequencyOrder
from tests.refusals import not_refused

TABLE = EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=4, feature_names=["a", "b"])


def batch(ids: list[int], keys: tuple[str, str] = ("a", "b")) -> KeyedJaggedTensor:
    half = len(ids) // 2
    return KeyedJaggedTensor(list(keys), torch.tensor(ids), lengths=torch.tensor([half, len(ids) - half]))


@given(st.lists(st.integers(0, 11), min_size=1, max_size=40))
def test_new_ids_are_used_less_and_less_and_turn_back(ids: list[int]) -> None:
    order = FrequencyOrder.measured([batch(ids)], [TABLE])
    renumbered = order(batch(ids))
    uses = torch.bincount(renumbered.values(), minlength=12)
    assert uses.tolist() == sorted(torch.bincount(torch.tensor(ids), minlength=12).tolist(), reverse=True)
    assert order.inverse()(renumbered).values().tolist() == ids
    assert renumbered.lengths().tolist() == batch(ids).lengths().tolist()


def test_a_model_with_renumbered_ids_and_reordered_rows_gives_the_same() -> None:
    ids = [3, 3, 3, 11, 0, 11, 5, 3]
    order = FrequencyOrder.measured([batch(ids)], [TABLE])
    plain, sorted_by_use = EmbeddingBagCollection([TABLE]), EmbeddingBagCollection([TABLE])
    weight = plain.embedding_bags["t"].weight
    with torch.no_grad():
        sorted_by_use.embedding_bags["t"].weight.copy_(order.reorder("t", weight))
    assert torch.equal(sorted_by_use(order(batch(ids))).values(), plain(batch(ids)).values())


def test_what_cannot_be_renumbered_is_refused_by_name() -> None:
    other = EmbeddingBagConfig(name="u", num_embeddings=12, embedding_dim=4, feature_names=["b"])
    order = FrequencyOrder.measured([batch([1, 2])], [TABLE])
    refusals: list[tuple[Any, str]] = [
        (lambda: FrequencyOrder.measured([batch([1, 2])], [TABLE, other]), "'b' is read by tables 't' and 'u'"),
        (lambda: FrequencyOrder.measured([batch([1, 2], ("x", "b"))], [TABLE]), "no feature 'a'"),
        (lambda: FrequencyOrder.measured([batch([1, 12])], [TABLE]), "ids must be 0 to 11, got 12 to 12"),
        (lambda: FrequencyOrder.measured([], [TABLE]), "no batches"),
        (lambda: FrequencyOrder({"t": torch.tensor([0, 0, 2])}, {"a": "t"}), "must be a permutation of 0 to 2"),
        (lambda: order.reorder("t", torch.zeros(3, 4)), "has 12 rows, got 3"),
        (lambda: order.reorder("u", torch.zeros(3, 4)), "no table 'u' is renumbered; these are: t"),
    ]
    assert not_refused(refusals) == []
