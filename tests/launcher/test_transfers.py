"""Large values, values that do not open, and transfers that are ended on the way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted, current
from recshard_lab.launcher.shape import Shape
from recshard_lab.launcher.wires import Wires
from tests.launched import launched
from tests.launcher.waiting import left, running
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(60)


ranks = launched(2)


def test_large_tensors_of_a_call_travel_in_shared_memory(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    send = Wires.send

    def counted(self: Wires, rank: int, kind: str, cell: int = 0, payload: bytes = b"", fds: Any = ()) -> None:
        sent.append(len(payload))
        send(self, rank, kind, cell, payload, fds)

    monkeypatch.setattr(Wires, "send", counted)
    large = torch.arange(1 << 20)  # 8 MB
    (back, _) = ranks.run(lambda tensor, *, more: {"sum": tensor + more["one"]}, large, more={"one": large})
    assert torch.equal(back["sum"], 2 * large)
    back["sum"][0] = 7  # a private copy: no other process sees it
    assert max(sent) < 10_000
    world = ranks._world
    assert world is not None
    assert not world.wires.attached


class Hidden:
    """Unpickles on ranks only."""

    def __reduce__(self) -> tuple[Any, ...]:
        return opens_here, ()


def opens_here() -> int:
    return 1 // 0


def test_a_result_that_does_not_open_names_its_rank_and_type(ranks: Ranks) -> None:
    ranks.push({"Hidden": Hidden})
    ranks.exec("hidden = Hidden() if rank == 1 else 'plain'")
    for use in (
        lambda: ranks.run(lambda: Hidden() if torch.distributed.get_rank() == 1 else 0),
        lambda: ranks.pull("hidden"),
    ):
        with pytest.raises(RankError, match=r"rank 1 .*type .*Hidden cannot be unpickled here \(ZeroDivis") as caught:
            use()
        assert caught.value.ranks == (1,)
        assert "Fix: send plain data" in str(caught.value)
    assert ranks.run(int) == [0, 0]


@pytest.mark.parametrize("kind", ["push", "pull", "run"])
def test_ranks_that_are_stopped_in_large_transfers_leave_nothing_and_start_again(ranks: Ranks, kind: str) -> None:
    large = torch.ones(64 << 20)  # 256 MB
    ranks.exec("large = torch.ones(64 << 20)")
    old, before = [psutil.Process(pid) for pid in ranks.pids], psutil.Process().num_fds()
    uses: dict[str, Callable[[], Any]] = {
        "push": lambda: ranks.push({"large": large}),
        "pull": lambda: ranks.pull("large"),
        "run": lambda: ranks.run(lambda x: x + 1, large),
    }

    def again_and_again() -> None:
        while True:
            uses[kind]()

    with ThreadPoolExecutor(1) as pool:
        using = pool.submit(again_and_again)
        wait_until(lambda: running(ranks))
        ranks.stop()
        assert isinstance(using.exception(), RankError | LaunchError)
    assert not left(old)
    assert current() is None
    ranks.restart()
    assert ranks.run(int) == [0, 0]
    assert psutil.Process().num_fds() == before


def test_an_interrupt_of_a_large_transfer_keeps_the_ranks(ranks: Ranks) -> None:
    ranks.exec("kept = rank")
    pids = ranks.pids
    pressing = threading.Thread(target=lambda: wait_until(ranks.interrupt, every_s=0.001))
    pressing.start()
    with contextlib.suppress(RanksInterrupted):
        ranks.run(len, b"x" * (64 << 20))  # over the sockets
    pressing.join()
    assert ranks.pull("kept") == [0, 1]
    assert ranks.pids == pids


def test_the_death_of_a_rank_above_255_is_reported() -> None:
    class Engine:
        """Ranks that end as soon as they start."""

        def __init__(self) -> None:
            self.shape = replace(Shape.checked(1), world_size=301, devices=("cpu",) * 301)
            self.endings: list[tuple[Callable[[Any], None], int]] = []

        def store(self, generation: int) -> str:
            return "nowhere"

        def start(self, rank: int, spec: Any, fds: Any, on_exit: Callable[[Any], None]) -> Any:
            self.endings.append((on_exit, rank))
            return SimpleNamespace(pid=rank, kill=lambda number: None, memory_bytes=lambda: 0)

        def close(self) -> None: ...

    engine: Any = Engine()
    wires = Wires(engine)
    for on_exit, rank in engine.endings[299:]:
        on_exit(-9 if rank == 300 else 3)
    assert sorted(wires.take(5)[:2] for _ in range(2)) == [(299, "died"), (300, "died")]
    for on_exit, _ in engine.endings[:299]:
        on_exit(0)
    wires.stop(0)


def test_a_listening_thread_that_fails_ends_the_ranks_and_says_why(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    old = [psutil.Process(pid) for pid in ranks.pids]
    with monkeypatch.context() as patched:
        patched.setattr(Wires, "_receive", fails)
        with pytest.raises(RankError, match=r"thread that listens to ranks failed[\s\S]*on purpose"):
            ranks.exec("1")
    assert not left(old)
    with pytest.raises(LaunchError, match="thread that listens to ranks failed"):
        ranks.exec("1")
    ranks.restart()
    assert ranks.run(int) == [0, 0]
