"""Quantized tables against the formula in numpy, the dequantized table in plain torch, and their own promises."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding import QuantizedEmbeddingBagCollection, quantize_embeddings

KINDS = {rs.DataType.INT8: 255, rs.DataType.INT4: 15}
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.value)


def tables(pooling: rs.PoolingType = rs.PoolingType.SUM, dim: int = 6) -> list[rs.EmbeddingBagConfig]:
    return [
        rs.EmbeddingBagConfig(50, dim, "film", feature_names=["seen", "liked"], pooling=pooling),
        rs.EmbeddingBagConfig(9, dim, "genre", feature_names=["genre"], pooling=pooling),
    ]


def batch(weights: bool = False) -> rs.KeyedJaggedTensor:
    ids = torch.tensor([0, 3, 49, 49, 7, 1, 1, 8, 0])
    lengths = torch.tensor([2, 0, 2, 1, 1, 0, 1, 1, 1])
    return rs.KeyedJaggedTensor(["seen", "liked", "genre"], ids, torch.rand(9) if weights else None, lengths=lengths)


def weight_of(collection: rs.EmbeddingBagCollection, name: str) -> torch.Tensor:
    return collection.embedding_bags[name].weight.detach()  # type: ignore[union-attr, operator, return-value]


@every_kind
def test_each_row_is_rounded_to_its_own_steps(kind: rs.DataType) -> None:
    torch.manual_seed(0)
    truth = rs.EmbeddingBagCollection(tables())
    with torch.no_grad():
        weight_of(truth, "film").mul_(torch.logspace(-1, 3, 50).unsqueeze(1))  # rows of very different size
    found = QuantizedEmbeddingBagCollection.from_float(truth, kind).dequantized("film").numpy()
    rows = weight_of(truth, "film").numpy()
    if kind is rs.DataType.INT8:
        low = rows.min(1, keepdims=True)
        scale = (rows.max(1, keepdims=True) - low) / 255
        assert np.allclose(found, low + np.round((rows - low) / scale) * scale, rtol=1e-5, atol=1e-6)
    scale = (rows.max(1) - rows.min(1)) / KINDS[kind]
    assert (np.abs(found - rows).max(1) <= 0.55 * scale).all()
    assert np.abs(found - rows).max() > 0  # it did round


@every_kind
@pytest.mark.parametrize("pooling", [rs.PoolingType.SUM, rs.PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_are_those_of_the_dequantized_tables(
    kind: rs.DataType, pooling: rs.PoolingType, weighted: bool
) -> None:
    torch.manual_seed(1)
    truth = rs.EmbeddingBagCollection(tables(pooling), is_weighted=weighted)
    small = QuantizedEmbeddingBagCollection.from_float(truth, kind)
    truth.load_state_dict({f"embedding_bags.{t.name}.weight": small.dequantized(t.name) for t in tables()})
    given = batch(weighted)
    expected, found = truth(given), small(given)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.values(), expected.values().detach(), rtol=1e-6, atol=1e-7)


@every_kind
def test_it_is_as_small_as_it_says_and_goes_through_a_file(kind: rs.DataType, tmp_path: object) -> None:
    truth = rs.EmbeddingBagCollection(tables(dim=64))
    small = QuantizedEmbeddingBagCollection.from_float(truth, kind)
    packed = {rs.DataType.INT8: 64 + 8, rs.DataType.INT4: 32 + 4}[kind]
    assert small.weight_bytes() == 59 * packed == sum(t.numel() for t in small.state_dict().values())
    assert not list(small.parameters())
    torch.save(small.state_dict(), f"{tmp_path}/small.pt")
    again = QuantizedEmbeddingBagCollection(small.embedding_bag_configs())
    again.load_state_dict(torch.load(f"{tmp_path}/small.pt", weights_only=True))
    assert torch.equal(again(batch()).values(), small(batch()).values())


def test_a_model_is_copied_but_for_its_tables_and_its_dense_part_kept() -> None:
    model = nn.Sequential(rs.EmbeddingBagCollection(tables()))
    model.append(nn.Linear(3, 1))
    small = quantize_embeddings(model, torch.qint8)
    assert type(model[0]) is rs.EmbeddingBagCollection
    assert isinstance(small[0], QuantizedEmbeddingBagCollection)  # type: ignore[index]
    assert torch.equal(small[1].weight, model[1].weight)  # type: ignore[index, union-attr, arg-type]
    assert small[1].weight is not model[1].weight  # type: ignore[index, union-attr]
    assert not small.training
    assert quantize_embeddings(model, torch.quint4x2, inplace=True) is model
    assert model[0].weight_bytes() == 59 * (3 + 4)  # type: ignore[operator]


def test_ids_out_of_range_are_refused_left_out_or_moved_as_before() -> None:
    outside = rs.KeyedJaggedTensor(["seen", "liked", "genre"], torch.tensor([50, 0, 0]), lengths=torch.tensor([1] * 3))
    with pytest.raises(ValueError, match="id 50 is not a row of table 'film'"):
        quantize_embeddings(rs.EmbeddingBagCollection(tables()))(outside)
    ignoring = QuantizedEmbeddingBagCollection.from_float(
        rs.EmbeddingBagCollection(tables(), out_of_range="ignore"), rs.DataType.INT8
    )
    assert not ignoring(outside)["seen"].any()
    assert ignoring.out_of_range_count() == 1


def test_what_cannot_be_served_so_is_refused_with_the_smallest_fix() -> None:
    odd = rs.EmbeddingBagCollection(tables(dim=5))
    with pytest.raises(ValueError, match=r"5 columns.*use INT8"):
        quantize_embeddings(odd, rs.DataType.INT4)
    with pytest.raises(ValueError, match="INT8 or INT4"):
        quantize_embeddings(odd, torch.float16)
    with pytest.raises(ValueError, match="has no EmbeddingBagCollection to quantize"):
        quantize_embeddings(nn.Linear(2, 2))
    sharded = rs.DistributedModelParallel(nn.Sequential(rs.EmbeddingBagCollection(tables())))
    with pytest.raises(ValueError, match="load_checkpoint into an unsharded model"):
        quantize_embeddings(sharded)
    large = rs.EmbeddingBagCollection(tables())
    with torch.no_grad():
        weight_of(large, "film")[3] = 1e6 * torch.arange(6)
    with pytest.raises(ValueError, match=r"fp16.*use INT8"):
        quantize_embeddings(large, rs.DataType.INT4)
    quantize_embeddings(large)
    with torch.no_grad():
        weight_of(large, "film")[3] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        quantize_embeddings(large)
