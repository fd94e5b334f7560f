"""A batch stored once for each distinct bag gives the outputs and gradients of the batch written out in full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import recshard_lab as rs
from recshard_lab.embedding import RowWiseAdagrad
from recshard_lab.embedding.kernels import available
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


@pytest.mark.parametrize("backend", available())
@pytest.mark.parametrize("weighted", [True, False])
def test_fused_steps_end_where_the_full_batch_ends(backend: str, weighted: bool) -> None:
    kwargs = {"lr": 0.3, "eps": 1e-3}
    one, other = (
        rs.FusedEmbeddingBagCollection(tables(MEAN), RowWiseAdagrad, kwargs, is_weighted=weighted, backend=backend)
        for _ in range(2)
    )
    other.load_state_dict(one.state_dict())
    for seed in range(6):
        variable, plain = deduplicated(seed, weighted=weighted)
        mixing = torch.randn(5, 48)
        outputs = [one(variable).values(), other(plain).values()]
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
        for output in outputs:
            (output * mixing).sum().backward()
    for name, weight in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], weight, atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_a_sequence_collection_keeps_each_features_own_batch(seed: int) -> None:
    configs = [
        rs.EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names) for t in tables()
    ]
    variable, _ = deduplicated(seed)
    for key, output in rs.EmbeddingCollection(configs)(variable).items():
        bags = variable[key.split("@")[0]]
        assert torch.equal(output.lengths(), bags.lengths())
        assert output.values().shape[0] == bags.values().shape[0]


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
