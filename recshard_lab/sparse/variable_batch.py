"""Variable batches (VBE): features with different numbers of bags, and their expansion to one batch.

A feature that many samples share (a user's, in a batch of one user's items) is stored once for each distinct
bag. `stride_per_key_per_rank[f][r]` bags of feature f came from rank r; `inverse_indices` have, for every
sample of the full batch, the number of its bag::

    "user"   bags [u0] [u1]         inverse [0 0 1 0]      sample 0 -> [u0], 1 -> [u0], 2 -> [u1], 3 -> [u0]
    "item"   bags [a] [b] [c] [d]   inverse [0 1 2 3]

Shape letters: F features (keys), R ranks, B_f bags of feature f, B samples of the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from recshard_lab.sparse import checks


def strides_from(keys: list[str], given: Any) -> list[list[int]]:
    """``[F][R]`` as lists of whole numbers, from lists or an integer tensor ``[F, R]``."""
    name = "stride_per_key_per_rank"
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dim() != 2:
            raise ValueError(f"{name} must be [F, R] integers, got {given.dtype} of shape {list(given.shape)}")
        given = given.tolist()
    if not isinstance(given, list | tuple) or len(given) != len(keys):
        raise ValueError(f"{name} must have one list of ranks for each of {len(keys)} keys, got {given!r}"[:300])
    strides: list[list[int]] = []
    for key, row in zip(keys, given, strict=True):
        if not isinstance(row, list | tuple):
            raise ValueError(f"{name} of {key!r} must be a list, one number a rank, got {row!r}: use [{row!r}]")
        strides.append([checks.check_count(f"{name} of {key!r}", number) for number in row])
    if len({len(row) for row in strides}) > 1:
        ranks = {key: len(row) for key, row in zip(keys, strides, strict=True)}
        raise ValueError(f"{name} must name the same ranks for every key, got numbers of ranks {ranks}")
    return strides


def check_bags(keys: list[str], lengths: Tensor | None, offsets: Tensor | None, stride_per_key: list[int]) -> None:
    """Lengths ``[sum of B_f]`` and offsets ``[sum of B_f + 1]``, whichever are there."""
    total = sum(stride_per_key)
    for name, tensor, expected in (("lengths", lengths, total), ("offsets", offsets, total + 1)):
        if tensor is None or (name == "offsets" and total == 0 and tensor.numel() == 0):
            continue
        if tensor.dim() != 1 or tensor.numel() != expected:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, but stride_per_key_per_rank gives the {len(keys)} keys "
                f"{stride_per_key} bags: expected [{expected}]"
            )


def full_stride(given: int | None, stride_per_key: list[int], inverse: Tensor | None) -> int:
    """B: the samples of `inverse_indices`; without them, the largest number of bags of a feature."""
    expected = inverse.shape[1] if inverse is not None else None
    if given is not None:
        given = checks.check_count("stride", given)
        if expected is not None and given != expected:
            raise ValueError(f"stride is {given}, but inverse_indices has {expected} samples: leave stride out")
        return given
    return expected if expected is not None else max(stride_per_key, default=0)


def check_inverse(given: Any, values: Tensor) -> tuple[list[str], Tensor]:
    """Keys and ``[keys, B]`` integers, one row a key, beside the values."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"inverse_indices must be (keys, tensor [keys, B]), got {type(given).__name__}")
    keys, index = checks.check_keys(given[0]), given[1]
    checks.index_keys(keys)
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        what = index.dtype if isinstance(index, Tensor) else type(index).__name__
        raise ValueError(f"inverse_indices must hold a tensor of int32 or int64, got {what}")
    if index.dim() != 2 or index.shape[0] != len(keys):
        raise ValueError(
            f"inverse_indices must be [{len(keys)}, B], a row for each of its keys {keys}, got {list(index.shape)}"
        )
    if index.device != values.device:
        raise ValueError(f"inverse_indices is on {index.device}, but values is on {values.device}: move it")
    return keys, index


def check_inverse_range(keys: list[str], index: Tensor, bags: dict[str, int]) -> None:
    """Every entry is one of its feature's bags. Reads the numbers."""
    for key, row in zip(keys, index, strict=True):
        limit = bags.get(key)
        if limit is None or not row.numel():
            continue
        outside = (row < 0) | (row >= limit)
        if bool(outside.any()):
            sample = int(outside.nonzero()[0])
            raise ValueError(
                f"inverse_indices of feature {key!r}, sample {sample} is {int(row[sample])}, but the feature has "
                f"{limit} bags: use numbers from 0 to {limit - 1}"
            )


def inverse_of(inverse: tuple[Sequence[str], Tensor] | None, feature: str) -> Tensor:
    """One feature's row ``[B]`` of the inverse indices.

    Raises:
        ValueError: there are none, or none for this feature.
    """
    if inverse is None:
        raise ValueError(
            "the batch has another number of bags for each feature (stride_per_key_per_rank) and no "
            "inverse_indices, so pooled rows of different features belong to no common sample: give "
            "inverse_indices=(keys, tensor [keys, B])"
        )
    keys, index = inverse
    if feature not in keys:
        raise ValueError(f"inverse_indices has no row for feature {feature!r}, only for {list(keys)}: add it")
    return index[list(keys).index(feature)]
