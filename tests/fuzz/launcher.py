"""Random cells on ranks, with faults injected, against a simple model of what must be true after each.

    python -m tests.fuzz.launcher SEED [CELLS]    one chapter: a launch, its cells, a stop; a failing test prints this

The model holds the variables of every rank. After each cell the ranks answer ``1 + rank`` from the processes that were
launched, with the variables of the model, unless an error has announced a death. A cell that fails names the ranks that
failed, and no others. After a chapter no process, descriptor, thread or file of it is left.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from recshard_lab.launcher import LaunchError, Printer, RankError, Ranks, RanksInterrupted, launch
from recshard_lab.launcher.engines.fork import forkserver
from tests.patience import scaled, wait_until

__all__ = ["CELLS", "Chapter", "play"]

CELLS = 40  # of a chapter
HANG_S = 120.0  # for one cell; machines are shared
AGAIN_S = 8.0  # after which a person stops a cell again; a third stop kills the ranks

RARE = {  # they take long
    *("cell_restarts", "cell_launches_again", "cell_leaves", "cell_killed_between_cells"),
    "cell_stopped_for_good",
}

ODD_EXCEPTIONS = {
    "class E(Exception):\n def __str__(self): raise ValueError(1)\nraise E()": "E: <its __str__ raised ValueError>",
    "class E(Exception):\n __reduce__ = lambda self: 1 / 0\nraise E(lambda: 0)": "E: <function <lambda> at",
    "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('b') from e": "KeyError: 'b'",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded",
    "import sys; sys.exit('leaving')": "SystemExit: leaving",
    "e = ValueError('\\ud800 \\x00'); e.__notes__ = 5; raise e": "ValueError: ",
    "a = b = = c": "SyntaxError: invalid syntax",
    "raise ValueError('x' * 300_000)": "ValueError: xxxx",
}


class Quiet(Printer):
    """Prints nothing."""

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        pass

    def card(self, bundle: dict[str, str]) -> None:
        pass


class Chapter:
    """One launch and its cells. Everything that is random follows from `seed`."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history: list[str] = []
        self.started: list[psutil.Process] = []  # by ranks, in sessions of their own
        self.serial = 0
        self.ranks: Ranks
        self.launch()

    def launch(self) -> None:
        self.ranks = launch(self.rng.randint(1, 3))
        self.fresh()

    def fresh(self) -> None:
        """Ranks that have just been started."""
        self.pids = self.ranks.pids
        self.model: list[dict[str, Any]] = [{} for _ in self.pids]
        self.ranks.exec("import os, signal, threading, time\nv = {}")
        left = [process.pid for process in self.started if process.is_running() and process.status() != "zombie"]
        assert not left, f"processes of earlier ranks are alive: {left}"
        self.started = []

    # -- what must be true --------------------------------------------------------------------------

    def check(self) -> None:
        """Ranks answer as themselves, with their variables, and can meet in a collective."""
        self.serial += 1
        assert self.ranks.usable, f"the ranks were lost: {self.ranks!r}"
        found = self.ranks.eval(f"(1 + rank, os.getpid(), {self.serial}, v)")
        wanted = [(1 + r, pid, self.serial, self.model[r]) for r, pid in enumerate(self.pids)]
        assert found == wanted, f"found {found}, expected {wanted}"
        if self.rng.random() < 0.2:
            sums = self.ranks.exec("t = torch.ones(1); dist.all_reduce(t); t.item()")
            assert {result.text for result in sums} == {str(float(len(self.pids)))}

    def some_ranks(self) -> list[int]:
        everyone = list(range(len(self.pids)))
        return sorted(self.rng.sample(everyone, self.rng.randint(1, len(everyone))))

    @contextlib.contextmanager
    def fails(self, ranks: list[int], words: str = "", kind: str = "raised") -> Iterator[None]:
        """What runs inside raises a RankError that these ranks caused."""
        with pytest.raises(RankError) as raised:
            yield
        caught = raised.value
        assert list(caught.ranks) == ranks, f"ranks {caught.ranks} failed, expected {ranks}: {caught}"
        assert caught.failures[0].kind == kind, str(caught)
        assert words in caught.headline(), f"{words!r} is not in {caught.headline()[:500]!r}"

    @contextlib.contextmanager
    def stops(self, after_s: float) -> Iterator[None]:
        """Asks for a stop after a while, and again every `AGAIN_S` while what runs inside has not ended."""
        over = threading.Event()

        def press() -> None:
            wait = after_s
            while not over.wait(wait):
                self.ranks.interrupt()
                wait = AGAIN_S

        thread = threading.Thread(target=press)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def survives_stop(self) -> Iterator[None]:
        """What runs inside may be stopped. `stops` asks until it is, and ranks that need a third stop are killed."""
        note = ""
        try:
            yield
        except RanksInterrupted as stopped:
            note = str(stopped)
        assert "fresh ones run now" not in note, f"the ranks did not stop when asked twice: {note}"

    def lose(self) -> None:
        """A death was announced: nothing runs until there are other ranks."""
        assert not self.ranks.usable
        with pytest.raises(LaunchError):
            self.ranks.exec("1")
        if self.rng.random() < 0.7:
            self.ranks.restart()
            self.fresh()
        else:
            self.ranks.stop()
            self.launch()

    # -- cells --------------------------------------------------------------------------------------

    def cell_value(self) -> None:
        ranks, number = self.some_ranks(), self.rng.randrange(1000)
        results = self.ranks.exec(f"{number} + 1000 * rank", ranks=ranks)
        assert [(r.rank, r.text) for r in results] == [(rank, str(number + 1000 * rank)) for rank in ranks]

    def cell_variable(self) -> None:
        ranks, name, number = self.some_ranks(), self.rng.choice("abc"), self.rng.randrange(1000)
        self.ranks.exec(f"v[{name!r}] = ({number}, rank)", ranks=ranks)
        for rank in ranks:
            self.model[rank][name] = (number, rank)

    def cell_raises(self) -> None:
        ranks, (source, words) = self.some_ranks(), self.rng.choice(list(ODD_EXCEPTIONS.items()))
        with self.fails(ranks, words):
            self.ranks.exec(source, ranks=ranks, printer=Quiet([]))

    def cell_interrupted(self) -> None:
        source = self.rng.choice(
            (
                "while True: pass",
                "while True: display(rank)",
                "while True: print('x' * 50)",
                "dist.barrier() if rank else time.sleep(60)",
                "import subprocess; subprocess.run(['sleep', '60'])",
                "class E(Exception):\n def __str__(self): time.sleep(60)\nraise E()",
                "try: time.sleep(60)\nexcept KeyboardInterrupt: pass\ndist.barrier()\ntime.sleep(60)",
            )
        )
        self.history.append(source)
        with self.survives_stop(), self.stops(self.rng.random() * 0.3):
            self.ranks.exec(source, printer=Quiet([]))
            raise AssertionError("the cell did not stop")

    def cell_out_of_time(self) -> None:
        source = self.rng.choice(("time.sleep(60)", "while True: pass", "dist.barrier() if rank else time.sleep(60)"))
        with pytest.raises(RankError, match=r"time limit of 0\.2 s") as caught:
            self.ranks.exec(source, timeout_s=0.2, printer=Quiet([]))
        if caught.value.failures[0].kind == "died":  # on a busy machine, 5 s after the limit
            self.lose()

    def cell_stopped_for_good(self) -> None:
        os.kill(self.rng.choice(self.pids), signal.SIGSTOP)
        with pytest.raises(RankError) as caught:
            self.ranks.exec("dist.barrier()", timeout_s=0.2, printer=Quiet([]))
        assert "died" in {failure.kind for failure in caught.value.failures}, "no death was announced"
        self.lose()

    def cell_stuck_collective(self) -> None:
        guilty = self.rng.randrange(len(self.pids))
        with self.fails([guilty], "ValueError: boom"):
            self.ranks.exec(f"if rank == {guilty}: raise ValueError('boom')\ndist.barrier()", printer=Quiet([]))

    def cell_killed(self) -> None:
        victim = self.rng.randrange(len(self.pids))
        number = self.rng.choice([9, 9, 11, 6, int(signal.SIGRTMIN) + self.rng.randrange(20)])
        after = self.rng.choice(("time.sleep(60)", "dist.barrier()", "while True: display(1)", "1"))
        source = f"if rank == {victim}: os.kill(os.getpid(), {number}); time.sleep(60)\n{after}"
        if after == "1" and len(self.pids) > 1:
            source = source.replace("\n1", "\ntime.sleep(60)")
        name = "SIGKILL" if number == 9 else ""
        with self.fails([victim], f"was killed by {name}", "died"):
            self.ranks.exec(source, printer=Quiet([]))
        self.lose()

    def cell_leaves(self) -> None:
        victim, status = self.rng.randrange(len(self.pids)), self.rng.randrange(256)
        with self.fails([victim], f"exited with code {status}", "died"):
            self.ranks.exec(f"if rank == {victim}: os._exit({status})\ntime.sleep(60)", printer=Quiet([]))
        self.lose()

    def anything(self) -> None:
        """Work that leaves the model as it is, however far it gets."""
        source = self.rng.choice(
            (
                "for _ in range(200): dist.all_reduce(torch.ones(100))",
                "if rank == 0: raise ValueError('boom')\ndist.barrier()",
                "for i in range(3000): print('line', i)",
                "for i in range(30): display(i)",
                "import multiprocessing as m\nwith m.get_context('fork').Pool(2) as pool: pool.map(abs, range(9))",
                "pid = os.fork()\nif pid: os.waitpid(pid, 0)",
                "dist.new_group([0])",
                "",
            )
        )
        if source:
            self.ranks.exec(source, printer=Quiet([]))
        else:
            self.ranks.push({"sent": torch.ones(2_000_000)})
            self.ranks.pull("sent")

    def cell_killed_at_any_moment(self) -> None:
        victim, moment = self.rng.choice(self.pids), self.rng.random() * 0.3
        timer = threading.Timer(moment, os.kill, (victim, signal.SIGKILL))
        timer.start()
        with contextlib.suppress(RankError, LaunchError):
            self.anything()
        timer.join()
        wait_until(lambda: not self.ranks.usable)
        self.lose()

    def cell_interrupted_at_any_moment(self) -> None:
        timers = [
            threading.Timer(self.rng.random() * 0.3, self.ranks.interrupt) for _ in range(self.rng.choice((1, 2, 5)))
        ]
        for timer in timers:
            timer.start()
        with contextlib.suppress(RankError, RanksInterrupted):
            self.anything()
        for timer in timers:
            timer.join()
        if self.ranks.pids != self.pids:
            assert len(timers) == 5, "ranks were killed before the third stop"
            self.fresh()

    def cell_killed_between_cells(self) -> None:
        victim = self.rng.randrange(len(self.pids))
        os.kill(self.pids[victim], signal.SIGKILL)
        wait_until(lambda: not self.ranks.usable)
        self.lose()

    def cell_stopped_for_a_while(self) -> None:
        victim = psutil.Process(self.rng.choice(self.pids))
        victim.suspend()
        timer = threading.Timer(self.rng.random() * 0.3, victim.resume)
        timer.start()
        try:
            results = self.ranks.exec("t = torch.ones(1); dist.all_reduce(t); rank", printer=Quiet([]))
        finally:
            timer.join()
        assert [result.text for result in results] == [str(rank) for rank in range(len(self.pids))]

    def cell_forks(self) -> None:
        end = self.rng.choice(("1", "raise ValueError(1)", "display(2)", "time.sleep(0.1)", "os.kill(os.getpid(), 9)"))
        source = f"pid = os.fork()\nif pid == 0: {end}\nos.getpid()"
        assert [int(str(result.text)) for result in self.ranks.exec(source, printer=Quiet([]))] == self.pids
        assert all(self.ranks.eval("os.waitpid(pid, 0)[0] == pid"))

    def cell_starts_daemons(self) -> None:
        self.ranks.exec("import subprocess; d = subprocess.Popen(['sleep', '600'], start_new_session=True)")
        self.started += [psutil.Process(pid) for pid in self.ranks.eval("d.pid")]

    def cell_restarts(self) -> None:
        self.ranks.restart()
        self.fresh()

    def cell_launches_again(self) -> None:
        self.ranks.stop()
        self.launch()

    def play(self, cells: int) -> Counter[str]:
        """Plays so many cells; how often each kind was played."""
        kinds: list[Callable[[], None]] = [getattr(self, name) for name in dir(self) if name.startswith("cell_")]
        weights = [1 if kind.__name__ in RARE else 3 for kind in kinds]
        played: Counter[str] = Counter()
        for _ in range(cells):
            kind = self.rng.choices(kinds, weights)[0]
            self.history.append(kind.__name__)
            faulthandler.dump_traceback_later(scaled(HANG_S), exit=False)
            kind()
            self.check()
            played[kind.__name__] += 1
        return played


