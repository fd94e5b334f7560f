"""TorchRec's functions over lists of jagged batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recshard_lab.sparse import KeyedJaggedTensor

TENSORS_PER_BATCH = 6
"""Values, weights, lengths, offsets, strides (int32), inverse indices."""


def flatten_kjt_list(
    kjt_arr: Sequence[KeyedJaggedTensor],
) -> tuple[list[Tensor | None], list[list[str]]]:
    """Batches as tensors, six for each, and their keys. `unflatten_kjt_list` reverses it.

    A tensor that a batch does not store is None.

    >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([7]), lengths=torch.tensor([1]))
    >>> flatten_kjt_list([kjt])
    ([tensor([7]), None, tensor([1]), None, None, None], [['a']])
    """
    tensors: list[Tensor | None] = []
    for kjt in kjt_arr:
        strides = kjt.stride_per_key_per_rank() if kjt.variable_stride_per_key() else None
        inverse = kjt.inverse_indices_or_none()
        tensors += [
            kjt.values(),
            kjt.weights_or_none(),
            kjt.lengths_or_none(),
            kjt.offsets_or_none(),
            None if strides is None else torch.tensor(strides, dtype=torch.int32),
            None if inverse is None else inverse[1],
        ]
    return tensors, [kjt.keys() for kjt in kjt_arr]


def unflatten_kjt_list(values: Sequence[Tensor | None], contexts: Sequence[list[str]]) -> list[KeyedJaggedTensor]:
    """Batches from the tensors and keys of `flatten_kjt_list`.

    Raises:
        ValueError: another number of tensors, or a batch without values.
    """
    if len(values) != TENSORS_PER_BATCH * len(contexts):
        raise ValueError(
            f"values has {len(values)} entries for {len(contexts)} batches: expected {TENSORS_PER_BATCH} for each. "
            f"Fix: pass both results of flatten_kjt_list"
        )
    batches = []
    for place, keys in enumerate(contexts):
        first = place * TENSORS_PER_BATCH
        ids, weights, lengths, offsets, strides, inverse = values[first : first + TENSORS_PER_BATCH]
        if ids is None:
            raise ValueError(f"values[{first}] is None: batch {place} needs a tensor of ids")
        batches.append(
            KeyedJaggedTensor(
                keys,
                ids,
                weights,
                lengths,
                offsets,
                stride_per_key_per_rank=strides,
                inverse_indices=None if inverse is None else (keys, inverse),
            )
        )
    return batches
