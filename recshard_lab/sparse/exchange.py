"""A batch as the tensors that an all-to-all exchanges, and the batch rebuilt from what all ranks sent.

                 rank 0 sends      rank 1 sends        received, by rank           rebuilt, by feature
    "movie"      m0 m1             m2                   m0 m1 g0 | m2 g1 g2         m0 m1 m2
    "genre"      g0                g1 g2                                           g0 g1 g2

Shape letters: F features (keys), R ranks, N values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recshard_lab.sparse import checks
from recshard_lab.sparse.ops import gather_segments

if TYPE_CHECKING:
    from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def labels(kjt: KeyedJaggedTensor) -> list[str]:
    """Names of the tensors to exchange."""
    strides = ["strides"] if kjt.variable_stride_per_key() else []
    return ["lengths", "values", *strides, *([] if kjt.weights_or_none() is None else ["weights"])]


def tensors(kjt: KeyedJaggedTensor) -> list[Tensor]:
    """The tensors to exchange, in the order of `labels`."""
    parts = {
        "lengths": lambda: kjt.lengths(),
        "values": lambda: kjt.values(),
        "strides": lambda: torch.tensor(kjt.stride_per_key(), device=kjt.device()),
        "weights": lambda: kjt.weights(),
    }
    return [parts[label]() for label in labels(kjt)]


def splits(kjt: KeyedJaggedTensor, key_splits: list[int]) -> list[list[int]]:
    """How many entries of each tensor every rank receives, if rank r receives ``key_splits[r]`` features."""
    for count in checks.check_list("key_splits", key_splits):
        checks.check_count("each of key_splits", count)
    if sum(key_splits) != len(kjt.keys()):
        raise ValueError(
            f"key_splits {key_splits} sum to {sum(key_splits)}, but there are {len(kjt.keys())} keys: "
            f"every key goes to one rank"
        )
    counts = {
        "lengths": _sums(kjt.stride_per_key(), key_splits),
        "values": _sums(kjt.length_per_key(), key_splits),
        "strides": key_splits,
        "weights": _sums(kjt.length_per_key(), key_splits),
    }
    return [counts[label] for label in labels(kjt)]


def rebuilt(
    kind: type[KeyedJaggedTensor],
    keys: list[str],
    received: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> KeyedJaggedTensor:
    """The batch of all ranks; see `KeyedJaggedTensor.dist_init`."""
    least = 3 if variable_stride_per_key else 2
    if not least <= len(checks.check_all("tensors", received, Tensor)) <= least + 1:
        raise ValueError(f"tensors has {len(received)} entries, expected {least}, or {least + 1} with weights")
    lengths, values = received[:2]
    weights = received[least] if len(received) > least else None
    strides, bags = None, None
    if variable_stride_per_key:
        by_rank = received[2].reshape(num_workers, len(keys))
        order = torch.arange(num_workers).reshape(stagger, -1).T.reshape(-1)
        strides = by_rank[order].T.tolist()
        bags = by_rank.reshape(-1)
    elif stride_per_rank is None:
        raise ValueError("stride_per_rank is None: a batch of one stride needs the samples of each rank. Fix: pass it")
    elif recat is not None and recat.numel() != lengths.numel():
        bags = torch.tensor(stride_per_rank, device=lengths.device).repeat_interleave(len(keys))
    if recat is not None:
        if bags is not None:  # from segments (rank, feature) to bags
            recat = gather_segments(torch.arange(lengths.numel(), device=lengths.device), bags, recat)[0]
        values, lengths, weights = gather_segments(values, lengths, recat, weights)
    stride = None if stride_per_rank is None else sum(stride_per_rank)
    return kind(keys, values, weights, lengths, stride=stride, stride_per_key_per_rank=strides).sync()


def _sums(counts: list[int], key_splits: list[int]) -> list[int]:
    """Sums of consecutive groups of counts."""
    ends = [sum(key_splits[: place + 1]) for place in range(len(key_splits))]
    return [sum(counts[end - size : end]) for end, size in zip(ends, key_splits, strict=True)]
