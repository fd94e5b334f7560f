"""The sequence model against its plain twin, and what it must not see."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.apparatus.sequence_runs import ITEMS, PlainSASRec
from recshard_lab.embedding import EmbeddingCollection, EmbeddingConfig
from recshard_lab.models import SASRec
from recshard_lab.sparse import KeyedJaggedTensor
from tests.refusals import not_refused

FEATURES = ["history", "next", "negative"]


def model(**own: Any) -> SASRec:
    torch.manual_seed(0)
    table = EmbeddingConfig(name="movie", num_embeddings=20, embedding_dim=8, feature_names=FEATURES)
    return SASRec(EmbeddingCollection([table], device=own.get("device")), **{"max_length": 6, "num_heads": 2, **own})


def batch(history: list[list[int]]) -> KeyedJaggedTensor:
    """Next items are the ids plus 1, negative items the ids plus 2, modulo 20."""
    flat = [id_ for bag in history for id_ in bag]
    ids = [(id_ + shift) % 20 for shift in range(3) for id_ in flat]
    lengths = torch.tensor([len(bag) for bag in history] * 3)
    return KeyedJaggedTensor(FEATURES, torch.tensor(ids, dtype=torch.int64), lengths=lengths, stride=len(history))


def test_it_equals_its_plain_twin_forward_and_backward() -> None:
    ours, kjt = model(), batch([[3, 1, 4, 1, 5], [9], [2, 6, 5]])
    twin = PlainSASRec(ours)
    found = [ours(None, kjt).flatten(), twin(None, kjt)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    for logits in found:
        logits.square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, twin.weights[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def test_a_place_sees_no_later_item() -> None:
    ours = model()
    before, after = (ours(None, batch([history]))[:4] for history in ([3, 1, 4, 7, 5], [3, 1, 4, 7, 11]))
    torch.testing.assert_close(before, after)
    other = ours(None, batch([[3, 1, 8, 7, 5]]))[:5]
    assert float((other - ours(None, batch([[3, 1, 4, 7, 5]]))[:5]).detach()[3].abs()) > 1e-4


def test_a_user_vector_is_the_state_after_the_last_item_and_ignores_padding() -> None:
    ours = model()
    histories = [[3, 1, 4], [], [5]]
    ids = torch.tensor([3, 1, 4, 5])
    vectors = ours.user_vectors(KeyedJaggedTensor(["history"], ids, lengths=torch.tensor([3, 0, 1])))
    twin = PlainSASRec(ours)
    for vector, history in zip(vectors, histories, strict=True):
        expected: Tensor = twin.states([torch.tensor(history)])[0, -1] if history else torch.zeros(8)
        torch.testing.assert_close(vector, expected, rtol=1e-5, atol=1e-6)
    items = ours.item_vectors(KeyedJaggedTensor(["next"], torch.tensor([7, 7, 2]), lengths=torch.tensor([3])))
    assert torch.equal(items, twin.weights[ITEMS][[7, 7, 2]])


def test_no_user_and_no_item_are_valid_batches() -> None:
    assert model()(None, batch([])).shape == (0, 1)
    assert model()(None, batch([[], []])).shape == (0, 1)
    assert {p.device.type for p in model(device="meta").parameters()} == {"meta"}


def test_wrong_arguments_are_named() -> None:
    two = [EmbeddingConfig(name=n, num_embeddings=9, embedding_dim=8, feature_names=[n]) for n in "ab"]
    uneven = KeyedJaggedTensor(FEATURES, torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 1, 1]))
    refusals: list[tuple[Any, str]] = [
        (lambda: SASRec(EmbeddingCollection(two), 5), "reads one table by three features, got 2 tables"),
        (lambda: model(max_length=0), "max_length is 0"),
        (lambda: model(num_heads=3), "num_heads is 3, which does not divide 8 columns"),
        (lambda: model()(None, batch([list(range(7))])), "a history has 7 items, but max_length is 6"),
        (lambda: model()(None, uneven), "feature 'next' has 1 ids for 2 of 'history'"),
    ]
    assert not_refused(refusals) == []
