"""Dense building blocks of recommendation models.

Shape letters: B batch, D embedding dim, F sparse features.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(layer_norm(x))``: swish (Ramachandran et al. 2017, arXiv 1710.05941) with layer norm.

    Args:
        input_dims: sizes of the last axes, which are normalized.
        device: of the weights.

    >>> SwishLayerNorm(4)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        norm = nn.LayerNorm(input_dims if isinstance(input_dims, int) else list(input_dims), device=device)
        self.norm = nn.Sequential(norm, nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """The same shape."""
        gate: Tensor = self.norm(input)
        return input * gate


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


class Perceptron(nn.Module):
    """One linear layer and an activation.

    Args:
        in_size, out_size: widths.
        bias: whether it has a bias.
        activation: applied to the output.
        device, dtype: of the weights.

    >>> Perceptron(3, 2)(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size] -> [B, out_size]``"""
        return self.activation(self.linear(input))


class MLP(nn.Module):
    """Linear layers, each followed by an activation.

    Args:
        in_size: width of the input.
        layer_sizes: widths of the layers, the last one that of the output; may be empty (identity).
        bias: whether the layers have a bias.
        activation: applied after every layer: a function, a module (shared by the layers), or a class of modules (one
            for each layer), or a name: "relu", "sigmoid" or "swish_layernorm" (one `SwishLayerNorm` per layer).
        device: of the weights; "meta" allocates nothing.
        dtype: of the weights.
        activation_on_last: whether the last layer has an activation.

    Raises:
        ValueError: a layer of width 0, or an unknown name of an activation.

    >>> MLP(13, [8, 4])(torch.zeros(2, 13)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | type[nn.Module] | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        sizes = [in_size, *layer_sizes]
        if max(sizes) >= 1 << 40:
            raise ValueError(f"no layer is {max(sizes):,} wide: {in_size} -> {list(layer_sizes)}")
        if min(sizes) < 1:
            raise ValueError(f"every layer must be at least 1 wide, got {in_size} -> {list(layer_sizes)}")
        self.layers = nn.ModuleList(
            nn.Linear(before, after, bias=bias, device=device, dtype=dtype) for before, after in pairwise(sizes)
        )
        made = [_activation_of(activation, size, device) for size in layer_sizes]
        if made and not activation_on_last:
            made[-1] = nn.Identity() if isinstance(made[-1], nn.Module) else _as_it_is
        modules = [each for each in made if isinstance(each, nn.Module)]
        self.activations: Any = nn.ModuleList(modules) if modules else made

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size] -> [B, layer_sizes[-1]]``"""
        for layer, activation in zip(self.layers, self.activations, strict=True):
            input = activation(layer(input))
        return input


def _activation_of(
    activation: str | type[nn.Module] | Callable[[Tensor], Tensor], size: int, device: torch.device | str | None
) -> Callable[[Tensor], Tensor]:
    if isinstance(activation, str):
        return activation_named(activation, size, device)
    return activation() if isinstance(activation, type) else activation


def activation_named(name: str, size: int, device: torch.device | str | None = None) -> Callable[[Tensor], Tensor]:
    """The activation "relu", "sigmoid" or "swish_layernorm" of a layer.

    Args:
        name: of the activation.
        size: width of the layer.
        device: of the weights of "swish_layernorm".

    Raises:
        ValueError: another name.

    >>> activation_named("swish_layernorm", 4)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """
    if name == "swish_layernorm":
        return SwishLayerNorm(size, device)
    if name not in _ACTIVATIONS:
        known = ", ".join([*_ACTIVATIONS, "swish_layernorm"])
        raise ValueError(f"no activation is named {name!r}. Fix: use one of {known}, or a function")
    return _ACTIVATIONS[name]


def _as_it_is(input: Tensor) -> Tensor:
    return input


class InteractionArch(nn.Module):
    """Dot products between all pairs of feature vectors (DLRM, arXiv 1906.00091, section 2.1.3).

    The output has the dense vector, then the dots of the pairs (i, j), i < j, where vector 0 is the
    dense one and 1..F are the sparse features': D + (F + 1) F / 2 columns.

    Args:
        num_sparse_features: F.

    >>> InteractionArch(3)(torch.zeros(2, 8), torch.zeros(2, 3, 8)).shape
    torch.Size([2, 14])
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        if num_sparse_features < 1:
            raise ValueError(f"num_sparse_features must be at least 1, got {num_sparse_features}")
        self.num_sparse_features = num_sparse_features

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """dense ``[B, D]``, sparse ``[B, F, D]`` -> ``[B, D + (F + 1) F / 2]``"""
        vectors = torch.cat([dense_features.unsqueeze(1), sparse_features], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        size = self.num_sparse_features + 1
        row, column = torch.triu_indices(size, size, offset=1, device=dots.device)
        pairs = dots.flatten(1).index_select(1, row * size + column)
        return torch.cat([dense_features, pairs], dim=1)

    def output_size(self, embedding_dim: int) -> int:
        """Columns of the output for vectors of this width D."""
        return embedding_dim + (self.num_sparse_features + 1) * self.num_sparse_features // 2
