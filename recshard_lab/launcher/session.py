"""What a notebook holds: ranks that stay, run cells and functions, and end without leaving anything."""

from __future__ import annotations

import math
import os
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

from ..interrupts import stop_button, uninterrupted
from .devices import torch_device
from .engines import Ending, RankProcess
from .errors import Failure, LaunchError, RankError, RanksInterrupted, ranks_text, resources_needed
from .flight import Flight
from .lines import Printer
from .payload import decode_apart, encode_apart, sources_of
from .shape import Shape
from .wires import exit_text
from .world import World

if TYPE_CHECKING:
    import torch

    from .device_memory import RankMemory

__all__ = ["CellResult", "RankStatus", "Ranks", "current", "launch", "rank_status", "start"]

MEMORY_S = 10.0  # for each rank to report its memory
PATIENCE_S = 2.0  # with what another thread does on the ranks: a widget trains in bursts between the reader's cells

P = ParamSpec("P")
T = TypeVar("T")


class Ranks:
    """Running ranks, as `launch` returns them. As a context manager they stop at its end.

    They belong to the process that launched them. In a fork of it (``os.fork``, ``multiprocessing``) every use raises
    LaunchError; the fork may launch its own ranks.
    """

    running: ClassVar[Ranks | None] = None  # in this process, one world at a time
    starting: ClassVar[threading.RLock] = threading.RLock()  # held while `running` changes

    def __init__(self, shape: Shape) -> None:
        self.asked = shape
        self._busy = threading.Lock()
        self._holders = 1  # `launch` calls that returned these ranks
        self._process = os.getpid()
        self._started: World | None = World(shape)

    @property
    def _world(self) -> World | None:
        if self._process != os.getpid():
            raise LaunchError(
                f"these ranks belong to process {self._process}, of which process {os.getpid()} is a fork. "
                f"Fix: launch other ranks here, recshard_lab.launch({self.world_size})."
            )
        return self._started

    @property
    def shape(self) -> Shape:
        """What runs. On a Ray cluster it may be on more nodes than requested."""
        return self._started.shape if self._started is not None else self.asked

    @property
    def world_size(self) -> int:
        """The number of ranks; never fewer than requested."""
        return self.asked.world_size

    @property
    def nodes(self) -> int:
        """The number of nodes: virtual ones, or machines of a Ray cluster."""
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
    def devices(self) -> list[torch.device]:
        """The device of each rank, as the rank names it: "cpu" or "cuda:K". With a MIG slice it is "cuda:0"."""
        return [torch_device(name) for name in self.shape.devices]

    @property
    def times_note(self) -> str:
        """What to print beside measured times; empty unless several ranks share a GPU."""
        return self.shape.times_note

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
        """Whether cells can run: the ranks are not stopped, none has died, and this process launched them."""
        return self._process == os.getpid() and self._world is not None and not self._world.why_not()

    def run(self, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """Returns ``fn(*args, **kwargs)`` of every rank, in a list.

        The globals that fn names are sent with it. Tensors arrive on the CPU, also those of a GPU.

        Raises:
            RankError: fn raised on a rank, or a rank died.
            LaunchError: the ranks cannot be used.
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
        """`run` with a choice of ranks, a time limit in seconds, and where output goes.

        timeout_s: then the ranks are interrupted, and killed `flight.KILL_S` later if they have not answered. The
        RankError names the ranks that were killed and the variables that are lost.
        """
        chosen = self._chosen(ranks)
        check_limit(timeout_s)
        world = self._usable_world()  # before the arguments are packed
        carried = ((fn, tuple(args), dict(kwargs or {})), sources_of(fn), world.shares_memory)
        return self._send("run", carried, chosen, timeout_s, printer)

    def exec(
        self,
        source: str,
        *,
        ranks: Sequence[int] | None = None,
        filename: str | None = None,
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[CellResult]:
        """Runs `source` in the namespace of each rank, which stays. Returns one CellResult per rank.

        The namespace begins with rank, world_size, local_rank, device, torch, dist and display. filename:
        what tracebacks call the cell. timeout_s: see `call`.
        """
        if not isinstance(source, str):
            raise TypeError(
                f"source={source!r} is not Python code in a string. Fix: Ranks.exec('x = rank'), or Ranks.run(fn) for "
                "functions."
            )
        chosen = self._chosen(ranks)
        check_limit(timeout_s)
        name = filename or f"<cell {self._usable_world().cell + 1}>"
        with self._work() as world:
            outcomes = world.send("exec", pickle.dumps((source, name)), chosen, timeout_s, printer).outcomes
        return [CellResult(r, outcomes[r]["value"] or {}, outcomes[r]["seconds"]) for r in chosen]

    def push(self, values: Mapping[str, Any], *, ranks: Sequence[int] | None = None) -> None:
        """Puts values by name into the namespaces of ranks."""
        self._send("push", (dict(values), sources_of(*values.values())), self._chosen(ranks))

    def pull(self, name: str, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """Fetches a variable by name from the namespaces of ranks. Returns one value per rank.

        Tensors arrive on the CPU, also those of a GPU: this process need not start CUDA.

        Raises:
            ValueError: `name` is an expression; `eval` evaluates it.
            RankError: a rank has no variable of that name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"Ranks.pull({name!r:.80}): a variable has a plain name. Fix: ranks.eval({name!r:.80})")
        return self._send("pull", name, self._chosen(ranks))

    def eval(self, expression: str, *, ranks: Sequence[int] | None = None) -> list[Any]:
        """Evaluates an expression in the namespaces of ranks. Returns one value per rank.

        Tensors arrive on the CPU, also those of a GPU.

        Raises:
            TypeError: `expression` is not a string.
            RankError: the expression raised on a rank.
        """
        if not isinstance(expression, str):
            raise TypeError(
                f"Ranks.eval({expression!r:.80}): an expression is a string. Fix: ranks.eval('x.sum()'), or "
                "ranks.run(fn) for functions."
            )
        return self._send("eval", expression, self._chosen(ranks))

    def complete(self, word: str, timeout_s: float = 0.25) -> list[str]:
        """The names on rank 0 that begin with `word`; none while the ranks are busy or gone."""
        world = self._world
        if world is None or world.why_not() or not self._busy.acquire(blocking=False):
            return []
        try:
            return world.ask([0], "complete", word, timeout_s).get(0) or []
        finally:
            self._busy.release()

    def calibrate(self, seconds: float = 50.0, *, progress: bool = True, seed: int = 0) -> Any:
        """Measures what steps of sharded tables cost on these ranks and fits the planner's figures to it.

        What comes back shows them, `save`s them as a device profile, and has the `topology` to plan with; see
        `recshard_lab.calibration`, which does the work: ranks themselves know nothing of tables.
        """
        with uninterrupted():
            above = import_module("recshard_lab.calibration")
        return above.calibrate(self, seconds, progress=progress, seed=seed)

    def status(self) -> list[RankStatus]:
        """Each rank's process, state and memory; empty once stopped."""
        world = self._world
        if world is None:
            return []
        wires, busy = world.wires, self._busy.locked()
        return [
            rank_status(rank, process, rank // self.local_world_size, busy, wires.dead, self.shape.devices[rank])
            for rank, process in enumerate(wires.processes)
        ]

    def memory(self, reset_peak: bool = False, *, max_age_s: float = 0.0) -> list[RankMemory]:
        """Each rank's device memory, split by use: a list, one `RankMemory` per rank. Also while a cell runs.

        Args:
            reset_peak: whether peaks count anew after this measurement.
            max_age_s: seconds for which a rank reuses its list of modules. Finding them takes about 0.1 s.

        Raises:
            LaunchError: the ranks have ended, or a rank did not answer within 10 s.
        """
        world = self._usable_world()
        everyone = range(self.world_size)
        found = world.ask(everyone, "memory", (max_age_s, bool(reset_peak)), MEMORY_S)
        if silent := [rank for rank in everyone if rank not in found]:
            why = world.why_not() or f"{ranks_text(silent)} did not answer within {MEMORY_S:g} s"
            raise LaunchError(f"Ranks.memory: {why}. Fix: wait for the cell to end, or interrupt it.")
        for rank, answer in found.items():
            if isinstance(answer, str):
                raise LaunchError(f"Ranks.memory: rank {rank} could not measure its memory: {answer}")
        from .device_memory import with_rest

        return with_rest(found[rank] for rank in everyone)

    @contextmanager
    def memory_snapshot(self, folder: str | os.PathLike[str]) -> Iterator[list[str]]:
        """Records every CUDA allocation inside the block, and writes one file per rank at its end.

        Drop a file on https://pytorch.org/memory_viz to see it. The list that the block gets holds the files' names
        after the block::

            with ranks.memory_snapshot("snapshots") as files:
                ranks.run(train_step)

        Raises:
            LaunchError: the ranks compute on the CPU.
        """
        from .device_memory import save_history, start_history

        if self.devices[0].type != "cuda":
            raise LaunchError(
                f"Ranks.memory_snapshot({os.fspath(folder)!r}): ranks on the CPU have no CUDA allocator to record. "
                "Fix: Ranks.memory(reset_peak=True) before the steps, and Ranks.memory() after them."
            )
        self.run(start_history)
        files: list[str] = []
        try:
            yield files
        finally:
            if self.usable:
                files += self.run(save_history, os.path.abspath(folder))

    def posted(self, name: str) -> list[Any]:
        """The last value that each rank posted under a name (`launcher.board.post`), or None."""
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
        """Ends every rank and all they started. Stopping twice does nothing more."""
        world = self._world
        with Ranks.starting:
            world, self._started = self._started, None
            if Ranks.running is self:
                Ranks.running = None
        if world is not None:
            with stop_button(lambda: None):  # it ends within a second or two
                world.stop(*[0.0] if self._busy.locked() else [])

    def restart(self) -> None:
        """Fresh ranks of the same shape and seed. The variables of the old ones are lost."""
        _ = self._world
        with Ranks.starting:
            if Ranks.running not in (None, self):
                raise LaunchError(f"other ranks are running ({Ranks.running!r}). Fix: stop them first, %recshard_stop.")
            self.stop()
            self._started = World(self.asked)
            Ranks.running = self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._holders -= 1
        if self._holders <= 0 and self._process == os.getpid():  # the end of a fork leaves the parent's ranks alone
            self.stop()

    def __repr__(self) -> str:
        if self._process != os.getpid():
            return f"<Ranks: {self.shape}, of process {self._process}>"
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
        if ranks is None:
            return list(range(self.world_size))
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise LaunchError(f"ranks={ranks!r} is not a list of ranks. Fix: ranks=[0].")
        listed = list(ranks)
        if not listed:
            raise LaunchError("ranks=[] names no rank. Fix: leave out ranks= to use all of them.")
        for rank in listed:
            if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.world_size:
                raise LaunchError(
                    f"rank {rank!r} in ranks={listed} does not exist: expected some of 0 to {self.world_size - 1}. "
                    f"Fix: leave out {rank!r}."
                )
        return sorted(set(listed))

    @contextmanager
    def _work(self) -> Iterator[World]:
        """The world, for one piece of work at a time; restarted if the reader's last stop has killed it."""
        world = self._usable_world()
        if not self._busy.acquire(timeout=PATIENCE_S):
            raise LaunchError("the ranks are busy with another cell. Fix: wait for it, or interrupt it.")
        try:
            world = self._usable_world()  # the other cell may have ended it
            with stop_button(world.press_stop):
                yield world
        except RanksInterrupted as stopped:
            if not world.lost or not self._replace(world):
                raise
            note = f"{world.lost}: {self.world_size} fresh ones run now, without the variables of the old."
            raise RanksInterrupted(stopped.failures, self.world_size, note) from None
        finally:
            self._busy.release()

    def _replace(self, lost: World) -> bool:
        """Fresh ranks instead of those of a world that is lost; False if somebody stopped or restarted it meanwhile."""
        with Ranks.starting:
            if self._started is not lost:
                return False
            with stop_button(lambda: None):
                lost.stop()
            self._started = World(self.asked)
            return True

    def _send(
        self,
        kind: str,
        value: Any,
        chosen: list[int],
        timeout_s: float | None = None,
        printer: Printer | None = None,
    ) -> list[Any]:
        """Sends a value. Returns the answers of the ranks; "push" has none."""
        with self._work() as world:
            if kind in ("pull", "eval"):
                data, fd = pickle.dumps((value, world.shares_memory)), None
            else:
                data, fd = encode_apart(value, world.shares_memory)
            try:
                with resources_needed(f"Ranks.{kind}"):
                    flight = world.send(kind, data, chosen, timeout_s, printer, () if fd is None else (fd,))
            finally:
                if fd is not None:
                    os.close(fd)
            return [] if kind == "push" else self._opened(world, flight, chosen)

    def _opened(self, world: World, flight: Flight, chosen: list[int]) -> list[Any]:
        values = []
        for rank in chosen:
            try:
                values.append(
                    decode_apart(flight.outcomes[rank]["value"], world.wires.attached.pop((rank, flight.cell), None))
                )
            except pickle.UnpicklingError as error:
                cause = error.__cause__ or error
                text = "".join(traceback.format_exception(cause)) + f"\n{error}"
                raise RankError(
                    [Failure(rank, "raised", "UnpicklingError", str(error), text)],
                    self.world_size,
                    "The result arrived, and the notebook could not open it. The ranks are as they were.",
                ) from cause
        return values


def check_limit(timeout_s: Any) -> None:
    """Raises ValueError where `timeout_s` is neither None nor a finite number of seconds above 0."""
    if timeout_s is None:
        return
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s < math.inf:
        raise ValueError(
            f"timeout_s={timeout_s!r} is not a time limit: expected seconds above 0. Fix: timeout_s=None for no limit."
        )


def _in_fork() -> None:
    Ranks.running = None
    Ranks.starting = threading.RLock()  # a thread that the child does not have may hold it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_fork)


@dataclass(frozen=True)
class CellResult:
    """The result of a cell on one rank. data: MIME type -> content of the last expression, empty if it has none."""

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
    device: str = "cpu"  # as in `Shape.devices`


def rank_status(
    rank: int, process: RankProcess, node: int, busy: bool, dead: Mapping[int, Ending], device: str
) -> RankStatus:
    """The state of one rank. dead: rank -> how its process ended."""
    pid = process.pid
    if rank in dead:
        return RankStatus(rank, pid, exit_text(dead[rank])[1], node, 0, device)
    memory = process.memory_bytes()
    state = "ended" if not memory else "running" if busy else "idle"
    return RankStatus(rank, pid, state, node, memory, device)


def current() -> Ranks | None:
    """The ranks that are running, if any."""
    return Ranks.running


def launch(
    n: int,
    nodes: int = 1,
    backend: str | None = None,
    *,
    share_gpu: bool = False,
    devices: str | Sequence[int | str] | None = None,
    memory_gb: float | None = None,
    seed: int | None = None,
    threads: int = 1,
    start_method: str | None = None,
    inter_node_latency_ms: float | None = None,
    inter_node_gbps: float | None = None,
    engine: str | None = None,
    address: str | None = None,
) -> Ranks:
    """Starts `n` ranks on this machine and returns them after their first all_reduce.

    With ``backend=None`` the ranks use NCCL if each can have its own GPU, otherwise Gloo on the CPU. If GPUs stay
    unused, a RuntimeWarning gives the reason and the fix. `devices.choose` lists all cases.

    Args:
        n: the number of ranks.
        nodes: virtual nodes, n / nodes ranks on each.
        backend: ``gloo``, ``nccl`` or None.
        share_gpu: lets several ranks compute on one GPU, over Gloo. Their bytes and results are real, their times are
            not: `Ranks.times_note` is shown beside every measured time.
            ``RECSHARD_SHARE_GPU=1`` in the environment makes it the default where backend and devices are None.
        devices: the GPUs to use: indices into the visible ones (``[0, 1]``) or UUIDs (``["MIG-..."]``). ``"cpu"``
            leaves all GPUs unused. Default: the visible GPUs (``CUDA_VISIBLE_DEVICES``).
        memory_gb: device memory that each rank may use, in units of 1e9 bytes. Above it a rank raises
            ``torch.OutOfMemoryError``. None: no limit.
        seed: makes the random numbers of torch, numpy and `random` repeatable: each rank draws other numbers than the
            other ranks, and the same at each launch and `Ranks.restart`. None: other numbers at each launch.
        threads: threads per rank of torch, OpenMP, MKL and numpy's BLAS.
        start_method: ``fork`` (from a process that has imported torch: 0.1 s), ``spawn`` (a clean interpreter per
            rank: seconds) or None (fork on Linux, spawn on macOS).
        inter_node_latency_ms: latency of an emulated link between the virtual nodes, in ms.
        inter_node_gbps: bandwidth of that link per rank and direction, in Gbit/s. Embedding exchanges between nodes
            take at least as long as over such a link.
        engine: ``local`` (same as None) or ``ray``: ranks on a Ray cluster (``pip install recshard-lab[ray]``). The
            differences are listed in `engines.ray_cluster`.
        address: address of the Ray cluster. ``auto``: the running one. None: the one that this process is connected
            to, otherwise a new one on this machine.

    Returns:
        New ranks, or the running ranks if they have the same shape.

    Raises:
        LaunchError: the shape is not possible, or other ranks are running. The message names a fix.

    Example::

        with recshard_lab.launch(4) as ranks:
            ranks.run(torch.distributed.get_rank)   # [0, 1, 2, 3]
    """
    shape = Shape.checked(
        n,
        nodes,
        backend,
        threads,
        start_method,
        inter_node_latency_ms=inter_node_latency_ms,
        inter_node_gbps=inter_node_gbps,
        engine=engine,
        address=address,
        share_gpu=share_gpu,
        devices=devices,
        memory_gb=memory_gb,
        seed=seed,
    )
    ranks, fresh = start(shape)
    if fresh and shape.unused_gpus:
        warnings.warn(shape.unused_gpus, RuntimeWarning, stacklevel=2)
    return ranks


def start(shape: Shape) -> tuple[Ranks, bool]:
    """Ranks of a shape, and whether they are new: running ranks of the same shape are returned as they are."""
    with Ranks.starting:  # one launch at a time, from any thread
        running = Ranks.running
        if running is not None and running.usable:
            if running.asked == shape:
                running._holders += 1
                return running, False
            raise LaunchError(
                f"requested {shape}, but {running.shape} are running. "
                "Fix: stop them first, %recshard_stop or recshard_lab.launcher.current().stop()."
            )
        if running is not None:
            running.stop()
        Ranks.running = Ranks(shape)
        return Ranks.running, True
