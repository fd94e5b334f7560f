"""The interface of lookup kernels.

A kernel serves *shards* (those of one rank that share a `KernelSpec`) and *shard features* (one feature of one shard).
It depends on no ranks, plans or modules.

Shape letters: F shard features, B batch, N ids, d columns of a shard, U distinct rows of a shard in a batch.
"""

from __future__ import annotations

import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from recshard_lab.embedding.configs import DataType
from recshard_lab.embedding.kernels.transposed import touched_rows
from recshard_lab.embedding.optimizers import OptimizerSpec

# Large CPU tensors whose pages cost nothing until they are written.


_LARGE = 2**20
_ALIGNMENT = 64


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.zeros``; large ones on CPU are the system's untouched zero pages (``calloc``), huge pages if it has them.

    ``torch.zeros`` writes every page. A table that is filled next is then written twice, which doubled the time to make
    kernels beside running ones.

    >>> zeros((1000, 1000), torch.float16, torch.device("cpu")).sum().item()
    0.0
    """
    if device.type != "cpu" or prod(shape) * dtype.itemsize < _LARGE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return _aligned(np.zeros, shape, dtype)


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """``torch.empty`` on CPU; large ones on huge pages if the system has them, which numpy requests.

    A batch's output is written once. With 4 KB pages, allocating it takes as long as writing it.

    >>> empty((2, 3)).shape
    torch.Size([2, 3])
    """
    if prod(shape) * dtype.itemsize < _LARGE:
        return torch.empty(tuple(shape), dtype=dtype)
    return _aligned(np.empty, shape, dtype)


def _aligned(make: Callable[..., Any], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    size = prod(shape) * dtype.itemsize
    memory = torch.from_numpy(make(size + _ALIGNMENT, dtype=np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + size].view(dtype).view(tuple(shape))


RowNorms = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
"""Adds up squares over all columns of a table's rows. Takes per shard the distinct touched rows ``[U]`` (local,
ascending, int64) and the squares summed over the shard's own columns, ``[U]`` or ``[U, k]``. Returns per shard the sums
over all columns, in the same shape. Rows may be followed by padding, numbered ``num_rows`` or higher. All shards with
the same row range have the same U, padding included."""

TORCH_DTYPES = {
    DataType.FP64: torch.float64,
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}
"""The number formats that can be trained."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class ShardSpec:
    """One shard of a table, as a kernel stores it.

    Args:
        table: the table's name, for messages.
        num_rows: rows of the shard; its ids run from 0 to ``num_rows - 1``.
        num_cols: columns d of the shard.
        data_type: number format of its weights.
        full_dim: columns D of the whole table. Row-wise optimizers divide by it.
        first_row: the table's row that is row 0 of the shard, for messages.
    """

    table: str
    num_rows: int
    num_cols: int
    data_type: DataType
    full_dim: int
    first_row: int = 0

    def row_name(self, row: int) -> str:
        """A local row by its number in the whole table."""
        return f"row {self.first_row + row}"


class KernelSpec(NamedTuple):
    """What a kernel serves.

    Attributes:
        shards: their weights start as zeros; the caller fills them.
        features: for each shard feature the index of its shard.
        optimizer: stepped inside `LookupKernel.backward`. None makes the kernel *dense*: `backward` then adds to the
            ``grad`` of each of `weights`, as autograd does.
        pooled: sum each bag (True) or return one row per id (False, sequence embeddings).
        device: stores weights and states, and takes ids and gradients.
        weighted: whether batches may have per-sample weights.
        joins_norms: whether `LookupKernel.backward` gets ``row_norms``.
        deterministic: equal batches step equal weights to equal bits. The kernels of replicas require it.
    """

    shards: Sequence[ShardSpec]
    features: Sequence[int]
    optimizer: OptimizerSpec | None
    pooled: bool = True
    device: torch.device = CPU
    weighted: bool = False
    joins_norms: bool = False
    deterministic: bool = False


class KernelInput(NamedTuple):
    """One batch of a kernel. Tensors may have any strides.

    Attributes:
        ids: ``[N]`` int32 or int64, one shard feature after the other, local to its shard. The caller checks their
            range.
        offsets: pooled: where bags begin, ``[F * B + 1]``, feature-major. Not pooled: where shard features begin,
            ``[F + 1]``.
        weights: ``[N]`` per-sample weights or None; pooled only.
        counts: ids of each shard feature, F numbers on the host.
        prefetched: what `LookupKernel.prefetch` has returned for this batch, if it was called.
    """

    ids: Tensor
    offsets: Tensor
    weights: Tensor | None
    counts: list[int]
    prefetched: Any = None

    def spans(self) -> list[tuple[int, int]]:
        """Where the ids of each shard feature begin and end."""
        return list(pairwise(accumulate(self.counts, initial=0)))


