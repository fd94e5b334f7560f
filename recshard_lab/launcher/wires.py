"""The notebook's side of the ranks: starts them, sends to them, and receives on one thread.

Sending never blocks: messages to a rank that does not read stay in its `Outbox`. Output of ranks is buffered in
bounded memory until a cell reads it. While a cell runs, ranks that print faster than it reads are blocked. Between
cells the oldest output is dropped and counted.
"""

from __future__ import annotations

import codecs
import os
import pickle
import queue
import selectors
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from ..interrupts import stop_button, uninterrupted
from ..sockets import loopback_interface
from .channel import Channel, Message, Outbox, forget_in_forks, pipe, socket_pair
from .collectives import RING
from .devices import DEVICE_VARIABLE, rank_variables
from .engines import Ending, Engine, RankProcess
from .engines.engine import THREAD_VARIABLES
from .errors import LaunchError
from .shape import Shape

__all__ = ["Event", "Wires"]

LAST_LINES = 2000  # characters of a rank's output kept, to be shown if it dies
AHEAD_CHARS = 1 << 18  # of output that a running cell has not taken yet: ranks wait, so that a stop ends it soon
IDLE_CHARS = 1 << 18  # of output kept between cells
PIPE_BYTES = 1 << 16  # that a pipe holds, on Linux and macOS
FULL_READS = 2  # of a pipe at a time: all that was in it, and little of what a rank prints meanwhile
LEFT_S = 10.0  # for a rank that was killed to end


class Event(NamedTuple):
    """kind: ``stdout``, ``stderr`` (data: text), ``died`` (data: its Ending), or a Message's kind.

    ``dropped``: output between cells that is lost; data: its lines and characters.
    """

    rank: int
    kind: str
    cell: int
    data: Any


_OUTPUT = ("stdout", "stderr", "display")


