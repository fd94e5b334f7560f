"""Fresh ranks begin fresh, errors keep variables and rebuild groups, and threads that launch at once get one world."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

import recshard_lab as rs
from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted, current, flight, launch
from recshard_lab.launcher.engines.fork import forkserver
from tests.launcher.waiting import interrupt, left, running, then
from tests.patience import scaled, wait_until

pytestmark = pytest.mark.timeout(60)

BEGINNING = "sorted(name for name in globals() if not name.startswith('_'))"


def left_behind(ranks: Ranks) -> list[int]:
    """Gives ranks variables of every kind, and the old process ids."""
    ranks.exec("kept = 1\nimport math\ndef mine(): return kept\nrank = 99\ndel world_size\nmath.tau = 3")
    ranks.exec("only = 2", ranks=[1])
    ranks.push({"pushed": torch.ones(3)})
    ranks.exec("import os; os.environ['LEFT'] = '1'; torch.manual_seed(5); torch.set_num_threads(2)")
    assert set(ranks.variables) >= {"kept", "mine", "only", "pushed"}
    return ranks.pids


def killed_by_the_third_stop(ranks: Ranks) -> None:
    """The reader's last resort: the ranks are started again without being asked for."""
    line = then(ranks, lambda: [ranks.interrupt() for _ in range(3)])
    block = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
    with pytest.raises(RanksInterrupted, match=r"and with them .*kept.*only.* fresh ones run now"):
        ranks.exec(f"{block}{line}while True: time.sleep(0.1)")


def restarted_after_a_death(ranks: Ranks) -> None:
    os.kill(ranks.pids[2], signal.SIGKILL)
    wait_until(lambda: not ranks.usable)
    with pytest.raises(LaunchError, match="rank 2 was killed by SIGKILL"):
        ranks.exec("1")
    ranks.restart()


@pytest.mark.parametrize("again", [Ranks.restart, restarted_after_a_death, killed_by_the_third_stop])
def test_fresh_ranks_have_no_variable_of_the_old_ones(ranks: Ranks, again: Callable[[Ranks], None]) -> None:
    beginning, threads = ranks.eval(BEGINNING), ranks.eval("torch.get_num_threads()")
    seeds = ranks.eval("torch.initial_seed()")
    old = left_behind(ranks)
    again(ranks)
    assert not set(old) & set(ranks.pids)
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert ranks.variables == []
    assert ranks.eval(BEGINNING) == beginning
    assert ranks.eval("(rank, world_size)") == [(0, 3), (1, 3), (2, 3)]
    assert ranks.eval("__import__('os').environ.get('LEFT')") == [None] * 3
    assert ranks.eval("torch.get_num_threads()") == threads
    assert 5 not in ranks.eval("torch.initial_seed()") + seeds
    assert ranks.eval("__import__('math').tau > 6") == [True] * 3
    for name in ("kept", "mine", "only", "pushed"):
        with pytest.raises(RankError, match=rf"NameError: no variable '{name}' on this rank, which has none"):
            ranks.pull(name)
    ranks.exec("t = torch.ones(1); dist.all_reduce(t)")
    assert ranks.eval("t.item()") == [3.0] * 3
    assert ranks.variables == ["t"]


def test_variables_are_lost_at_every_restart_and_never_come_back(ranks: Ranks) -> None:
    for number in range(3):
        assert ranks.variables == []
        ranks.exec(f"count{number} = {number}")
        assert ranks.variables == [f"count{number}"]
        assert ranks.run(dist.get_rank) == [0, 1, 2]
        ranks.restart()
    assert ranks.eval("[name for name in globals() if name.startswith('count')]") == [[]] * 3


def test_a_failed_cell_an_interrupt_and_a_time_limit_keep_variables(ranks: Ranks) -> None:
    """The other side: without a restart nothing is lost."""
    left_behind(ranks)
    old = ranks.pids
    with pytest.raises(RankError):
        ranks.exec("later = 5\nif rank == 99 and dist.get_rank() == 1: 1 / 0\ndist.barrier()")
    with pytest.raises(RankError, match="time limit"):
        ranks.exec("import time; time.sleep(30)", timeout_s=0.3)
    with pytest.raises(RanksInterrupted):
        ranks.exec(f"{then(ranks, interrupt)}time.sleep(30)")
    assert ranks.pids == old
    assert ranks.eval("(kept, mine(), later, rank, pushed.sum().item())") == [(1, 1, 5, 99, 3.0)] * 3
    assert ranks.pull("only", ranks=[1]) == [2]


