"""Every id of a batch is a row of its table before it is sent. An id out of range is refused, clamped or left out.

Valid batches cost the host nothing on a GPU: the check travels with the one read of a step. On a CPU it compares the
smallest and the largest id of each feature. Only a batch with an id out of range is built again, with a key for each
block, because a feature that two tables read may be in range of one of them alone.

Shape letters: F keys, N ids of the batch, M remaining ids of a block, B_f bags of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.types import host_list
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor

NO_LIMIT = 2**31 - 1
"""In place of the rows of a table, for keys that no table reads. Their ids are never sent."""


@dataclass(slots=True)
class Checked:
    """A batch whose ids are all rows.

    Attributes:
        features: the batch.
        position: for each block, the position of its key in the batch.
        lengths: for each block, its bag lengths ``[B_f]`` as given; None where the batch is unchanged.
        kept: for each block, the places of the remaining ids ``[M]``, or None where all remain.
    """

    features: KeyedJaggedTensor
    position: list[int]
    lengths: list[Tensor] | None = None
    kept: list[Tensor | None] | None = None


def check_dtype(values: Tensor) -> None:
    """Refuses ids that are not integers ``[N]``.

    Raises:
        ValueError: with shape and dtype.
    """
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise ValueError(
            f"ids must be [N] of int32 or int64, got {list(values.shape)} of {values.dtype}. Fix: use values.long()"
        )


def row_limits(num_keys: int, position: Sequence[int], layout: Layout) -> list[int]:
    """For each key, the rows of the smallest table that reads it; 0 where only dynamic tables do, or none."""
    limits = [0] * num_keys
    for block, key in zip(layout.blocks, position, strict=True):
        if layout.dynamic[block.table]:
            continue
        rows = layout.tables[block.table].num_embeddings
        limits[key] = min(limits[key] or rows, rows)
    return limits


def all_are_rows(values: Tensor, starts: Sequence[int], limits: Sequence[int]) -> bool:
    """Whether the ids of each key f, ``values[starts[f]:starts[f + 1]]``, are in ``[0, limits[f])``. On a CPU."""
    bounds, ends = np.asarray(limits), np.asarray(starts)
    filled = np.flatnonzero(ends[1:] > ends[:-1])
    if not len(filled):
        return True
    ids, first = values.detach().numpy(), ends[filled]
    used = bounds[filled] > 0
    low, high = np.minimum.reduceat(ids, first)[used], np.maximum.reduceat(ids, first)[used]
    return bool((low >= 0).all() and (high < bounds[filled][used]).all())


def clamp_to_rows(
    values: Tensor, counts: Tensor, limits: Sequence[int], dynamic: bool = False
) -> tuple[Tensor, Tensor]:
    """The ids moved into ``[0, limit)``, and ``[1]`` whether any was outside. Does not read the device.

    Args:
        values: ``[N]``.
        counts: ``[F]`` ids of each key.
        limits: as `row_limits` returns them.
        dynamic: whether ids of keys without a limit must stay as they are.
    """
    last = host_list([(limit or NO_LIMIT) - 1 for limit in limits], values.device)
    inside = torch.minimum(values.clamp(min=0), torch.repeat_interleave(last, counts, output_size=values.numel()))
    outside = inside != values
    if not all(limits):
        used = host_list([bool(limit) for limit in limits], values.device, torch.bool)
        limited = torch.repeat_interleave(used, counts, output_size=values.numel())
        outside &= limited
        if dynamic:
            inside = torch.where(limited, inside, values)
    return inside, outside.any().view(1)


def apply_policy(features: KeyedJaggedTensor, position: list[int], layout: Layout, policy: OutOfRange) -> Checked:
    """The batch under the out-of-range policy, with one key for each block. Reads the device.

    Raises:
        ValueError: under ``"error"``, with the feature and sample of the first id that is no row.
    """
    bags = features.lengths_offset_per_key()
    lengths = [features.lengths().reshape(-1)[bags[key] : bags[key + 1]] for key in position]
    parts, kept = [], []
    for block, key in zip(layout.blocks, position, strict=True):
        table = layout.tables[block.table]
        given = features.permute([key])[block.feature]
        if layout.dynamic[block.table]:
            part, places = given, None
        else:
            part, places = policy.fit(given, block.feature, table.name, table.num_embeddings)
        parts.append(part)
        kept.append(places)
    weighted = features.weights_or_none() is not None
    inverse = features.inverse_indices_or_none()
    rebuilt = KeyedJaggedTensor._unchecked(
        [block.key for block in layout.blocks],
        torch.cat([part.values() for part in parts]),
        torch.cat([part.weights() for part in parts]) if weighted else None,
        torch.cat([part.lengths() for part in parts]),
        stride=features.stride(),
        length_per_key=[part.values().shape[0] for part in parts],
        strides=[[part.numel()] for part in lengths] if features.variable_stride_per_key() else None,
        inverse=None if inverse is None else inverse[1],
        inverse_keys=None if inverse is None else inverse[0],
    )
    return Checked(rebuilt, list(range(len(parts))), lengths, kept)
