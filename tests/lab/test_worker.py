"""The background work of a widget: lanes, requests that replace each other, delays, and the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from recshard_lab.lab.widgets.worker import Worker
from tests.patience import scaled


def test_the_newest_request_replaces_the_waiting_one_and_ends_the_running_one() -> None:
    worker, started, go, done = Worker("test"), threading.Event(), threading.Event(), list[tuple[str, bool]]()

    def first(is_current: Callable[[], bool]) -> None:
        started.set()
        go.wait()
        done.append(("first", is_current()))

    worker.newest(first)
    assert started.wait(scaled(5))
    worker.newest(lambda is_current: done.append(("second", is_current())))
    worker.newest(lambda is_current: done.append(("third", is_current())))
    assert not worker.wait(timeout_s=0.05)
    go.set()
    assert worker.wait(timeout_s=scaled(5))
    assert done == [("first", False), ("third", True)]
    assert not worker.busy()


def test_a_lane_runs_in_order_and_lanes_run_beside_each_other() -> None:
    worker, go, done = Worker("test"), threading.Event(), list[str]()
    worker.queue(lambda: (go.wait(), done.append("a")), "slow")
    worker.queue(lambda: done.append("b"), "slow")
    worker.queue(lambda: done.append("c"), "fast")
    assert worker.wait("fast", timeout_s=scaled(5))
    assert done == ["c"]
    go.set()
    assert worker.wait(timeout_s=scaled(5))
    assert done == ["c", "a", "b"]


def test_work_that_is_due_goes_before_delayed_work_and_a_delay_can_be_cancelled() -> None:
    worker, done = Worker("test"), list[str]()
    worker.queue(lambda: done.append("late"), delay_s=0.1)
    worker.queue(lambda: done.append("now"))
    assert worker.wait(timeout_s=scaled(5))
    assert done == ["now", "late"]
    worker.queue(lambda: done.append("never"), delay_s=60)
    worker.cancel()
    assert worker.wait(timeout_s=scaled(5))
    assert done == ["now", "late"]


def test_a_call_returns_the_result_or_raises_the_error() -> None:
    worker = Worker("test")
    assert worker.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0)
    worker.close()
    with pytest.raises(RuntimeError, match="the widget is closed"):
        worker.call(lambda: 3)


def test_a_closed_worker_ends_its_threads() -> None:
    worker, looks = Worker("ends"), threading.Semaphore(0)
    worker.every(0.01, looks.release, "look")
    worker.newest(lambda _: None, "follow", delay_s=60)
    assert looks.acquire(timeout=scaled(20))
    assert looks.acquire(timeout=scaled(20))
    worker.close()
    assert worker.wait(timeout_s=scaled(5))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("recshard-ends")]
    worker.queue(looks.release)
    assert not worker.busy()
