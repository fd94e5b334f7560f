"""Every id of a batch is a row of its table before it is sent: refused, moved or left out where it is not.

Ids that are all rows cost one look at the smallest and the largest of each feature. Only where one is not, the batch
is made anew with a key for each block, since a feature that two tables read may be a row of one of them alone.

Shape letters: N ids of a block as given, M of them left, B_f bags of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from recshard_lab.distributed.step.layout import Block, Layout
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor


@dataclass(slots=True)
class Fitted:
    """A batch all of whose ids are rows.

    Attributes:
        features: the batch.
        position: for each block, the position of its key in the batch.
        lengths: for each block, its bag lengths ``[B_f]`` as given; None where the batch is as it was given.
        kept: for each block, where in it the ids that are left stood ``[M]``, None where all are left.
    """

    features: KeyedJaggedTensor
    position: list[int]
    lengths: list[Tensor] | None
    kept: list[Tensor | None] | None


def fit_ids(features: KeyedJaggedTensor, position: list[int], layout: Layout, policy: OutOfRange) -> Fitted:
    """The batch as the policy wants it.

    Raises:
        ValueError: ids that are not integers; under ``"error"`` one that is no row, with its feature and sample.
    """
    values, starts = features.values(), features.offset_per_key()
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise ValueError(
            f"ids must be [N] of int32 or int64, got {list(values.shape)} of {values.dtype}: use values.long()"
        )
    spans = [(block, starts[key], starts[key + 1]) for block, key in zip(layout.blocks, position, strict=True)]
    spans = [span for span in spans if span[2] > span[1]]
    if not spans or _all_rows(values, spans, layout):
        return Fitted(features, position, None, None)
    bags = features.lengths_offset_per_key()
    lengths = [features.lengths().reshape(-1)[bags[key] : bags[key + 1]] for key in position]
    parts, kept = [], []
    for block, key in zip(layout.blocks, position, strict=True):
        table = layout.tables[block.table]
        given = features.permute([key])[block.feature]
        part, left = policy.fit(given, block.feature, table.name, table.num_embeddings)
        parts.append(part)
        kept.append(left)
    weighted = features.weights_or_none() is not None
    inverse = features.inverse_indices_or_none()
    remade = KeyedJaggedTensor._unchecked(
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
    return Fitted(remade, list(range(len(parts))), lengths, kept)


def _all_rows(values: Tensor, spans: list[tuple[Block, int, int]], layout: Layout) -> bool:
    extremes = [torch.aminmax(values[start:end]) for _, start, end in spans]
    both = torch.stack([e.min for e in extremes] + [e.max for e in extremes]).tolist()
    low, high = both[: len(spans)], both[len(spans) :]
    rows = [layout.tables[block.table].num_embeddings for block, _, _ in spans]
    return min(low) >= 0 and all(top < size for top, size in zip(high, rows, strict=True))