class Inbox:
    """Events of all ranks in order. Buffered output is bounded.

    >>> inbox = Inbox()
    >>> inbox.put(Event(0, "stdout", 0, "lost\\n" + "x" * IDLE_CHARS))
    >>> inbox.take(0).data, len(inbox.take(0).data) == IDLE_CHARS
    ((1, 5), True)
    """

    def __init__(self) -> None:
        self.reading = False  # a cell takes events
        self._events: deque[Event] = deque()
        self._arrived = threading.Condition()
        self._chars = 0
        self._dropped: dict[int, tuple[int, int]] = {}  # rank -> lines, characters

    @property
    def full(self) -> bool:
        """Whether ranks that print must wait until the cell has read more."""
        return self.reading and self._chars > AHEAD_CHARS

    def put(self, event: Event) -> None:
        """Adds an event. Between cells it drops the oldest output above the limit."""
        with self._arrived:
            self._events.append(event)
            self._chars += _size(event)
            while self._chars > IDLE_CHARS and not self.reading:
                self._drop_oldest()
            self._arrived.notify()

    def take(self, timeout_s: float) -> Event:
        """The oldest event. Raises queue.Empty when none arrives in time."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._events or self._dropped, timeout_s):
                raise queue.Empty
            if self._dropped:
                rank = min(self._dropped)
                return Event(rank, "dropped", 0, self._dropped.pop(rank))
            event = self._events.popleft()
            self._chars -= _size(event)
            return event

    def _drop_oldest(self) -> None:
        index = next(i for i, event in enumerate(self._events) if event.kind in _OUTPUT)
        event = self._events[index]
        gone = kept = ""
        if event.kind == "display":
            lines, chars = 1, len(event.data)
        else:
            excess = self._chars - IDLE_CHARS
            gone, kept = event.data[:excess], event.data[excess:]
            lines, chars = gone.count("\n"), len(gone)
        if kept:
            self._events[index] = event._replace(data=kept)
        else:
            del self._events[index]
        self._chars -= chars
        before = self._dropped.get(event.rank, (0, 0))
        self._dropped[event.rank] = before[0] + lines, before[1] + chars


def _size(event: Event) -> int:
    return len(event.data) if event.kind in _OUTPUT else 0


class Wires:
    """One world's processes, control channels and output pipes."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.shape = engine, engine.shape
        shape = self.shape
        self.inbox = Inbox()
        self.replies: queue.SimpleQueue[Event] = queue.SimpleQueue()  # to questions, whose cells are below 0
        self.pressed: deque[int] = deque()  # the cells that the user has stopped
        self.last_output = [deque[str](maxlen=64) for _ in range(shape.world_size)]
        self.dead: dict[int, Ending] = {}
        self.buried: dict[int, Ending] = {}  # the same, once all that the rank printed has arrived
        self.processes: list[RankProcess] = []
        self.pids: list[int] = []
        self.attached: dict[tuple[int, int], int] = {}  # (rank, cell) -> shared memory that came with the answer
        self.board: list[dict[str, bytes]] = [{} for _ in range(shape.world_size)]  # what ranks put up (`board.post`)
        self._channels: list[Channel] = []
        self._outboxes: list[Outbox] = []
        self._pipes: dict[tuple[int, str], int] = {}
        self._lent: list[int] = []  # the rank's ends, until they are handed over
        self._paused: set[tuple[int, str]] = set()  # pipes that are not read while the inbox is full
        self._unshown: list[int] = []  # ranks that wait until their display has room in the inbox
        self._decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        self._gone = [threading.Event() for _ in range(shape.world_size)]
        self._tasks: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()  # of the listening thread
        self._selector = selectors.PollSelector()  # has no descriptor: forks share an epoll and lose a kqueue
        self._wakeup, self._wake = socket_pair()
        self._thread = threading.Thread(target=self._listen, name="recshard-ranks", daemon=True)
        forget_in_forks(self)
        try:
            for end in (self._wakeup, self._wake):
                end.setblocking(False)
            self._selector.register(self._wakeup, selectors.EVENT_READ, None)
            store = engine.store(0)
            with uninterrupted():  # half a request would end the forkserver
                for rank in range(shape.world_size):
                    self.processes.append(self._start(rank, store))
                self._thread.start()
            self.pids += [process.pid for process in self.processes]  # waits for them
        except BaseException:
            with stop_button(lambda: None):
                self._give_up()
            raise

    def _start(self, rank: int, store: str) -> RankProcess:
        spec = rank_spec(self.shape, rank, store)
        try:
            ours, theirs = socket_pair()
            self._channels.append(Channel(ours))
            self._outboxes.append(Outbox(ours))
            self._lent.append(theirs.detach())
            self._selector.register(ours, selectors.EVENT_READ, (rank, "control"))
            for stream in ("stdout", "stderr"):
                read, write = pipe()
                self._lent.append(write)
                self._pipes[rank, stream] = read
                self._decoders[rank, stream] = codecs.getincrementaldecoder("utf-8")(errors="replace")
                self._selector.register(read, selectors.EVENT_READ, (rank, stream))
            return self.engine.start(rank, spec, tuple(self._lent), partial(self._on_exit, rank))
        finally:
            while self._lent:
                os.close(self._lent.pop())

    def send(self, rank: int, kind: str, cell: int = 0, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Sends without blocking. A message to a rank that has ended is dropped; its end is an event."""
        if not self._outboxes[rank].put(Message(kind, cell, payload, fds)):
            self._ask("write", rank)

    def take(self, timeout_s: float) -> Event:
        """The next event of a cell. Raises queue.Empty when none arrives in time."""
        event = self.inbox.take(timeout_s)
        if (self._paused or self._unshown) and not self.inbox.full:
            self._ask("resume")
        return event

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Marks that a cell reads events, so that no output is dropped."""
        self.inbox.reading = True
        try:
            yield
        finally:
            self.inbox.reading = False
            self._ask("resume")

    def alive(self) -> list[int]:
        """The ranks whose process has not ended."""
        return [rank for rank in range(self.shape.world_size) if rank not in self.dead]

    def kill(self, rank: int) -> None:
        """Kills a rank and what it started."""
        if rank not in self.dead:
            self.processes[rank].kill(signal.SIGKILL)

    def stop(self, patience_s: float) -> None:
        """Requests every rank to exit, kills the remaining ones after `patience_s`, and closes everything."""
        for rank in self.alive():
            self.send(rank, "stop")
        end = time.monotonic() + patience_s
        for rank, gone in enumerate(self._gone):
            if not gone.wait(max(0.0, end - time.monotonic())):
                self.kill(rank)
        self._wait_until_gone()
        self._ask("end")
        self._thread.join(LEFT_S)
        self.close()

    def close(self) -> None:
        """Closes every descriptor. Ranks that still run then exit."""
        for channel, outbox in zip(self._channels, self._outboxes, strict=True):
            outbox.clear()
            channel.close()
        for fd in (*self._pipes.values(), *self._lent):
            os.close(fd)
        self._pipes.clear()
        self._lent.clear()
        self.drop_attached()
        self._wakeup.close()
        self._wake.close()

    def forget(self) -> None:
        """In a forked child: closes its copies of the descriptors."""
        for outbox in self._outboxes:
            outbox.forget_lock()
        with suppress(OSError):  # the parent was just closing it
            self.close()

    def drop_attached(self) -> None:
        """Closes shared memory of answers that are not needed any more."""
        while self.attached:
            os.close(self.attached.popitem()[1])

    def _give_up(self) -> None:
        """After a failed start: ends every process and closes every descriptor."""
        for process in self.processes:
            with suppress(LaunchError):  # it never had a process
                process.kill(signal.SIGKILL)
        if self._thread.ident is not None:
            self._ask("end")
            self._thread.join(LEFT_S)
        self.close()
        self._wait_until_gone()

    def _wait_until_gone(self) -> None:
        end = time.monotonic() + LEFT_S
        for gone in self._gone[: len(self.processes)]:
            gone.wait(max(0.0, end - time.monotonic()))

    # -- the listening thread ----------------------------------------------------------------------

    def _ask(self, task: str, rank: int = -1) -> None:
        """Wakes the listening thread."""
        self._tasks.put((task, rank))
        with suppress(OSError):  # closed; or full, and then it wakes anyway
            self._wake.send(b"x")

    def _on_exit(self, rank: int, ending: Ending) -> None:
        self.dead.setdefault(rank, ending)
        self._gone[rank].set()
        self._ask("bury", rank)  # after the rank's last output

    def _listen(self) -> None:
        try:
            while self._serve():
                pass
        except BaseException:
            self._fail(
                f"was lost, because the notebook's thread that listens to ranks failed:\n{traceback.format_exc()}"
            )

    def _fail(self, reason: str) -> None:
        """Kills the ranks and reports `reason` as their end. Nothing is received afterwards."""
        for rank in self.alive():
            self.dead[rank] = reason
            with suppress(LaunchError):
                self.processes[rank].kill(signal.SIGKILL)
            self._bury(rank)

    def _serve(self) -> bool:
        """Handles what has arrived. Returns False at the end."""
        for key, ready in self._selector.select():
            if key.data is None:
                with suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                while not self._tasks.empty():
                    task, rank = self._tasks.get()
                    if task == "end":
                        return False
                    self._do(task, rank)
                continue
            rank, stream = key.data
            if stream != "control":
                self._drain(rank, stream)
                continue
            if ready & selectors.EVENT_WRITE and self._outboxes[rank].write():
                self._selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
            if ready & selectors.EVENT_READ:
                self._receive(rank)
        return True

    def _do(self, task: str, rank: int) -> None:
        if task == "bury":
            self._drain(rank, "stdout")
            self._drain(rank, "stderr")
            self._bury(rank)
        elif task == "write":
            sock = self._channels[rank].sock
            if sock in self._selector.get_map():
                self._selector.modify(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, (rank, "control"))
        elif task == "resume":
            self._let_go()

    def _bury(self, rank: int) -> None:
        self.buried[rank] = self.dead[rank]
        self.inbox.put(Event(rank, "died", 0, self.dead[rank]))

    def _let_go(self) -> None:
        """Resumes ranks that waited for room in the inbox."""
        while self._unshown:
            self.send(self._unshown.pop(), "shown")
        while self._paused:
            paused = self._paused.pop()
            self._selector.register(self._pipes[paused], selectors.EVENT_READ, paused)

    def _receive(self, rank: int) -> None:
        try:
            messages = self._channels[rank].receive_some()
        except (EOFError, ConnectionError):
            self._selector.unregister(self._channels[rank].sock)
            return
        for message in messages:
            if message.kind == "post":
                name, value = opened(message.payload)
                self.board[rank][name] = value
                continue
            if message.kind in ("done", "display"):  # what was printed before comes before
                self._drain(rank, "stdout")
                self._drain(rank, "stderr")
            if message.fds:
                self.attached[rank, message.cell] = message.fds[0]
            event = Event(rank, message.kind, message.cell, message.payload)
            if message.cell < 0:
                self.replies.put(event)
            else:
                self.inbox.put(event)
            if message.kind == "display":
                self._unshown.append(rank)
        if not self.inbox.full:
            self._let_go()

    def _drain(self, rank: int, stream: str) -> None:
        """Reads what the rank has printed, or leaves it in the pipe while the inbox is full."""
        fd = self._pipes[rank, stream]
        parts = []
        while True:
            try:
                data = os.read(fd, PIPE_BYTES)
            except BlockingIOError:
                break
            if not data:
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
                break
            parts.append(data)
            if len(parts) == FULL_READS:  # a rank that floods must delay neither the others nor a stop
                break
        if parts:
            text = self._decoders[rank, stream].decode(b"".join(parts))
            self.last_output[rank].append(text[-LAST_LINES:])
            self.inbox.put(Event(rank, stream, 0, text))
        if self.inbox.full and fd in self._selector.get_map():
            self._selector.unregister(fd)
            self._paused.add((rank, stream))


def rank_spec(shape: Shape, rank: int, store: str) -> dict[str, Any]:
    """What a new process needs to become this rank: the notebook's environment and torchrun's variables."""
    local = shape.local_world_size
    ring = os.environ.get("TORCH_FR_BUFFER_SIZE", RING)
    if not ring.isdecimal():
        raise LaunchError(
            f"the environment variable TORCH_FR_BUFFER_SIZE={ring!r} is not a whole number: torch would hang in the "
            "first collective. Fix: os.environ.pop('TORCH_FR_BUFFER_SIZE')."
        )
    variables = {
        "TORCH_FR_BUFFER_SIZE": ring,
        "RANK": str(rank),
        "WORLD_SIZE": str(shape.world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "NODE_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(shape.nodes),
        **dict.fromkeys(THREAD_VARIABLES, str(shape.threads)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": loopback_interface(),
        "NCCL_SOCKET_IFNAME": loopback_interface(),
        **rank_variables(shape.devices, rank),
        **shape.variables(),
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RECSHARD_INTER_NODE_")}
    return {
        "rank": rank,
        "world_size": shape.world_size,
        "backend": shape.backend,
        "threads": shape.threads,
        "device": variables[DEVICE_VARIABLE],
        "memory_gb": shape.memory_gb,
        "seed": shape.seed,
        "store": store,
        "environment": {**inherited, **variables},
        "variables": variables,
        "path": list(sys.path),
        "folder": os.getcwd(),
    }


def exit_text(ending: Ending) -> tuple[str, str]:
    """How a process ended, as (short name, sentence).

    >>> exit_text(-9), exit_text(3), exit_text(-40)[0]
    (('SIGKILL', 'was killed by SIGKILL'), ('exit', 'exited with code 3'), 'SIGRTMIN+6')
    """
    if isinstance(ending, str):
        return "gone", ending
    if ending < 0:
        name = _signal_name(-ending)
        return name, f"was killed by {name}"
    return "exit", f"exited with code {ending}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python has names for the first and the last of the real-time signals only
        first = getattr(signal, "SIGRTMIN", None)
        return f"signal {number}" if first is None else f"SIGRTMIN{number - first:+d}"


def opened(data: bytes) -> Any:
    """A plain payload, opened."""
    return pickle.loads(data)
