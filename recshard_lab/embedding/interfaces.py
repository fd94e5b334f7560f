"""What the variants of a collection have in common, for annotations and `isinstance`; under TorchRec's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

from recshard_lab.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from recshard_lab.embedding.configs import EmbeddingBagConfig, EmbeddingConfig
from recshard_lab.embedding.fused_collections import FusedEmbeddingBagCollection, FusedEmbeddingCollection


class EmbeddingBagCollectionInterface(ABC, nn.Module):
    """A KeyedJaggedTensor in, a KeyedTensor of pooled rows out.

    >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    >>> isinstance(EmbeddingBagCollection([table]), EmbeddingBagCollectionInterface)
    True
    """

    @abstractmethod
    def forward(self, features: Any) -> Any:
        """Looks up one batch."""

    @abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """Whether batches carry weights."""


class EmbeddingCollectionInterface(ABC, nn.Module):
    """A KeyedJaggedTensor in, a JaggedTensor of rows a feature out."""

    @abstractmethod
    def forward(self, features: Any) -> Any:
        """Looks up one batch."""

    @abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""


EmbeddingBagCollectionInterface.register(EmbeddingBagCollection)
EmbeddingBagCollectionInterface.register(FusedEmbeddingBagCollection)
EmbeddingCollectionInterface.register(EmbeddingCollection)
EmbeddingCollectionInterface.register(FusedEmbeddingCollection)
