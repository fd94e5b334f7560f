"""Kernels that look up rows of served tables, and the choice among them.

::

    fbgemm.py    fbgemm's IntNBit kernels: CPU and CUDA, one operator for all features
    native.py    torch operators: every device

A new backend is one file in this folder: a subclass of `QuantKernel`, decorated with `register_quant_kernel`.

Shape letters: F features, B batch, N ids, D columns of one feature.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from recshard_lab.embedding.kernels import notice_once
from recshard_lab.embedding.quantized.formats import Place

_K = TypeVar("_K", bound=type["QuantKernel"])
_KERNELS: dict[str, type[QuantKernel]] = {}


class Feature(NamedTuple):
    """One feature of one table: its name, the table's name, and where the table is stored."""

    name: str
    table: str
    place: Place


class QuantKernel(ABC):
    """One backend. It has no weights: each call takes the bytes of the tables.

    Args:
        features: in the order of the ids.
        device: stores the tables, and takes ids.
        output_dtype: of the rows.
        pooling: ``"sum"``, ``"mean"``, or ``"none"`` for one row per id; then all features have the same columns.
    """

    name: ClassVar[str]
    checks_upper_bound: ClassVar[bool] = False
    """Whether `forward` raises RuntimeError for ids that are too large. If not, the caller must check them."""
    needs_counts: bool = False
    """Whether `forward` reads offsets on the host if it gets no ``counts``."""

    def __init__(
        self, features: Sequence[Feature], device: torch.device, output_dtype: torch.dtype, pooling: str
    ) -> None:
        self.features, self.device, self.output_dtype, self.pooling = list(features), device, output_dtype, pooling

    @classmethod
    def preference(cls, device: torch.device) -> int:
        """The kernel with the highest number is chosen."""
        return 0

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this machine cannot run this backend, or None."""
        return None

    @classmethod
    @abstractmethod
    def refuses(cls, feature: Feature, device: torch.device) -> str | None:
        """Why this backend cannot look up a feature, or None if it can."""

    @abstractmethod
    def forward(
        self,
        flat: Tensor,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Looks up one batch, with torch operators or operators that have a meta kernel.

        Args:
            flat: the bytes of `PackedTables`.
            ids: ``[N]`` int32 or int64, one feature after the other. -1 is a row of zeros.
            offsets: the same dtype. Pooled: where bags begin, ``[F * B + 1]``, feature-major. Not pooled: where
                features begin, ``[F + 1]``.
            weights: ``[N]`` fp32 or None. Pooled only.
            counts: ids of each feature, if the host knows them.

        Returns:
            Pooled ``[B, sum of D]``, else ``[N, D]``.
        """


def register_quant_kernel(kernel: _K) -> _K:
    """Class decorator: registers the kernel under its ``name`` and replaces an older kernel of that name."""
    _KERNELS[kernel.name] = kernel
    return kernel


@cache
def _load_own_kernels() -> None:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__package__}.{module.name}")


def quant_kernel_names() -> list[str]:
    """Names of all registered kernels, whether or not this machine can run them.

    >>> quant_kernel_names()
    ['fbgemm', 'native']
    """
    _load_own_kernels()
    return sorted(_KERNELS)


def choose_quant_kernel(feature: Feature, device: torch.device, backend: str | None = None) -> type[QuantKernel]:
    """The preferred kernel that can look up a feature; with ``backend``, that kernel or an error.

    Raises:
        ValueError: no kernel of this name, or it cannot look up the feature. The message has the reason.
    """
    known = quant_kernel_names()
    if backend is not None and not (isinstance(backend, str) and backend in known):
        raise ValueError(f"backend {backend!r:.80} is not registered. Fix: use one of {', '.join(map(repr, known))}")
    reasons = []
    names = sorted(known, key=lambda name: -_KERNELS[name].preference(device))
    for name in names if backend is None else [backend]:
        kernel = _KERNELS[name]
        reason = kernel.refuses(feature, device)
        if reason is None:  # last, because it may load a library
            reason = kernel.unavailable()
            if reason is not None and backend is None:
                notice_once(f"kernel {name!r} is not used: {reason}")
        if reason is None:
            return kernel
        reasons.append(f"{name}: {reason}")
    fix = "" if backend is None else ". Fix: leave backend out"
    raise ValueError(f"no kernel can look up table {feature.table!r} ({'; '.join(reasons)}){fix}")
