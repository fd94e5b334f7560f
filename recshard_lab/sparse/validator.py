"""A complete check of a batch that was built without checks, or that is on a device."""

from __future__ import annotations

import torch

from recshard_lab.sparse import checks
from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor) -> None:
    """Checks every key, length, offset, stride and inverse index, on any device.

    Constructors check values on the CPU only, because on a GPU this makes the host wait.

    Args:
        kjt: the batch; not on ``meta``, which has no values.

    Raises:
        ValueError: which feature and which sample are wrong, and how: lengths that are negative or do not sum to
            the values, offsets that fall or start late, lengths and offsets that disagree, weights of another
            size, a key that occurs twice, strides and bags that differ, an inverse index that names no bag,
            counts on the host that are not those of the lengths, parts on several devices.

    >>> validate_keyed_jagged_tensor(KeyedJaggedTensor(["a"], torch.tensor([5]), lengths=torch.tensor([1, 0])))
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
