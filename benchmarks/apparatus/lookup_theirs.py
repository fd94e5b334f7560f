"""Collections and batches of TorchRec; its functions are called only in TorchRec's environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def collection(features: Sequence[str], rows: int, dim: int, kind: torch.dtype | None) -> Any:
    """One table for each feature, quantized to `kind` if it is not None."""
    from torchrec.inference.modules import quantize_inference_model
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=f"t{one}", feature_names=[one])
        for one in features
    ]
    trained = torch.nn.Sequential(EmbeddingBagCollection(tables=tables, device=torch.device("cpu")))
    if kind is not None:
        trained = quantize_inference_model(trained, quantization_dtype=kind)
    return trained.eval()


def batch(features: Sequence[str], ids: Tensor, lengths: Tensor) -> Any:
    """A batch in TorchRec's class."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(list(features), ids, lengths=lengths)
