"""Calls a module with other weights, and restores its own, also where a module or a weight has several names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def call_with(module: nn.Module, weights: Mapping[str, Tensor], *arguments: Any) -> Any:
    """Calls a module with other parameters and buffers, and restores its own.

    `torch.func.functional_call` of torch 2.13 replaces a tied weight once for each of its names. Of a module that has
    two names, it then restores the replacement. Here each attribute is replaced once.

    Args:
        weights: by the names of ``named_parameters()`` and ``named_buffers()``. A tied weight has one of its names.

    >>> shared = nn.Linear(1, 1, bias=False)
    >>> own = shared.weight
    >>> call_with(nn.Sequential(shared, shared), {"0.weight": torch.tensor([[3.0]])}, torch.ones(1)).tolist()
    [9.0]
    >>> shared.weight is own
    True
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    replaced = {id(own[name]): weight for name, weight in weights.items()}
    attributes = [
        named
        for path, part in module.named_modules()
        for members in (part.named_parameters, part.named_buffers)
        for named in members(path, recurse=False, remove_duplicate=False)
    ]
    by_attribute = {name: replaced[id(tensor)] for name, tensor in attributes if id(tensor) in replaced}
    return torch.func.functional_call(module, by_attribute, arguments, tie_weights=False)
