"""The known kernels, and which of them serves a lookup."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch

from recshard_lab.embedding.kernels.base import LookupKernel, Slot
from recshard_lab.embedding.optimizers import OptimizerSpec

_K = TypeVar("_K", bound=type[LookupKernel])
_KERNELS: dict[str, type[LookupKernel]] = {}


def register_kernel(kernel: _K) -> _K:
    """Class decorator: registers the kernel under its ``name`` and replaces an older kernel of that name."""
    _KERNELS[kernel.name] = kernel
    return kernel


@cache
def _load_own_kernels() -> None:
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"{__package__}.{module.name}")


def kernel_names() -> list[str]:
    """Names of all registered kernels that train, whether or not this machine can run them.

    >>> sorted(kernel_names())
    [...'native'...]
    """
    _load_own_kernels()
    return sorted(name for name, kernel in _KERNELS.items() if kernel.trains)


def available() -> list[str]:
    """Names of the kernels that this machine can run. `LookupKernel.unavailable` gives the reason for the others.

    >>> "native" in available()
    True
    """
    return [name for name in kernel_names() if _KERNELS[name].unavailable() is None]


def kernel_named(name: str) -> type[LookupKernel]:
    """The kernel registered under a name.

    Raises:
        ValueError: the name is not registered.
    """
    names = kernel_names()
    if name not in _KERNELS:
        raise ValueError(f"kernel {name!r} is not registered. Fix: choose one of {', '.join(names)}")
    return _KERNELS[name]


def choose_kernel(
    slots: Sequence[Slot],
    optimizer: OptimizerSpec | None,
    *,
    pooled: bool,
    weighted: bool,
    exchanges_row_norms: bool,
    device: torch.device | str,
    backend: str | None = None,
) -> type[LookupKernel]:
    """The preferred kernel that can serve a lookup; with ``backend``, that kernel or an error.

    Raises:
        ValueError: the named backend is absent or refuses, or every kernel does. The message has each reason.
    """
    reasons = []
    names = sorted(kernel_names(), key=lambda name: -_KERNELS[name].preference(optimizer, device))
    for name in names if backend is None else [backend]:
        kernel = kernel_named(name)
        reason = kernel.refuses(
            slots,
            optimizer,
            pooled=pooled,
            weighted=weighted,
            exchanges_row_norms=exchanges_row_norms,
            device=device,
        )
        if reason is None:  # last, because it may load a library
            reason = kernel.unavailable()
            if reason is not None and backend is None:
                notice_once(f"kernel {name!r} is not used: {reason}")
        if reason is None:
            return kernel
        reasons.append(f"{name}: {reason}")
    others = [name for name in available() if name != backend]
    fix = f". Fix: leave backend out, or use one of {', '.join(others)}" if backend is not None and others else ""
    raise ValueError(f"no kernel can serve this lookup ({'; '.join(reasons)}){fix}")


@cache
def notice_once(message: str) -> None:
    """Logs a warning once per process (logger ``recshard_lab``)."""
    logging.getLogger("recshard_lab").warning(message)
