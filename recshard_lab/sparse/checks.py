"""Checks of jagged batches, with errors that name the wrong feature and sample.

Shapes, types and counts are always compared. Values are read on CPU tensors only, because reading values of a GPU
makes the host wait.

Shape letters: B batch, F features, N ids.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

#: Bags of every feature, or of each feature its own number.
Stride = int | list[int]

#: Whether constructors leave out values beyond the sum of the lengths. Otherwise such values are an error.
LEAVE_OUT_SPARE_VALUES = False

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class UnknownKeyError(KeyError, ValueError):
    """A key that is not there: a KeyError, as of a dict, and a ValueError, as of every bad argument here."""

    __str__ = Exception.__str__


def readable(tensor: Tensor) -> bool:
    """Whether the numbers can be looked at for free: a plain CPU tensor, outside of a compiler."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor and not torch.compiler.is_compiling()


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """Values are a tensor `[N, ...]`; weights have one entry for each value, on the same device."""
    if not isinstance(values, Tensor) or values.dim() == 0:
        raise ValueError(f"values must be a tensor of at least one dimension, got {_what(values)}")
    if values.layout is not torch.strided:
        raise ValueError(f"values must be an ordinary (strided) tensor, got {values.layout}: use values.to_dense()")
    if weights is None:
        return
    if not isinstance(weights, Tensor) or weights.dim() == 0:
        raise ValueError(f"weights must be a tensor like values, got {_what(weights)}")
    if weights.shape[0] != values.shape[0]:
        raise ValueError(
            f"weights has {weights.shape[0]} entries for {values.shape[0]} values: give one weight a value"
        )
    check_device("weights", weights, values)


