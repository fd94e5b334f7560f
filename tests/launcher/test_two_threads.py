"""Threads of a notebook that launch, restart and stop at once: one world at a time, and no rank outside it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, current, launch
from recshard_lab.launcher.engines.fork import forkserver

pytestmark = pytest.mark.timeout(60)


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """What threads that start together return or raise."""
    start = threading.Barrier(len(works))
    found: list[Any] = [None] * len(works)

    def work(index: int) -> None:
        start.wait()
        try:
            found[index] = works[index]()
        except LaunchError as error:
            found[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def left() -> list[psutil.Process]:
    """Ranks that are alive."""
    children = psutil.Process(forkserver().process.pid).children()
    return psutil.wait_procs(children, timeout=2)[1]


def test_threads_that_launch_at_once_get_the_same_ranks_and_nothing_stays() -> None:
    first, second = at_once(lambda: launch(2), lambda: launch(2))
    assert first is second is current()
    assert first.run(dist.get_rank) == [0, 1]
    first.stop()
    assert not left()


def test_threads_that_launch_two_shapes_get_one_and_an_error() -> None:
    found = at_once(lambda: launch(1), lambda: launch(2))
    (ranks,) = [each for each in found if isinstance(each, Ranks)]
    (error,) = [each for each in found if isinstance(each, LaunchError)]
    assert "are running. Fix: stop them first" in str(error)
    ranks.stop()
    assert not left()


@pytest.mark.gate
def test_threads_that_restart_and_stop_at_once_leave_one_world_or_none() -> None:
    with launch(2) as ranks:
        at_once(ranks.restart, ranks.restart)
        assert {process.pid for process in left()} == set(ranks.pids)
        assert ranks.run(dist.get_rank) == [0, 1]
        at_once(ranks.restart, ranks.stop)
        assert {process.pid for process in left()} == set(ranks.pids)
        ranks.restart()

        def cell() -> None:
            with suppress(RankError):
                ranks.exec("import time; time.sleep(30)")

        busy = threading.Thread(target=cell)
        busy.start()
        while ranks.status()[0].state != "running":
            pass
        ranks.restart()  # ends the cell, too
        busy.join(10)
        assert not busy.is_alive()
        assert {process.pid for process in left()} == set(ranks.pids)
        assert ranks.run(dist.get_rank) == [0, 1]
    assert not left()
