"""Measures the memory of a rank's device, split by use, and limits it on request.

It needs no launched ranks: the functions work in any process, for instance under ``torchrun``::

    measure()           this process's memory now and at its peak, as a `RankMemory`
    reset_peak()        the mark from which `measure` reports the peak
    counting()          counts the tensors of a CPU process while a block runs
    limit(2.0, device)  makes later allocations beyond 2 GB raise torch.OutOfMemoryError
"""

from __future__ import annotations

import gc
import math
import os
import pickle
import re
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import LaunchError

__all__ = ["MEASURED_CATEGORIES", "RankMemory", "counting", "limit", "measure", "reset_peak", "with_rest"]

MEASURED_CATEGORIES = (
    "weights",
    "optimizer_state",
    "gradients",
    "exchange_buffers",
    "activations",
    "allocator_cache",
    "process",
)
GB = 10**9


@dataclass(frozen=True)
class RankMemory:
    """Bytes in one rank's device memory, now and at the peak since the last mark.

    A storage counts once, also if several tensors view it.

    Attributes:
        rank: the rank.
        device: ``"cpu"`` or ``"cuda:K"``.
        source: where `in_use` and `peak` come from. ``"allocator"``: torch's CUDA caching allocator. ``"counted"``:
            tensors of a CPU rank with ``memory_gb=``. ``"process"``: the process's share of the host's memory (PSS:
            pages shared with other processes count in part), with Python and its libraries.
        in_use: bytes now.
        peak: most bytes since the mark, or since the start. None if the system reports none.
        weights: parameters and buffers of all modules, tables included.
        optimizer_state: state of torch optimizers and of optimizers fused into backward.
        gradients: ``.grad`` of the parameters.
        exchange_buffers: ids, rows and gradients that ranks exchange in one step, as sharded collections counted them
            in their last step.
        allocator_cache: bytes that the CUDA allocator reserves beyond `in_use`.
        process: bytes of the process: PSS on CPU; on CUDA the driver's figure, which needs nvidia-ml-py. None if
            unknown, as in containers, whose process ids the driver does not know.
        capacity: bytes that this rank may use: ``memory_gb``, or the whole GPU. None on a CPU rank without a limit.
        gpu: UUID of the GPU; empty on CPU.
        gpu_used, gpu_total: bytes of the whole GPU, all processes. 0 on CPU.
        gpu_rest: of `gpu_used`, the bytes outside the allocators of these ranks: CUDA contexts, NCCL, CUDA graphs,
            other programs. One number per GPU, also where several ranks share it.
    """

    rank: int
    device: str
    source: str
    in_use: int
    peak: int | None
    weights: int = 0
    optimizer_state: int = 0
    gradients: int = 0
    exchange_buffers: int = 0
    allocator_cache: int = 0
    process: int | None = None
    capacity: int | None = None
    gpu: str = ""
    gpu_used: int = 0
    gpu_total: int = 0
    gpu_rest: int = 0

    @property
    def activations(self) -> int:
        """Bytes of tensors at the peak that are none of the above; 0 on ranks measured by process."""
        return self.parts["activations"]

    @property
    def parts(self) -> dict[str, int]:
        """Category -> bytes at the peak, by `MEASURED_CATEGORIES`.

        The sum is the peak plus the allocator's cache. ``activations`` is the peak minus weights, optimizer state,
        gradients and exchange buffers. On ranks measured by process that difference also contains Python and its
        libraries, and is called ``process``.

        >>> parts = RankMemory(0, "cpu", "counted", 60, 100, weights=40, optimizer_state=10).parts
        >>> parts["weights"], parts["activations"], sum(parts.values())
        (40, 50, 100)
        """
        most = self.in_use if self.peak is None else max(self.peak, self.in_use)
        left, found = most, dict.fromkeys(MEASURED_CATEGORIES, 0)
        for name in ("weights", "optimizer_state", "gradients", "exchange_buffers"):
            found[name] = min(getattr(self, name), left)
            left -= found[name]
        found["process" if self.source == "process" else "activations"] = left
        found["allocator_cache"] = max(0, self.in_use + self.allocator_cache - most)
        return found


