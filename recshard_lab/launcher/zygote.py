"""The process that ranks are forked from: torch imported once, one thread, one connection, no listener.

It serves fork requests that arrive on an inherited socket pair (the rank's own pipes travel along as file
descriptors), imports what ranks are likely to need while nobody is waiting, reaps and reports its children,
and when the notebook's kernel is gone, however that went, kills what is left and removes its folder.
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
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .channel import Channel, Message
from .engines.engine import kill_group
from .worker import die_with_parent, run_rank

__all__ = ["main"]

IDLE_S = 0.3  # without a request before imports go on: ranks that are just starting come first
FDS_A_RANK = 3  # its control socket, its stdout, its stderr


class Zygote:
    """Serves one kernel until that kernel's end of `sock` closes."""

    def __init__(self, sock: socket.socket, later: Sequence[str]) -> None:
        self.channel = Channel(sock)
        self.later = list(later)
        self.children: set[int] = set()
        self.folder = tempfile.mkdtemp(prefix="recshard-")  # 0700
        self.selector = selectors.DefaultSelector()
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
        """One module of the list; what cannot be imported here a rank imports, or misses, itself."""
        name = self.later.pop(0)
        try:
            importlib.import_module(name)
        except Exception:
            sys.modules.pop(name, None)
        gc.freeze()  # pages with imported objects stay shared: a collection in a rank does not touch them
        if not self.later:
            self.channel.send(Message("warm"))

    def request(self) -> bool:
        """Answers one request; False when the kernel is gone."""
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
            if pid in self.children:  # not reaped yet, so the number is still that process
                kill_group(pid, number)
        return True

    def fork(self, message: Message, fds: list[int]) -> None:
        spec = pickle.loads(message.payload)
        pid = os.fork()
        if pid == 0:
            self.become_rank(spec, fds)
        for fd in fds:
            os.close(fd)
        self.children.add(pid)
        self.channel.send(Message("forked", message.cell, pickle.dumps(pid)))

    def become_rank(self, spec: dict[str, Any], fds: list[int]) -> NoReturn:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self.selector, self.wakeup, self.wake, self.channel):
                end.close()
            os.dup2(fds[2], 2)
            die_with_parent()
            status = run_rank(spec, *fds)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)  # never back into the zygote's stack

    def reap(self) -> None:
        while self.children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            kill_group(pid, signal.SIGKILL)  # what the rank itself had started
            self.children.discard(pid)
            self.channel.send(Message("exited", 0, pickle.dumps((pid, status))))

    def close(self) -> None:
        for pid in self.children:
            kill_group(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


def main(fd: int, later: Sequence[str]) -> None:
    """Runs a zygote on an inherited socket; returns when the kernel is gone."""
    zygote = Zygote(socket.socket(fileno=fd), later)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)  # from here on trouble is told over the channel; ranks bring their own stderr
    os.close(null)
    try:
        with suppress(OSError):  # the kernel went away while it was being told something
            zygote.serve()
    finally:
        zygote.close()
