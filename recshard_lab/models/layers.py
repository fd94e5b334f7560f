"""Dense building blocks of recommendation models.

Shape letters: B batch, D embedding dim, F sparse features.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """Linear layers, each followed by an activation.

    Args:
        in_size: width of the input.
        layer_sizes: widths of the layers, the last one that of the output; may be empty (identity).
        bias: whether the layers have one.
        activation: applied after every layer, the last included.
        device: where the weights live; "meta" holds none.

    >>> MLP(13, [8, 4])(torch.zeros(2, 13)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = [in_size, *layer_sizes]
        if min(sizes) < 1:
            raise ValueError(f"every layer must be at least 1 wide, got {in_size} -> {list(layer_sizes)}")
        self.layers = nn.ModuleList(
            nn.Linear(before, after, bias=bias, device=device) for before, after in pairwise(sizes)
        )
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size] -> [B, layer_sizes[-1]]``"""
        for layer in self.layers:
            input = self.activation(layer(input))
        return input


class InteractionArch(nn.Module):
    """Dot products between all pairs of feature vectors (DLRM, arXiv 1906.00091, section 2.1.3).

    The output holds the dense vector itself, then the dots of the pairs (i, j), i < j, where vector 0 is the
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