def measure(device: torch.device | str | None = None, *, max_age_s: float = 0.0) -> RankMemory:
    """This process's device memory, from any thread.

    Weights, gradients and optimizer state are those of all living modules and optimizers on the device.

    Args:
        device: the device. Default: the current CUDA device if this process uses CUDA, else the CPU.
        max_age_s: seconds for which a list of modules and optimizers is reused. Finding them takes about 0.1 s.

    >>> layer = torch.nn.Linear(1000, 1000)
    >>> measure("cpu").weights >= 4_004_000
    True
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    rank = _rank()
    parts: dict[str, Any] = _named(device, max_age_s)
    if device.type == "cuda":
        return _on_gpu(rank, device, parts)
    process = _process_bytes()
    if (ledger := _ledger) is not None:
        in_use, peak = ledger.totals()
        held = RankMemory(rank, str(device), "counted", in_use, peak, process=process, **parts)
        return replace(held, capacity=None if math.isinf(ledger.capacity) else int(ledger.capacity))
    return RankMemory(rank, str(device), "process", process, _process_peak(process), process=process, **parts)


def reset_peak(device: torch.device | str) -> None:
    """Sets the mark from which `measure` reports the peak."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _ledger is not None:
        _ledger.reset_peak()
    else:
        with suppress(OSError):  # the file does not exist: `measure` reports None
            Path("/proc/self/clear_refs").write_text("5")


def with_rest(records: Iterable[RankMemory]) -> list[RankMemory]:
    """Records of all ranks, each with `gpu_rest` of its GPU.

    >>> held = RankMemory(0, "cuda:0", "allocator", 30, 40, allocator_cache=10, gpu="a", gpu_used=100, gpu_total=200)
    >>> [one.gpu_rest for one in with_rest([held, replace(held, rank=1)])]
    [20, 20]
    """
    listed = list(records)
    reserved: dict[str, int] = {}
    for one in listed:
        reserved[one.gpu] = reserved.get(one.gpu, 0) + one.in_use + one.allocator_cache
    return [replace(one, gpu_rest=max(0, one.gpu_used - reserved[one.gpu])) if one.gpu else one for one in listed]


# -- weights, optimizer state, gradients, exchange buffers ---------------------------------------------

_holders: tuple[float, list[weakref.ref[Any]]] = (-math.inf, [])  # when found, and what


def _held(max_age_s: float) -> tuple[list[tuple[str, list[Any]]], Counter[str]]:
    """Tensors of all living modules and optimizers with their category; type of device -> bytes of exchange buffers."""
    global _holders
    if time.monotonic() - _holders[0] > max_age_s:
        kinds = (torch.nn.Module, torch.optim.Optimizer)
        found = [weakref.ref(thing) for thing in gc.get_objects() if issubclass(type(thing), kinds)]
        _holders = (time.monotonic(), found)
    things = [thing for ref in _holders[1] if (thing := ref()) is not None]
    weights: list[Any] = []
    states: list[Any] = []  # of torch's optimizers
    fused: list[Any] = []  # of lookup kernels
    exchanged = Counter[str]()
    for thing in things:
        own = vars(thing)
        weights += [*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values()]
        if isinstance(thing, torch.optim.Optimizer):
            states += [value for state in list(thing.state.values()) for value in list(state.values())]
        with suppress(AttributeError):  # a module whose __init__ runs or failed
            fused += thing.optimizer_tensors() if hasattr(thing, "optimizer_tensors") else []
            if hasattr(thing, "exchange_bytes"):
                exchanged[torch.device(thing.device).type] += thing.exchange_bytes()
    gradients = [weight.grad for weight in weights if isinstance(weight, Tensor) and weight.is_leaf]
    # kernels' states come first: fbgemm's are also parameters or buffers of its module
    held = [("optimizer_state", fused), ("weights", weights), ("optimizer_state", states), ("gradients", gradients)]
    return held, exchanged


