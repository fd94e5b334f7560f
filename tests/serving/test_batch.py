"""Batches of requests: merged, split, and checked."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recshard_lab.serving import Batch, Inputs, SparseInput
from tests.serving.bundles import COLUMNS, batch_of, dlrm

INPUTS = Inputs(("age",), (SparseInput("movie", 10), SparseInput("word", None), SparseInput("genre", 4)))
WEIGHTED = Inputs((), tuple(replace(each, weighted=True) for each in INPUTS.sparse))


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(vars(one).values(), vars(other).values(), strict=True)
    return all(a is b if a is None else torch.equal(a, b) for a, b in pairs)


def samples(batch: Batch, inputs: Inputs) -> list[list[list[int]]]:
    """The ids of each sample, by feature, through the library's own arrangement."""
    features = batch.to_keyed_jagged(inputs).to_dict()
    return [[features[name].to_dense()[row].tolist() for name in inputs.names()] for row in range(batch.size)]


@pytest.mark.parametrize("inputs", [INPUTS, WEIGHTED], ids=["plain", "weighted"])
@pytest.mark.parametrize("sizes", [[1, 1, 1], [2, 5, 1], [0, 3, 0], [4], [0, 0], [1, 0, 1]])
def test_merged_batches_keep_their_samples_and_can_be_split_again(inputs: Inputs, sizes: list[int]) -> None:
    parts = [batch_of(inputs, size, seed=place) for place, size in enumerate(sizes)]
    merged = Batch.cat(parts)
    merged.check(inputs)
    assert samples(merged, inputs) == [sample for part in parts for sample in samples(part, inputs)]
    assert torch.equal(merged.dense, torch.cat([part.dense for part in parts]))
    assert all(same(a, b) for a, b in zip(merged.split(sizes), parts, strict=True))


def test_batches_of_other_models_are_not_merged() -> None:
    with pytest.raises(ValueError, match="different columns, features or weights"):
        Batch.cat([batch_of(INPUTS, 2), batch_of(WEIGHTED, 2)])
    with pytest.raises(ValueError, match="no batches"):
        Batch.cat([])
    with pytest.raises(ValueError, match="do not sum to the batch of 2"):
        batch_of(INPUTS, 2).split([1])


def test_a_keyed_jagged_tensor_becomes_a_batch_in_the_order_of_the_inputs() -> None:
    batch = batch_of(INPUTS, 3)
    features = batch.to_keyed_jagged(INPUTS)
    assert same(Batch.from_keyed_jagged(features, INPUTS, batch.dense), batch)
    assert same(Batch.from_keyed_jagged(features.permute([2, 0, 1]), INPUTS, batch.dense), batch)
    with pytest.raises(ValueError, match="feature 'movie' is not in the batch"):
        Batch.from_keyed_jagged(features.permute([1, 2]), INPUTS, batch.dense)


def good() -> dict[str, Tensor]:
    values = torch.tensor([1, 2, 9, -5, 3])
    return {"dense": torch.zeros(2, 1), "values": values, "lengths": torch.tensor([1, 2, 1, 0, 0, 1])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dense": torch.zeros(2, 3)}, r"dense are float32 \[2, 3\], but the model takes float32 \[B, 1\]"),
        ({"dense": torch.zeros(2, 1).double()}, "dense are float64"),
        ({"values": torch.zeros(5)}, r"values are float32 \[5\], but the model takes int64"),
        (
            {"lengths": torch.ones(5).long()},
            r"lengths are int64 \[5\], but the model takes .* \[6\] for 3 features of 2",
        ),
        ({"lengths": torch.ones(6)}, "lengths are float32"),
        ({"lengths": torch.tensor([1, 2, 1, 0, 0, 2])}, "lengths sum to 6, but there are 5 values"),
        ({"lengths": torch.tensor([1, 2, 1, -1, 1, 1])}, "feature 'word', sample 1: length -1 is negative"),
        (
            {"values": torch.tensor([1, 2, 10, -5, 3])},
            "feature 'movie', sample 1, position 1: id 10 is not within 0 to 9",
        ),
        (
            {"values": torch.tensor([1, 2, 9, -5, 4])},
            "feature 'genre', sample 1, position 0: id 4 is not within 0 to 3",
        ),
        ({"values": torch.tensor([-1, 2, 9, -5, 3])}, "feature 'movie', sample 0, position 0: id -1"),
        ({"weights": torch.ones(4)}, r"weights are float32 \[4\]"),
    ],
)
def test_a_wrong_batch_is_refused_with_its_place(change: dict[str, Tensor], message: str) -> None:
    Batch(**good()).check(INPUTS)
    with pytest.raises(ValueError, match=message):
        Batch(**{**good(), **change}).check(INPUTS)


def test_the_inputs_of_a_model_come_from_its_collections() -> None:
    expected = tuple(SparseInput(f"f{i}", 50 + i) for i in range(3))
    assert Inputs.of(dlrm(), COLUMNS) == Inputs(COLUMNS, expected)
    assert Inputs.of(dlrm(weighted=True)).weighted
    assert {each.rows for each in Inputs.of(dlrm(out_of_range="clamp")).sparse} == {None}
    with pytest.raises(ValueError, match="Linear has no embedding collection"):
        Inputs.of(torch.nn.Linear(1, 1))
