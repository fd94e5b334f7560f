"""Shapes and values of the dense blocks against loops over single samples."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recshard_lab.models import MLP, InteractionArch, SwishLayerNorm


@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_interaction_is_the_dense_vector_and_every_pairs_dot(batch: int, features: int, dim: int) -> None:
    dense, sparse = torch.randn(batch, dim), torch.randn(batch, features, dim)
    arch = InteractionArch(features)
    out = arch(dense, sparse)
    assert out.shape == (batch, arch.output_size(dim))
    for sample in range(batch):
        vectors = [dense[sample], *sparse[sample]]
        pairs = [float(vectors[i] @ vectors[j]) for i in range(len(vectors)) for j in range(i + 1, len(vectors))]
        expected = torch.cat([dense[sample], torch.tensor(pairs)])
        assert torch.allclose(out[sample], expected, atol=1e-5)


def test_mlp_is_relu_after_every_layer() -> None:
    mlp = MLP(5, [4, 3])
    x = torch.randn(7, 5)
    first, second = mlp.layers
    by_hand = (first.weight @ x.T + first.bias[:, None]).clamp(min=0)  # type: ignore[operator, union-attr, index]
    by_hand = (second.weight @ by_hand + second.bias[:, None]).clamp(min=0)  # type: ignore[operator, union-attr, index]
    assert torch.allclose(mlp(x), by_hand.T, atol=1e-6)
    assert torch.equal(MLP(5, [])(x), x)
    assert sum(p.numel() for p in MLP(5, [4], bias=False).parameters()) == 20


def test_impossible_widths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least 1 wide, got 0 -> \[4\]"):
        MLP(0, [4])
    with pytest.raises(ValueError, match="num_sparse_features must be at least 1"):
        InteractionArch(0)


def test_an_mlps_activation_goes_by_name_by_class_or_as_a_module() -> None:
    x = torch.randn(3, 5)
    torch.manual_seed(0)
    plain = MLP(5, [4, 4], activation=torch.sigmoid)
    for activation in ("sigmoid", torch.nn.Sigmoid, torch.nn.Sigmoid()):
        torch.manual_seed(0)
        assert torch.equal(MLP(5, [4, 4], activation=activation)(x), plain(x))
    with pytest.raises(ValueError, match="no activation is named 'relo'"):
        MLP(5, [4], activation="relo")


def test_each_layer_has_a_swish_of_its_own_with_weights() -> None:
    mlp = MLP(5, [4, 3], activation="swish_layernorm")
    assert sum(isinstance(part, SwishLayerNorm) for part in mlp.modules()) == 2
    x = torch.randn(6, 4)
    swish = SwishLayerNorm(4)
    centred = x - x.mean(1, keepdim=True)
    normed = centred / (centred.pow(2).mean(1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(swish(x), x / (1 + torch.exp(-normed)), atol=1e-6)
