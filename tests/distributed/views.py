"""Views of a tensor with the same numbers, beside other numbers: code that ignores strides reads these."""

from collections.abc import Callable

import torch
from torch import Tensor


def column(tensor: Tensor) -> Tensor:
    """A column of a matrix: stride 2, with other numbers between."""
    return torch.stack([tensor, tensor.roll(1).flip(0)], 1)[:, 0]


def flipped(tensor: Tensor) -> Tensor:
    """The reverse of a reversed copy."""
    return tensor.flip(0).flip(0)


def inside(tensor: Tensor) -> Tensor:
    """A slice of a longer tensor, with a storage offset."""
    return torch.cat([tensor.flip(0), tensor, tensor.flip(0)])[tensor.numel() : 2 * tensor.numel()]


def expanded(tensor: Tensor) -> Tensor:
    """One stored element, stride 0. The tensor must be constant."""
    return tensor[:1].expand(tensor.numel())


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "column": column,
    "flipped": flipped,
    "inside": inside,
    "expanded": expanded,
}
