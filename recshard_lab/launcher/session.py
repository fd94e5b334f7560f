"""What a notebook holds: a world of ranks that stays, runs cells and functions, and ends without a trace."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from .errors import LaunchError, RankError, RanksInterrupted, ranks_text
from .forkserver import forkserver
from .lines import Printer
from .payload import decode, encode_call
from .shape import Shape
from .waiting import Flight
from .wires import Wires

__all__ = ["CellResult", "RankStatus", "Ranks", "current", "launch"]

P = ParamSpec("P")
T = TypeVar("T")

READY_S = 120.0  # a rank that has not joined by then never will
LEAVE_S = 1.0  # for exit handlers when ranks are stopped


@dataclass(frozen=True)
class CellResult:
    """What one rank's cell gave. data: MIME type -> content of the last expression, empty if it has none."""

    rank: int
    data: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def text(self) -> str | None:
        """The repr of the last expression, None when the cell ends in none."""
        return self.data.get("text/plain")


@dataclass(frozen=True)
class RankStatus:
    """One rank now. state: ``idle``, ``running`` or how it ended; memory_bytes: resident set, 0 when gone."""

    rank: int
    pid: int
    state: str
    node: int
    memory_bytes: int


class Ranks:
    """A running world. Made by `launch`; a context manager that stops it."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._cell = 0
        self._lock = threading.Lock()
        self._holders = 1
        self._wires: Wires | None = None
        self._broken = ""
        self._start()

    world_size = property(lambda self: self.shape.world_size, doc="How many ranks there are.")
    nodes = property(lambda self: self.shape.nodes, doc="How many virtual nodes they live on.")
    local_world_size = property(lambda self: self.shape.local_world_size, doc="Ranks a node.")
    backend = property(lambda self: self.shape.backend, doc="``gloo`` or ``nccl``.")

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty once stopped."""
        return list(self._wires.pids) if self._wires is not None else []

    @property
    def running(self) -> bool:
        """Not stopped, and no rank lost."""
        return self._wires is not None and not self._broken

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """``fn(*args, **kwargs)`` on every rank; one result a rank.

        fn may be defined in the notebook: it takes along the globals it names. Raises RankError when it
        raises on a rank or a rank dies, LaunchError when the ranks cannot be used.
        """
        return self.call(fn, args, kwargs)

    def call(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[T]:
        """`run` with a choice of ranks, a time limit, and where output goes."""
        self._check()
        chosen = self._chosen(ranks)
        flight = self._fly("run", encode_call(fn, args, kwargs or {}), chosen, timeout_s, printer)
        return [decode(flight.outcomes[rank]["value"]) for rank in chosen]

    def exec(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        filename: str | None = None,
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[CellResult]:
        """Runs `source` in each rank's own namespace, which stays; one CellResult a rank.

        The namespace begins with rank, world_size, local_rank, device, torch, dist and display.
        """
        self._check()
        chosen = self._chosen(ranks)
        payload = pickle.dumps((source, filename or f"<cell {self._cell + 1}>"))
        outcomes = self._fly("exec", payload, chosen, timeout_s, printer).outcomes
        return [CellResult(r, outcomes[r]["value"] or {}, outcomes[r]["seconds"]) for r in chosen]

    def status(self) -> list[RankStatus]:
        """Each rank's process, state and memory; empty once stopped."""
        import psutil

        wires = self._wires
        if wires is None:
            return []
        rows = []
        for rank, pid in enumerate(wires.pids):
            state, memory = ("running" if self._lock.locked() else "idle"), 0
            if rank in wires.dead:
                from .wires import exit_text

                state = exit_text(wires.dead[rank])[1]
            else:
                try:
                    memory = psutil.Process(pid).memory_info().rss
                except psutil.NoSuchProcess:
                    state = "gone"
            rows.append(RankStatus(rank, pid, state, rank // self.local_world_size, memory))
        return rows

    def stop(self) -> None:
        """Ends every rank and all they started; doing it twice is the same as once."""
        wires, self._wires = self._wires, None
        global _current
        if _current is self:
            _current = None
        if wires is not None:
            wires.stop(0.0 if self._broken or self._lock.locked() else LEAVE_S)
            shutil.rmtree(os.path.dirname(self._store), ignore_errors=True)

    def restart(self) -> None:
        """Fresh ranks of the same shape; what the old ones held is gone."""
        global _current
        if _current not in (None, self):
            raise LaunchError(f"other ranks are running ({_current!r}); stop them first.")
        self.stop()
        self._start()
        _current = self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._holders -= 1
        if self._holders <= 0:
            self.stop()

    def __repr__(self) -> str:
        if self._wires is None:
            return f"<Ranks: {self.shape}, stopped>"
        if self._broken:
            return f"<Ranks: {self.shape}, broken: {self._broken}>"
        return f"<Ranks: {self.shape}, ready in {self.launch_s:.2f} s>"

    # -- inside ------------------------------------------------------------------------------------

    def _start(self) -> None:
        started = time.perf_counter()
        server = forkserver()
        self._broken, self._rebuilds = "", 0
        folder = os.path.join(server.folder, f"world-{os.urandom(4).hex()}")
        os.mkdir(folder, 0o700)
        self._store = os.path.join(folder, "store")
        wires = Wires(server, self.shape, self._store)
        flight = Flight(wires, 0, range(self.world_size), Printer(range(self.world_size)), READY_S)
        flight.wait()
        if flight.failures or flight.waiting:
            wires.stop(0.0)
            shutil.rmtree(folder, ignore_errors=True)
            error = RankError(list(flight.failures.values()), self.world_size)
            raise LaunchError(f"the ranks did not come up: {error}")
        self._groups = {rank: outcome["groups"] for rank, outcome in flight.outcomes.items()}
        self._counts = {rank: outcome["group_count"] for rank, outcome in flight.outcomes.items()}
        self._wires = wires
        self.launch_s = time.perf_counter() - started

    def _check(self) -> Wires:
        if self._wires is None:
            raise LaunchError(
                f"these ranks are stopped. Start new ones: %recshard_launch -n {self.world_size}, "
                f"or recshard_lab.launch({self.world_size})."
            )
        dead = [rank for rank in range(self.world_size) if rank in self._wires.dead]
        if dead and not self._broken:
            from .wires import exit_text

            self._broken = "; ".join(f"rank {rank} {exit_text(self._wires.dead[rank])[1]}" for rank in dead)
        if self._broken:
            raise LaunchError(
                f"{self._broken}; nothing runs on fewer than {self.world_size} ranks unasked. "
                "Start fresh ones: %recshard_restart, or Ranks.restart()."
            )
        return self._wires

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        wrong = [rank for rank in chosen if not 0 <= rank < self.world_size]
        if wrong or not chosen:
            raise LaunchError(f"ranks={list(ranks or ())}: expected some of 0 to {self.world_size - 1}.")
        return chosen

    def _fly(
        self, kind: str, payload: bytes, ranks: list[int], timeout_s: float | None, printer: Printer | None
    ) -> Flight:
        """Sends one piece of work and waits; puts the world right and raises if it went wrong."""
        wires = self._check()
        if not self._lock.acquire(blocking=False):
            raise LaunchError("the ranks are busy with another cell; wait for it, or stop it.")
        try:
            self._cell += 1
            flight = Flight(wires, self._cell, ranks, printer or Printer(ranks), timeout_s)
            for rank in ranks:
                wires.send(rank, kind, self._cell, payload)
            flight.wait()
            for rank, outcome in flight.outcomes.items():
                self._groups[rank], self._counts[rank] = outcome["groups"], outcome["group_count"]
            if not (flight.failures or flight.killed):
                return flight
            note = self._put_right(flight)
        finally:
            self._lock.release()
        failures = list(flight.failures.values())
        if flight.killed or (flight.stops and not flight.died):
            raise RanksInterrupted(failures, self.world_size, note)
        raise RankError(failures, self.world_size, note)

    def _put_right(self, flight: Flight) -> str:
        """After a failed cell: what was done so that the next one works, in a sentence."""
        if flight.killed:
            stuck = ranks_text(sorted(flight.waiting))
            self._lock_free_restart()
            return f"{stuck} did not answer: all {self.world_size} ranks were started again; their variables are lost."
        if flight.died:
            self._broken = "; ".join(f"rank {f.rank} {f.message}" for f in flight.failures.values() if f.kind == "died")
            return "Nothing runs until fresh ranks are started: %recshard_restart, or Ranks.restart()."
        same = len(flight.failures) == self.world_size and len({f.kind for f in flight.failures.values()}) == 1
        if not flight.freed and same:
            return "Variables on the ranks are kept."
        return self._rebuild()

    def _rebuild(self) -> str:
        """Fresh connections inside the ranks' process groups."""
        wires = self._wires
        assert wires is not None
        self._rebuilds += 1
        self._cell += 1
        ranks = range(self.world_size)
        members: dict[str, list[int]] = {name: who for groups in self._groups.values() for name, who in groups.items()}
        whole = [name for name, who in members.items() if all(self._groups[rank].get(name) == who for rank in who)]
        everywhere = all(any(len(who) == self.world_size for who in self._groups[rank].values()) for rank in ranks)
        store = f"{self._store}-{self._rebuilds}"
        flight = Flight(wires, self._cell, ranks, Printer(ranks), READY_S)
        for rank in ranks:
            names = [name for name in whole if rank in members[name]] if everywhere else []
            payload = pickle.dumps((store, names, max(self._counts.values())))
            wires.send(rank, "rebuild", self._cell, payload)
        flight.wait()
        if flight.failures:
            self._broken = (
                f"process groups could not be rebuilt ({RankError(list(flight.failures.values()), self.world_size)})"
            )
            return "The process groups could not be rebuilt: %recshard_restart, or Ranks.restart()."
        for rank, outcome in flight.outcomes.items():
            self._groups[rank], self._counts[rank] = outcome["groups"], outcome["group_count"]
        return "Process groups were rebuilt; variables on the ranks are kept."

    def _lock_free_restart(self) -> None:
        wires, self._wires = self._wires, None
        assert wires is not None
        wires.stop(0.0)
        self._start()


_current: Ranks | None = None


def current() -> Ranks | None:
    """The ranks that are running, if any."""
    return _current


def launch(n: int, nodes: int = 1, backend: str | None = None, *, threads: int = 1) -> Ranks:
    """Starts `n` ranks on this machine and returns when a real all_reduce has gone round.

    n: ranks. nodes: virtual nodes they believe to live on, n / nodes ranks each. backend: ``gloo``,
    ``nccl`` or None (NCCL with one GPU a rank where CUDA GPUs are, Gloo otherwise). threads: torch threads
    a rank. Ranks of the same shape that are running already are returned as they are.

    Raises LaunchError, naming the smallest change, when the shape does not fit or others are running.

        with recshard_lab.launch(4) as ranks:
            ranks.run(lambda: torch.distributed.get_rank())   # [0, 1, 2, 3]
    """
    global _current
    shape = Shape.checked(n, nodes, backend, threads)
    running = _current
    if running is not None:
        if running.shape == shape and running.running:
            running._holders += 1
            return running
        if running.running:
            raise LaunchError(
                f"asked for {shape}, but {running.shape} are running. "
                "Stop them first: %recshard_stop, or recshard_lab.launcher.current().stop()."
            )
        running.stop()
    _current = Ranks(shape)
    return _current
