"""`quantize_embeddings`: which parts of a model become served ones; and the errors in `quantization_report`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from recshard_lab.embedding.quantized import quantize
from tests.embedding.quantized.test_collections import batch, rows_of, tables


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags: Any = rs.EmbeddingBagCollection(tables())
        self.same = self.bags
        self.rows: Any = rs.EmbeddingCollection(
            [rs.EmbeddingConfig(70, 8, "words", feature_names=["word"])], out_of_range="clamp"
        )
        self.fused: Any = rs.FusedEmbeddingBagCollection(
            [rs.EmbeddingBagConfig(50, 8, "likes", feature_names=["liked"])], torch.optim.SGD, {"lr": 0.1}
        )
        self.dense: Any = nn.Linear(36, 1)

    def forward(self, given: rs.KeyedJaggedTensor) -> torch.Tensor:
        rest = self.rows(given)["word"].values().sum() + self.fused(given).values().sum()
        found: torch.Tensor = self.dense(self.bags(given).values()) + self.same(given).values().mean() + rest
        return found


def test_every_collection_is_replaced_and_the_rest_is_copied() -> None:
    torch.manual_seed(0)
    model = Model()
    served: Any = rs.quantize_embeddings(model)
    assert isinstance(served.bags, QuantEmbeddingBagCollection)
    assert served.same is served.bags
    assert isinstance(served.rows, QuantEmbeddingCollection)
    assert isinstance(served.fused, QuantEmbeddingBagCollection)
    assert served.rows.out_of_range == "clamp"
    assert type(model.bags) is rs.EmbeddingBagCollection
    assert torch.equal(served.dense.weight, model.dense.weight)
    assert served.dense.weight is not model.dense.weight
    assert not served.training
    assert model.training
    torch.testing.assert_close(served(batch()), model(batch()), atol=0.02, rtol=0.02)
    assert rs.quantize_embeddings(model, inplace=True) is model
    assert torch.equal(model.eval()(batch()), served(batch()))


def test_a_format_per_table() -> None:
    served: Any = rs.quantize_embeddings(Model(), {"film": "int4", "words": torch.float16}, output_dtype=torch.bfloat16)
    kinds = {
        t.name: t.data_type.value for t in [*served.bags.embedding_bag_configs(), *served.rows.embedding_configs()]
    }
    assert kinds == {"film": "INT4", "genre": "FP32", "word": "FP32", "words": "FP16"}
    assert served.fused.embedding_bag_configs()[0].data_type is rs.DataType.FP32
    assert served.rows.output_dtype() is served.bags.output_dtype() is torch.bfloat16
    native: Any = rs.quantize_embeddings(rs.EmbeddingCollection(rows_of((8, 8, 8))), "int2", backend="native")
    assert set(native.backends().values()) == {"native"}


def test_dynamic_tables_are_exported_first() -> None:
    users = rs.DynamicEmbeddingConfig("user", 4, capacity=128, absent="zero", feature_names=["f"])
    dynamic = rs.DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 0.5})
    given = rs.KeyedJaggedTensor(["f"], torch.tensor([10**15, -7, 3]), lengths=torch.tensor([2, 1]))
    dynamic(given).values().sum().backward()
    served: Any = rs.quantize_embeddings(nn.Sequential(dynamic))
    assert served[0].collection.embedding_bag_configs()[0].data_type is rs.DataType.INT8
    expected = dynamic.eval()(given).values()
    torch.testing.assert_close(served(given).values(), expected, atol=0.02, rtol=0.02)
    assert served(given).values().any()


def test_wrong_arguments_are_refused_with_a_fix() -> None:
    model = Model()
    for wrong, why in (
        ({"module": nn.Linear(2, 2)}, "Linear has no embedding collection to quantize. Fix: pass the module"),
        ({"module": model, "dtype": "int3"}, "dtype 'int3' is not a number format of served tables"),
        ({"module": model, "dtype": {"films": "int8"}}, "names table 'films', which the model does not have. Fix: use"),
        ({"module": model, "inplace": 1}, "inplace must be bool, got 1"),
        ({"module": model, "output_dtype": torch.int8}, "is not supported. Fix: use one of"),
    ):
        with pytest.raises(ValueError, match=why.replace(".", r"\.")):
            rs.quantize_embeddings(**wrong)  # type: ignore[arg-type]
    with torch.no_grad():
        model.bags.embedding_bags["genre"].weight[3] = float("nan")
    with pytest.raises(ValueError, match="table 'genre' has weights that are not finite"):
        rs.quantize_embeddings(model)


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


def test_models_with_other_tables_are_refused() -> None:
    one, other = (
        rs.EmbeddingBagCollection([rs.EmbeddingBagConfig(rows, 4, "t", feature_names=["f"])]) for rows in (3, 5)
    )
    with pytest.raises(ValueError, match="table 't' is not the same"):
        rs.embedding.quantization_report(one, rs.quantize_embeddings(other))
    with pytest.raises(ValueError, match="quantized collections at no path"):
        rs.embedding.quantization_report(one, other)