def test_a_time_limit_ends_a_cell_soon_after_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the limit stands still: at its start, and then just before and just after the limit."""
    now, over, early = [0.0], threading.Event(), []
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def let_time_pass() -> None:
        now[0] = 9.9
        early.append(over.wait(3 * flight.TICK_S))
        now[0] = 10.1
        if not over.wait(scaled(10)):
            ranks.interrupt()

    with pytest.raises((RankError, RanksInterrupted)) as ended:
        ranks.exec(f"import time\n{then(ranks, let_time_pass)}time.sleep(600)", timeout_s=10)
    over.set()
    assert early == [False]
    assert "time limit of 10 s" in str(ended.value)


def pooled_ids() -> list[float]:
    """Output of a new sharded model whose row k is all k, for the bag [1, 2]."""
    table = rs.EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="t", feature_names=["f"])
    collection = rs.EmbeddingBagCollection([table])
    with torch.no_grad():
        collection.embedding_bags["t"].weight.copy_(torch.arange(10.0)[:, None].expand(10, 2))
    model = rs.DistributedModelParallel(collection)
    return model(rs.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))).values()[0].tolist()


def default_types() -> dict[str, str]:
    """Group -> the type of its default backend. torch raises if no backend is registered under it."""
    types = dist.ProcessGroup.BackendType.__members__
    groups = list(dist.distributed_c10d._world.pg_map)
    assert all(group._backend_id(types[group.name().upper()]) for group in groups)
    return {group.group_name: group.name() for group in groups}


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("mine")
    dist.barrier()


def test_models_are_built_after_errors_on_backends_of_the_types_that_torch_looks_up(ranks: Ranks) -> None:
    assert ranks.run(pooled_ids) == [[3.0, 3.0]] * 3
    types = ranks.run(default_types)
    assert set(types[0].values()) == {"gloo", "custom"}
    for _ in range(2):
        with pytest.raises(RankError, match="mine"):
            ranks.run(raise_on_rank_1)
        assert ranks.run(default_types) == types
        assert ranks.run(pooled_ids) == [[3.0, 3.0]] * 3


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
        thread.join()
    return found


def alive() -> list[int]:
    """The ranks that have not ended."""
    return [process.pid for process in left(psutil.Process(forkserver().process.pid).children(), 2)]


def test_threads_that_launch_at_once_get_the_same_ranks_or_an_error_and_nothing_stays() -> None:
    first, second = at_once(lambda: launch(2), lambda: launch(2))
    assert first is second is current()
    assert first.run(dist.get_rank) == [0, 1]
    first.stop()
    found = at_once(lambda: launch(1), lambda: launch(2))
    (ranks,) = [each for each in found if isinstance(each, Ranks)]
    (error,) = [each for each in found if isinstance(each, LaunchError)]
    assert "are running. Fix: stop them first" in str(error)
    ranks.stop()
    assert not alive()


@pytest.mark.gate
def test_threads_that_restart_and_stop_at_once_leave_one_world_or_none() -> None:
    with launch(2) as ranks:
        at_once(ranks.restart, ranks.restart)
        assert ranks.run(dist.get_rank) == [0, 1]
        at_once(ranks.restart, ranks.stop)
        assert set(alive()) == set(ranks.pids)
        ranks.restart()

        def cell() -> None:
            with suppress(RankError):
                ranks.exec("import time; time.sleep(30)")

        busy = threading.Thread(target=cell)
        busy.start()
        wait_until(lambda: running(ranks))
        ranks.restart()  # ends the cell, too
        busy.join()
        assert set(alive()) == set(ranks.pids)
        assert ranks.run(dist.get_rank) == [0, 1]
    assert not alive()
