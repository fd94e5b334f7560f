"""DLRM, the deep learning recommendation model (Naumov et al. 2019, arXiv 1906.00091).

    dense [B, I] -- bottom MLP ------------> [B, D]    \
                                                        dots of all pairs -- top MLP -> logit [B, 1]
    ids   KJT    -- embedding collection --> [B, F, D] /

The code is the same for a sharded and an unsharded embedding collection: the model calls it with a KeyedJaggedTensor
and receives a KeyedTensor.

Shape letters: B batch, I dense features, F sparse features, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models.crossnet import LowRankCrossNet
from recshard_lab.models.layers import MLP, InteractionArch
from recshard_lab.sparse import KeyedJaggedTensor


class DenseArch(nn.Module):
    """The bottom MLP. Without dense features it is a learned constant vector.

    The dot product of the constant with each embedding is a bias of its id.
    """

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.in_features = in_features
        self.mlp: MLP | None = None
        self.constant: nn.Parameter | None = None
        if in_features > 0:
            self.mlp = MLP(in_features, layer_sizes, device=device)
        else:
            self.constant = nn.Parameter(torch.empty(layer_sizes[-1], device=device))
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the constant like the bias of a linear layer of this width."""
        if self.constant is not None:
            bound = self.constant.numel() ** -0.5
            nn.init.uniform_(self.constant, -bound, bound)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, I] -> [B, D]``"""
        features = checked_dense(features, self.in_features)
        if self.mlp is not None:
            dense: Tensor = self.mlp(features)
            return dense
        assert self.constant is not None
        return self.constant.expand(features.shape[0], -1)


@wrap  # one node in an fx graph
def checked_dense(features: Tensor, in_features: int) -> Tensor:
    """Returns the dense features of a batch.

    Raises:
        ValueError: their shape is not ``[B, in_features]``.
    """
    if features.dim() != 2:
        raise ValueError(f"dense_features must be [B, {in_features}], got {list(features.shape)}")
    if features.shape[1] != in_features:
        raise ValueError(
            f"dense_features has {features.shape[1]} columns, the model was built for {in_features}. Fix: build it "
            f"with dense_in_features={features.shape[1]}"
        )
    return features


def common_dim(model: str, tables: Sequence[EmbeddingBagConfig], least: int = 1) -> int:
    """The `embedding_dim` of all tables.

    Raises:
        ValueError: it differs between tables, or is below `least`.
    """
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) != 1 or min(widths.values()) < least:
        raise ValueError(f"{model} needs tables of one embedding_dim, at least {least}, got {widths}")
    return tables[0].embedding_dim


def checked_sizes(
    tables: Sequence[EmbeddingBagConfig],
    dense_in_features: int,
    dense_arch_layer_sizes: Sequence[int],
    over_arch_layer_sizes: Sequence[int],
) -> tuple[list[int], list[int]]:
    """Widths of the bottom and of the top MLP.

    Raises:
        ValueError: tables of different widths, or layer sizes that do not fit them.
    """
    dim = common_dim("DLRM", tables)
    bottom, over = list(dense_arch_layer_sizes), list(over_arch_layer_sizes)
    if dense_in_features < 0:
        raise ValueError(f"dense_in_features must be 0 or more, got {dense_in_features}")
    if dense_in_features == 0 and not bottom:
        bottom = [dim]
    if not bottom or bottom[-1] != dim or (dense_in_features == 0 and len(bottom) > 1):
        expected = f"[..., {dim}]" if dense_in_features else "[]"
        raise ValueError(
            f"dense_arch_layer_sizes must be {expected} for {dense_in_features} dense features and tables "
            f"of embedding_dim {dim}, got {bottom}"
        )
    if not over:
        raise ValueError(
            "over_arch_layer_sizes is empty. Fix: pass widths such as [64, 1]; the last layer is the logit"
        )
    return bottom, over


class SparseArch(nn.Module):
    """An embedding collection whose output is one vector per feature.

    Args:
        embedding_bag_collection: tables of one `embedding_dim` D; may be sharded.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        tables = embedding_bag_collection.embedding_bag_configs()
        self.D = tables[0].embedding_dim
        self.F = sum(len(table.feature_names) for table in tables)

    @property
    def sparse_feature_names(self) -> list[str]:
        """The features, in the order of the output."""
        tables = self.embedding_bag_collection.embedding_bag_configs()
        return [feature for table in tables for feature in table.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """ids of B samples -> ``[B, F, D]``"""
        values: Tensor = self.embedding_bag_collection(features).values()
        return values.reshape(-1, self.F, self.D)


class OverArch(nn.Module):
    """The top MLP. Its last layer is linear and computes the logit."""

    def __init__(self, in_features: int, layer_sizes: Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        *hidden, last = layer_sizes
        self.mlp = MLP(in_features, hidden, device=device)
        self.out = nn.Linear(hidden[-1] if hidden else in_features, last, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features] -> [B, layer_sizes[-1]]``"""
        logits: Tensor = self.out(self.mlp(features))
        return logits


class Interaction(Protocol):
    """A module that combines the feature vectors of a sample."""

    def __call__(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """dense ``[B, D]``, sparse ``[B, F, D]`` -> ``[B, output_size(D)]``"""

    def output_size(self, embedding_dim: int) -> int:
        """Columns of the output for vectors of this width D."""


@names_wrong_arguments
class DLRM(nn.Module):
    """DLRM over one embedding collection; arguments as in TorchRec.

    Args:
        embedding_bag_collection: the tables, all of one `embedding_dim` D. May be on the meta device.
        dense_in_features: I. With 0, a learned vector replaces the bottom MLP.
        dense_arch_layer_sizes: widths of the bottom MLP, the last must be D; ``[]`` or ``[D]`` without dense
            features.
        over_arch_layer_sizes: widths of the top MLP, the last one usually 1 (the logit).
        dense_device: of the dense weights.

    Raises:
        ValueError: tables of different widths, or layer sizes that do not fit them.

    >>> from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
    >>> tables = [EmbeddingBagConfig(name="t1", num_embeddings=10, embedding_dim=8, feature_names=["f1", "f2"])]
    >>> model = DLRM(EmbeddingBagCollection(tables), 13, [32, 8], [16, 1])
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
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dense_device = device_named(dense_device, "dense_device")
        tables = embedding_bag_collection.embedding_bag_configs()
        bottom, over = checked_sizes(tables, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        self.embedding_dim = tables[0].embedding_dim
        self.num_sparse_features = sum(len(table.feature_names) for table in tables)
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = DenseArch(dense_in_features, bottom, device=dense_device)
        self.inter_arch = self._interaction(dense_device)
        self.over_arch = OverArch(self.inter_arch.output_size(self.embedding_dim), over, device=dense_device)

    def _interaction(self, device: torch.device | str | None) -> Interaction:
        return InteractionArch(self.num_sparse_features)

    @property
    def sparse_arch(self) -> SparseArch:
        """A view of the tables, as in TorchRec's DLRM. Its parameters have the names of this model."""
        return SparseArch(self.embedding_bag_collection)

    @names_wrong_arguments
    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """dense ``[B, I]`` and ids of B samples -> logits ``[B, 1]``"""
        dense = self.dense_arch(dense_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        sparse = pooled.reshape(-1, self.num_sparse_features, self.embedding_dim)
        logits: Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return logits


# DLRM-DCNv2: DLRM with a low-rank cross network as interaction (Wang et al. 2021, arXiv 2008.13535).
#
#     dense [B, I] -- bottom MLP ------------> [B, D]    \
#                                                         side by side [B, (F + 1) D] -- cross net -- top MLP -> logit
#     ids   KJT    -- embedding collection --> [B, F, D] /
#
# It is the model of MLPerf Training's recommendation benchmark; its sizes are in `recshard_lab.mlperf`.
#
# Shape letters: B batch, I dense features, F sparse features, D embedding dim.


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


# DLRM with its loss, with the interface that training pipelines expect. Names and results are TorchRec's.


class DLRMTrain(nn.Module):
    """A model whose forward takes a batch and returns ``(loss, (loss, logits, labels))``.

    Args:
        dlrm_module: takes dense and sparse features, returns logits ``[B, 1]``.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])]
    >>> model = DLRMTrain(DLRM(EmbeddingBagCollection(tables), 3, [8], [4, 1]))
    >>> ids = KeyedJaggedTensor(["f"], torch.tensor([3, 1]), lengths=torch.tensor([1, 1]))
    >>> batch = SimpleNamespace(dense_features=torch.rand(2, 3), sparse_features=ids, labels=torch.tensor([0, 1]))
    >>> loss, (_, logits, labels) = model(batch)
    >>> loss.shape, logits.shape
    (torch.Size([]), torch.Size([2]))
    """

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The mean loss over the batch; then, without gradients, loss, logits ``[B]`` and labels ``[B]``.

        Args:
            batch: has ``dense_features``, ``sparse_features`` and ``labels``.
        """
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss: Tensor = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
