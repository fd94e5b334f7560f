"""What the stages of a step pass to each other, and the terms of a step.

A step takes a *local batch* (what one rank feeds its collection) to pooled rows, and their gradients back::

    KeyedJaggedTensor --route--> Packed --send--> LookupInput --look_up--> rows --give, join--> output
                                 gradients of rows <--update-- gradients of output <--split--

- *block*: one (table, feature) pair, a range of columns of the output. *Shard feature*: one (block, shard) pair, the
  ids of that feature whose rows the shard stores.
- *Exchanged* shard features get ids from all ranks and return rows to them. *Replicated* ones (data parallel) look up
  the local batch alone; their gradients go to all ranks.
- *source rank*: the rank whose local batch an id is from. It receives the row.
- *segment*: ids of one key, or of one (row shard, key), of a local batch. The ids of a shard feature are one segment.
- *variable batch*: features have different numbers of bags. *Distinct rows*: the row of each distinct id travels once.
- *kernel*: looks up and steps the adjacent shard features of a rank that have one number format, optimizer and backend.
- *output path*: how rows return: direct, reduce-scatter, two-hop, distinct rows. *Area*: rows of one width in a flat
  message, such as what one rank sent. *Parcel*: the part of a message that has one number of rows.
- *form*: what a batch has in common with others, but for the numbers of ids. A plan and a form fix the calls of a step.
- *drain*: after an error a rank sends its other messages with any numbers, marked, since other ranks wait for them.

Shape letters of this folder: B samples, D columns of a block, F keys, J blocks, K row shards of a table, L exchanged
shard features of this rank, E of all ranks, M ids of a block that are rows, N ids, R replicated shard features, S bags
of a feature, T bags of all ranks, U distinct ids or rows, W ranks, d columns of a kernel, n ids of some shard features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.distributed.step.layout import Layout
from recshard_lab.sparse.ops import complete_cumsum

Run = tuple[Tensor, int, int]
"""``(tensor, start, end)``: the elements ``tensor[start:end]``."""


@dataclass(slots=True)
class FeatureIds:
    """The local ids of one shard feature.

    Attributes:
        lengths: ids of each bag.
        ids: counted from the first row of the shard.
        weights: per-sample weights; None without them.
    """

    lengths: Run
    ids: Run
    weights: Run | None

    @property
    def num_bags(self) -> int:
        """Bags."""
        return self.lengths[2] - self.lengths[1]

    @property
    def num_ids(self) -> int:
        """Ids."""
        return self.ids[2] - self.ids[1]


@dataclass(slots=True)
class TouchedRows:
    """A replicated shard feature that is sent as distinct rows.

    Attributes:
        rows: ``[U]`` distinct ids, ascending.
        starts: ``[U]`` where each row's members begin.
        members: ``[n]`` the bags (of sequence collections, the ids) that read each row, row after row.
        weights: ``[n]`` per-sample weights of the members, or None.
    """

    rows: Tensor
    starts: Tensor
    members: Tensor
    weights: Tensor | None


@dataclass(slots=True)
class LocalBatch:
    """What the source rank keeps of its batch until the rows return.

    Attributes:
        batch_size: B on this rank.
        lengths: for each block, its bag lengths ``[B]``; ``[S]`` in a variable batch.
        counts: for each block, the number of its ids.
        sent: ids sent for each exchanged shard feature, rank after rank.
        replicas: the ids of each replicated shard feature, which this rank looks up itself.
        touched: for each replicated shard feature its distinct rows; None where its bags are sent.
        layout: the layout at the time of sending.
        places: ``[n]`` the place in the batch of each id of exchanged, then of replicated shard features. Only of
            sequence collections, and where weights require gradients. In pooled collections with the path
            "distinct_rows", those of its shard features. Ids that share one sent id are adjacent.
        num_places: for each of these shard features, the number of its places.
        uses: ``[n]`` the number of places of each id that is sent; None where it is 1 for all.
        remaining: for each block, the lengths ``[B]`` of its bags without ids that were left out.
        inverse: for each block, the bag of each sample ``[B]``; None where bag b is sample b's.
        kept: for each block, the places of the ids that remain after ids out of range were left out. ``lengths``
            still count all ids, ``counts`` the remaining ones.
        weights: the per-sample weights ``[N]``, if they require a gradient.
        spans: for each block, where its ids begin and end among those N.
        ids: for each block of a sequence collection, its ids as they were in the batch.
    """

    batch_size: int
    lengths: list[Tensor]
    counts: list[int]
    sent: NDArray[np.int64]
    replicas: list[FeatureIds]
    touched: list[TouchedRows | None]
    layout: Layout
    places: Tensor | None = None
    num_places: NDArray[np.int64] | None = None
    uses: Tensor | None = None
    remaining: Sequence[Tensor] = ()
    inverse: list[Tensor] | None = None
    kept: list[Tensor | None] | None = None
    weights: Tensor | None = None
    spans: Sequence[tuple[int, int]] = ()
    ids: Sequence[Tensor] = ()


@dataclass(slots=True)
class LookupInput:
    """The ids that this rank looks up, from all ranks.

    Attributes:
        ids: ``[N]`` by shard feature, then by source rank; counted from the shard's first row.
        weights: ``[N]`` per-sample weights, or None.
        lengths: of exchanged shard features ``[L, T]``; in a variable batch ``[L, most bags of a feature]``, padded
            with empty bags. Empty for sequence collections. Without shard features of the path "distinct_rows", which
            are last.
        copies: the same of replicated shard features, padded always: each may arrive as bags or as rows.
        copy_bags: ``[W, R]`` bags of replicated shard features by source rank; ids in sequence collections.
        segments: S of each source rank; in a variable batch the width of ``lengths`` alone.
        counts: ``[L + R, W]`` ids by shard feature and source rank.
        local_batch: this rank's batch.
        bags: ``[W, L]`` in a variable batch, bags of exchanged shard features by source rank; else None.
        looked_up: the returned rows, where they were looked up before the forward.
        weight_gradients: for each rank, whether its weights require a gradient; None if no rank's do.
        prefetched: for each exchanged kernel what `LookupKernel.prefetch` has returned, where it was called.
        rows: ``[n]`` the row of each id that this rank looks up, by shard feature, if the tables are managed. Zeros
            after an error.
        error: of this rank while the ids were exchanged. The lookup raises it, on all ranks.
    """

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor
    copies: Tensor
    copy_bags: NDArray[np.int64]
    segments: list[int]
    counts: NDArray[np.int64]
    local_batch: LocalBatch
    bags: NDArray[np.int64] | None = None
    looked_up: Tensor | None = None
    weight_gradients: list[bool] | None = None
    prefetched: list[Any] | None = None
    rows: Tensor | None = None
    error: Exception | None = None


def host_list(
    numbers: Sequence[int] | NDArray[np.int64], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Host integers on a device. The copy to a GPU is pinned, so the host does not wait for it."""
    tensor = torch.as_tensor(numbers, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def join(runs: Sequence[Run]) -> Tensor:
    """The runs end to end. Adjacent runs of one tensor are one; a single one is a view."""
    merged: list[Run] = []
    for tensor, start, end in runs:
        if start == end:
            continue
        if merged and merged[-1][0] is tensor and merged[-1][2] == start:
            merged[-1] = tensor, merged[-1][1], end
        else:
            merged.append((tensor, start, end))
    if not merged:
        return runs[0][0][:0]
    parts = [tensor if end - start == tensor.numel() else tensor[start:end] for tensor, start, end in merged]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def segment_index(starts: Tensor, sizes: Tensor, total: int) -> Tensor:
    """``[total]``: the places of segments that begin at ``starts [n]`` and have ``sizes [n]``, one after the other.

    >>> segment_index(torch.tensor([5, 0]), torch.tensor([2, 3]), 5).tolist()
    [5, 6, 0, 1, 2]
    """
    shift = starts - complete_cumsum(sizes)[:-1]
    index = torch.repeat_interleave(shift, sizes, output_size=total)
    return index.add_(torch.arange(total, device=index.device))


def read_all(tensors: Sequence[Tensor]) -> list[NDArray[np.int64]]:
    """Integer tensors ``[n]`` of one device as arrays. Waits for a GPU once: no other code of a step does.

    >>> [found.tolist() for found in read_all([torch.tensor([3, 1]), torch.tensor([True])])]
    [[3, 1], [1]]
    """
    if len(tensors) < 2:
        return [own.long().cpu().numpy() for own in tensors]
    flat = torch.cat([own.long() for own in tensors]).cpu().numpy()
    return np.split(flat, np.cumsum([own.numel() for own in tensors])[:-1])
