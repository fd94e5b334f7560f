"""Lookup kernels: one table-batched lookup over everything a rank holds, optimizer included.

A kernel sees *slots* (rectangles of tables) and *lanes* (one slot read by one feature). It knows nothing
of ranks, plans or modules. A new backend is one file in this folder: a subclass of `LookupKernel`,
decorated with `register_kernel`.

Shape letters: L lanes, B batch, N ids, d columns of a slot, U distinct rows of a slot that a batch touched.
"""

from __future__ import annotations

import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.optimizers import OptimizerSpec

RowNorms = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""Given per slot the distinct touched rows ``[U]`` (local, ascending, int64) and squares summed over this slot's
columns, ``[U]`` or ``[U, k]``, returns per slot the sums over *all* columns of the table's row, in the same shape."""

TORCH_DTYPES = {
    DataType.FP64: torch.float64,
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
"""The number formats that can be trained."""


@dataclass(frozen=True)
class Slot:
    """One rectangle of a table as a kernel sees it.

    Args:
        table: the table's name, for messages.
        num_rows: rows of the rectangle; ids given to the kernel run from 0 to ``num_rows - 1``.
        num_cols: columns d of the rectangle.
        data_type: number format of its weights.
        full_dim: columns D of the whole table, which row-wise optimizers divide by.
        first_row: the table's row that is row 0 here, for messages.
    """

    table: str
    num_rows: int
    num_cols: int
    data_type: DataType
    full_dim: int
    first_row: int = 0

    def row_name(self, row: int) -> str:
        """A local row as the user knows it."""
        return f"row {self.first_row + row}"


class LookupKernel(ABC):
    """Weights, optimizer states and the two passes of one backend.

    Args:
        slots: the rectangles; their weights start as zeros and are the caller's to fill.
        lane_slots: for each lane the index of the slot that it reads.
        optimizer: stepped inside `backward`; None makes the kernel *dense*: `backward` then adds to the
            ``grad`` of each of `weights`, as autograd would.
        pooled: sum each bag (True) or keep each id's row (False, sequence embeddings).
        device: where everything lives.

    Raises:
        ValueError: the kernel is `unavailable` here, or `refuses` the job.
    """

    name: ClassVar[str]

    def __init__(
        self,
        slots: Sequence[Slot],
        lane_slots: Sequence[int],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        device: torch.device | str,
    ) -> None:
        self.slots = tuple(slots)
        self.lane_slots = tuple(lane_slots)
        self.optimizer = optimizer
        self.pooled = pooled
        self.device = torch.device(device)
        reason = self.unavailable() or self.refuses(
            self.slots, optimizer, pooled=pooled, weighted=False, exchanges_row_norms=False, device=self.device
        )
        if reason is not None:
            hint = "; use kernel 'native'" if self.name != "native" else ""
            raise ValueError(f"kernel {self.name!r} refuses: {reason}{hint}")
        self._allocate()

    def _allocate(self) -> None:  # noqa: B027, a kernel may also do it in an __init__ of its own
        """Makes weights and states, all zeros, for what `__init__` has noted; no job that is refused comes here."""

    @classmethod
    def preference(cls, optimizer: OptimizerSpec | None, device: torch.device | str) -> int:
        """How early this backend is asked: of those that can do a job, the highest number gets it."""
        return 0

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this backend cannot be used on this machine at all, or None."""
        return None

    @classmethod
    @abstractmethod
    def refuses(
        cls,
        slots: Sequence[Slot],
        optimizer: OptimizerSpec | None,
        *,
        pooled: bool,
        weighted: bool,
        exchanges_row_norms: bool,
        device: torch.device | str,
    ) -> str | None:
        """Why this backend cannot do the job given, or None when it can."""

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Per slot ``[num_rows, num_cols]``: views to read and write in place, the same every time."""

    @abstractmethod
    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per slot its states by fbgemm's names: views to read and to write in place."""

    @abstractmethod
    def set_learning_rate(self, lr: float) -> None:
        """The step size from the next `backward` on."""

    @abstractmethod
    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Any]:
        """Looks up one batch. Arguments may be views of any stride: a kernel that reads memory copies them first.

        Args:
            ids: ``[N]`` int32 or int64, lane after lane, each local to its slot; their range is the caller's
                to check.
            offsets: pooled: where bags begin, ``[L * B + 1]``, lane-major; not pooled: where lanes begin,
                ``[L + 1]``.
            weights: ``[N]`` per-sample weights or None; pooled only.

        Returns:
            The rows, and what `backward` needs. Pooled: sums ``[B, columns of all lanes]``. Not pooled: flat,
            for each lane its ``[n, d]`` rows one after the other.
        """

    def remember(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Any:
        """What `backward` needs of a batch that is learned from but not looked up here (data-parallel replicas learn
        from every rank's batch). Backends that can spare themselves the lookup override this."""
        return self.forward(ids, offsets, weights)[1]

    @abstractmethod
    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """Steps the optimizer (or, dense, adds to ``.grad``) with the gradient of `forward`'s rows.

        Ids that occur several times in the batch, in one lane or in several lanes of one slot, are stepped
        once with their summed gradient.

        Args:
            saved: what `forward` returned.
            grad: shaped as `forward`'s rows.
            row_norms: completes the squares of rows whose columns lie in several slots, here or on other
                ranks. Called ``optimizer.row_norm_rounds`` times, each time with all slots; never for a dense kernel.

        Returns:
            The gradient ``[N]`` of the per-sample weights if there were any, else None.
        """

    def counters(self) -> list[dict[str, float]]:
        """Per slot what the backend itself counts, to be shown: ``hits``, ``misses`` and ``evictions`` of a cache,
        ``grown_rows`` of a table that grows, whatever it has. Empty for backends that count nothing."""
        return []


_K = TypeVar("_K", bound=type[LookupKernel])
_KERNELS: dict[str, type[LookupKernel]] = {}


def register_kernel(kernel: _K) -> _K:
    """Class decorator: makes the kernel known under its ``name``, in place of an older one so named."""
    _KERNELS[kernel.name] = kernel
    return kernel


@cache
def _load_own_kernels() -> None:
    for module in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")


def kernel_names() -> list[str]:
    """All registered kernels, whether or not this machine can run them.

    >>> sorted(kernel_names())
    [...'native'...]
    """
    _load_own_kernels()
    return sorted(_KERNELS)


def available() -> list[str]:
    """The kernels that this machine can run. `LookupKernel.unavailable` says why not.

    >>> "native" in available()
    True
    """
    return [name for name in kernel_names() if _KERNELS[name].unavailable() is None]


def kernel_named(name: str) -> type[LookupKernel]:
    """The kernel registered under a name.

    Raises:
        ValueError: no such kernel.
    """
    names = kernel_names()
    if name not in _KERNELS:
        raise ValueError(f"there is no kernel {name!r}: choose one of {', '.join(names)}")
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
    """The preferred kernel that can do a job; with ``backend``, that one or an error.

    Raises:
        ValueError: the named backend is absent or refuses, or every kernel does; each reason is given.
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
        if reason is None:  # asked last: the answer may mean to load what would not be used
            reason = kernel.unavailable()
            if reason is not None and backend is None:
                notice_once(f"kernel {name!r} is not used: {reason}")
        if reason is None:
            return kernel
        reasons.append(f"{name}: {reason}")
    others = [name for name in available() if name != backend]
    hint = f"; leave backend out, or use {others}" if backend is not None and others else ""
    raise ValueError(f"no kernel can do this lookup ({'; '.join(reasons)}){hint}")


@cache
def notice_once(message: str) -> None:
    """Tells the user something that is no mistake, the first time only (logger ``recshard_lab``)."""
    logging.getLogger("recshard_lab").warning(message)
