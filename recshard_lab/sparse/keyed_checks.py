"""Checks that keys, lengths, offsets and stride of a KeyedJaggedTensor are consistent.

Shape letters: F features (keys), B samples (stride), N values.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recshard_lab.sparse import checks

if TYPE_CHECKING:
    from recshard_lab.sparse.keyed_storage import KeyedStorage


def stride_of(keys: list[str], lengths: Tensor | None, offsets: Tensor | None, stride: int | None) -> int:
    """Returns B, passed or derived. Raises if the counts are not F * B."""
    if stride is not None:
        stride = checks.check_count("stride", stride)
    bags = 0
    if offsets is not None:
        if offsets.dim() != 1:
            raise ValueError(f"offsets must be [F * B + 1], got shape {list(offsets.shape)}")
        bags = max(offsets.numel() - 1, 0)
        _check_bags("offsets", bags, keys, stride)
    if lengths is not None:
        if lengths.dim() != 1 and not (lengths.dim() == 2 and lengths.shape[0] == len(keys)):
            raise ValueError(f"lengths must be [F * B] or [F, B] with F = {len(keys)}, got shape {list(lengths.shape)}")
        if offsets is not None and lengths.numel() != bags:
            raise ValueError(
                f"offsets has {offsets.numel()} entries for {lengths.numel()} lengths: expected {lengths.numel() + 1}"
            )
        bags = lengths.numel()
        _check_bags("lengths", bags, keys, stride)
    if stride is not None:
        return stride
    return bags // len(keys) if keys else 0


def _check_bags(name: str, bags: int, keys: list[str], stride: int | None) -> None:
    fits = bags == len(keys) * stride if stride is not None else bags == 0 if not keys else bags % len(keys) == 0
    if not fits:
        samples = "a whole number of samples" if stride is None else f"stride {stride}"
        more = ", and one more" if name == "offsets" else ""
        raise ValueError(
            f"{name} describes {bags} bags, which is not {len(keys)} keys x {samples}: "
            f"pass one entry for each feature and sample{more}"
        )


def check_derived(
    keys: list[str],
    stride: int,
    bags: list[int] | None,
    stride_per_key: list[int] | None,
    lengths_offset_per_key: list[int] | None,
    index_per_key: dict[str, int] | None,
) -> None:
    """Checks arguments that TorchRec accepts although they follow from the others. Raises if they differ."""
    expected = [stride] * len(keys) if bags is None else bags
    if stride_per_key is not None and checks.check_list("stride_per_key", stride_per_key) != expected:
        raise ValueError(
            f"stride_per_key {stride_per_key} differs from the bags {expected}. Fix: for features with different "
            f"numbers of bags pass stride_per_key_per_rank={[[number] for number in stride_per_key]}"
        )
    if lengths_offset_per_key is None:
        pass
    elif checks.check_list("lengths_offset_per_key", lengths_offset_per_key) != [0, *accumulate(expected)]:
        raise ValueError(f"lengths_offset_per_key {lengths_offset_per_key} is not the running sum of {expected}")
    checks.check_numbering(index_per_key, keys)


def common_strides(batches: Sequence[KeyedStorage]) -> list[list[int]] | None:
    """Strides of joined batches; None if all have the same samples."""
    if not any(batch.variable_stride_per_key() for batch in batches):
        strides = [batch.stride() for batch in batches]
        if len(set(strides)) > 1:
            raise ValueError(f"all must have the same stride (samples), got {strides}")
        return None
    joined = []
    for batch in batches:
        joined += batch.stride_per_key_per_rank() or [[bags] for bags in batch.stride_per_key()]
    if len({len(ranks) for ranks in joined}) > 1:
        raise ValueError(f"stride_per_key_per_rank must name the same ranks in all, got {joined}")
    return joined


def common_inverse(batches: Sequence[KeyedStorage]) -> tuple[list[str] | None, Tensor | None]:
    """Inverse indices of joined batches. All batches have them, for the same samples, or none has."""
    found = [batch.inverse_indices_or_none() for batch in batches]
    given = [pair for pair in found if pair is not None]
    if not given:
        return None, None
    if len(given) < len(found) or len({index.shape[1] for _, index in given}) > 1:
        shapes = [None if pair is None else list(pair[1].shape) for pair in found]
        raise ValueError(f"all or none must have inverse_indices, of the same samples, got shapes {shapes}")
    rows = {key: row for keys, index in given for key, row in zip(keys, index, strict=True)}
    return list(rows), torch.stack(list(rows.values())) if rows else given[0][1]


def check_host_counts(
    keys: list[str], values: Tensor, length_per_key: list[int] | None, offset_per_key: list[int] | None
) -> list[int] | None:
    """length_per_key from the caller's counts, after a comparison with N."""
    for name, given in (("length_per_key", length_per_key), ("offset_per_key", offset_per_key)):
        for number in checks.check_list(name, [] if given is None else given):
            checks.check_count(f"each of {name}", number)
    if length_per_key is None and offset_per_key is not None:
        length_per_key = [upper - lower for lower, upper in pairwise(offset_per_key)]
    if length_per_key is None:
        return None
    length_per_key = list(length_per_key)
    if len(length_per_key) != len(keys) or sum(length_per_key) != values.shape[0]:
        raise ValueError(
            f"length_per_key {length_per_key} must have one count for each of {len(keys)} keys, "
            f"summing to {values.shape[0]} values"
        )
    if offset_per_key is not None and list(offset_per_key) != [0, *accumulate(length_per_key)]:
        raise ValueError(f"offset_per_key {offset_per_key} is not the running sum of {length_per_key}")
    return length_per_key


def check_numbers(
    keys: list[str], values: Tensor, lengths: Tensor | None, offsets: Tensor | None, stride: checks.Stride
) -> list[int]:
    """Ids of each feature, after a check of every length and offset. CPU only."""
    if offsets is not None:
        checks.check_offsets(offsets, values, keys, stride)
        if lengths is None:
            if not stride or not keys or not offsets.numel():
                return [0] * len(keys)
            if isinstance(stride, list):
                ends = offsets[torch.tensor([0, *accumulate(stride)])].tolist()
                return [upper - lower for lower, upper in pairwise(ends)]
            return [upper - lower for lower, upper in pairwise(offsets[::stride].tolist())]
        if offsets.numel():
            checks.check_agreement(lengths, offsets, keys, stride)
    assert lengths is not None
    return checks.check_lengths(lengths, values, keys, stride)


def all_or_none(weighted: Sequence[bool], names: Sequence[str]) -> bool:
    """Whether all have weights. Raises for a mixture, and names those without."""
    if any(weighted) and not all(weighted):
        without = [name for name, has in zip(names, weighted, strict=True) if not has]
        raise ValueError(f"some have weights, but {without} have none. Fix: pass weights to all or to none")
    return all(weighted)


def join(name: str, tensors: list[Tensor]) -> Tensor:
    """Concatenates. Raises for integers and floats together, because ids would become floats."""
    if torch.compiler.is_compiling():  # sizes are not known yet
        return torch.cat(tensors)
    filled = [tensor for tensor in tensors if tensor.numel()]
    if len({tensor.is_floating_point() for tensor in filled}) > 1:
        raise ValueError(
            f"{name} mix integers and floats {[str(tensor.dtype) for tensor in tensors]}. Fix: convert them to one type"
        )
    return torch.cat(filled or tensors)
