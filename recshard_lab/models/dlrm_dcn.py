"""DLRM-DCNv2: DLRM with a low-rank cross network as interaction (Wang et al. 2021, arXiv 2008.13535).

    dense [B, I] -- bottom MLP ------------> [B, D]    \\
                                                        side by side [B, (F + 1) D] -- cross net -- top MLP -> logit
    ids   KJT    -- embedding collection --> [B, F, D] /

It is the model of MLPerf Training's recommendation benchmark; its sizes are in `recshard_lab.mlperf`.

Shape letters: B batch, I dense features, F sparse features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models.crossnet import LowRankCrossNet
from recshard_lab.models.dlrm import DLRM


class InteractionDCNArch(nn.Module):
    """The dense vector and the features' vectors side by side, through a cross network.

    Args:
        num_sparse_features: F.
        crossnet: ``[B, (F + 1) D] -> [B, (F + 1) D]``.

    >>> InteractionDCNArch(3, nn.Identity())(torch.zeros(2, 8), torch.zeros(2, 3, 8)).shape
    torch.Size([2, 32])
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        if num_sparse_features < 1:
            raise ValueError(f"num_sparse_features must be at least 1, got {num_sparse_features}")
        self.num_sparse_features = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """dense ``[B, D]``, sparse ``[B, F, D]`` -> ``[B, (F + 1) D]``"""
        crossed: Tensor = self.crossnet(torch.cat([dense_features, sparse_features.flatten(1)], dim=1))
        return crossed

    def output_size(self, embedding_dim: int) -> int:
        """Columns of the output for vectors of this width D."""
        return (self.num_sparse_features + 1) * embedding_dim


@names_wrong_arguments
class DLRM_DCN(DLRM):
    """DLRM-DCNv2 over one embedding collection; arguments as in TorchRec.

    Args:
        embedding_bag_collection: the tables, all of one `embedding_dim` D. May be on the meta device.
        dense_in_features: I, as for `DLRM`.
        dense_arch_layer_sizes: widths of the bottom MLP, the last must be D.
        over_arch_layer_sizes: widths of the top MLP, the last one usually 1 (the logit).
        dcn_num_layers: layers of the cross network.
        dcn_low_rank_dim: their rank.
        dense_device: of the dense weights.

    Raises:
        ValueError: tables of different widths, layer sizes that do not fit them, or no cross layer.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> from recshard_lab.sparse import KeyedJaggedTensor
    >>> tables = [EmbeddingBagConfig(name="t1", num_embeddings=10, embedding_dim=8, feature_names=["f1", "f2"])]
    >>> model = DLRM_DCN(EmbeddingBagCollection(tables), 13, [32, 8], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=4)
    >>> ids = KeyedJaggedTensor(["f1", "f2"], torch.tensor([3, 1, 4]), lengths=torch.tensor([1, 0, 1, 1]))
    >>> model(torch.rand(2, 13), ids).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | str | None = None,
    ) -> None:
        self._cross_sizes = (dcn_num_layers, dcn_low_rank_dim)  # DLRM.__init__ calls _interaction
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _interaction(self, device: torch.device | str | None) -> InteractionDCNArch:
        width = (self.num_sparse_features + 1) * self.embedding_dim
        return InteractionDCNArch(self.num_sparse_features, LowRankCrossNet(width, *self._cross_sizes, device=device))
