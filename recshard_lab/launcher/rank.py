"""A rank's process: the main thread runs cells one by one, and a side thread receives messages meanwhile."""

from __future__ import annotations

import ast
import atexit
import builtins
import ctypes
import gc
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import dill
import threadpoolctl
import torch
import torch.distributed as dist
import torch.distributed.c10d_logger

from . import board, device_memory, groups
from .cell import (
    NOTHING,
    bundle,
    completions,
    describe,
    evaluate,
    failure_text,
    no_keyboard,
    redirect_display,
    run_source,
)
from .channel import Channel, Message
from .collectives import Line
from .engines.engine import end_children
from .payload import decode_apart, encode_apart, remember_sources
from .recorder import Recorder, users_line
from .seeds import seed_rank

__all__ = ["Rank", "die_with_parent", "run_rank"]

DEPTH = 200  # calls that a report may nest

# Files whose frames say nothing about the user's code.
_TORCH = os.path.dirname(torch.__file__)
_OURS = (
    os.path.dirname(__file__),
    ast.__file__,
    torch.distributed.c10d_logger.__file__,
    os.path.join(_TORCH, "_compile.py"),  # these two call the limit of device memory
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
)


def flush() -> None:
    """Flushes stdout and stderr. A cell may have replaced them by None or by any object."""
    for name in ("stdout", "stderr"):
        with suppress(BaseException):
            getattr(sys, name).flush()


def leave_fork(error: BaseException | None) -> NoReturn:
    """Ends a process that a cell forked and that returned from the cell. Only the rank itself answers.

    The output of such a process joins the rank's output. Its last expression is dropped. No exit handler runs in it.
    """
    status: Any = 0
    if isinstance(error, SystemExit):
        status = 0 if error.code is None else error.code
    elif error is not None:
        status = f"process {os.getpid()}, which a cell forked, ended with:\n{failure_text(error, _OURS)}".rstrip()
    flush()
    if not isinstance(status, int):
        os.write(2, f"{status}\n".encode(errors="backslashreplace"))
        status = 1
    os._exit(status & 255)


def leave_now() -> NoReturn:
    """Ends this rank and every process it started, also while the main thread is stuck."""
    end_children()
    os.killpg(0, signal.SIGKILL)
    os._exit(1)


class Guarded:
    """Wraps a signal handler. It may raise while a cell runs; at other times its traceback is printed."""

    def __init__(self, handler: Callable[[int, Any], Any], rank: Rank) -> None:
        self.handler, self.rank = handler, rank

    def __call__(self, number: int, frame: Any) -> Any:
        if self.rank.running is not None and not self.rank.rebuilding:
            return self.handler(number, frame)
        try:
            return self.handler(number, frame)
        except BaseException:
            os.write(2, traceback.format_exc().encode(errors="backslashreplace"))


