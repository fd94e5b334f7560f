"""One cell or call in flight: from the request until all ranks have answered, failed or been stopped.

a rank raises        the others have FAILURE_GRACE_S to finish. Then their collectives are ended. They are interrupted
                     after STRAGGLER_S, and killed ABANDON_S later if they do not answer
a rank dies          the cell fails at once. The collectives of the others are ended and they are stopped
the time limit ends  ranks are interrupted. Their collectives are ended after INTERRUPT_GRACE_S, and they are killed
                     after KILL_S
the user stops       1. ranks in Python code get KeyboardInterrupt
                     2. after INTERRUPT_GRACE_S, or at a second stop (which interrupts again), collectives are ended
                     3. at a stop after that they get KeyboardInterrupt again. After INTERRUPT_GRACE_S, or at another
                        stop, ranks that have not ended the cell are killed, and all are started again
the user stops       the ranks are killed at once
a launch

A killed rank may stay in an uninterruptible system call. The cell then fails after GONE_S.
"""

from __future__ import annotations

import math
import pickle
import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .collectives import Line
from .errors import Failure
from .hangs import AFTERWARDS, STOPPED, Watch
from .lines import Printer
from .wires import IDLE_CHARS, Event, Wires, exit_text, opened

__all__ = ["Flight"]

TICK_S = 0.05
FAILURE_GRACE_S = 0.2  # for the others to finish by themselves after one rank failed
STRAGGLER_S = 2.0  # after that, ranks still at work in a failed cell are interrupted
INTERRUPT_GRACE_S = 0.4  # between KeyboardInterrupt and freeing collectives
CABLES_S = 0.3  # for the ranks to report their connections
DEATH_GRACE_S = 0.1  # for other deaths to be reported (a group killed together)
PATIENCE_S = 3.0  # then a notice names the rank that does not answer, and the next step
KILL_S = 5.0  # from the time limit's interrupt to SIGKILL
ABANDON_S = 60.0  # from the interrupt in a failed cell to SIGKILL
GONE_S = 5.0  # from SIGKILL to the end of the process