def play(seed: int, cells: int = CELLS) -> Counter[str]:
    """A chapter and what it must leave behind: nothing. An error names the seed and the command that repeats it."""
    with launch(1):
        pass  # what stays, the forkserver, is there from here on
    me, server = psutil.Process(), forkserver()
    server.warmed.wait(300)
    gc.collect()
    before = me.num_fds(), threading.active_count()
    chapter = None
    try:
        chapter = Chapter(seed)
        played = chapter.play(cells)
        chapter.ranks.stop()
        gc.collect()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: (me.num_fds(), threading.active_count()) == before, 5)
        now = me.num_fds(), threading.active_count()
        assert now == before, f"{now} descriptors and threads, {before} before"
        left = [process.pid for process in chapter.started if process.is_running() and process.status() != "zombie"]
        assert not left, f"processes in separate sessions are alive: {left}"
        assert not psutil.Process(server.process.pid).children(), "ranks are left"
        assert os.listdir(server.folder) == [], "files are left"
    except BaseException as error:
        cell = 0 if chapter is None else sum(name.startswith("cell_") for name in chapter.history)
        last = [] if chapter is None else chapter.history[-3:]
        error.add_note(
            f"cell {cell} of seed {seed}, after {last}. Repeat: python -m tests.fuzz.launcher {seed} {cells}"
        )
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        if chapter is not None:
            chapter.ranks.stop()
    return played


if __name__ == "__main__":
    print(play(*map(int, sys.argv[1:])))