class Rank:
    """One rank: its namespace, its groups, its connection to the kernel."""

    def __init__(self, spec: dict[str, Any], channel: Channel) -> None:
        self.spec, self.channel, self.pid = spec, channel, os.getpid()
        self.rank, self.world_size = int(spec["rank"]), int(spec["world_size"])
        self.work: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.running: int | None = None  # the cell that an interrupt may stop
        self.answered = -1  # the last cell that ended here
        self.asked_to_stop: int | None = None  # the cell that is to end, begun or not
        self.stopped_at: tuple[int, Line | None] | None = None  # where the last interrupt met the main thread
        self.shield = False  # an interrupt has to wait
        self.rebuilding = False  # the work that is answered is a rebuild: no signal handler may end it
        self.shown = threading.Event()
        self.recorder = Recorder()
        self.attached: int | None = None  # shared memory that goes with the next answer
        self.main_module = types.ModuleType("__main__")
        self.namespace = self.main_module.__dict__
        self.given: frozenset[str] = frozenset()  # the names that every cell finds

    def serve(self) -> int:
        threading.Thread(target=self.listen, name="recshard-control", daemon=True).start()
        os.register_at_fork(before=flush, after_in_child=partial(board.hold, None))
        signal.signal(signal.SIGINT, self.on_interrupt)
        self.answer(0, self.set_up)
        while True:
            message = self.work.get()
            if message.kind == "stop":
                atexit._run_exitfuncs()
                flush()
                end_children()
                return 0
            self.rebuilding = message.kind == "rebuild"
            self.answer(message.cell, partial(getattr(self, f"do_{message.kind}"), message))

    # -- the main thread ---------------------------------------------------------------------------

    def set_up(self) -> None:
        """Joins the default group and defines the names that every cell finds."""
        board.hold(self)
        builtins.input = no_keyboard
        torch.set_num_threads(self.spec["threads"])
        if self.spec["threads"] > 1:
            threadpoolctl.threadpool_limits(self.spec["threads"])  # the forkserver has loaded BLAS for one thread
        seed_rank(self.spec["seed"], self.rank)
        self.device = torch.device(self.spec["device"])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.spec["memory_gb"] is not None:
            device_memory.limit(self.spec["memory_gb"], self.device, self.rank)
        sys.modules["__main__"] = dill._dill._main_module = self.main_module
        self.namespace.update(
            rank=self.rank,
            world_size=self.world_size,
            local_rank=int(os.environ["LOCAL_RANK"]),
            device=self.device,
            torch=torch,
            dist=dist,
            display=self.display,
        )
        self.given = frozenset(self.namespace)
        groups.connect(self.spec["store"], self.rank, self.world_size, self.spec["backend"], self.device)

    def answer(self, cell: int, work: Callable[[], Any]) -> None:
        """Runs one cell or call and reports its result. No exception of it ends the rank."""
        started = time.perf_counter()
        outcome = self.attempt(cell, work)
        if "OutOfMemoryError" in outcome.get("failure", {}).get("traceback", ""):
            gc.collect()  # frames of the failed cell may be in cycles, which keep its tensors
        self.answered, self.asked_to_stop = cell, None
        outcome["seconds"] = time.perf_counter() - started
        try:
            sys.setrecursionlimit(max(sys.getrecursionlimit(), DEPTH))  # the cell may have lowered it
            board.rest()
            data = pickle.dumps({**outcome, **self.books()})
        except BaseException as error:  # the cell has changed objects that the report needs
            failure = {"failure": describe(error, _OURS), "seconds": outcome["seconds"]}
            data = pickle.dumps({"groups": {}, "group_count": 0, "windows": {}, "names": [], **failure})
        flush()
        fds = () if self.attached is None else (self.attached,)
        self.channel.send(Message("done", cell, data, fds))
        if self.attached is not None:
            os.close(self.attached)
            self.attached = None

    def attempt(self, cell: int, work: Callable[[], Any]) -> dict[str, Any]:
        """``{"value": ...}`` or ``{"failure": ...}``, in built-in types. Only the rank comes back from here."""
        try:
            try:
                self.running = cell
                self.stop_if_asked()
                value = work()
                if os.getpid() != self.pid:
                    leave_fork(None)
                return {"value": value}
            except BaseException as error:
                if os.getpid() != self.pid:
                    leave_fork(error)
                return {"failure": describe(error, _OURS)}  # an interrupt ends a __str__ that takes too long
            finally:
                self.guard_handlers()
                self.running = None
        except BaseException as error:
            with suppress(BaseException):
                self.guard_handlers()
            self.running = None
            error.__context__ = None  # whose description was interrupted, and would take as long again
            return {"failure": describe(error, _OURS)}

    def books(self) -> dict[str, Any]:
        """The state that the notebook stores about this rank: its groups, their collectives, its variables."""
        return {
            "groups": groups.group_names(),
            "group_count": groups.group_count(),
            "windows": self.recorder.windows(),
            "names": self.names(),
        }

    def names(self) -> list[str]:
        """Names of the variables that cells have created on this rank."""
        variables = self.namespace.copy().items()
        texts = [(str.__str__(name), type(value)) for name, value in variables if isinstance(name, str)]
        made = [(name, kind) for name, kind in texts if not name.startswith("_") and name not in self.given]
        return [name for name, kind in made if not issubclass(kind, types.ModuleType)]

    def do_run(self, message: Message) -> bytes:
        (fn, args, kwargs), sources, shared = decode_apart(message.payload, message.fds[0] if message.fds else None)
        remember_sources(sources)
        data, self.attached = encode_apart(fn(*args, **kwargs), shared)
        return data

    def do_exec(self, message: Message) -> dict[str, Any] | None:
        source, filename = pickle.loads(message.payload)
        if "IPython" in source or "matplotlib" in source:
            redirect_display(self.display)
        value = run_source(source, filename, self.namespace)
        return None if value is NOTHING else bundle(value)

    def do_push(self, message: Message) -> None:
        values, sources = decode_apart(message.payload, message.fds[0] if message.fds else None)
        remember_sources(sources)
        self.namespace.update(values)

    def do_pull(self, message: Message) -> bytes:
        return self.do_eval(message)

    def do_eval(self, message: Message) -> bytes:
        expression, shared = pickle.loads(message.payload)
        data, self.attached = encode_apart(evaluate(expression, self.namespace, self.names()), shared)
        return data

    def do_rebuild(self, message: Message) -> None:
        store, names, count = pickle.loads(message.payload)
        if names:
            groups.rebuild(store, names, count, self.device)
        else:
            groups.reconnect(store, self.rank, self.world_size, self.spec["backend"], self.device)

    def display(self, *values: Any, **_: Any) -> None:
        """Shows values in the notebook, marked with this rank. A process that the rank forked prints their text."""
        for value in values:
            shown = bundle(value)
            if os.getpid() != self.pid:
                print(shown["text/plain"])
                continue
            message = Message("display", self.running or 0, pickle.dumps(shown))
            flush()
            self.shown.clear()
            with self.shielded():
                self.channel.send(message)
                self.shown.wait()  # later output, which uses a pipe, must not overtake it

    # -- interrupts --------------------------------------------------------------------------------

    def on_interrupt(self, number: int, frame: Any) -> None:
        """Handles SIGINT: stops the cell that it was sent for, and no other cell."""
        if self.running is not None and not self.shield and self.asked_to_stop in (None, self.running):
            self.asked_to_stop = None
            raise KeyboardInterrupt from None

    def guard_handlers(self) -> None:
        """Wraps every Python signal handler, so that none raises between cells.

        Its exception would end the rank, or take the place of a message that was just received.
        """
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.on_interrupt and not isinstance(handler, Guarded):
                signal.signal(number, Guarded(handler, self))

    @contextmanager
    def shielded(self) -> Iterator[None]:
        """Delays an interrupt until the end. A partly sent message would break the channel."""
        self.shield = True
        try:
            yield
        finally:
            self.shield = False
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Raises a delayed KeyboardInterrupt."""
        if self.running is not None and self.asked_to_stop == self.running:
            self.asked_to_stop = None
            raise KeyboardInterrupt

    # -- the side thread ---------------------------------------------------------------------------

    def interrupt(self, cell: int) -> None:
        """Stops a cell that runs on this rank, or that is queued."""
        if cell <= self.answered:
            return
        self.asked_to_stop = cell
        if self.running == cell:
            self.stopped_at = (cell, users_line())
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)  # also ends a sleep or a read

    def listen(self) -> None:
        while True:
            try:
                message = self.channel.receive()
            except (EOFError, OSError):
                shutil.rmtree(self.spec.get("litter", ""), ignore_errors=True)
                leave_now()  # the notebook has ended
            try:
                self.take(message)
            except Exception:  # without descriptors or memory, for one: the next message may still be an interrupt
                os.write(2, traceback.format_exc().encode(errors="backslashreplace"))

    def take(self, message: Message) -> None:
        """Answers messages that do not need the main thread, and queues the others."""
        if message.kind == "interrupt":
            self.interrupt(message.cell)
        elif message.kind == "cables":
            self.reply(message, groups.cables())
        elif message.kind == "cut":
            if groups.waits_end_silently():
                self.interrupt(message.cell)
            self.reply(message, groups.cut(pickle.loads(message.payload)))
        elif message.kind == "shown":
            self.shown.set()
        elif message.kind == "complete":
            self.reply(message, completions(pickle.loads(message.payload), self.namespace.copy()))
        elif message.kind == "pulse":
            self.reply(message, (self.running, groups.issue_counts(), users_line()))
        elif message.kind == "position":
            self.tell_position(message)
        elif message.kind == "lines":
            # on a separate thread: torch may import for 1 s, and ending collectives must not wait
            threading.Thread(target=lambda: self.reply(message, self.recorder.lines()), daemon=True).start()
        elif message.kind == "memory":  # also on a separate thread: finding all modules takes 0.1 s
            threading.Thread(target=self.tell_memory, args=(message,), daemon=True).start()
        else:
            self.work.put(message)

    def reply(self, message: Message, value: Any) -> None:
        self.channel.send(Message(message.kind, message.cell, pickle.dumps(value)))

    def tell_memory(self, message: Message) -> None:
        """Sends this rank's memory or the error in words, and then sets the mark of the next peak if requested."""
        max_age_s, reset_peak = pickle.loads(message.payload)
        try:
            found: Any = replace(device_memory.measure(self.device, max_age_s=max_age_s), rank=self.rank)
            if reset_peak:
                device_memory.reset_peak(self.device)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        self.reply(message, found)

    def tell_position(self, message: Message) -> None:
        """Sends where this rank is, or where it was when its cell was interrupted."""
        cell, line = self.running, users_line()
        if self.stopped_at is not None and self.stopped_at[0] == message.cell:
            cell, line = self.stopped_at
        self.reply(message, self.recorder.position(cell, line))


def run_rank(spec: dict[str, Any], control: int, stdout: int, stderr: int) -> int:
    """Turns a new process into a rank and serves it. Returns the exit status."""
    os.setsid()  # a separate session: Jupyter interrupts the notebook's kernel, which forwards it
    null = os.open(os.devnull, os.O_RDONLY)
    for number, fd in enumerate((null, stdout, stderr)):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(spec["environment"])
    sys.path[:] = spec["path"]
    sys.argv[:] = [""]
    with suppress(OSError):  # removed meanwhile: stay where the forkserver is
        os.chdir(spec["folder"])
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.set_inheritable(control, False)  # descriptors that come over a socket are inheritable
    gc.enable()
    return Rank(spec, Channel(socket.socket(fileno=control))).serve()


def die_with_parent(parent: int) -> None:
    """Linux: SIGKILL when process `parent` ends. On other systems the end of the channel ends the rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended before
            os.kill(os.getpid(), signal.SIGKILL)
