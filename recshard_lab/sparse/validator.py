"""A complete check of a batch that was built without checks, or that is on a device."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from recshard_lab.sparse import checks
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor

logger = logging.getLogger(__name__)


class TableRange(Protocol):
    """What the validator reads of a table's config."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableRange] | None = None) -> bool:
    """Checks every key, length, offset, stride and inverse index, on any device.

    Constructors check values on the CPU only, because on a GPU this makes the host wait.

    Args:
        kjt: the batch; not on ``meta``, which has no values.
        configs: tables whose sizes the ids must fit, such as `EmbeddingBagConfig`; None skips that.

    Returns:
        Whether the ids of all features are rows of their tables. A warning is logged for each feature with others.

    Raises:
        ValueError: which feature and which sample are wrong, and how: lengths that are negative or do not sum to
            the values, offsets that fall or start late, lengths and offsets that disagree, weights of another
            size, a key that occurs twice, strides and bags that differ, an inverse index that names no bag,
            counts on the host that are not those of the lengths, parts on several devices.

    >>> validate_keyed_jagged_tensor(KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1, 0])))
    True
    """
    if not isinstance(kjt, KeyedJaggedTensor):
        raise ValueError(f"expected a KeyedJaggedTensor, got {type(kjt).__name__}")
    checks.index_keys(checks.check_keys(kjt._keys))
    checks.check_values(kjt._values, kjt._weights)
    if kjt._values.is_meta:
        raise ValueError("tensors on 'meta' hold no numbers to validate")
    for name, tensor in kjt._tensors().items():
        if tensor.device != kjt.device():
            raise ValueError(f"{name.lstrip('_')} is on {tensor.device}, but values is on {kjt.device()}: move it")
    inverse = kjt.inverse_indices_or_none()
    KeyedJaggedTensor(
        kjt._keys,
        torch.empty(kjt._values.shape[0]),
        lengths=None if kjt._lengths is None else kjt._lengths.cpu(),
        offsets=None if kjt._offsets is None else kjt._offsets.cpu(),
        stride=kjt._stride,
        stride_per_key_per_rank=kjt._strides,
        length_per_key=kjt._length_per_key,
        offset_per_key=kjt._offset_per_key,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1].cpu()),
    )
    outside = [] if configs is None else _outside(kjt, configs)
    for warning in outside:
        logger.warning(warning)
    return not outside


def _outside(kjt: KeyedJaggedTensor, configs: Sequence[TableRange]) -> list[str]:
    """One warning for each feature with ids that are not rows of its table."""
    rows = {feature: config.num_embeddings for config in configs for feature in config.feature_names}
    found = []
    for key in filter(rows.__contains__, kjt.keys()):
        ids = kjt[key].values()
        if ids.numel():
            low, high = map(int, torch.stack(ids.aminmax()))
            if low < 0 or high >= rows[key]:
                found.append(f"feature {key!r} has ids from {low} to {high}, but its table has {rows[key]} rows")
    return found
