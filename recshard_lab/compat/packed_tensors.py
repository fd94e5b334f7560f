"""TorchRec's tensors of 2-bit and 4-bit numbers, packed into bytes.

UInt4Tensor, shape [2, 4]        bytes, shape [2, 2]
a b c d                          ab cd
e f g h                          ef gh
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

_aten = torch.ops.aten


def down_size(N: int, size: torch.Size) -> tuple[int, ...]:
    """The shape of the bytes that hold N numbers each.

    Raises:
        ValueError: the last dimension is not a multiple of N.

    >>> down_size(4, torch.Size([2, 8]))
    (2, 2)
    """
    if size[-1] % N:
        raise ValueError(f"the last dimension of {list(size)} is not a multiple of {N}: a byte holds {N} numbers")
    return (*size[:-1], size[-1] // N)


def up_size(N: int, size: torch.Size) -> tuple[int, ...]:
    """The shape of the numbers in bytes that hold N each.

    >>> up_size(4, torch.Size([2, 2]))
    (2, 8)
    """
    return (*size[:-1], size[-1] * N)


def fill_defaults(args: Sequence[Any], n: int, defaults_tail: Sequence[Any]) -> list[Any]:
    """The first n arguments of a call, with defaults for those that are missing at the end.

    Args:
        args: the arguments that were passed.
        n: how many there are in all.
        defaults_tail: defaults of the last ones.

    Raises:
        RuntimeError: an argument without a default is missing.

    >>> fill_defaults([1, 2], 4, [8, 9])
    [1, 2, 8, 9]
    """
    missing = n - len(args)
    if missing > len(defaults_tail):
        raise RuntimeError(f"{missing} of {n} arguments are missing, and only {len(defaults_tail)} have defaults")
    return [*args, *defaults_tail[len(defaults_tail) - missing :]] if missing > 0 else list(args)


def find_arg_of_type(it: Iterable[Any], t: type | tuple[type, ...]) -> Any:
    """The first value of a type; None if there is none.

    >>> find_arg_of_type([1, "a", "b"], str)
    'a'
    """
    return next((value for value in it if isinstance(value, t)), None)


class UIntXTensor(Tensor):
    """Numbers of 8 / N bits, packed into bytes. Its dtype is uint8, and its last dimension counts numbers.

    ``.view(torch.uint8)`` returns the bytes. Views, slices, copies and moves work in numbers; their size in the last
    dimension must be a multiple of N. Arithmetic is not supported.

    Args:
        N: numbers in a byte.
        elem: the bytes, uint8.

    Raises:
        ValueError: bytes of another dtype, or a size that is not a multiple of N.
        NotImplementedError: another operator.
    """

    N: ClassVar[int]
    elem: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, N: int, elem: Tensor) -> Self:
        if elem.dtype is not torch.uint8:
            raise ValueError(f"packed numbers are bytes (torch.uint8), got {elem.dtype}")
        packed: Self = Tensor._make_wrapper_subclass(cls, up_size(N, elem.shape), dtype=torch.uint8, device=elem.device)
        packed.elem = elem
        return packed

    def __init__(self, N: int, elem: Tensor) -> None:
        """`__new__` does the work."""

    def tolist(self) -> Any:
        """The bytes as lists."""
        return self.elem.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={self.shape}, elem={self.elem})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packed = find_arg_of_type(args, UIntXTensor)
        own: Any = type(packed)
        if func is _aten.view.dtype and args[1] is torch.uint8:
            return packed.elem
        if func in _WHOLE:
            bytes_of = [arg.elem if isinstance(arg, UIntXTensor) else arg for arg in args]
            return own(func(*bytes_of, **(kwargs or {})))
        if func is _aten.view.default:
            return own(func(packed.elem, _packed_sizes(packed.N, args[1])))
        if func is _aten.select.int and args[1] % packed.dim() != packed.dim() - 1:
            return own(func(packed.elem, *args[1:]))
        if func is _aten.slice.Tensor:
            _, dim, start, end, step = fill_defaults(args, 5, [0, None, None, 1])
            if dim % packed.dim() == packed.dim() - 1:
                end = packed.shape[-1] if end is None else min(end, packed.shape[-1])
                start, end = (down_size(packed.N, torch.Size([bound]))[0] for bound in (start or 0, end))
            return own(func(packed.elem, dim, start, end, step))
        raise NotImplementedError(f"{func} has no meaning for {own.__name__}. Fix: use .view(torch.uint8) or unpack it")


_WHOLE = (
    _aten.detach.default,
    _aten.alias.default,
    _aten.clone.default,
    _aten.copy_.default,
    _aten._to_copy.default,
)
"""Operators that do the same to numbers and to bytes."""


def _packed_sizes(count: int, sizes: Sequence[int]) -> list[int]:
    """A shape of numbers -> that of their bytes. A last dimension of -1 stays."""
    return [*sizes[:-1], sizes[-1] if sizes[-1] == -1 else down_size(count, torch.Size(sizes[-1:]))[0]]


class UInt4Tensor(UIntXTensor):
    """4-bit numbers, two in a byte.

    Args:
        elem: the bytes, uint8.

    >>> UInt4Tensor(torch.tensor([[18, 52]], dtype=torch.uint8)).shape
    torch.Size([1, 4])
    """

    N = 2

    @staticmethod
    def __new__(cls, elem: Tensor) -> Self:
        return UIntXTensor.__new__(cls, cls.N, elem)

    def __init__(self, elem: Tensor) -> None:
        """`__new__` does the work."""


class UInt2Tensor(UIntXTensor):
    """2-bit numbers, four in a byte.

    Args:
        elem: the bytes, uint8.

    >>> UInt2Tensor(torch.tensor([[18, 52]], dtype=torch.uint8)).shape
    torch.Size([1, 8])
    """

    N = 4

    @staticmethod
    def __new__(cls, elem: Tensor) -> Self:
        return UIntXTensor.__new__(cls, cls.N, elem)

    def __init__(self, elem: Tensor) -> None:
        """`__new__` does the work."""
