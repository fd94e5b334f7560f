"""Device memory over time during one training step of the launched ranks.

On CPU ranks every storage that an operator allocates is counted until it is freed. On a GPU torch's allocator keeps the
history (``torch.cuda.memory``). Both give the same events, and a `MemoryHistory` is their sum over time.

Shape letters: T points in time.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.launcher import LaunchError

CATEGORIES = ("weights", "optimizer_state", "dense", "exchange_buffers", "gradients", "activations")
MOST_BLOCKS = 8
_EXCHANGES = ("recshard_lab.distributed.step", "recshard_lab.comm")
_RANK_SIDE = "__import__('recshard_lab.lab.live.memory_history', fromlist=['live'])"


@dataclass(frozen=True)
class MemoryEvent:
    """One allocation, or the end of one.

    Attributes:
        ms: since the start of the step.
        block: names the allocation; its end has the same.
        size: bytes; negative at the end.
        category: one of `CATEGORIES`.
        where: the operator and the function that allocated it.
    """

    ms: float
    block: int
    size: int
    category: str
    where: str = ""


@dataclass(frozen=True, eq=False)
class MemoryHistory:
    """Bytes on one rank's device during a step.

    Attributes:
        rank: the rank.
        source: ``"counted"`` on CPU, ``"allocator"`` on a GPU.
        ms: ``[T]`` times since the start of the step, ascending.
        size: category -> ``[T]`` bytes from this time on.
        blocks: the largest allocations of the step that live at the peak: category, bytes, where.
        capacity: bytes that the rank may use; None without a limit.
    """

    rank: int
    source: str
    ms: np.ndarray
    size: dict[str, np.ndarray]
    blocks: tuple[tuple[str, int, str], ...] = ()
    capacity: int | None = None

    @classmethod
    def of(
        cls,
        rank: int,
        source: str,
        base: Mapping[str, int],
        events: Sequence[MemoryEvent],
        end_ms: float,
        capacity: int | None = None,
    ) -> MemoryHistory:
        """From what there was at the start, and the events of the step.

        >>> events = [MemoryEvent(1.0, 7, 100, "activations", "mm"), MemoryEvent(2.0, 7, -100, "activations")]
        >>> history = MemoryHistory.of(0, "counted", {"weights": 50}, events, 3.0)
        >>> history.total.tolist(), history.peak, history.blocks
        ([50, 150, 50, 50], (1.0, 150), (('activations', 100, 'mm'),))
        """
        ordered = sorted(events, key=lambda event: event.ms)
        ms = np.array([0.0, *(event.ms for event in ordered), max(end_ms, ordered[-1].ms if ordered else 0.0)])
        size = {}
        for name in (*CATEGORIES, *(key for key in base if key not in CATEGORIES)):
            steps = [event.size if event.category == name else 0 for event in ordered]
            if base.get(name, 0) or any(steps):
                size[name] = np.cumsum([base.get(name, 0), *steps, 0])
        history = cls(rank, source, ms, size, (), capacity)
        alive: dict[int, MemoryEvent] = {}
        for event in ordered[: history.peak_index]:
            if event.size > 0:
                alive[event.block] = event
            else:
                alive.pop(event.block, None)
        largest = sorted(alive.values(), key=lambda event: -event.size)[:MOST_BLOCKS]
        blocks = tuple((event.category, event.size, event.where) for event in largest)
        return cls(rank, source, ms, size, blocks, capacity)

    @property
    def total(self) -> np.ndarray:
        """``[T]`` bytes of all categories."""
        return np.sum(list(self.size.values()), axis=0) if self.size else np.zeros(len(self.ms), dtype=np.int64)

    @property
    def peak_index(self) -> int:
        """Place of the peak in `ms`."""
        return int(np.argmax(self.total)) if len(self.ms) else 0

    @property
    def peak(self) -> tuple[float, int]:
        """Time and bytes of the peak."""
        return float(self.ms[self.peak_index]), int(self.total[self.peak_index])

    @property
    def at_peak(self) -> dict[str, int]:
        """Category -> bytes at the peak."""
        return {name: int(values[self.peak_index]) for name, values in self.size.items()}


def record_memory(ranks: Any, model: str = "model", step: str = "train_step") -> list[MemoryHistory]:
    """Trains one step on the launched ranks, and returns the device memory of each rank over time.

    Args:
        ranks: the launched session.
        model: name of a `DistributedModelParallel` on the ranks.
        step: name of a function without arguments on the ranks that trains one step.

    Raises:
        LaunchError: the ranks have ended. RankError: a rank raised.
    """
    if gone := BoundRanks.of(ranks).gone(model):
        raise LaunchError(gone)
    found: list[MemoryHistory] = ranks.eval(f"{_RANK_SIDE}.record_on_rank({model}, {step})")
    return found


def record_on_rank(model: Any, step: Callable[[], Any]) -> MemoryHistory:
    """What `record_memory` runs on a rank. Collective if the step is."""
    from recshard_lab.launcher.device_memory import measure

    held = model.memory_bytes()
    base = {name: held[name] for name in ("weights", "optimizer_state", "dense", "index") if held.get(name)}
    capacity = measure(model.device, max_age_s=60.0).capacity
    if model.device.type == "cuda":
        return _on_gpu(model, step, base, capacity)
    recorder = allocation_recorder()
    with recorder:
        step()
    return MemoryHistory.of(model.env.rank, "counted", base, recorder.done(), recorder.now(), capacity)


def _on_gpu(model: Any, step: Callable[[], Any], base: dict[str, int], capacity: int | None) -> MemoryHistory:
    import torch

    torch.cuda.synchronize(model.device)
    allocated, begun = torch.cuda.memory_allocated(model.device), perf_counter()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    try:
        step()
        torch.cuda.synchronize(model.device)
        end_ms, snapshot = 1000 * (perf_counter() - begun), torch.cuda.memory._snapshot(model.device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    return history_of_snapshot(snapshot, model.device.index or 0, model.env.rank, base, allocated, end_ms, capacity)


def history_of_snapshot(
    snapshot: Mapping[str, Any],
    device: int,
    rank: int,
    base: Mapping[str, int],
    allocated: int,
    end_ms: float,
    capacity: int | None = None,
) -> MemoryHistory:
    """From a snapshot of torch's CUDA allocator, as ``torch.cuda.memory._snapshot`` returns it.

    Args:
        snapshot: has ``device_traces``, for each device a list of events with ``action``, ``addr``, ``size``,
            ``time_us`` and ``frames``.
        device: index of the GPU.
        rank: the rank.
        base: category -> bytes that the model had before the step.
        allocated: bytes that the allocator had given out before the step. What `base` does not explain counts as
            activations.
        end_ms: length of the step.
        capacity: bytes that the rank may use.
    """
    events, alive = [], dict[int, MemoryEvent]()
    traced = snapshot["device_traces"][device] if snapshot["device_traces"] else []
    start = traced[0]["time_us"] if traced else 0
    for number, entry in enumerate(traced):
        ms = (entry["time_us"] - start) / 1000
        if entry["action"] == "alloc":
            frames = entry.get("frames", [])
            event = MemoryEvent(ms, number, entry["size"], _category_of_frames(frames), _where_of_frames(frames))
            alive[entry["addr"]] = event
            events.append(event)
        elif entry["action"] == "free_completed" and (freed := alive.pop(entry["addr"], None)) is not None:
            events.append(MemoryEvent(ms, freed.block, -freed.size, freed.category))
        elif entry["action"] == "free_completed":  # allocated before the step
            events.append(MemoryEvent(ms, -1 - number, -entry["size"], "activations"))
    rest = max(0, allocated - sum(base.values()))
    parts = {**base, "activations": base.get("activations", 0) + rest}
    return MemoryHistory.of(rank, "allocator", parts, events, end_ms, capacity)


def _category_of_frames(frames: Sequence[Mapping[str, Any]]) -> str:
    """By the functions that were running, the innermost first."""
    files = [str(frame.get("filename", "")).replace("/", ".") for frame in frames]
    if any(package in file for file in files for package in _EXCHANGES):
        return "exchange_buffers"
    backward = any("backward" in str(frame.get("name", "")) for frame in frames)
    return "gradients" if backward else "activations"


def _where_of_frames(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        file = str(frame.get("filename", ""))
        if file.endswith(".py") and "/torch/" not in file:
            return f"{frame.get('name', '')} ({file.rpartition('/')[2]}:{frame.get('line', 0)})"
    return str(frames[0].get("name", "")) if frames else ""


def allocation_recorder() -> Any:
    """A context in which the allocations of this thread's operators on the CPU are recorded.

    ``now()`` returns milliseconds since the start, ``done()`` the events.
    """
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Recorder(TorchDispatchMode):
        """Sees every operator; frees are reported by the storages themselves, in any thread."""

        def __init__(self) -> None:
            super().__init__()
            self.begun = perf_counter()
            self.events: list[MemoryEvent] = []
            self.alive: dict[int, tuple[Any, MemoryEvent]] = {}
            self.freed: deque[tuple[float, int]] = deque()
            self.count = 0

        def now(self) -> float:
            return 1000 * (perf_counter() - self.begun)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.settle()
            known = {id(own.untyped_storage()) for own in _plain(tree_leaves((args, kwargs)))}
            for tensor in _plain(tree_leaves(out)):
                storage = tensor.untyped_storage()
                key = id(storage)
                if key in known or key in self.alive or not storage.nbytes():
                    continue
                self.count += 1
                category, where = _category_here(torch._C._current_graph_task_id() >= 0)
                where = f"{str(func).split('.')[1]} in {where}"
                event = MemoryEvent(self.now(), self.count, storage.nbytes(), category, where)
                ref = weakref.ref(storage, lambda _, key=key: self.freed.append((self.now(), key)))  # type: ignore[misc]
                self.alive[key] = ref, event
                self.events.append(event)
            return out

        def settle(self) -> None:
            while self.freed:
                ms, key = self.freed.popleft()
                _, event = self.alive.pop(key)
                self.events.append(MemoryEvent(ms, event.block, -event.size, event.category))

        def done(self) -> list[MemoryEvent]:
            self.settle()
            return self.events

    def _plain(values: Iterable[Any]) -> list[Any]:
        kinds = (Tensor, torch.nn.Parameter)
        return [
            one for one in values if type(one) in kinds and one.device.type == "cpu" and one.layout == torch.strided
        ]

    return Recorder()


def _category_here(backward: bool) -> tuple[str, str]:
    """Category and function of the code that runs now, outside of torch."""
    frame: Any = sys._getframe(2)
    exchange, where = False, ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name and not name.startswith("torch") and name != __name__:
            where = where or f"{frame.f_code.co_name} ({name.rpartition('.')[2]})"
            exchange = exchange or name.startswith(_EXCHANGES)
            if name.startswith("recshard_lab.embedding"):  # rows that a kernel looks up, or their gradients
                exchange = False
                break
            if exchange:
                break
        frame = frame.f_back
    category = "exchange_buffers" if exchange else "gradients" if backward else "activations"
    return category, where or "torch"