def _named(device: torch.device, max_age_s: float) -> dict[str, int]:
    """Bytes by category on a device. Each storage counts in the first category that it is in."""
    held, exchanged = _held(max_age_s)
    seen: set[int] = set()
    found = {"exchange_buffers": exchanged[device.type], **dict.fromkeys([name for name, _ in held], 0)}
    for name, values in held:
        fresh = {(s := tensor.untyped_storage())._cdata: s.nbytes() for tensor in _local(values, device)}
        found[name] += sum(size for place, size in fresh.items() if place not in seen)
        seen |= fresh.keys()
    return found


def _local(values: Iterable[Any], device: torch.device) -> Iterator[Tensor]:
    """The tensors with storage on a device; of distributed tensors this rank's."""
    for value in values:
        if hasattr(value, "local_shards"):  # a ShardedTensor
            yield from _local([shard.tensor for shard in value.local_shards()], device)
        elif hasattr(value, "to_local"):  # a DTensor
            yield from _local([value.to_local()], device)
        elif isinstance(value, Tensor) and value.device == device and value.layout == torch.strided:
            yield value


# -- a GPU ---------------------------------------------------------------------------------------------


def _on_gpu(rank: int, device: torch.device, parts: dict[str, Any]) -> RankMemory:
    stats = torch.cuda.memory_stats(device)
    in_use = stats.get("allocated_bytes.all.current", 0)
    reserved = stats.get("reserved_bytes.all.current", 0)
    free, total = torch.cuda.mem_get_info(device)
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return RankMemory(
        rank,
        str(device),
        "allocator",
        in_use,
        stats.get("allocated_bytes.all.peak", 0),
        **parts,
        allocator_cache=reserved - in_use,
        process=_gpu_process_bytes(uuid, reserved),
        capacity=_gpu_limit or total,
        gpu=uuid,
        gpu_used=total - free,
        gpu_total=total,
    )


def _gpu_process_bytes(uuid: str, reserved: int) -> int | None:
    """The driver's figure for this process; None without nvidia-ml-py, or if the driver knows other process ids.

    reserved: by the allocator. A smaller figure belongs to another process with the same id outside the container.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
        used = [p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
    except pynvml.NVMLError:
        return None
    return used[0] if used and used[0] is not None and used[0] >= reserved else None


# -- a process on CPU ----------------------------------------------------------------------------------


def _process_bytes() -> int:
    """PSS of this process; where the system has none, the bytes that are its own (USS)."""
    import psutil

    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.uss))


def _process_peak(now: int) -> int | None:
    """PSS at the peak: pages gained or lost since then count as this process's own. None where the system has none."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    kib = {name: int(value) for name, value in re.findall(r"(VmHWM|VmRSS):\s+(\d+)", status)}
    return now + 1024 * max(0, kib["VmHWM"] - kib["VmRSS"]) if len(kib) == 2 else None


# -- counting, and a limit -----------------------------------------------------------------------------

_ledger: _Ledger | None = None  # of this process, while tensors are counted
_gpu_limit = 0  # bytes; 0: none


