"""DeepFM as published: a factorization machine and a deep network over the same embeddings, added up.

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", arXiv 1703.04247::

    logit = sum of w_f  +  sum over pairs of <V_f, V_g>  +  MLP([V_1 ... V_M])          (equations 1, 2, 4)

A field f is a feature: sparse ones have the pooled rows of their ids, a dense one ``x`` has ``x`` times a learned row.
Every row holds both orders, so that one lookup serves both parts: column 0 is the weight w, the others the vector V.

Shape letters: B batch, I dense features, F sparse features, M = F + I fields, D embedding dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models.dlrm import OverArch, checked_dense
from recshard_lab.sparse import KeyedJaggedTensor

wrap("checked_dense")  # one node in an fx graph


class DenseFields(nn.Module):
    """A learned row for each dense feature, times the feature.

    >>> DenseFields(3, 4)(torch.zeros(2, 3)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(self, in_features: int, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, dim, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes the rows like the weights of a linear layer."""
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, I] -> [B, I, D]``"""
        return features.unsqueeze(2) * self.weight


@names_wrong_arguments
class DeepFMNN(nn.Module):
    """The published DeepFM over one embedding collection. Returns logits.

    Args:
        embedding_bag_collection: the tables, all of one `embedding_dim` D, at least 2: a weight and a vector. May be on
            the meta device.
        dense_in_features: I; may be 0.
        deep_layer_sizes: widths of the deep part, without its last layer, whose width is 1.
        dense_device: of the dense weights.

    Raises:
        ValueError: tables of different widths or of one column, or a layer of width 0.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f", "g"])]
    >>> model = DeepFMNN(EmbeddingBagCollection(tables), 3, [16, 16])
    >>> ids = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 1, 4]), lengths=torch.tensor([1, 0, 1, 1]))
    >>> model(torch.rand(2, 3), ids).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        deep_layer_sizes: Sequence[int],
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dense_device = device_named(dense_device, "dense_device")
        tables = embedding_bag_collection.embedding_bag_configs()
        widths = {table.name: table.embedding_dim for table in tables}
        if len(set(widths.values())) != 1 or tables[0].embedding_dim < 2:
            raise ValueError(
                f"DeepFMNN needs tables of one embedding_dim, at least 2 (a weight and a vector), got {widths}"
            )
        if not 0 <= dense_in_features < 1 << 40:
            raise ValueError(f"dense_in_features must be 0 or more, got {dense_in_features}")
        self.embedding_dim = tables[0].embedding_dim
        self.dense_in_features = dense_in_features
        self.num_sparse_features = sum(len(table.feature_names) for table in tables)
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_fields: DenseFields | None = None
        if dense_in_features:
            self.dense_fields = DenseFields(dense_in_features, self.embedding_dim, dense_device)
        fields = self.num_sparse_features + dense_in_features
        self.deep = OverArch(fields * (self.embedding_dim - 1), [*deep_layer_sizes, 1], dense_device)

    @names_wrong_arguments
    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """dense ``[B, I]`` and ids of B samples -> logits ``[B, 1]``"""
        dense = checked_dense(dense_features, self.dense_in_features)
        pooled = self.embedding_bag_collection(sparse_features).values()
        sparse = pooled.reshape(-1, self.num_sparse_features, self.embedding_dim)
        fields = sparse if self.dense_fields is None else torch.cat([sparse, self.dense_fields(dense)], dim=1)
        linear, vectors = fields[..., 0].sum(1, keepdim=True), fields[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1, keepdim=True) / 2
        logits: Tensor = linear + pairs + self.deep(vectors.flatten(1))
        return logits