class Flight:
    """Waits for the answers of `ranks` to cell number `cell`."""

    def __init__(
        self,
        wires: Wires,
        cell: int,
        ranks: Sequence[int],
        printer: Printer,
        timeout_s: float | None = None,
        watched: bool = False,
    ) -> None:
        self.wires, self.cell, self.printer = wires, cell, printer
        self.waiting = set(ranks)
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.failures: dict[int, Failure] = {}
        self.stops = 0  # how often the user pressed stop
        self.freed = False  # connections were cut: groups must be rebuilt
        self.killed = False  # the user's last stop
        self.timed_out = False
        self.overdue: list[int] = []  # ranks that were killed because they did not answer
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._since: dict[str, float] = {}  # when something happened first
        self._cables: dict[int, Any] | None = None
        self._watch = Watch(wires, cell, printer)  # used for cells only: a launch has no groups to compare yet
        self._watched = watched
        self._placed: set[int] = set()  # unresponsive ranks whose line has been shown
        for rank in self.waiting & set(wires.buried):  # an earlier cell took the event
            self._on(Event(rank, "died", 0, wires.buried[rank]))

    @property
    def died(self) -> bool:
        """Some rank's process ended."""
        return any(failure.kind == "died" for failure in self.failures.values())

    def wait(self) -> None:
        """Returns when every rank has answered, or when the cell cannot continue."""
        while self.waiting and not self.killed:
            self._take(TICK_S)
            self.printer.flush()
            self._act()
            if self.died and self._for("died") > DEATH_GRACE_S and not set(self.overdue) & self.waiting:
                break
        if self.died and self.waiting:
            self._abandon()
        self.printer.close()

    def free(self) -> None:
        """Closes the connections between ranks, if they are open. No rank waits in a collective afterwards."""
        self._ask_for_cables()
        while not self.freed:
            with suppress(queue.Empty):
                self._on(self.wires.take(TICK_S))
            self._cut_if_known()

    def compare(self) -> None:
        """After a cell: shows where the collectives of the ranks differ."""
        self._watch.look(AFTERWARDS)
        self.settle()

    def settle(self) -> None:
        """Waits for the positions that were requested from ranks."""
        while self._watch.expecting():
            with suppress(queue.Empty):
                self._on(self.wires.take(TICK_S))

    # -- what arrives ------------------------------------------------------------------------------

    def _take(self, seconds: float) -> None:
        """Handles events for at most `seconds`, so that a flood of output does not delay other actions."""
        end = time.monotonic() + seconds
        with suppress(queue.Empty):
            self._on(self.wires.take(seconds))
            while time.monotonic() < end:
                self._on(self.wires.take(0))

    def _on(self, event: Event) -> None:
        rank, kind, cell, data = event
        if kind in ("stdout", "stderr"):
            self.printer.feed(rank, kind, data)
        elif kind == "dropped":
            lines, characters = data
            self.printer.notice(
                f"rank {rank} printed {lines:,} more lines ({characters:,} characters) between cells; only the last "
                f"{IDLE_CHARS:,} characters of all ranks are kept."
            )
        elif kind == "died":
            name, message = exit_text(data)
            last = "".join(self.wires.last_output[rank])[-1000:]
            text = f"{message}; the last it printed:\n{last}" if last.strip() else message
            self.failures[rank] = Failure(rank, "died", name, message, text)
            self._mark("died")
            self._finish(rank)
        elif cell != self.cell:
            return  # a late answer to an earlier cell
        elif kind == "done":
            outcome = opened(data)
            self.outcomes[rank] = outcome
            if "failure" in outcome:
                self.failures[rank] = Failure(rank, **outcome["failure"])
                self._mark("failed")
            self._finish(rank)
        elif kind == "display":
            self.printer.display(rank, opened(data))
        elif kind == "cables" and self._cables is not None:
            self._cables[rank] = opened(data)
            if self.freed:  # too busy to answer in time
                self._cut()
        elif kind in ("pulse", "position", "lines"):
            self._watch.hear(rank, kind, data)
            if kind == "pulse" and "notified" in self._since:
                self._show_line(rank, opened(data)[-1])

    def _finish(self, rank: int) -> None:
        self.waiting.discard(rank)
        self.printer.finish(rank)

    def _mark(self, what: str) -> None:
        self._since.setdefault(what, time.monotonic())

    def _for(self, what: str) -> float:
        """Seconds since `what` happened first; negative when it has not."""
        return time.monotonic() - self._since[what] if what in self._since else -1.0

    # -- what is done about it ---------------------------------------------------------------------

    def _act(self) -> None:
        while self.wires.pressed:  # not an event: it would wait behind all that the ranks print
            if self.wires.pressed.popleft() == self.cell:
                self._asked_to_stop()
        if self._watched and not self._since:
            self._watch.tick()
        if self._deadline is not None and time.monotonic() > self._deadline and not self.timed_out:
            self.timed_out = True
            self._interrupt()
        if self._for("failed") > FAILURE_GRACE_S or self._for("interrupted") > INTERRUPT_GRACE_S:
            self._free()
        if self._for("failed") > STRAGGLER_S and "interrupted" not in self._since:
            self._interrupt()
        patience = math.inf if self.stops else ABANDON_S if "failed" in self._since else math.inf
        if self.timed_out or not self._watched:  # ranks that start or rebuild groups are lost without the others
            patience = KILL_S
        if self._for("interrupted") > patience and not self.overdue:
            self._kill()
        if self._for("last") > INTERRUPT_GRACE_S:
            self.killed = True
        if self._for("killed") > GONE_S:
            for rank in sorted(self.waiting & set(self.overdue)):
                self._on(Event(rank, "died", 0, f"was killed and has not ended after {GONE_S:g} s"))
        if self._for("interrupted") > PATIENCE_S and "notified" not in self._since:
            self._mark("notified")
            for rank in self.waiting:
                self.wires.send(rank, "pulse", self.cell)
        self._cut_if_known()

    def _asked_to_stop(self) -> None:
        self.stops += 1
        if not self._watched:  # ranks that start: they hold nothing, and may wait for one another
            self._kill()
            return
        if self.stops == 1:
            self._interrupt()
            return
        for rank in self.waiting:  # a library may have swallowed the first
            self.wires.send(rank, "interrupt", self.cell)
        if not self.freed and self._cables is None:
            self._free()
        elif "last" in self._since:
            self.killed = True
        else:
            self._mark("last")

    def _interrupt(self) -> None:
        self._mark("interrupted")
        for rank in self.waiting:
            self.wires.send(rank, "interrupt", self.cell)
        if self._watched and not self.died:
            self._watch.look(STOPPED)  # ranks remember the line at which the interrupt met them

    def _kill(self) -> None:
        self._mark("killed")
        self.overdue = sorted(self.waiting)
        for rank in self.overdue:
            self.wires.kill(rank)

    def _free(self) -> None:
        if self.waiting:
            self._ask_for_cables()

    def _ask_for_cables(self) -> None:
        """Requests the list of connections between ranks. No other connection may be closed."""
        if self._cables is None:
            self._mark("freeing")
            self._cables = {}
            for rank in self.wires.alive():
                self.wires.send(rank, "cables", self.cell)

    def _cut_if_known(self) -> None:
        if self._cables is None or self.freed:
            return
        if len(self._cables) >= len(self.wires.alive()) or self._for("freeing") > CABLES_S:
            self._cut()

    def _cut(self) -> None:
        assert self._cables is not None
        self.freed = True
        ends = {tuple(cable) for each in self._cables.values() for cable in each}
        everyone = len(self._cables) >= len(self.wires.alive())
        between = {(a, b) for a, b in ends if (b, a) in ends or not everyone}
        for rank in self.wires.alive():
            self.wires.send(rank, "cut", self.cell, pickle.dumps(between))

    def _abandon(self) -> None:
        """A rank died, so the world is lost. Interrupts the others and does not wait for them."""
        self._interrupt()
        for rank in self.waiting:
            self.failures[rank] = Failure(rank, "freed", "stopped", "the cell was abandoned")

    def _show_line(self, rank: int, line: Line | None) -> None:
        if rank in self.waiting and rank not in self._placed:
            self._placed.add(rank)
            at = f"it is at {self.printer.place(Line(*line))}" if line else "it is in code that is not the notebook's"
            self.printer.notice(
                f"rank {rank} does not answer; {at}\n"
                "It may still answer. Stop once more: ranks that do not end the cell are killed, and all start again."
            )
