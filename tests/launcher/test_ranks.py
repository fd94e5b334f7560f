"""Ranks from Python: results, failures, deaths, stops, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted, current, launch, session
from recshard_lab.launcher.engines.fork import forkserver
from recshard_lab.launcher.flight import INTERRUPT_GRACE_S, Flight
from tests.launcher.waiting import interrupt, left, running, then
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(60)

ALL_REDUCE = "t = torch.ones(1); dist.all_reduce(t); t.item()"


def texts(results: list[Any]) -> list[str | None]:
    return [result.text for result in results]


def test_run_gives_one_result_a_rank_in_rank_order(ranks: Ranks) -> None:
    assert ranks.run(lambda x, *, y: x * dist.get_rank() + y, 10, y=1) == [1, 11, 21]
    space: dict[str, Any] = {"__name__": "__main__"}  # a module that is not in site-packages
    exec("import recshard_lab as rs\ndef name():\n    return rs.__name__", space)
    assert ranks.run(space["name"]) == ["recshard_lab"] * 3


def test_a_namespace_stays_between_cells_and_starts_with_the_useful_names(ranks: Ranks) -> None:
    ranks.exec("mine = rank * 2")
    assert texts(ranks.exec("mine")) == ["0", "2", "4"]
    assert texts(ranks.exec("mine;")) == [None, None, None]
    assert texts(ranks.exec("world_size, local_rank, str(device), dist.get_rank() == rank")) == [
        f"(3, {rank}, 'cpu', True)" for rank in range(3)
    ]


def test_an_exception_names_its_rank_and_shows_its_lines(ranks: Ranks) -> None:
    def fail() -> None:
        if dist.get_rank() == 2:
            raise KeyError("movies")

    with pytest.raises(RankError, match=r"rank 2 raised KeyError: 'movies'") as caught:
        ranks.run(fail)
    assert caught.value.rank == 2
    assert 'raise KeyError("movies")' in str(caught.value)
    with pytest.raises(RankError, match="all 3 ranks raised SyntaxError") as caught:
        ranks.exec("a = 1\nb = = 2", filename="<cell [7]>")
    assert 'File "<cell [7]>", line 2' in str(caught.value)
    assert "launcher" not in str(caught.value)
    with pytest.raises(RankError, match="all 3 ranks raised"):
        ranks.run(lambda: (x for x in [1]))  # a result that cannot travel
    assert ranks.run(dist.get_rank) == [0, 1, 2]


@pytest.mark.parametrize("group", ["dist.group.WORLD", "pair"])
def test_ranks_waiting_for_a_failed_one_are_freed_and_models_go_on(ranks: Ranks, group: str) -> None:
    ranks.exec("pair = dist.new_group([0, 1])")
    ranks.exec("ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)); x = torch.ones(4, 2)")
    step = "ddp.zero_grad(); ddp(x).sum().backward(); ddp.module.bias.grad.item()"
    before = texts(ranks.exec(step))
    with pytest.raises(RankError) as caught:
        ranks.exec(f"if rank == 1: raise ValueError('boom')\nif rank < 2: dist.barrier(group={group})")
    assert caught.value.ranks == (1,)
    assert texts(ranks.exec(step)) == before == ["4.0"] * 3
    sums = texts(ranks.exec("t = torch.ones(1)\nif rank < 2: dist.all_reduce(t, group=pair)\nt.item()"))
    assert sums == ["2.0", "2.0", "1.0"]


def test_pull_fetches_a_variable_and_eval_evaluates_an_expression(ranks: Ranks) -> None:
    ranks.exec("x = torch.full((2,), rank + 1.0)")
    assert [x.tolist() for x in ranks.pull("x")] == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
    assert ranks.eval("(rank, x[0].item())", ranks=[2]) == [(2, 3.0)]
    with pytest.raises(ValueError, match=r"Ranks.pull\('x.sum\(\)'\).*Fix: ranks.eval\('x.sum\(\)'\)"):
        ranks.pull("x.sum()")
    with pytest.raises(TypeError, match="an expression is a string"):
        ranks.eval(3)  # type: ignore[arg-type]


def test_a_name_that_ranks_do_not_have_is_answered_with_a_fix(ranks: Ranks) -> None:
    ranks.exec("model = rank\ndef of_model(): return modle")
    with pytest.raises(RankError, match=r"no variable 'modle' on this rank, which has .*model.*Fix: use 'model'\n"):
        ranks.eval("modle + 1")
    with pytest.raises(RankError, match=r"Fix: run a cell on the ranks that defines 'nothing'\n"):
        ranks.pull("nothing")
    with pytest.raises(RankError, match="NameError: name 'modle' is not defined"):  # a cell's own mistake
        ranks.eval("of_model()")


def test_a_destroyed_group_is_made_anew(ranks: Ranks) -> None:
    with pytest.raises(RankError):
        ranks.exec("if rank == 1: dist.destroy_process_group()\ndist.barrier()")
    assert texts(ranks.exec(ALL_REDUCE)) == ["3.0"] * 3


@pytest.mark.parametrize(
    ("end", "words"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", "was killed by SIGSEGV"), ("os._exit(3)", "exited with code 3")],
)
def test_a_rank_that_dies_in_a_cell_is_named_at_once_with_its_last_words(ranks: Ranks, end: str, words: str) -> None:
    ranks.push({"mine": 1})
    with pytest.raises(RankError, match=f"rank 1 {words}") as caught:
        ranks.exec(f"import os, signal\nif rank == 1:\n    print('so long')\n    {end}\ndist.barrier()")
    assert "so long" in str(caught.value)
    assert "Variables that are lost: mine." in str(caught.value)
    with pytest.raises(LaunchError, match=r"rank 1 .*nothing runs on fewer than 3 ranks.*restart"):
        ranks.exec("1")
    ranks.restart()
    assert texts(ranks.exec(ALL_REDUCE)) == ["3.0"] * 3


def test_a_rank_that_died_between_cells_is_not_overlooked(ranks: Ranks) -> None:
    os.kill(ranks.pids[2], signal.SIGKILL)
    wait_until(lambda: not ranks.usable)
    with pytest.raises(LaunchError, match="rank 2 was killed by SIGKILL"):
        ranks.run(dist.get_rank)
    assert [status.state for status in ranks.status()] == ["idle", "idle", "was killed by SIGKILL"]


def test_an_interrupt_stops_the_cell_on_ranks_and_keeps_what_it_had_done(ranks: Ranks) -> None:
    with pytest.raises(RanksInterrupted, match="stopped on all 3 ranks"):
        ranks.exec(f"import time\ncount = 1\n{then(ranks, interrupt)}time.sleep(60)")
    assert texts(ranks.exec("count")) == ["1"] * 3


def test_an_interrupt_is_not_lost_on_a_rank_that_displays_without_pause(ranks: Ranks) -> None:
    for _ in range(3):
        with pytest.raises(RanksInterrupted):
            ranks.exec(f"{then(ranks, interrupt)}while True: display(rank)")


def test_an_interrupt_meets_a_rank_that_has_not_begun_the_cell(ranks: Ranks) -> None:
    ranks.exec("import time")
    late = [psutil.Process(pid) for pid in ranks.pids[1:]]
    for process in late:
        process.suspend()

    def stop() -> None:
        ranks.interrupt()
        for process in late:
            process.resume()

    with pytest.raises(RanksInterrupted, match="stopped on all 3 ranks"):
        ranks.exec(f"{then(ranks, stop, on=[0])}while True: time.sleep(0.01)")
    assert texts(ranks.exec("world_size")) == ["3"] * 3


@pytest.mark.parametrize("later_s", [0, 3 * INTERRUPT_GRACE_S], ids=["soon", "collectives have ended"])
def test_a_second_stop_interrupts_again_where_the_first_was_swallowed(ranks: Ranks, later_s: float) -> None:
    first, again = then(ranks, interrupt), then(ranks, interrupt)
    swallow = f"try:\n    {first}    time.sleep(60)\nexcept KeyboardInterrupt:\n    swallowed = True\n    "
    swallow += f"time.sleep({later_s})\n    {again}"
    with pytest.raises(RanksInterrupted, match="stopped on all 3 ranks"):
        ranks.exec(f"import time\n{swallow}time.sleep(60)")
    assert texts(ranks.exec("swallowed")) == ["True"] * 3


def test_a_time_limit_frees_even_collectives(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"time limit of 0\.3 s"):
        ranks.exec("if rank: dist.barrier()\nelse: import time; time.sleep(60)", timeout_s=0.3)
    assert texts(ranks.exec(ALL_REDUCE)) == ["3.0"] * 3


def test_an_answer_that_comes_late_is_not_that_of_the_next_cell(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(number: int, frame: object) -> None:
        raise TimeoutError

    before, wait = signal.signal(signal.SIGALRM, leave), Flight.wait
    cell = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'next')!r}): time.sleep(0.01)\n'late'"
    try:
        with pytest.raises(TimeoutError):  # the notebook leaves a cell that goes on
            ranks.exec(then(ranks, lambda: os.kill(os.getpid(), signal.SIGALRM)) + cell)
    finally:
        signal.signal(signal.SIGALRM, before)

    def begun(flight: Flight) -> None:
        (tmp_path / "next").touch()
        wait(flight)

    monkeypatch.setattr(Flight, "wait", begun)
    assert texts(ranks.exec("time.sleep(0.3)\nrank")) == ["0", "1", "2"]  # after the late answers


def test_lines_are_marked_by_rank_and_common_ones_shown_once(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.exec(
        "import sys\nprint('I am', rank)\nprint('loss', 0.5)\nprint('oh', file=sys.stderr)\nprint('end', end='')"
    )
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[0] I am 0", "[1] I am 1", "[2] I am 2", "[all] end", "[all] loss 0.5"]
    assert err == "[all] oh\n"


def test_output_of_a_ranks_own_children_is_shown_and_they_end_with_it(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.exec("import subprocess\nsubprocess.run(['echo', 'from a child'])")
    assert capsys.readouterr().out == "[all] from a child\n"
    ranks.exec("child = subprocess.Popen(['sleep', '600'])")
    children = [psutil.Process(pid) for pid in ranks.eval("child.pid")]
    ranks.stop()
    assert not left(children)


def test_stopping_twice_is_stopping_once_runs_exit_handlers_and_then_cells_are_refused(tmp_path: Path) -> None:
    ranks = launch(2)
    ranks.exec(f"import atexit, pathlib\natexit.register((pathlib.Path({str(tmp_path)!r}) / str(rank)).touch);")
    processes = [psutil.Process(pid) for pid in ranks.pids]
    ranks.stop()
    ranks.stop()
    assert not left(processes)
    assert current() is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    with pytest.raises(LaunchError, match=r"stopped\. Start new ones"):
        ranks.run(dist.get_rank)


def test_ranks_that_do_not_exist_are_refused_by_name(ranks: Ranks) -> None:
    for chosen, words in (
        ([], "names no rank"),
        ([0, 3], r"rank 3 in ranks=\[0, 3\] does not exist: expected some of 0 to 2"),
        ([-1], r"rank -1 in ranks=\[-1\] does not exist"),
        ([True], "rank True"),
        ("01", "not a list of ranks"),
    ):
        with pytest.raises(LaunchError, match=words):
            ranks.exec("1", ranks=chosen)  # type: ignore[arg-type]


def test_another_threads_work_is_waited_for_and_refused_when_it_takes_long(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at_work(seconds: float) -> threading.Thread:
        def work() -> None:
            with suppress(RanksInterrupted):
                ranks.exec(f"import time; time.sleep({seconds})")

        thread = threading.Thread(target=work)
        thread.start()
        wait_until(lambda: running(ranks))
        return thread

    short = at_work(0.3)
    assert ranks.pull("rank") == [0, 1, 2]
    short.join()
    monkeypatch.setattr(session, "PATIENCE_S", 0.1)
    long = at_work(30)
    with pytest.raises(LaunchError, match="busy with another cell"):
        ranks.pull("rank")
    ranks.interrupt()
    long.join()


def test_nothing_listens_beyond_loopback(ranks: Ranks) -> None:
    processes = [psutil.Process(pid) for pid in [*ranks.pids, forkserver().process.pid, os.getpid()]]
    listeners = [c for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip for connection in listeners} <= {"127.0.0.1", "::1"}
    unix = [c for p in processes for c in p.net_connections("unix") if c.laddr]
    assert not [c for c in unix if "recshard" in str(c.laddr)]


def test_many_launches_leave_no_process_no_file_and_no_descriptor() -> None:
    with launch(2):
        pass
    server = forkserver()
    me = psutil.Process()
    fds, threads = me.num_fds(), threading.active_count()
    for _ in range(10):
        with launch(2) as ranks:
            ranks.exec("1")
    assert me.num_fds() == fds
    assert threading.active_count() == threads
    assert os.listdir(server.folder) == []
    assert not psutil.Process(server.process.pid).children()
