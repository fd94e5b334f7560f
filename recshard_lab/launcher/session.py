"""What a notebook holds: ranks that stay, run cells and functions, and end without a trace."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import TracebackType
from typing import Any, ClassVar, ParamSpec, TypeVar

from .errors import LaunchError, RanksInterrupted
from .interrupts import stop_button
from .lines import Printer
from .payload import decode, decode_apart, encode, encode_apart, encode_call, sources_of
from .results import CellResult, RankStatus, rank_status
from .shape import Shape
from .world import World

__all__ = ["Ranks"]

PATIENCE_S = 2.0  # with what another thread does on the ranks: a widget trains in bursts between the reader's cells

P = ParamSpec("P")
T = TypeVar("T")


class Ranks:
    """Running ranks, as `launch` returns them; as a context manager they stop at its end."""

    running: ClassVar[Ranks | None] = None  # in this process, one world at a time

    def __init__(self, shape: Shape) -> None:
        self.asked = shape
        self._busy = threading.Lock()
        self._holders = 1  # `launch` calls that were handed these ranks
        self._world: World | None = World(shape)

    @property
    def shape(self) -> Shape:
        """What runs; where the engine decides, on a Ray cluster, it may be on more nodes than were asked for."""
        return self._world.shape if self._world is not None else self.asked

    @property
    def world_size(self) -> int:
        """How many ranks there are; never fewer than were asked for."""
        return self.asked.world_size

    @property
    def nodes(self) -> int:
        """How many nodes they live on: virtual ones, or machines of a Ray cluster."""
        return self.shape.nodes

    @property
    def local_world_size(self) -> int:
        """Ranks a node."""
        return self.shape.local_world_size

    @property
    def backend(self) -> str:
        """``gloo`` or ``nccl``."""
        return self.shape.backend

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty once stopped."""
        return list(self._world.wires.pids) if self._world is not None else []

    @property
    def launch_s(self) -> float:
        """Seconds from the request to the end of the first all_reduce; 0 once stopped."""
        return self._world.launch_s if self._world is not None else 0.0

    @property
    def variables(self) -> list[str]:
        """Names of the variables that cells have made on any rank, sorted; they are lost when the ranks end.

        The ranks are not asked: the names are those at the end of the last cell. Empty once stopped.
        """
        return self._world.names if self._world is not None else []

    @property
    def usable(self) -> bool:
        """Neither stopped nor short of a rank."""
        return self._world is not None and not self._world.why_not()

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """``fn(*args, **kwargs)`` on every rank; a list, one result a rank.

        fn may be defined in the notebook: it takes along the globals it names. Raises RankError when it
        raises on a rank or a rank dies, LaunchError when the ranks cannot be used.
        """
        return self.call(fn, args, kwargs)

    def call(
        self,
        fn: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[T]:
        """`run` with a choice of ranks, a time limit, and where output goes."""
        self._usable_world()  # before the arguments are packed
        return self._values("run", encode_call(fn, args, kwargs or {}), ranks, timeout_s, printer)

    def exec(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        filename: str | None = None,
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[CellResult]:
        """Runs `source` in each rank's own namespace, which stays; a CellResult a rank.

        The namespace begins with rank, world_size, local_rank, device, torch, dist and display. filename:
        what tracebacks call the cell.
        """
        chosen = self._chosen(ranks)
        name = filename or f"<cell {self._usable_world().cell + 1}>"
        with self._work() as world:
            outcomes = world.send("exec", pickle.dumps((source, name)), chosen, timeout_s, printer).outcomes
        return [CellResult(r, outcomes[r]["value"] or {}, outcomes[r]["seconds"]) for r in chosen]

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Puts values by name into the namespaces of ranks."""
        chosen = self._chosen(ranks)
        with self._work() as world:
            carried = (dict(values), sources_of(*values.values()))
            data, fd = encode_apart(carried) if world.shares_memory else (encode((encode(carried), [])), None)
            try:
                world.send("push", data, chosen, None, None, () if fd is None else (fd,))
            finally:
                if fd is not None:
                    os.close(fd)

    def pull(self, expression: str, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """The value of a name, or an expression, in the namespaces of ranks; one a rank."""
        chosen = self._chosen(ranks)
        with self._work() as world:
            flight = world.send("pull", encode((expression, world.shares_memory)), chosen, None, None)
            answers = [(flight.outcomes[r]["value"], world.wires.attached.pop((r, flight.cell), None)) for r in chosen]
            return [decode_apart(data, fd) for data, fd in answers]

    def complete(self, word: str, timeout_s: float = 0.25) -> list[str]:
        """The names on rank 0 that begin with `word`; none while the ranks are busy or gone."""
        world = self._world
        if world is None or world.why_not() or not self._busy.acquire(blocking=False):
            return []
        try:
            return world.ask(0, "complete", word, timeout_s) or []
        finally:
            self._busy.release()

    def calibrate(self, seconds: float = 50.0, *, progress: bool = True, seed: int = 0) -> Any:
        """Measures what steps of sharded tables cost on these ranks and fits the planner's figures to it.

        What comes back shows them, `save`s them as a device profile, and has the `topology` to plan with; see
        `recshard_lab.calibration`, which does the work: ranks themselves know nothing of tables.
        """
        above = import_module("recshard_lab.calibration")
        return above.calibrate(self, seconds, progress=progress, seed=seed)

    def status(self) -> list[RankStatus]:
        """Each rank's process, state and memory; empty once stopped."""
        world = self._world
        if world is None:
            return []
        wires, busy = world.wires, self._busy.locked()
        return [
            rank_status(rank, process, rank // self.local_world_size, busy, wires.dead)
            for rank, process in enumerate(wires.processes)
        ]

    def posted(self, name: str) -> list[Any]:
        """What each rank has put up last under a name (`launcher.board.post`), at any time; None where nothing."""
        world = self._world
        told = [] if world is None else [board.get(name) for board in world.wires.board]
        return [None if data is None else pickle.loads(data) for data in told]

    def output(self, lines: int = 20) -> list[str]:
        """The last lines that ranks printed, marked by rank, whether or not a cell showed them."""
        if lines < 1:
            raise ValueError(f"lines must be at least 1, got {lines!r}")
        world = self._world
        return [] if world is None else list(world.output)[-lines:]

    def interrupt(self) -> bool:
        """Asks the ranks to end the present work, as the stop button does; from any thread. Whether there was any.

        What runs raises `RanksInterrupted` where it was started; the ranks keep their variables.
        """
        world = self._world
        if world is None or not self._busy.locked():
            return False
        world.press_stop()
        return True

    def stop(self) -> None:
        """Ends every rank and all they started; doing it twice is the same as once."""
        world, self._world = self._world, None
        if Ranks.running is self:
            Ranks.running = None
        if world is not None:
            with stop_button(lambda: None):  # it ends within a second or two
                world.stop(*[0.0] if self._busy.locked() else [])

    def restart(self) -> None:
        """Fresh ranks of the same shape; what the old ones held is gone."""
        if Ranks.running not in (None, self):
            raise LaunchError(f"other ranks are running ({Ranks.running!r}). Stop them first: %recshard_stop.")
        self.stop()
        self._world = World(self.asked)
        Ranks.running = self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._holders -= 1
        if self._holders <= 0:
            self.stop()

    def __repr__(self) -> str:
        if self._world is None:
            return f"<Ranks: {self.shape}, stopped>"
        if why := self._world.why_not():
            return f"<Ranks: {self.shape}, not usable: {why}>"
        return f"<Ranks: {self.shape}, ready in {self.launch_s:.2f} s>"

    # -- inside ------------------------------------------------------------------------------------

    def _usable_world(self) -> World:
        if self._world is None:
            raise LaunchError(
                f"these ranks are stopped. Start new ones: %recshard_launch -n {self.world_size}, "
                f"or recshard_lab.launch({self.world_size})."
            )
        if why := self._world.why_not():
            raise LaunchError(
                f"{why}; nothing runs on fewer than {self.world_size} ranks unasked. "
                "Start fresh ones: %recshard_restart, or Ranks.restart()."
            )
        return self._world

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        chosen = list(range(self.world_size)) if ranks is None else sorted(set(ranks))
        if not chosen or not set(chosen) <= set(range(self.world_size)):
            raise LaunchError(f"ranks={list(ranks or ())}: expected some of 0 to {self.world_size - 1}.")
        return chosen

    @contextmanager
    def _work(self) -> Iterator[World]:
        """The world, for one piece of work at a time; started again if the reader's last resort was to kill it."""
        world = self._usable_world()
        if not self._busy.acquire(timeout=PATIENCE_S):
            raise LaunchError("the ranks are busy with another cell. Wait for it, or interrupt it.")
        try:
            world = self._usable_world()  # whoever was waited for may have ended it
            with stop_button(world.press_stop):
                yield world
        except RanksInterrupted as stopped:
            if not world.lost or self._world is not world:
                raise
            with stop_button(lambda: None):
                world.stop()
            self._world = World(self.asked)
            note = f"{world.lost}: {self.world_size} fresh ones run now, without the variables of the old."
            raise RanksInterrupted(stopped.failures, self.world_size, note) from None
        finally:
            self._busy.release()

    def _values(
        self, kind: str, payload: bytes, ranks: Sequence[int] | None, timeout_s: float | None, printer: Printer | None
    ) -> list[Any]:
        chosen = self._chosen(ranks)
        with self._work() as world:
            flight = world.send(kind, payload, chosen, timeout_s, printer)
        return [decode(flight.outcomes[rank]["value"]) for rank in chosen]
