"""`quantization_report` against errors that are computed from whole tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding.quantized import quantize
from tests.embedding.quantized.test_collections import batch
from tests.embedding.quantized.test_quantize import Model


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp8", "int8", "int4"])
def test_errors_and_bytes_are_those_of_whole_tables(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "CHUNK_BYTES", 7 * 4 * 8)  # tables are read in several pieces
    torch.manual_seed(0)
    model = Model()
    served: Any = rs.quantize_embeddings(model, kind)
    report = rs.embedding.quantization_report(model, served)
    state = model.state_dict()
    assert len(report.tables) == len(model.bags.embedding_bag_configs()) + 2
    for one in report.tables:
        kind_of = "embeddings" if one.path == "rows" else "embedding_bags"
        weight = state[f"{one.path}.{kind_of}.{one.name}.weight"]
        own = served.get_submodule(one.path)
        error = (own.dequantized(one.name) - weight).abs()
        span = weight.amax(1) - weight.amin(1)
        assert one.max_error == float(error.max()) > 0
        assert one.mean_error == pytest.approx(float(error.double().mean()))
        assert one.max_relative == pytest.approx(float((error.amax(1) / span).max()))
        assert one.bytes_before == weight.numel() * 4
        assert one.bytes_after == own.packed(one.name).numel()
    total = sum(one.bytes_after for one in report.tables)
    assert report.size_ratio == total / sum(one.bytes_before for one in report.tables)


def test_scores_are_of_both_models_and_the_text_has_every_table() -> None:
    model = Model()
    served = rs.quantize_embeddings(model, "int4")
    report = rs.embedding.quantization_report(model, served, {"mean": lambda one: float(one(batch()).mean())})
    before, after = report.scores["mean"]
    assert before == float(model(batch()).mean().detach())
    assert after == float(served(batch()).mean().detach()) != before
    text = str(report)
    assert "mean: " in text
    assert all(one.name in text for one in report.tables)


def test_rows_of_one_value_have_no_relative_error() -> None:
    model = rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])
    with torch.no_grad():
        model.embedding_bags["t"].weight.fill_(0.3)
    (one,) = rs.embedding.quantization_report(model, rs.quantize_embeddings(model, "int8")).tables
    assert one.max_relative == 0.0
    assert one.max_error < 1e-3


def test_models_with_other_tables_are_refused() -> None:
    one, other = (
        rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(rows, 4, "t", feature_names=["f"])]) for rows in (3, 5)
    )
    with pytest.raises(ValueError, match="table 't' is not the same"):
        rs.embedding.quantization_report(one, rs.quantize_embeddings(other))
    with pytest.raises(ValueError, match="quantized collections at no path"):
        rs.embedding.quantization_report(one, other)
    with pytest.raises(ValueError, match="quantized collections at '0'"):
        rs.embedding.quantization_report(one, nn.Sequential(rs.quantize_embeddings(other)))
