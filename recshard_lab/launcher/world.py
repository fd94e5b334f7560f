"""One world of ranks: starts it, sends it work, repairs its process groups after a failure, and ends it.

After a failed cell the process groups of the ranks may disagree about the next collective, or their connections were
closed to end a collective. The same groups then get new connections, so that models on the ranks keep working. A world
that lost a rank runs nothing until it is started again.
"""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..interrupts import stop_button
from .collectives import Window
from .engines import engine_for
from .errors import LaunchError, RankError, RanksInterrupted, named, ranks_text, resources_needed
from .flight import Flight
from .hangs import disagreeing
from .lines import Printer
from .shape import Shape
from .shared_memory import shelving
from .wires import Wires, exit_text, opened

__all__ = ["World"]

READY_S = 120.0  # a rank that has not joined by then never will
KEPT_LINES = 500  # of output
LEAVE_S = 1.0  # for exit handlers when ranks are stopped


class World:
    """Starts the ranks on construction. `launch_s`: seconds until every rank had completed an all_reduce."""

    def __init__(self, shape: Shape) -> None:
        started = time.perf_counter()
        self.size = shape.world_size
        self.cell = 0
        self.lost = ""  # why nothing runs any more
        self._rebuilds = 0
        self._upkeep = False
        self._asking = threading.Lock()  # one question at a time: whoever waits takes all replies
        self._questions = -1  # numbered downwards: they belong to no cell
        with resources_needed(f"launch(n={shape.world_size})"):
            self._engine = engine_for(shape)
            self.shape = self._engine.shape
            try:
                self.wires = Wires(self._engine)
            except BaseException:
                self._engine.close()
                raise
        self._groups: dict[int, dict[str, list[int]]] = {}
        self._group_counts: dict[int, int] = {}
        self._windows: dict[int, dict[str, Window]] = {}
        self._names: dict[int, list[str]] = {}  # the variables on each rank
        self._warned = False  # of collectives that do not pair up
        self.output: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            self._come_up()
        except BaseException:
            with stop_button(lambda: None):  # it ends within a second or two
                self.stop(0.0)
            raise
        self.launch_s = time.perf_counter() - started

    def _come_up(self) -> None:
        flight = self._flight(range(self.size), Printer(range(self.size)), READY_S)
        with stop_button(self.press_stop), self.wires.reading():
            flight.wait()
        if flight.stops:
            raise RanksInterrupted((), self.size, "stopped while the ranks were starting; none is left.")
        if flight.failures:
            late = f" within {READY_S:g} s" if flight.timed_out else ""
            raise LaunchError(f"the ranks did not come up{late}: {RankError([*flight.failures.values()], self.size)}")
        self._remember(flight)

    @property
    def shares_memory(self) -> bool:
        """Whether descriptors can be sent to the ranks. True if they run on this machine, over a socket pair."""
        return shelving and self.shape.engine in ("fork", "spawn")

    def press_stop(self) -> None:
        """Stops the current cell. The repair of process groups is not a cell and continues."""
        cell = -1 if self._upkeep else self.cell
        self.wires.pressed.append(cell)

    def why_not(self) -> str:
        """Why this world can run nothing; empty when it can."""
        dead = sorted(self.wires.dead)
        if dead and not self.lost:
            self.lost = "; ".join(f"rank {rank} {exit_text(self.wires.dead[rank])[1]}" for rank in dead)
        return self.lost

    def send(
        self,
        kind: str,
        payload: bytes,
        ranks: list[int],
        timeout_s: float | None,
        printer: Printer | None,
        fds: tuple[int, ...] = (),
    ) -> Flight:
        """Runs one cell or call. Raises RankError or RanksInterrupted after the process groups are repaired."""
        self.cell += 1
        printer = printer or Printer(ranks)
        printer.kept = self.output
        flight = self._flight(ranks, printer, timeout_s, watched=True)
        self.wires.drop_attached()
        with self.wires.reading():
            for rank in ranks:
                self.wires.send(rank, kind, self.cell, payload, fds)
            flight.wait()
        if not flight.died and not flight.killed:
            flight.settle()
        self._remember(flight)
        if flight.killed and flight.waiting:
            stuck = ranks_text(sorted(flight.waiting), self.size)
            gone = self.variables()
            held = f" and with them {gone}, and what this cell made" if gone else ""
            self.lost = f"{stuck} did not answer and all ranks were killed{held}"
            raise RanksInterrupted([*flight.failures.values()], self.size, self.lost)
        if not flight.failures:
            if flight.timed_out:
                printer.notice(f"the cell ended after its time limit of {timeout_s:g} s: it ignored the interrupt.")
            if flight.freed:  # no rank failed, but the connections were closed
                note = self._rebuild(flight)
                if self.lost:
                    raise LaunchError(f"the cell ended, but {note}")
            elif disagreeing(self._groups, self._windows):
                if not self._warned:
                    flight.compare()
                self._warned = True
            else:
                self._warned = False
            return flight
        note = self._put_right(flight)
        if flight.timed_out:
            note = f"The cell was stopped at its time limit of {timeout_s:g} s. {note}"
        if flight.overdue:
            who = ranks_text(flight.overdue, self.size).capitalize()
            note = (
                f"{who} did not answer the interrupt and {'were' if len(flight.overdue) > 1 else 'was'} killed. {note}"
            )
        failures = [*flight.failures.values()]
        if flight.stops and not flight.died:
            raise RanksInterrupted(failures, self.size, note)
        raise RankError(failures, self.size, note)

    @property
    def names(self) -> list[str]:
        """Names of the variables that cells have made on any rank, sorted, as of the last cell that ended."""
        return sorted({name for names in self._names.values() for name in names})

    def variables(self) -> str:
        """The names of the variables on the ranks as text. A cell that did not end may have made more."""
        return named(self.names)

    def ask(self, ranks: Sequence[int], kind: str, value: Any, timeout_s: float) -> dict[int, Any]:
        """Rank -> the answer of its side thread, also while a cell runs. Ranks that take too long are left out."""
        until, found = time.monotonic() + timeout_s, dict[int, Any]()
        if not self._asking.acquire(timeout=timeout_s):
            return found
        try:
            self._questions -= 1
            for rank in ranks:
                self.wires.send(rank, kind, self._questions, pickle.dumps(value))
            while len(found) < len(ranks) and (left := until - time.monotonic()) > 0 and not self.why_not():
                with suppress(queue.Empty):
                    event = self.wires.replies.get(timeout=min(left, 0.25))
                    if event.cell == self._questions:  # others are too late
                        found[event.rank] = opened(event.data)
        finally:
            self._asking.release()
        return found

    def stop(self, patience_s: float = LEAVE_S) -> None:
        """Ends every rank and every process that they started."""
        self.wires.stop(0.0 if self.lost else patience_s)
        self._engine.close()

    def _flight(
        self, ranks: list[int] | range, printer: Printer, timeout_s: float | None, watched: bool = False
    ) -> Flight:
        return Flight(self.wires, self.cell, ranks, printer, timeout_s, watched)

    def _remember(self, flight: Flight) -> None:
        for rank, outcome in flight.outcomes.items():
            self._groups[rank], self._group_counts[rank] = outcome["groups"], outcome["group_count"]
            self._windows[rank], self._names[rank] = outcome["windows"], outcome["names"]

    def _put_right(self, flight: Flight) -> str:
        """Repairs the groups for the next cell. Returns one sentence about the outcome."""
        if flight.died:
            died = [failure for failure in flight.failures.values() if failure.kind == "died"]
            self.lost = "; ".join(f"rank {failure.rank} {failure.message}" for failure in died)
            gone = self.variables()
            return "Nothing runs until fresh ranks are started: %recshard_restart, or Ranks.restart()." + (
                f" Variables that are lost: {gone}." if gone else ""
            )
        alike = len({(failure.kind, failure.traceback) for failure in flight.failures.values()}) == 1
        if not flight.freed and alike and len(flight.failures) == self.size:
            return ""  # the ranks left the cell at the same point: their groups still agree
        return self._rebuild(flight)

    def _rebuild(self, after: Flight) -> str:
        """Gives the process groups of the ranks new connections, after all users of the old ones have ended."""
        after.free()
        self._rebuilds += 1
        self.cell += 1
        members = {name: who for groups in self._groups.values() for name, who in groups.items()}
        whole = [name for name, who in members.items() if all(self._groups[r].get(name) == who for r in who)]
        if not any(len(members[name]) == self.size for name in whole):
            whole = []  # a cell destroyed the default group on some rank: they all join a new one
        store = self._engine.store(self._rebuilds)
        count = max(self._group_counts.values())
        flight = self._flight(range(self.size), Printer(range(self.size)), READY_S)
        for rank in range(self.size):
            names = [name for name in whole if rank in members[name]]
            self.wires.send(rank, "rebuild", self.cell, pickle.dumps((store, names, count)))
        self._upkeep = True
        flight.wait()
        self._upkeep = False
        self._remember(flight)
        if flight.failures or flight.waiting:
            causes = RankError([*flight.failures.values()], self.size).headline() if flight.failures else "stopped"
            self.lost = f"the process groups could not be rebuilt ({causes})"
            return f"{self.lost}. Start fresh ranks: %recshard_restart, or Ranks.restart()."
        return "Process groups were rebuilt; variables on the ranks are kept."
