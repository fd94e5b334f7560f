"""`compare_formats` and its picture, on a model whose numbers are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, quantize_embeddings
from recshard_lab.lab import compare_formats, views

BATCH = KeyedJaggedTensor(["seen"], torch.tensor([1, 7, 2]), lengths=torch.tensor([2, 1]))


def tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection([EmbeddingBagConfig(1000, 64, "movies", feature_names=["seen"])])


def test_bytes_scores_and_errors_are_those_of_the_quantized_models() -> None:
    model = tables().train()

    def score(one: nn.Module) -> float:
        return float(one(BATCH).values().sum())

    found = compare_formats(model, (BATCH,), score, formats=["fp16", "int8"], rounds=3)
    assert [one.name for one in found.results] == ["FP32", "FP16", "INT8"]
    assert [one.table_bytes for one in found.results] == [256_000, 128_000, 68_000]
    for one in found.results[1:]:
        served = quantize_embeddings(model, one.name)
        assert one.score == score(served)
        assert 0 < one.max_error < 0.01
    assert found.results[0].max_error == 0
    assert all(one.ms > 0 for one in found.results)
    assert model.training
    assert found.records()[2]["name"] == "INT8"


def test_the_picture_says_what_the_numbers_say() -> None:
    found = compare_formats(tables(), (BATCH,), lambda one: 0.5, formats=["int4"], rounds=1)
    view = views.number_formats(found)
    assert "INT4 has 14% of the bytes of FP32." in view.summary
    assert "36 KB" in view.svg
    assert "change of AUC" in view.svg
    assert len(view.figure.data) == 3
    plain = compare_formats(tables(), (BATCH,), formats=["int4"], rounds=1)
    assert "change of" not in views.number_formats(plain).svg


@pytest.mark.parametrize("formats", [[], ["int8", "INT8"], ["int3"]])
def test_formats_that_cannot_be_compared_are_refused(formats: list[str]) -> None:
    with pytest.raises(ValueError, match=r"number format"):
        compare_formats(tables(), (BATCH,), formats=formats)