class LookupKernel(ABC):
    """Weights, optimizer states and the two passes of one backend.

    Args:
        spec: what it serves.

    Raises:
        ValueError: the kernel is `unavailable` here, or `refuses` this.
    """

    name: ClassVar[str]
    trains: ClassVar[bool] = True
    """Whether it has a backward. `choose_kernel` takes others only by name, and no list of kernels has them."""

    def __init__(self, spec: KernelSpec) -> None:
        self._serve(spec)
        reason = self.unavailable() or self.refuses(spec)
        if reason is not None:
            fix = ". Fix: use kernel 'native'" if self.name != "native" else ""
            raise ValueError(f"kernel {self.name!r} cannot serve this lookup: {reason}{fix}")
        self._allocate()

    def _serve(self, spec: KernelSpec) -> None:
        self.spec, self.shards, self.features = spec, tuple(spec.shards), tuple(spec.features)
        self.optimizer, self.pooled, self.device = spec.optimizer, spec.pooled, spec.device

    def _allocate(self) -> None:
        """Allocates what `weights` and `optimizer_states` return, all zeros."""
        tables = [self._zeros(shard) for shard in self.shards]
        self._weights: list[Tensor] = [weight for weight, _ in tables]
        self._states: list[dict[str, Tensor]] = [states for _, states in tables]

    def _zeros(self, shard: ShardSpec) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and states of a shard in separate tensors."""
        size = (shard.num_rows, shard.num_cols)
        shapes = {} if self.optimizer is None else self.optimizer.state_shapes(*size)
        return zeros(size, TORCH_DTYPES[shard.data_type], self.device), {
            name: zeros(shape, torch.int64 if name == "iter" else torch.float32, self.device)
            for name, shape in shapes.items()
        }

    @classmethod
    def preference(cls, spec: KernelSpec) -> int:
        """Rank of this backend among those that can serve a lookup: the highest number is chosen."""
        return 0

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this machine cannot run this backend, or None."""
        return None

    @classmethod
    @abstractmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        """Why this backend cannot serve such a lookup, or None if it can."""

    def weights(self) -> list[Tensor]:
        """Per shard ``[num_rows, num_cols]``: views to read and write in place, the same on every call."""
        return self._weights

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        """Per shard its states, under fbgemm's names: views to read and write in place."""
        return self._states

    def set_learning_rate(self, lr: float) -> None:
        """Sets the step size of lookups from the next `forward` on. Backends may also apply it to earlier ones."""
        if self.optimizer is not None:
            self.optimizer = replace(self.optimizer, learning_rate=lr)

    @abstractmethod
    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        """Looks up one batch.

        Args:
            batch: its ids.
            train: whether a `backward` follows. Tables that insert ids or cache rows do so only if it is True.

        Returns:
            The rows, and what `backward` needs. Pooled: sums ``[B, columns of all shard features]``. Not pooled: flat,
            the ``[n, d]`` rows of each shard feature one after the other.
        """

    def prefetch(self, batch: KernelInput) -> Any:
        """Moves the rows of a coming training batch into the kernel's fast memory. It may run in another thread.

        Returns:
            The ``prefetched`` of the batch's `KernelInput`. None for kernels that have one memory.
        """
        return None

    def flush(self, shard: int) -> None:  # noqa: B027, most kernels have one memory
        """Brings `weights` and `optimizer_states` of a shard up to date, which may be read and written until the next
        lookup. Kernels without a cache do nothing."""

    def remember(self, batch: KernelInput, train: bool = True) -> Any:
        """What `backward` needs of a batch that is not looked up here. ``train``: whether ids may get rows.

        Data-parallel replicas learn from every rank's batch. Backends that can skip the lookup override this.
        """
        return self.forward(batch, train)[1]

    @abstractmethod
    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        """Steps the optimizer (or, dense, adds to ``.grad``) with the gradient of `forward`'s rows.

        An id that occurs several times in the batch, in one shard feature or in several of one shard, is stepped once
        with its summed gradient.

        Args:
            saved: the second result of `forward`.
            grad: shaped as `forward`'s rows.
            row_norms: completes the squares of rows whose columns are stored in several shards, here or on other
                ranks. Called ``optimizer.row_norm_rounds`` times, each time with all shards; never for a dense kernel.

        Returns:
            The gradient ``[N]`` of the per-sample weights if there were any, else None.
        """

    def touched_rows(self, ids: Tensor, shard: int) -> Tensor:
        """The distinct rows of a shard that `backward` passes to ``row_norms``, of the ids ``[n]`` of its features."""
        return touched_rows(ids, self.shards[shard].num_rows, padded=self.device.type != "cpu")

    def check_row_norms(self, row_norms: RowNorms | None) -> None:
        """Raises ValueError if a shard has not all columns of its table and nothing adds the others' squares."""
        for shard in self.shards:
            if row_norms is None and shard.num_cols != shard.full_dim:
                raise ValueError(
                    f"table {shard.table!r} has {shard.num_cols} of its {shard.full_dim} columns here, and a row-wise "
                    f"optimizer reads all. Fix: pass row_norms, which adds the squares of the other columns"
                )

    def features_by_shard(self) -> list[list[int]]:
        """Per shard the shard features that read it."""
        found: list[list[int]] = [[] for _ in self.shards]
        for feature, shard in enumerate(self.features):
            found[shard].append(feature)
        return found

    def check_weights(self, weights: Tensor | None) -> None:
        """Raises ValueError for per-sample weights without pooling."""
        if weights is not None and not self.pooled:
            raise ValueError("sequence embeddings take no per-sample weights. Fix: pass none, or pool")

    def index_tensors(self) -> list[dict[str, Tensor]]:
        """Per shard what says which id each row belongs to. It moves with the rows. Empty where ids are rows."""
        return [{} for _ in self.shards]

    def counters(self) -> list[dict[str, float]]:
        """Per shard what the backend counts for display, for example ``hits``, ``misses`` and ``evictions`` of a cache
        or ``grown_rows`` of a table that grows. Empty for backends that count nothing."""
        return []


# The known kernels, and which of them serves a lookup.


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


def choose_kernel(spec: KernelSpec, backend: str | None = None) -> type[LookupKernel]:
    """The preferred kernel that can serve a lookup; with ``backend``, that kernel or an error.

    Raises:
        ValueError: the named backend is absent or refuses, or every kernel does. The message has each reason.
    """
    reasons = []
    names = sorted(kernel_names(), key=lambda name: -_KERNELS[name].preference(spec))
    for name in names if backend is None else [backend]:
        kernel = kernel_named(name)
        reason = kernel.refuses(spec)
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
