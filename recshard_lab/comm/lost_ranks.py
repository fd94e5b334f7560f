"""Waits of the host for other ranks that end with an error that names a rank, if another rank does not send.

A wait looks at the store every half second. A wait that is shorter costs nothing.

==================================  ====================================================================
another rank ended                  its connections close. If it ended with an exception, it left the text in
                                    the store. Otherwise the ranks that answer are compared with all ranks
two ranks wait for each other       each leaves in the store what it waits for, and the last message that it
                                    has sent over each group. So both see that neither will send: code on one
                                    of them has skipped a part of the step. Their connections are closed
another rank's host is silent       `sockets.watch_hosts` closes the connections to that host after 20 s
==================================  ====================================================================
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from recshard_lab.comm.env import ShardingEnv
from recshard_lab.comm.errors import RankLost, note_sent, sent_numbers, store
from recshard_lab.comm.wire import Wire
from recshard_lab.sockets import SILENT_S, hosts_in, silent_hosts, tcp_sockets

TICK_S = 0.5
ANSWER_S = 0.6  # for the text of a rank that ended, and for the answers of other ranks
_TICK, _DRAIN = timedelta(seconds=TICK_S), timedelta(seconds=1)
_FIX = "Fix: raise errors on all ranks or on none, and start the ranks again"
Address = tuple[str, int]


@dataclass(frozen=True)
class Waiting:
    """What a rank waits for, as the others see it.

    Attributes:
        group: name of the process group.
        number: of the message in the group.
        label: of the message.
        sent: group -> number of the last message that the waiting thread has sent over it.
        links: (this end, the other end) of this process's TCP connections.
    """

    group: str
    number: int
    label: str
    sent: dict[str, int]
    links: frozenset[tuple[Address, Address]]

    def needs(self, other: Waiting) -> bool:
        """Whether the other rank, while it waits, cannot send what this one waits for."""
        return other.sent.get(self.group, self.number) < self.number


def wait(work: Any, env: ShardingEnv, number: int, label: str) -> None:
    """Waits for a collective on CPU tensors. Over Gloo, looks at the store meanwhile.

    Args:
        work: of torch.
        env: the ranks.
        number: of the message, as `Wire.issued` was before it.
        label: of the message.

    Raises:
        RankLost: another rank ended, or waits for this rank in another message. Names the rank.
    """
    if not env.wire.polls:
        work.wait()
        return
    posted = False
    while True:
        try:
            work.wait(_TICK)
            break
        except RuntimeError as error:
            if not str(error).startswith("Operation timed out"):
                with suppress(dist.DistError, OSError):  # another rank saw first that both wait, and closed it
                    _raise_if_crossed(env, number, label, not posted)
                _raise_lost(error, env, label)
        try:
            _raise_if_left(env, label)
            _raise_if_crossed(env, number, label, not posted)
            posted = True
        except dist.DistError:  # the process that serves the store has ended, and may have nothing to send
            continue
        except RankLost:
            with suppress(RuntimeError):  # its connection is closed; it must end before the process does
                work.wait(_DRAIN)
            raise
    if posted:
        with suppress(dist.DistError):
            store().set(_waits(env.rank, env), b"")


def issue_and_wait(issue: Callable[[Wire], Any], device: torch.device, env: ShardingEnv, label: str) -> None:
    """Issues a collective and waits for it.

    Args:
        issue: calls one method of the wire and returns its work.
        device: of the message. Elsewhere than on CPU, torch waits.
        env: the ranks.
        label: of the message.

    Raises:
        RankLost: as `wait`.
    """
    wire, on_cpu = env.wire, device.type == "cpu"
    number = wire.issued if on_cpu else 0
    work = issue(wire)
    if work is None:
        return
    if on_cpu:
        note_sent(number, env)
        wait(work, env, number, label)
    else:
        work.wait()


@atexit.register
def _leave() -> None:
    """Leaves the text of the exception that ends this process, for ranks that wait for it."""
    error = getattr(sys, "last_value", None)
    if error is None or not dist.is_initialized():
        return
    with suppress(dist.DistError):  # the store has ended
        left = f"{type(error).__name__}: {error}", _links()
        store().set(f"left/{dist.get_rank()}", pickle.dumps(left))
        base = _base_store()
        under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # its agent serves the store
        if dist.get_rank() == 0 and isinstance(base, TCPStore) and not under_torchrun:
            time.sleep(2 * TICK_S)  # this process serves the store


def _raise_if_left(env: ShardingEnv, label: str, cause: Exception | None = None) -> None:
    for rank in _members(env):
        if store().check([f"left/{rank}"]):
            text, links = pickle.loads(store().get(f"left/{rank}"))
            _close_shared(links)
            raise RankLost(
                f"rank {rank} ended while rank {dist.get_rank()} waited for {label!r}: {text}. "
                f"Fix: correct this error, and start the ranks again"
            ) from cause


def _raise_lost(error: RuntimeError, env: ShardingEnv, label: str) -> NoReturn:
    """The connection to a rank closed: names that rank."""
    rank, missing = dist.get_rank(), list[int]()
    try:
        store().set(f"answers/{rank}", b"")
        end = time.monotonic() + ANSWER_S
        while time.monotonic() < end:
            _raise_if_left(env, label, error)
            missing = [other for other in _members(env) if not store().check([f"answers/{other}"])]
            time.sleep(0.05)
    except (dist.DistError, OSError):
        who = "the process that serves the store (rank 0, or torchrun) has ended or cannot be reached"
    else:
        names = " and ".join(f"rank {other}" for other in missing)
        who = f"{names} did not answer" if missing else "all ranks answer, so an earlier error closed it"
    fix = "Fix: read the log of that rank, and start the ranks again"
    if silent := " and ".join(silent_hosts()):
        who = f"{silent} acknowledged nothing for {SILENT_S:g} s, so the host or its network is down"
        fix = "Fix: restore the host or its network, and start the ranks again"
    elif hosts := " and ".join(hosts_in(str(error))):
        who = f"it led to {hosts}; {who}"
    raise RankLost(
        f"a connection of rank {rank} closed while it waited for {label!r}: {who}. {fix}. torch reports: {error}"
    ) from error


def _raise_if_crossed(env: ShardingEnv, number: int, label: str, post: bool) -> None:
    own = Waiting(env.pg.group_name, number, label, sent_numbers(), _links() if post else frozenset())
    if post:
        store().set(_waits(env.rank, env), pickle.dumps(own))
    for rank in range(env.world_size):
        if rank == env.rank or not store().check([_waits(rank, env)]):
            continue
        data = store().get(_waits(rank, env))
        other: Waiting | None = pickle.loads(data) if data else None
        if other is not None and own.needs(other) and other.needs(own):
            time.sleep(TICK_S)  # for the other rank to see the same
            _close_shared(other.links)
            raise RankLost(
                f"rank {env.world.rank} waits for {label!r} of rank {env.world_ranks[rank]}, which waits for "
                f"{other.label!r} of this rank: one of them has skipped a part of the step, for example after an "
                f"error that its code caught. {_FIX}"
            )


def _waits(rank: int, env: ShardingEnv) -> str:
    return f"waits/{env.world_ranks[rank]}/{env.world_size}"


def _members(env: ShardingEnv) -> list[int]:
    """Global ranks of the others."""
    return [rank for rank in dist.get_process_group_ranks(env.pg) if rank != dist.get_rank()]


def _base_store() -> Any:
    base = dist.distributed_c10d._get_default_store()
    while isinstance(base, dist.distributed_c10d.PrefixStore):
        base = base.underlying_store
    return base


def _links() -> frozenset[tuple[Address, Address]]:
    """The TCP connections of this process that do not lead to the store."""
    found = set()
    port = getattr(_base_store(), "port", None)
    for sock in tcp_sockets():
        with suppress(OSError):  # not connected
            here, there = sock.getsockname()[:2], sock.getpeername()[:2]
            if port not in (here[1], there[1]):
                found.add((here, there))
    return frozenset(found)


def _close_shared(links: Iterable[tuple[Address, Address]]) -> None:
    """Closes the connections to the process with these ``links``, under collectives that wait on them.

    Aborts NCCL's collectives.
    """
    shared = {(there, here) for here, there in links}
    for sock in tcp_sockets():
        with suppress(OSError):
            if (sock.getsockname()[:2], sock.getpeername()[:2]) in shared:
                sock.shutdown(socket.SHUT_RDWR)
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # no backend on GPUs
            backend = group._get_backend(torch.device("cuda"))
            if not isinstance(backend, dist.ProcessGroupGloo):
                backend.abort()
