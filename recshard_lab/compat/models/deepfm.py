"""TorchRec's wrapper of SimpleDeepFMNN for batches of its test model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from recshard_lab.compat.models.dlrm import with_loss
from recshard_lab.models import SimpleDeepFMNN


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """`SimpleDeepFMNN` over a batch with ``float_features``, ``idlist_features`` and ``label``.

    Arguments are those of `recshard_lab.models.SimpleDeepFMNN`.
    """

    def forward(self, model_input: Any) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Probabilities ``[B, 1]``; in training mode ``(loss, probabilities)``.

        Args:
            model_input: the batch. As in TorchRec, the loss reads the probabilities as logits.
        """
        found = super().forward(model_input.float_features, model_input.idlist_features)
        return with_loss(found, model_input.label) if self.training else found