class _Ledger:
    """The storages of CPU tensors that live, and how many bytes more are allowed.

    A storage is entered when an operator returns a tensor on it, and leaves when it is freed. Callbacks of freed
    storages run in any thread at any time, so they only append to a queue.
    """

    def __init__(self, capacity: float, rank: int) -> None:
        self.capacity, self.rank = capacity, rank
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # id of a storage -> itself, bytes
        self._freed: deque[int] = deque()
        self._used = self._peak = 0
        self._lock = threading.Lock()

    def totals(self) -> tuple[int, int]:
        """Bytes now and at the peak."""
        with self._lock:
            self._drain()
            return self._used, self._peak

    def reset_peak(self) -> None:
        with self._lock:
            self._drain()
            self._peak = self._used

    def free(self) -> float:
        with self._lock:
            self._drain()
            return self.capacity - self._used

    def enter(self, tensors: Iterable[Tensor]) -> int:
        """Counts the storages of tensors. Returns the bytes that do not fit; then nothing is counted."""
        with self._lock:
            self._drain()
            more, fresh = 0, dict[int, tuple[weakref.ref[Any], int]]()
            for tensor in tensors:
                storage = tensor.untyped_storage()
                key, size = id(storage), storage.nbytes()
                known = self._live.get(key) or fresh.get(key)
                if known is None or known[1] != size:  # new, or resized
                    more += size - (known[1] if known else 0)
                    fresh[key] = (weakref.ref(storage, lambda _, key=key: self._freed.append(key)), size)  # type: ignore[misc]
            if self._used + more > self.capacity:
                return more
            self._live.update(fresh)
            self._used += more
            self._peak = max(self._peak, self._used)
            return 0

    def _drain(self) -> None:
        while self._freed:
            self._used -= self._live.pop(self._freed.popleft(), (None, 0))[1]

    def refuse(self, size: float) -> NoReturn:
        """Raises the error that a GPU of this capacity raises."""
        used, _ = self.totals()
        raise torch.OutOfMemoryError(
            f"CPU out of memory. Tried to allocate {_text(size)}. Rank {self.rank} has a total capacity of "
            f"{_text(self.capacity)} (memory_gb={self.capacity / GB:g}), of which {_text(self.capacity - used)} is "
            f"free. Tensors use {_text(used)}. Fix: split the largest tables by rows or columns over the ranks."
        )


class _Counting(TorchDispatchMode):
    """Sees every operator of the thread that entered it."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor, for one: its parts come here next
        kwargs = kwargs or {}
        ledger = self.ledger
        if not math.isinf(ledger.capacity) and _allocates(func):
            free = ledger.free()
            if _bound(func, args, kwargs) > free and (size := _predicted(func, args, kwargs)) > free:
                ledger.refuse(size)
        out = func(*args, **kwargs)
        found = [t for t in _tensors(out) if t.device.type == "cpu" and t.layout == torch.strided]
        if found and (over := ledger.enter(found)):
            del out, found  # the error's traceback would keep them
            ledger.refuse(over)
        return out


_kinds: dict[Any, bool] = {}
_PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}


def _allocates(func: Any) -> bool:
    """Whether an operator of torch makes new tensors, whose size its arguments determine."""
    known = _kinds.get(func)
    if known is None:
        schema = func._schema
        plain = not schema.is_mutable and all(value.alias_info is None for value in schema.returns)
        known = _kinds[func] = func.namespace == "aten" and plain
    return known


def _bound(func: Any, args: Any, kwargs: Any) -> float:
    """Bytes that an operator's results never exceed, from its arguments' sizes alone; 16 per element.

    Element by element operators and matrix products are most of a step, so theirs is close. Of all others it is the
    product of all sizes.
    """
    if torch.Tag.pointwise in func.tags:
        sizes = [one.shape for one in args if isinstance(one, Tensor)]
        with suppress(RuntimeError):  # the operator itself reports shapes that do not match
            return 16.0 * math.prod(torch.broadcast_shapes(*sizes))
    if func in _PRODUCTS:
        left, right = args[-2:]
        return 16.0 * left.numel() / max(1, left.shape[-1]) * right.shape[-1]
    total, todo = 16.0, [args, kwargs]
    while todo:
        one = todo.pop()
        if isinstance(one, Tensor):
            total *= max(1, one.numel())
        elif isinstance(one, (list, tuple)):
            todo += one
        elif isinstance(one, dict):
            todo += one.values()
        elif isinstance(one, (int, float)) and one:
            total *= max(abs(one), 1 / abs(one))
    return total


def _predicted(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes of the tensors that an operator returns, from running it on tensors without data; 0 where it cannot."""
    try:
        moved = {name: None if name in ("generator", "pin_memory") else value for name, value in kwargs.items()}
        if any(argument.name == "device" for argument in func._schema.arguments):
            if torch.device(moved.get("device") or "cpu").type != "cpu":
                return 0
            moved["device"] = torch.device("meta")
        out = func(*_on_meta(args), **_on_meta(moved))
    except Exception:  # the size depends on data, or torch cannot predict it: it is checked afterwards
        return 0
    return sum(one.untyped_storage().nbytes() for one in _tensors(out))


