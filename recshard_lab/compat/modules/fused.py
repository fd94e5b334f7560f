"""``torchrec.modules.fused_embedding_modules``: optimizers as fused tables name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recshard_lab import embedding
from recshard_lab.embedding import EmbOptimType, RowWiseAdagrad
from recshard_lab.embedding.fused import check_location

_KINDS: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    torch.optim.Adam: EmbOptimType.ADAM,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def convert_optimizer_type_and_kwargs(
    optimizer_type: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any]
) -> tuple[EmbOptimType, dict[str, Any]] | None:
    """The rule of a fused table and its arguments: ``lr`` becomes ``learning_rate``. None for another optimizer.

    Args:
        optimizer_type: SGD, Adagrad or Adam of torch, or `RowWiseAdagrad`.
        optimizer_kwargs: its arguments; unchanged.

    >>> convert_optimizer_type_and_kwargs(torch.optim.SGD, {"lr": 0.1})
    (<EmbOptimType.EXACT_SGD: 'exact_sgd'>, {'learning_rate': 0.1})
    """
    if optimizer_type not in _KINDS:
        return None
    arguments = dict(optimizer_kwargs)
    if "lr" in arguments:
        arguments["learning_rate"] = arguments.pop("lr")
    return _KINDS[optimizer_type], arguments


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: Mapping[str, Any],
    device: torch.device | None,
    location: Any = None,
) -> nn.Module:
    """Replaces every collection of a module by a fused one, as `recshard_lab.embedding.fuse_embedding_optimizer`.

    Args:
        model, optimizer_type, optimizer_kwargs, device: as there.
        location: as of `recshard_lab.embedding.FusedEmbeddingBagCollection`.

    Raises:
        ValueError: another `location`, or as there.

    >>> table = embedding.EmbeddingBagConfig(4, 4, "movies", feature_names=["seen"])
    >>> tables = embedding.EmbeddingBagCollection([table])
    >>> type(fuse_embedding_optimizer(tables, torch.optim.SGD, {"lr": 0.5}, torch.device("cpu"))).__name__
    'FusedEmbeddingBagCollection'
    """
    check_location(location, torch.device("cpu" if device is None else device))
    return embedding.fuse_embedding_optimizer(model, optimizer_type, optimizer_kwargs, device)
