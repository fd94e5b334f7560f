"""Batches from a TensorDict (package ``tensordict``), which is not a dependency."""

from __future__ import annotations

import sys
from typing import Any

import torch

from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def maybe_td_to_kjt(features: Any, keys: list[str] | None = None) -> Any:
    """A TensorDict of jagged nested tensors as a KeyedJaggedTensor. Returns any other object unchanged.

    Args:
        features: a ``tensordict.TensorDict`` whose entries are nested tensors of layout ``torch.jagged``, ``[B, *]``,
            or another object.
        keys: the entries to take, in order. None takes all.

    Raises:
        ValueError: an entry is missing, or is not a jagged nested tensor.
    """
    tensordict = sys.modules.get("tensordict")  # an object of this type exists only if it is imported
    if tensordict is None or not isinstance(features, tensordict.TensorDict):
        return features
    names = list(features.keys()) if keys is None else keys
    parts = []
    for name in names:
        part = features.get(name, None)
        if getattr(part, "layout", None) is not torch.jagged:
            found = (
                "is missing" if part is None else f"is a {type(part).__name__}, not a nested tensor of layout jagged"
            )
            raise ValueError(f"entry {name!r} of the TensorDict {found}: a feature has one bag of ids for each sample")
        parts.append(part)
    return KeyedJaggedTensor(
        names,
        torch.cat([part.values() for part in parts]),
        lengths=torch.cat([part.offsets().diff() for part in parts]),
    )