def check_parts(
    values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The arguments, which are tensors of one device. Without spare values, if `LEAVE_OUT_SPARE_VALUES` (CPU only)."""
    check_values(values, weights)
    lengths = check_integers("lengths", lengths, values)
    offsets = check_integers("offsets", offsets, values)
    cuts = lengths if lengths is not None else offsets
    if LEAVE_OUT_SPARE_VALUES and readable(values) and cuts is not None and cuts.numel():
        used = int(cuts.sum()) if lengths is not None else int(cuts[-1])
        if 0 <= used < values.shape[0]:
            values, weights = values[:used], None if weights is None else weights[:used]
    return values, weights, lengths, offsets


def check_integers(name: str, tensor: Tensor | None, values: Tensor) -> Tensor | None:
    """The tensor itself, integer and beside the values; an empty one of another type becomes int32."""
    if tensor is None:
        return None
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor of integers, got {_what(tensor)}")
    if tensor.dtype not in _INTEGERS:
        if tensor.numel():
            raise ValueError(f"{name} must hold integers (int32 or int64), got {tensor.dtype}: use {name}.long()")
        tensor = tensor.to(torch.int32)
    check_device(name, tensor, values)
    return tensor


def _check_lengths(lengths: Tensor, values: Tensor, keys: Sequence[str] | None, stride: Stride) -> list[int]:
    """Ids of each feature `[F]`, after checking that no length is negative and they sum to N. CPU only."""
    per_key = sums_per_key(lengths, len(keys or ()), stride)
    low, high = torch.stack(lengths.aminmax()).tolist() if lengths.numel() else (0, 0)
    if low < 0:
        place = int((lengths.reshape(-1) < 0).nonzero()[0])
        raise ValueError(
            f"negative length {int(lengths.reshape(-1)[place])} at {_where(place, keys, stride)}: "
            f"an empty bag has length 0"
        )
    total = sum(per_key) if high <= values.shape[0] else sum(lengths.reshape(-1).tolist())  # sums wrap around
    if total != values.shape[0]:
        raise ValueError(
            f"lengths sum to {total}, but values has {values.shape[0]}" + _run_over(lengths, values, keys, stride)
        )
    return per_key


def sums_per_key(lengths: Tensor, num_keys: int, stride: Stride) -> list[int]:
    """Ids of each feature: the sums of its lengths, read by the host."""
    if isinstance(stride, list):
        ends = torch.tensor([0, *accumulate(stride)], device=lengths.device)
        starts = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int64), (1, 0))
        counts: list[int] = starts[ends].diff().tolist()
        return counts
    rows = lengths.reshape(-1, stride) if stride else lengths.reshape(num_keys, 0)
    sums: list[int] = rows.sum(dim=1).tolist()
    return sums


def _check_offsets(offsets: Tensor, values: Tensor, keys: Sequence[str] | None, stride: Stride) -> None:
    """Offsets start at 0, never fall and end at N. CPU only."""
    if not offsets.numel():
        if values.shape[0]:
            raise ValueError(f"offsets is empty, but values has {values.shape[0]}: offsets ends with their number")
        return
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets starts with {int(offsets[0])}, expected 0")
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        place = int(falls.nonzero()[0])
        raise ValueError(
            f"offsets fall from {int(offsets[place])} to {int(offsets[place + 1])} at "
            f"{_where(place, keys, stride)}: each must be at least the one before"
        )
    if int(offsets[-1]) != values.shape[0]:
        raise ValueError(f"offsets ends with {int(offsets[-1])}, but values has {values.shape[0]}: they must be equal")


def _check_agreement(lengths: Tensor, offsets: Tensor, keys: Sequence[str] | None, stride: Stride) -> None:
    """Lengths and offsets, when both are given, cut in the same places. CPU only."""
    flat = lengths.reshape(-1)
    differs = (offsets[1:] - offsets[:-1]) != flat
    if bool(differs.any()):
        place = int(differs.nonzero()[0])
        raise ValueError(
            f"lengths and offsets disagree at {_where(place, keys, stride)}: length {int(flat[place])}, but "
            f"offsets go from {int(offsets[place])} to {int(offsets[place + 1])}. Give only one of them"
        )


def check_keys(keys: Iterable[str]) -> list[str]:
    """The keys as a list of strings."""
    return check_all("keys", keys, str)


def index_keys(keys: Sequence[str]) -> dict[str, int]:
    """Maps each key to its position. Raises if a key occurs twice."""
    index = {key: place for place, key in enumerate(keys)}
    if len(index) != len(keys):
        twice = next(key for place, key in enumerate(keys) if index[key] != place)
        places = [place for place, key in enumerate(keys) if key == twice]
        raise ValueError(
            f"key {twice!r} is at positions {places}: its name is ambiguous. Fix: rename one, or select by position "
            f"with split() or permute()"
        )
    return index


def unknown_key(key: object, keys: Sequence[str]) -> UnknownKeyError:
    """The error for a key that is not there, naming those that are."""
    known = ", ".join(map(repr, keys[:20])) + (f", ... ({len(keys)} in all)" if len(keys) > 20 else "")
    return UnknownKeyError(f"no key {key!r}; there are: {known or 'none'}")


def check_count(name: str, value: object) -> int:
    """A whole number that is not negative."""
    if not isinstance(value, int | torch.SymInt) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r}")
    return int(value) if isinstance(value, int) else value  # type: ignore[return-value]


def check_list(name: str, given: Any) -> list[Any]:
    """A list, from anything with an order but a string or a tensor."""
    if not isinstance(given, Iterable) or isinstance(given, str | Tensor):
        fix = f": use [{given!r}]" if isinstance(given, str | int) else ""
        raise ValueError(f"{name} must be a list, got {_what(given)}{fix}")
    return given if isinstance(given, list) else list(given)


def check_all(name: str, given: Any, kind: type) -> list[Any]:
    """A list whose entries are all of one kind."""
    given = check_list(name, given)
    for place, entry in enumerate(given):
        if not isinstance(entry, kind):
            raise ValueError(f"{name}[{place}] must be a {kind.__name__}, got {_what(entry)}")
    return given


def check_same(name: str, given: Any, expected: list[int] | dict[str, int], fix: str = "leave it out") -> None:
    """An argument that TorchRec accepts although it follows from the others, if it is given."""
    if given is None:
        return
    if (given if isinstance(given, dict) else check_list(name, given)) != expected:
        raise ValueError(f"{name} is {given}, but the other arguments give {expected}. Fix: {fix}")


def _where(place: int, keys: Sequence[str] | None, stride: Stride) -> str:
    """Position in lengths as a person would say it."""
    if keys is None:
        return f"row {place}"
    if isinstance(stride, list):
        ends = list(accumulate(stride))
        feature = bisect_right(ends, place)
        return f"feature {keys[feature]!r}, sample {place - ends[feature] + stride[feature]}"
    return f"feature {keys[place // stride]!r}, sample {place % stride}"


def _run_over(lengths: Tensor, values: Tensor, keys: Sequence[str] | None, stride: Stride) -> str:
    """Which bag is the first to reach past the values, if one does."""
    ends = lengths.reshape(-1).cumsum(0, dtype=torch.int64)
    past = (ends > values.shape[0]).nonzero()
    if not past.numel():
        return f": {values.shape[0] - (int(ends[-1]) if ends.numel() else 0)} values belong to no bag"
    place = int(past[0])
    return f": {_where(place, keys, stride)} would end at {int(ends[place])}"


def check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    """A tensor is on the device of the values."""
    if tensor.device != values.device:
        raise ValueError(f"{name} is on {tensor.device}, but values is on {values.device}: move them with .to(device)")


def _what(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {value!r}"[:80]


# Counts of a KeyedJaggedTensor: keys, bags and samples that fit each other.
#
# Shape letters: F features (keys), B samples (stride), R ranks, N values.


def check_bags(lengths: Tensor | None, offsets: Tensor | None, keys: list[str] | None, stride: Stride | None) -> int:
    """The number of bags, which is that of keys and samples. Without keys: of a JaggedTensor."""
    bags = 0
    for name, cuts in (("offsets", offsets), ("lengths", lengths)):
        if cuts is None:
            continue
        table = name == "lengths" and keys is not None and not isinstance(stride, list)
        if cuts.dim() != 1 and not (table and cuts.dim() == 2 and cuts.shape[0] == len(keys or ())):
            also = f" or be [{len(keys or ())}, B]" if table else ""
            raise ValueError(f"{name} must have one dimension{also}, got shape {list(cuts.shape)}")
        if name == "lengths" and offsets is not None and cuts.numel() != bags:
            raise ValueError(
                f"offsets has {offsets.numel()} entries for {cuts.numel()} lengths: expected {cuts.numel() + 1}"
            )
        bags = cuts.numel() if name == "lengths" else max(cuts.numel() - 1, 0)
        if keys is None:
            continue
        if isinstance(stride, list):
            fits, wanted = bags == sum(stride), f"the {stride} of {len(keys)} keys in stride_per_key_per_rank"
        elif stride is not None:
            fits, wanted = bags == len(keys) * stride, f"{len(keys)} keys x stride {stride}"
        else:
            fits = bags % len(keys) == 0 if keys else bags == 0
            wanted = f"{len(keys)} keys x a whole number of samples"
        if not fits:
            more = ", and one more" if name == "offsets" else ""
            raise ValueError(f"{name} describes {bags} bags, expected {wanted}. Fix: pass one entry for each bag{more}")
    return bags


def check_strides(keys: list[str], given: Any) -> list[list[int]]:
    """``[F][R]`` as lists of whole numbers, from lists or an integer tensor ``[F, R]``."""
    name = "stride_per_key_per_rank"
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dim() != 2:
            raise ValueError(f"{name} must be [F, R] integers, got {given.dtype} of shape {list(given.shape)}")
        given = given.tolist()
    if len(check_list(name, given)) != len(keys):
        raise ValueError(f"{name} must have one list of ranks for each of {len(keys)} keys, got {given!r}"[:300])
    strides = []
    for key, row in zip(keys, given, strict=True):
        of_key = f"{name} of {key!r}"
        strides.append([check_count(of_key, number) for number in check_list(of_key, row)])
    if len({len(row) for row in strides}) > 1:
        ranks = {key: len(row) for key, row in zip(keys, strides, strict=True)}
        raise ValueError(f"{name} must name the same ranks for every key, got numbers of ranks {ranks}")
    return strides


def check_inverse(given: Any, values: Tensor) -> tuple[list[str], Tensor]:
    """Keys and ``[keys, B]`` integers, one row a key, beside the values."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ValueError(f"inverse_indices must be (keys, tensor [keys, B]), got {type(given).__name__}")
    keys, index = check_keys(given[0]), check_integers("the tensor of inverse_indices", given[1], values)
    index_keys(keys)
    if index is None or index.dim() != 2 or index.shape[0] != len(keys):
        shape = None if index is None else list(index.shape)
        raise ValueError(f"inverse_indices must be [{len(keys)}, B], a row for each of its keys {keys}, got {shape}")
    return keys, index


def check_inverse_range(keys: list[str], index: Tensor, bags: dict[str, int]) -> None:
    """Every entry is one of its feature's bags. Reads the numbers."""
    for key, row in zip(keys, index, strict=True):
        outside = ((row < 0) | (row >= bags.get(key, 0))).nonzero()
        if key in bags and outside.numel():
            raise ValueError(
                f"inverse_indices of feature {key!r}, sample {int(outside[0])} is {int(row[int(outside[0])])}, but the "
                f"feature has {bags[key]} bags: use numbers from 0 to {bags[key] - 1}"
            )


def check_host_counts(
    keys: list[str], values: Tensor, length_per_key: list[int] | None, offset_per_key: list[int] | None
) -> list[int] | None:
    """length_per_key from the caller's counts, after a comparison with N."""
    for name, given in (("length_per_key", length_per_key), ("offset_per_key", offset_per_key)):
        for number in check_list(name, [] if given is None else given):
            check_count(f"each of {name}", number)
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
    check_same("offset_per_key", offset_per_key, [0, *accumulate(length_per_key)])
    return length_per_key


def check_numbers(
    keys: list[str] | None, values: Tensor, lengths: Tensor | None, offsets: Tensor | None, stride: Stride
) -> list[int]:
    """Checks every length and offset. CPU only. Returns the ids of each feature, or of all bags without keys."""
    if offsets is not None:
        _check_offsets(offsets, values, keys, stride)
        if lengths is None:
            bags = stride if isinstance(stride, list) else [stride] * len(keys or ())
            ends = [0, *accumulate(bags)] if offsets.numel() else []
            return offsets[torch.tensor(ends, dtype=torch.int64)].diff().tolist() or [0] * len(bags)
        if offsets.numel():
            _check_agreement(lengths, offsets, keys, stride)
    assert lengths is not None
    return _check_lengths(lengths, values, keys, stride)


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
