"""A batch stored once for each distinct bag gives the outputs and gradients of the batch written out in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recshard_lab as rs
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.tables import MEAN, SUM, deduplicated, tables


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
@given(seed=st.integers(0, 999), size=st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_pooled_rows_come_back_for_every_sample(pooling: rs.PoolingType, weighted: bool, seed: int, size: int) -> None:
    collection = rs.EmbeddingBagCollection(tables(pooling), is_weighted=weighted)
    variable, plain = deduplicated(seed, size, weighted)
    mixing = torch.randn(size, 48)
    gradients = []
    for features in (variable, plain):
        output = collection(features)
        assert output.values().shape == (size, 48)
        torch.testing.assert_close(output.values(), collection(plain).values())
        gradients.append(torch.autograd.grad((output.values() * mixing).sum(), list(collection.parameters())))
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_variable_batch_that_names_no_common_samples_is_refused() -> None:
    variable, _ = deduplicated()
    bare = KeyedJaggedTensor(
        variable.keys(),
        variable.values(),
        lengths=variable.lengths(),
        stride_per_key_per_rank=variable.stride_per_key_per_rank(),
    )
    fused = rs.FusedEmbeddingBagCollection(tables(), torch.optim.SGD, {"lr": 0.1})
    for collection in (rs.EmbeddingBagCollection(tables()), fused):
        with pytest.raises(ValueError, match=r"belong to no common sample: give inverse_indices="):
            collection(bare)
    named = KeyedJaggedTensor(
        variable.keys(),
        variable.values(),
        lengths=variable.lengths(),
        stride_per_key_per_rank=variable.stride_per_key_per_rank(),
        inverse_indices=(["liked"], torch.zeros(1, 2, dtype=torch.int64)),
    )
    with pytest.raises(ValueError, match=r"no row for feature 'seen', only for \['liked'\]"):
        rs.EmbeddingBagCollection(tables())(named)
