"""TorchRec's DLRM models: the parts of `recshard_lab.models` under TorchRec's names, drawn in TorchRec's order.

A derived model first builds the parts of `DLRM`, which uses their random numbers, and then replaces two of them.

    sparse_arch.embedding_bag_collection.embedding_bags.TABLE.weight
    dense_arch.model._mlp.0._linear.weight                               bottom MLP
    inter_arch.crossnet.W_kernels.0                                      DLRM_DCN alone
    over_arch.model.0._mlp.0._linear.weight, over_arch.model.1.weight    top MLP, logit

Shape letters: B batch, I dense features, F sparse features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import wrap
from torch.nn import functional

from recshard_lab.compat.modules.mlp import MLP
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models import InteractionArch, InteractionDCNArch, LowRankCrossNet, SparseArch
from recshard_lab.models.dlrm import checked_dense, checked_sizes
from recshard_lab.sparse import KeyedJaggedTensor

wrap("checked_dense")  # one node in an fx graph


def choose(n: int, k: int) -> int:
    """The number of ways to choose `k` of `n`; 0 if `k` is negative or above `n`.

    >>> choose(5, 2)
    10
    """
    return comb(n, k) if 0 <= k <= n else 0


class DenseArch(nn.Module):
    """The bottom MLP, at ``model``.

    Args:
        in_features: I.
        layer_sizes: widths of the layers.
        device: of the weights.

    >>> DenseArch(3, [4, 2])(torch.zeros(5, 3)).shape
    torch.Size([5, 2])
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.model = MLP(in_features, layer_sizes, activation="relu", device=device)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, I] -> [B, D]``"""
        return self.model(checked_dense(features, self.in_features))


class OverArch(nn.Module):
    """The top MLP, at ``model.0``, and the linear layer of the logit, at ``model.1``.

    Args:
        in_features: columns of the interaction.
        layer_sizes: at least two widths.
        device: of the weights.

    Raises:
        ValueError: fewer than two layers.

    >>> OverArch(3, [4, 1])(torch.zeros(5, 3)).shape
    torch.Size([5, 1])
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(f"layer_sizes of OverArch must have at least 2 widths, got {list(layer_sizes)}")
        *hidden, last = layer_sizes
        self.model = nn.Sequential(
            MLP(in_features, hidden, activation="relu", device=device), nn.Linear(hidden[-1], last, device=device)
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features] -> [B, layer_sizes[-1]]``"""
        return self.model(features)


class InteractionProjectionArch(nn.Module):
    """The dense vector, and the dots of two projections of all vectors: ``[B, D + F1 F2]``.

    Args:
        num_sparse_features: F.
        interaction_branch1: ``[B, (F + 1) D] -> [B, F1 D]``.
        interaction_branch2: ``[B, (F + 1) D] -> [B, D F2]``.

    >>> arch = InteractionProjectionArch(2, nn.Linear(9, 6), nn.Linear(9, 12))
    >>> arch(torch.zeros(5, 3), torch.zeros(5, 2, 3)).shape
    torch.Size([5, 11])
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features
        self.interaction_branch1, self.interaction_branch2 = interaction_branch1, interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """dense ``[B, D]``, sparse ``[B, F, D]`` -> ``[B, D + F1 F2]``"""
        dim = dense_features.shape[1]
        vectors = torch.cat([dense_features, sparse_features.flatten(1)], dim=1)
        first = self.interaction_branch1(vectors).unflatten(1, (-1, dim))
        second = self.interaction_branch2(vectors).unflatten(1, (dim, -1))
        return torch.cat([dense_features, torch.bmm(first, second).flatten(1)], dim=1)


