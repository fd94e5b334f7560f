"""The process that ranks are forked from: torch imported once, one thread, one connection, no listener.

It serves fork requests that arrive on an inherited socket pair (the rank's pipes travel along as file descriptors).
Between requests it imports what ranks are likely to need. It reports the end of each rank. When the notebook's kernel
ends, it kills what is left and removes its folder.

On Linux it adopts what ranks start and leave, daemons in separate sessions included, and kills it when a rank ends.
Three kinds of process escape: those handed to another supervisor (systemd, cron, docker), those of another user,
and, if this process is killed with SIGKILL, those in separate sessions.

A fork is safe only while this process has one thread and CUDA is not initialised. Both are checked after each import.
If an import breaks this, no rank is forked any more, and the notebook starts ranks as clean interpreters.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from ..channel import Channel, Message
from ..rank import die_with_parent, run_rank
from .engine import adopt_orphans, end_children, has_ended, kill_group

__all__ = ["main"]

IDLE_S = 0.3  # without a request before the next import: ranks that are starting come first
FDS_A_RANK = 3  # control socket, stdout, stderr


class Server:
    """Serves one kernel until that kernel's end of `sock` closes."""

    def __init__(self, sock: socket.socket, later: Sequence[str]) -> None:
        self.channel = Channel(sock)
        self.later = list(later)
        self.ranks: set[int] = set()
        self.unsafe = ""  # why nothing may be forked
        self.folder = tempfile.mkdtemp(prefix="recshard-")  # 0700
        self.selector = selectors.PollSelector()  # has no descriptor: forks share an epoll and lose a kqueue
        self.wakeup, wake = socket.socketpair()
        for end in (self.wakeup, wake):
            end.setblocking(False)
        self.wake = wake
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only so that the wakeup socket is written
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.selector.register(sock, selectors.EVENT_READ)
        self.selector.register(self.wakeup, selectors.EVENT_READ)

    def serve(self) -> None:
        adopt_orphans()
        self.check("recshard_lab.launcher")
        self.channel.send(Message("hello", 0, pickle.dumps(self.folder)))
        gc.freeze()
        busy = True
        while True:
            ready = self.selector.select((IDLE_S if busy else 0) if self.later else None)
            busy = bool(ready)
            for key, _ in ready:
                if key.fileobj is self.wakeup:
                    self.wakeup.recv(4096)
                    self.reap()
                elif not self.request():
                    return
            if self.later and not busy:
                self.import_one()

    def import_one(self) -> None:
        """Imports one module of the list. If it fails, ranks that need the module import it and raise."""
        name = self.later.pop(0)
        torch = sys.modules.get("torch")
        try:
            # fbgemm's CUDA build starts a thread when it is imported, so each rank imports it
            if name != "fbgemm_gpu" or torch is None or torch.version.cuda is None:
                importlib.import_module(name)
        except Exception:
            sys.modules.pop(name, None)
        self.check(name)
        gc.freeze()  # pages with imported objects stay shared: a collection in a rank does not touch them
        if not self.later:
            self.channel.send(Message("warm"))

    def check(self, module: str) -> None:
        """After an import: if forks are now unsafe, reports it and ends the imports."""
        why = why_unsafe()
        if why:
            self.unsafe, self.later = f"importing {module!r} {why}", []
            self.channel.send(Message("unsafe", 0, pickle.dumps(self.unsafe)))

    def request(self) -> bool:
        """Answers one request. Returns False if the kernel has ended."""
        try:
            tag, fds, _, _ = socket.recv_fds(self.channel.sock, 1, FDS_A_RANK)
            if not tag:
                return False
            message = self.channel.receive_exactly()
        except (EOFError, OSError):
            return False
        if message.kind == "fork":
            self.fork(message, fds)
        elif message.kind == "kill":
            pid, number = pickle.loads(message.payload)
            if pid in self.ranks:  # not reaped yet, so the number is still that process
                kill_group(pid, number)
        return True

    def fork(self, message: Message, fds: list[int]) -> None:
        spec, pid, why = pickle.loads(message.payload), 0, self.unsafe
        if len(fds) != FDS_A_RANK:
            why = "its descriptors did not arrive: the forkserver has no more (ulimit -n)"
        if not why:
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError as error:  # the limit on processes, or memory
                why = f"os.fork() failed: {error}"
            else:
                if pid == 0:
                    self.become_rank(spec, fds, parent)
                self.ranks.add(pid)
        for fd in fds:
            os.close(fd)
        self.channel.send(Message("failed" if why else "forked", message.cell, pickle.dumps(why or pid)))

    def become_rank(self, spec: dict[str, Any], fds: list[int], parent: int) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self.wakeup, self.wake):
                end.close()
            os.dup2(fds[2], 2)
            die_with_parent(parent)
            status = run_rank(spec, *fds)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)  # never back into the forkserver's stack

    def reap(self) -> None:
        """Reports the ranks that have ended, after it has killed what they started."""
        while (pid := ended_child(self.ranks)) is not None:
            rank = pid in self.ranks
            if rank:
                kill_group(pid, signal.SIGKILL)
                end_children(kept=self.ranks, elsewhere=True)  # imports may start some in our session
                self.ranks.discard(pid)
            _, status = os.waitpid(pid, 0)
            if rank:
                self.channel.send(Message("exited", 0, pickle.dumps((pid, status))))

    def close(self) -> None:
        """Ends every process that was started from here, and removes the folder."""
        for pid in self.ranks:
            kill_group(pid, signal.SIGKILL)
        end_children()
        shutil.rmtree(self.folder, ignore_errors=True)


def why_unsafe() -> str:
    """Why a fork of this process is unsafe, to follow "importing 'module' ". Empty if it is safe."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "initialised CUDA, which does not work in a forked process"
    threads = psutil.Process().num_threads()  # with those that Python does not know
    return f"left {threads} threads running, and a fork copies only one" if threads > 1 else ""


def ended_child(known: Collection[int]) -> int | None:
    """A child that has ended and is not reaped. On a system without waitid, one of `known`."""
    if hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return None if ended is None else ended.si_pid
        return None
    return next((pid for pid in known if has_ended(pid)), None)


def main(fd: int, later: Sequence[str]) -> None:
    """Runs a forkserver on an inherited socket. Returns when the kernel has ended."""
    server = Server(socket.socket(fileno=fd), later)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)  # from here on errors go over the channel; ranks have a separate stderr
    os.close(null)
    try:
        server.serve()
    except BaseException:
        with suppress(OSError):  # the kernel has ended
            server.channel.send(Message("broken", 0, pickle.dumps(traceback.format_exc())))
    finally:
        server.close()
