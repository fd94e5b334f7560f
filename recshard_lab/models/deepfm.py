"""DeepFM: a factorization machine and a deep network over the same embeddings, as published and as TorchRec has it.

Guo et al. 2017, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", arXiv 1703.04247::

    logit = sum of w_f  +  sum over pairs of <V_f, V_g>  +  MLP([V_1 ... V_M])          (equations 1, 2, 4)

`DeepFMNN` is this model. A field f is a feature: sparse ones have the pooled rows of their ids, a dense one ``x`` has
``x`` times a learned row. Every row holds both orders, so that one lookup serves both parts: column 0 is the weight w,
the others the vector V.

`SimpleDeepFMNN` is TorchRec's model, of parts under TorchRec's names. It concatenates these parts. It uses the products
of all pairs of *numbers*, also of numbers in one vector, and returns probabilities.

Shape letters: B batch, I dense features, F sparse features, M = F + I fields, D embedding dim, H width of the deep
part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import wrap

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding import EmbeddingBagCollection, embedding_names_by_table
from recshard_lab.models import dlrm
from recshard_lab.models.dlrm import checked_dense, common_dim
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor

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
        self.embedding_dim = common_dim("DeepFMNN", tables, least=2)
        if not 0 <= dense_in_features < 1 << 40:
            raise ValueError(f"dense_in_features must be 0 or more, got {dense_in_features}")
        self.dense_in_features = dense_in_features
        self.num_sparse_features = sum(len(table.feature_names) for table in tables)
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_fields: DenseFields | None = None
        if dense_in_features:
            self.dense_fields = DenseFields(dense_in_features, self.embedding_dim, dense_device)
        fields = self.num_sparse_features + dense_in_features
        self.deep = dlrm.OverArch(fields * (self.embedding_dim - 1), [*deep_layer_sizes, 1], dense_device)

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


# TorchRec's model of DeepFM's parts, with the same results.


def _in_a_row(embeddings: Sequence[Tensor]) -> Tensor:
    if not len(embeddings):
        raise ValueError("embeddings is empty. Fix: pass at least one tensor [B, ...]")
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)


@names_wrong_arguments
class FactorizationMachine(nn.Module):
    """Sum of the products of all pairs of numbers of a sample: ``(sum(x)^2 - sum(x^2)) / 2`` over all features.

    This is the second-order term of Rendle 2010 (ICDM) for inputs of one number. `DeepFMNN` has the term for vectors:
    it adds their dot products.

    >>> FactorizationMachine()([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])]).item()
    11.0
    """

    @names_wrong_arguments
    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Tensors ``[B, ...]``, of any widths -> ``[B, 1]``"""
        row = _in_a_row(embeddings)
        return (row.sum(1, keepdim=True).square() - row.square().sum(1, keepdim=True)) / 2


@names_wrong_arguments
class DeepFM(nn.Module):
    """The deep part: a module over the concatenated embeddings of a sample.

    Args:
        dense_module: ``[B, sum of widths] -> [B, H]``.

    >>> DeepFM(nn.Linear(3, 4))([torch.zeros(5, 2), torch.zeros(5, 1)]).shape
    torch.Size([5, 4])
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    @names_wrong_arguments
    def forward(self, embeddings: Sequence[Tensor]) -> Tensor:
        """Tensors ``[B, ...]``, of any widths -> ``[B, H]``"""
        deep: Tensor = self.dense_module(_in_a_row(embeddings))
        return deep


class DenseArch(nn.Module):
    """Two linear layers with relu, from the dense features to one vector."""

    def __init__(
        self, in_features: int, hidden_layer_size: int, embedding_dim: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size, device=device),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim, device=device),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, I] -> [B, D]``"""
        dense: Tensor = self.model(checked_dense(features, self.in_features))
        return dense


class SparseArch(nn.Module):
    """The tables."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """ids of B samples -> ``[B, F D]``"""
        pooled: KeyedTensor = self.embedding_bag_collection(features)
        return pooled


class FMInteractionArch(nn.Module):
    """Concatenates the dense vector, the deep part and the pairwise products.

    Args:
        fm_in_features: columns of all vectors together.
        sparse_feature_names: keys of the F features.
        deep_fm_dimension: H.
    """

    def __init__(
        self,
        fm_in_features: int,
        sparse_feature_names: Sequence[str],
        deep_fm_dimension: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.sparse_feature_names = list(sparse_feature_names)
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension, device=device), nn.ReLU()),
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """dense ``[B, D]``, sparse ``[B, F D]`` -> ``[B, D + H + 1]``"""
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """One linear layer and a sigmoid."""

    def __init__(self, in_features: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1, device=device), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features] -> [B, 1]``, in (0, 1)"""
        chance: Tensor = self.model(features)
        return chance


@names_wrong_arguments
class SimpleDeepFMNN(nn.Module):
    """TorchRec's model of DeepFM's parts. It returns probabilities, not logits.

    Args:
        num_dense_features: I, at least 1.
        embedding_bag_collection: the tables, all of one `embedding_dim` D. May be on the meta device.
        hidden_layer_size: of the dense part.
        deep_fm_dimension: H.
        dense_device: of the dense weights.

    Raises:
        ValueError: tables of different widths, or sizes below 1.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> tables = [EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f", "g"])]
    >>> model = SimpleDeepFMNN(3, EmbeddingBagCollection(tables), hidden_layer_size=16, deep_fm_dimension=5)
    >>> ids = KeyedJaggedTensor(["f", "g"], torch.tensor([3, 1, 4]), lengths=torch.tensor([1, 0, 1, 1]))
    >>> model(torch.rand(2, 3), ids).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
        dense_device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        dense_device = device_named(dense_device, "dense_device")
        tables = embedding_bag_collection.embedding_bag_configs()
        dim = common_dim("SimpleDeepFMNN", tables)
        sizes = (num_dense_features, hidden_layer_size, deep_fm_dimension)
        if not all(1 <= size < 1 << 40 for size in sizes):
            raise ValueError(
                f"num_dense_features, hidden_layer_size and deep_fm_dimension must be at least 1, got {list(sizes)}"
            )
        names = [name for group in embedding_names_by_table(tables) for name in group]
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, dim, dense_device)
        self.inter_arch = FMInteractionArch(dim * (1 + len(names)), names, deep_fm_dimension, dense_device)
        self.over_arch = OverArch(dim + deep_fm_dimension + 1, dense_device)

    @names_wrong_arguments
    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """dense ``[B, I]`` and ids of B samples -> probabilities ``[B, 1]``"""
        dense = self.dense_arch(dense_features)
        chance: Tensor = self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))
        return chance
