"""Replaces plain collections in a module by fused ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from recshard_lab.embedding.fused_base import FusedCollection
from recshard_lab.embedding.fused_collections import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from recshard_lab.embedding.optimizers import EmbOptimType


@names_wrong_arguments
def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
) -> nn.Module:
    """Replaces every `EmbeddingBagCollection` and `EmbeddingCollection` of a module by a fused one.

    The fused collections have the same tables ``[E, D]``, weights and names in the state dict. The weights of one that
    was on ``meta`` are drawn. A collection used in two places is one fused collection in both. Make torch optimizers
    for the rest of the model afterwards.

    Args:
        model: a module with collections, or a collection; changed in place, unless it is a collection.
        optimizer_type: as of `FusedEmbeddingBagCollection`, for all tables.
        optimizer_kwargs: its arguments.
        device: of the fused collections. None keeps each collection's device, and takes the CPU for ``meta``.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.

    Returns:
        ``model``, or the fused collection if ``model`` is a collection.

    Raises:
        ValueError: no collection to replace, a collection of a derived class, a table that is frozen or that has an
            optimizer in backward already, or tables that the fused collection refuses. ``model`` is unchanged then.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"])
    >>> model = nn.ModuleDict({"sparse": EmbeddingBagCollection([table]), "dense": nn.Linear(4, 1)})
    >>> names = list(model.state_dict())
    >>> model = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.5}, torch.device("cpu"))
    >>> type(model["sparse"]).__name__, list(model.state_dict()) == names
    ('FusedEmbeddingBagCollection', True)
    """
    twins: dict[nn.Module, FusedCollection] = {}
    places = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        if module not in twins:
            _check(path, module)
            twins[module] = _twin(module, optimizer_type, optimizer_kwargs, device, backend)
        places.append((path, module))
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection or EmbeddingCollection to fuse. Fix: pass the "
            f"module that has them, before it is sharded"
        )
    for path, module in places:
        if not path:
            return twins[module]
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, twins[module])
    return model


def _twin(
    module: EmbeddingBagCollection | EmbeddingCollection,
    optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
    optimizer_kwargs: Mapping[str, Any] | None,
    device: torch.device | str | None,
    backend: str | None,
) -> FusedCollection:
    """The fused collection with the tables and weights of ``module``."""
    on_meta = module.device.type == "meta"
    if device is None:
        device = "cpu" if on_meta else module.device
    more: dict[str, Any] = {"device": device, "backend": backend, "out_of_range": module.out_of_range}
    twin: FusedCollection
    if isinstance(module, EmbeddingBagCollection):
        tables, weighted = module.embedding_bag_configs(), module.is_weighted()
        twin = FusedEmbeddingBagCollection(tables, optimizer_type, optimizer_kwargs, weighted, **more)
    else:
        more["need_indices"] = module.need_indices()
        twin = FusedEmbeddingCollection(module.embedding_configs(), optimizer_type, optimizer_kwargs, **more)
    if not on_meta:
        twin.load_state_dict(module.state_dict())
    return twin.train(module.training)


def _check(path: str, module: nn.Module) -> None:
    if type(module) not in (EmbeddingBagCollection, EmbeddingCollection):
        raise ValueError(
            f"module {path!r} is a {type(module).__name__}, and a fused collection would lose the behaviour of that "
            f"class. Fix: derive it from a fused collection"
        )
    for name, weight in module.named_parameters(prefix=path):
        if not weight.requires_grad:
            raise ValueError(
                f"{name} is frozen, and a fused table always learns. Fix: set requires_grad, or fuse the rest"
            )
        if getattr(weight, "_optimizer_classes", None):
            raise ValueError(f"{name} has an optimizer in backward already. Fix: fuse it without that optimizer")
