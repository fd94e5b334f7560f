"""DLRM with its loss, with the interface that training pipelines expect. Names and results are TorchRec's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from recshard_lab.models.dlrm import DLRM


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
