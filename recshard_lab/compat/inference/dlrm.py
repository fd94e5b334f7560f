"""``torchrec.inference.dlrm_predict``: a DLRM whose input and output are dicts of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recshard_lab.compat.inference.modules import PredictModule
from recshard_lab.data import Batch
from recshard_lab.embedding import EmbeddingBagCollection
from recshard_lab.models import DLRM
from recshard_lab.sparse import KeyedJaggedTensor


@dataclass
class DLRMModelConfig:
    """The sizes of a DLRM.

    Args:
        dense_arch_layer_sizes, dense_in_features, over_arch_layer_sizes: as of `DLRM`.
        embedding_dim: columns of all tables.
        id_list_features_keys: the sparse features.
        num_embeddings_per_feature: rows of the table of each feature.
        num_embeddings: rows of each table, if they are equal.
        sample_input: a batch, for tracing.
    """

    dense_arch_layer_sizes: list[int]
    dense_in_features: int
    embedding_dim: int
    id_list_features_keys: list[str]
    num_embeddings_per_feature: list[int]
    num_embeddings: int
    over_arch_layer_sizes: list[int]
    sample_input: Batch


class DLRMPredictModule(PredictModule):
    """A DLRM for inference.

    Args:
        embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes: as of `DLRM`.
        id_list_features_keys: the sparse features, in the order of the input.
        dense_device: of the dense layers.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        id_list_features_keys: list[str],
        dense_device: torch.device | None = None,
    ) -> None:
        module = DLRM(
            embedding_bag_collection=embedding_bag_collection,
            dense_in_features=dense_in_features,
            dense_arch_layer_sizes=dense_arch_layer_sizes,
            over_arch_layer_sizes=over_arch_layer_sizes,
            dense_device=dense_device,
        )
        super().__init__(module, None if dense_device is None else str(dense_device))
        self.id_list_features_keys = id_list_features_keys

    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Click probabilities.

        Args:
            batch: ``float_features`` ``[B, I]``; ``id_list_features.lengths`` ``[F * B]`` or ``[F, B]`` and
                ``id_list_features.values`` ``[N]``, feature by feature.

        Returns:
            ``default``: ``[B]``.

        Raises:
            KeyError: an input is missing.
        """
        sparse = KeyedJaggedTensor(
            keys=self.id_list_features_keys,
            values=batch["id_list_features.values"],
            lengths=batch["id_list_features.lengths"].reshape(-1),
        )
        module: Any = self.predict_module
        logits: Tensor = module(batch["float_features"], sparse)
        return {"default": logits.sigmoid().squeeze(-1)}