def _on_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return type(value)([_on_meta(one) for one in value])
    if isinstance(value, dict):
        return {name: _on_meta(one) for name, one in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for each in value for one in _tensors(each)] if isinstance(value, (list, tuple)) else []


@contextmanager
def counting() -> Iterator[None]:
    """Inside, `measure` reports the tensors of a CPU process (``source="counted"``): weights, optimizer state and
    gradients, and what operators of this thread return. With `limit` on, nothing changes.

    >>> with counting():
    ...     before = measure("cpu").in_use
    ...     one = torch.zeros(1000); view = one[3:]
    ...     measure("cpu").in_use - before
    4000
    """
    global _ledger
    if _ledger is not None:
        yield
        return
    _ledger = _Ledger(math.inf, 0)
    held, _ = _held(0.0)
    _ledger.enter(_local((value for _, values in held for value in values), torch.device("cpu")))
    try:
        with _Counting(_ledger):
            yield
    finally:
        _ledger = None


def limit(memory_gb: float, device: torch.device | str, rank: int = 0) -> None:
    """Makes later allocations on the device beyond `memory_gb` (1e9 bytes) raise torch.OutOfMemoryError.

    On CUDA torch's allocator enforces it (``set_per_process_memory_fraction``). On CPU every operator is followed:
    the storages of all tensors that operators of this thread, and of threads started later, return. An operator
    of torch is refused before it runs. Others are checked when they return. Memory inside an operator, of numpy and of
    Gloo is not counted. An operator takes 10 to 40 us longer.

    Raises:
        LaunchError: the GPU has less memory, or this process has a limit already.
    """
    global _ledger, _gpu_limit
    device = torch.device(device)
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        if memory_gb * GB > total:
            raise LaunchError(
                f"launch(memory_gb={memory_gb:g}): {device} has {total / GB:.1f} GB. "
                f"Fix: memory_gb={math.floor(total / GB)}, or leave it out."
            )
        torch.cuda.set_per_process_memory_fraction(memory_gb * GB / total, device)
        _gpu_limit = int(memory_gb * GB)
        return
    if _ledger is not None:
        raise LaunchError("limit: this process counts its tensors already. Fix: one limit per process.")
    ledger = _ledger = _Ledger(memory_gb * GB, rank)
    os.register_at_fork(after_in_child=lambda: setattr(ledger, "capacity", math.inf))  # worker processes have no limit
    _Counting(ledger).__enter__()
    run = threading.Thread.run

    def counted(thread: threading.Thread) -> None:
        with _Counting(ledger):
            run(thread)

    threading.Thread.run = counted  # type: ignore[method-assign, assignment]


def _text(value: float) -> str:
    """Bytes as CUDA's message writes them, in decimal units.

    >>> _text(2e9), _text(512.4e6), _text(12)
    ('2.00 GB', '512.40 MB', '0.00 MB')
    """
    return f"{value / GB:.2f} GB" if abs(value) >= GB else f"{value / 1e6:.2f} MB"


# -- a recording of every allocation, on CUDA ----------------------------------------------------------


def start_history() -> None:
    """Starts to record every CUDA allocation of this process, with its Python stack."""
    torch.cuda.memory._record_memory_history("all")


def save_history(folder: str) -> str:
    """Writes the recording to ``rank_<rank>.pickle`` in a folder and ends it. Returns the file's name."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder, f"rank_{_rank()}.pickle")
    file.write_bytes(pickle.dumps(torch.cuda.memory._snapshot()))
    torch.cuda.memory._record_memory_history(None)
    return str(file)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