class DLRM(nn.Module):
    """DLRM with TorchRec's parameter names.

    Args:
        embedding_bag_collection: the tables, all of one `embedding_dim` D.
        dense_in_features: I.
        dense_arch_layer_sizes: widths of the bottom MLP, the last must be D.
        over_arch_layer_sizes: widths of the top MLP, at least two.
        dense_device: of the dense weights.

    Raises:
        ValueError: tables of different widths, or layer sizes that do not fit them.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    >>> list(DLRM(tables, 3, [8], [4, 1]).state_dict())[:2]
    ['sparse_arch.embedding_bag_collection.embedding_bags.t.weight', 'dense_arch.model._mlp.0._linear.weight']
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = embedding_bag_collection.embedding_bag_configs()
        bottom, over = checked_sizes(tables, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch: Any = DenseArch(dense_in_features, bottom, dense_device)
        features, dim = self.sparse_arch.F, self.sparse_arch.D
        self.inter_arch: Any = InteractionArch(features)
        self.over_arch: Any = OverArch(dim + choose(features, 2) + features, over, dense_device)
        self._dense_path_compiled = False

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """dense ``[B, I]`` and ids of B samples -> logits ``[B, 1]``"""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(dense, sparse))

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compiles the dense parts with ``torch.compile``. The tables stay eager. A second call has no effect.

        Args:
            compile_mode: ``mode`` of ``torch.compile``.
        """
        if not self._dense_path_compiled:
            for name in ("dense_arch", "inter_arch", "over_arch"):
                setattr(self, name, torch.compile(getattr(self, name), mode=compile_mode))
            self._dense_path_compiled = True


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network as interaction, and TorchRec's parameter names.

    Args:
        embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device: as of
            `DLRM`.
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: their rank.

    Raises:
        ValueError: as of `DLRM`, or no cross layer.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    >>> list(DLRM_DCN(tables, 3, [8], [4, 1], 1, 2).state_dict())[3]
    'inter_arch.crossnet.W_kernels.0'
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )
        features, width = self.sparse_arch.F, (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, device=dense_device)
        self.inter_arch = InteractionDCNArch(features, crossnet)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)


class DLRM_Projection(DLRM):
    """DLRM whose interaction is the dots of two learned projections of all vectors.

    Args:
        embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device: as of
            `DLRM`.
        interaction_branch1_layer_sizes, interaction_branch2_layer_sizes: widths of the MLPs of the projections; the
            last ones are multiples of D.

    Raises:
        ValueError: as of `DLRM`, or a last width that is not a multiple of D.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    >>> DLRM_Projection(tables, 3, [8], [4, 1], [16], [24]).over_arch.model[0]._mlp[0]._linear.in_features
    14
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )
        features, dim = self.sparse_arch.F, self.sparse_arch.D
        branches, columns = [], 1
        for number, sizes in enumerate((interaction_branch1_layer_sizes, interaction_branch2_layer_sizes), start=1):
            if not sizes or sizes[-1] % dim:
                raise ValueError(
                    f"interaction_branch{number}_layer_sizes {list(sizes)} must end with a multiple of the "
                    f"embedding_dim {dim}"
                )
            branches.append(DenseArch((features + 1) * dim, sizes, dense_device))
            columns *= sizes[-1] // dim
        self.inter_arch = InteractionProjectionArch(features, *branches)
        self.over_arch = OverArch(dim + columns, over_arch_layer_sizes, dense_device)


class DLRMWrapper(DLRM):
    """`DLRM` over a batch with ``float_features``, ``idlist_features`` and ``label``. Arguments are those of `DLRM`."""

    def forward(self, model_input: Any) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Logits ``[B, 1]``; in training mode ``(loss, logits)``.

        Args:
            model_input: the batch. The loss is the mean binary cross-entropy of the logits and ``label`` ``[B]``.
        """
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        return with_loss(logits, model_input.label) if self.training else logits


def with_loss(predictions: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """The mean binary cross-entropy of predictions ``[B, 1]``, read as logits, and labels ``[B]``; the predictions."""
    loss = functional.binary_cross_entropy_with_logits(predictions.squeeze(-1), label.to(predictions.dtype))
    return loss, predictions
