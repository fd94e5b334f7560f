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
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from recshard_lab.launcher import LaunchError, Printer, RankError, Ranks, RanksInterrupted, launch
from recshard_lab.launcher.engines.fork import forkserver

__all__ = ["CELLS", "Chapter", "play"]

CELLS = 40  # of a chapter
HANG_S = 120.0  # for one cell; machines are shared
AGAIN_S = 8.0  # after which a person stops a cell again; a third stop kills the ranks

RARE = {  # they take long
    *("cell_restarts", "cell_launches_again", "cell_leaves", "cell_killed_between_cells"),
    *("cell_stopped_for_good", "cell_few_descriptors_at_launch"),
}

ODD_EXCEPTIONS = {
    "class E(Exception):\n def __str__(self): raise ValueError(1)\nraise E()": "E: <its __str__ raised ValueError>",
    "class S(str): 0\nclass E(Exception):\n def __str__(self): return S('text')\nraise E()": "E: text",
    "class E(BaseException):\n def __str__(self): raise self\nraise E()": "E: <its __str__ raised E>",
    "class E(Exception):\n __reduce__ = lambda self: 1 / 0\nraise E(lambda: 0)": "E: <function <lambda> at",
    "class M(type):\n __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M): 0\nraise E('x')": "E: x",
    "raise ExceptionGroup('many', [ValueError(lambda: 0), KeyError(1)])": "ExceptionGroup: many (2 sub-exceptions)",
    "try: 1 / 0\nexcept ZeroDivisionError as e: raise KeyError('b') from e": "KeyError: 'b'",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded",
    "import sys; sys.exit('leaving')": "SystemExit: leaving",
    "raise GeneratorExit": "GeneratorExit",
    "e = ValueError('\\ud800 \\x00'); e.__notes__ = 5; raise e": "ValueError: ",
    "raise MemoryError('none left')": "MemoryError: none left",
    "a = b = = c": "SyntaxError: invalid syntax",
    "raise ValueError('x' * 300_000)": "ValueError: xxxx",
}
ODD_DISPLAYS = (
    "class X: _repr_html_ = lambda s: (lambda: 0)\ndisplay(X()); X()",
    "class X: _repr_html_ = lambda s: ()\ndisplay(X()); X()",
    "class X: _repr_json_ = lambda s: {'a': [s]}\nX()",
    "class X: _repr_mimebundle_ = lambda s: {s: 1}\nX()",
    "class X: __repr__ = lambda s: 1 / 0\nX()",
    "class X: __getattr__ = lambda s, name: 1 / 0\nX()",
    "class S(str): 0\nclass X: __repr__ = lambda s: S('text')\ndisplay(X()); X()",
    "class X: _repr_png_ = lambda s: bytes(200_000)\ndisplay(X()); X()",
    "import unittest.mock\nunittest.mock.MagicMock()",
    "display(*range(20))",
    "(x for x in [1])",
)
ODD_STATES = (  # (cell, what undoes it)
    ("import sys; out = sys.stdout; sys.stdout = None", "sys.stdout = out"),
    ("import sys; err = sys.stderr; sys.stderr = type('Tee', (), {'write': lambda s, t: 0})()", "sys.stderr = err"),
    ("import sys; both = sys.stdout, sys.stderr; del sys.stdout, sys.stderr", "sys.stdout, sys.stderr = both"),
    ("signal.signal(signal.SIGALRM, lambda *_: 1 / 0); signal.setitimer(0, 0.02)", "time.sleep(0.05)"),
    ("globals()[1] = 2", "del globals()[1]"),
    ("x = type('X', (), {'__class__': property(lambda s: 1 / 0)})()", "del x"),
    ("import sys; sys.setrecursionlimit(60)", "sys.setrecursionlimit(1000)"),
    ("import os; os.environ.clear()", "1"),
    ("import resource as r; limits = r.getrlimit(7); r.setrlimit(7, (8, limits[1]))", "r.setrlimit(7, limits)"),
    ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "signal.signal(signal.SIGTERM, signal.SIG_DFL)"),
)


class Kept(Printer):
    """Keeps the lines of each rank instead of printing them."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(ranks)
        self.lines: dict[int, list[str]] = {rank: [] for rank in ranks}

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        if stream == "stdout":
            for rank in ranks:
                self.lines.setdefault(rank, []).append(content)

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
        caught = None
        try:
            yield
        except RankError as error:
            caught = error
        assert caught is not None, "the cell did not fail"
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
        with contextlib.suppress(LaunchError):
            self.ranks.exec("1")
            raise AssertionError("a cell ran without all ranks")
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
            self.ranks.exec(source, ranks=ranks, printer=Kept(ranks))

    def cell_displays(self) -> None:
        ranks = self.some_ranks()
        results = self.ranks.exec(self.rng.choice(ODD_DISPLAYS), ranks=ranks, printer=Kept(ranks))
        assert [result.rank for result in results] == ranks

    def cell_odd_state(self) -> None:
        cell, undo = self.rng.choice(ODD_STATES)
        self.ranks.exec(cell)
        with contextlib.suppress(RankError):
            self.ranks.exec(self.rng.choice(("1 + rank", "display(1)", "print('x')")), printer=Kept([]))
        self.ranks.complete("t")
        with contextlib.suppress(RankError):
            self.ranks.exec(undo)

    def cell_prints(self) -> None:
        lines, length = self.rng.choice([(3000, 20), (300, 1000), (5, 90_000), (0, 0)])
        ranks, kept = self.some_ranks(), Kept(self.some_ranks())
        self.ranks.exec(
            f"for i in range({lines}): print(f'{{rank}} {{i}} ' + 'x' * {length})\nprint('end', end='')",
            ranks=ranks,
            printer=kept,
        )
        for rank in ranks:
            wanted = [f"{rank} {i} " + "x" * length for i in range(lines)] + ["end"]
            assert kept.lines[rank] == wanted, f"rank {rank} printed {len(wanted)} lines, {len(kept.lines[rank])} came"

    def cell_prints_from_threads(self) -> None:
        kept, count = Kept(list(range(len(self.pids)))), self.rng.randint(1, 4)
        self.ranks.exec(
            "def write(number):\n for i in range(200): print(f'{number} {i}\\n', end='')\n"
            f"threads = [threading.Thread(target=write, args=(n,)) for n in range({count})]\n"
            "for thread in threads: thread.start()\nfor thread in threads: thread.join()",
            printer=kept,
        )
        for lines in kept.lines.values():
            assert Counter(lines) == Counter(f"{n} {i}" for n in range(count) for i in range(200))

    def cell_prints_between_cells(self) -> None:
        self.ranks.exec(
            "def write():\n for i in range(2000): print('background', i)\nthreading.Thread(target=write).start()",
            printer=Kept([]),
        )

    def cell_interrupted(self) -> None:
        source = self.rng.choice(
            (
                "time.sleep(60)",
                "while True: pass",
                "while True: time.sleep(0.001)",
                "while True: display(rank)",
                "while True: print('x' * 50)",
                "dist.barrier() if rank else time.sleep(60)",
                "import subprocess; subprocess.run(['sleep', '60'])",
                "queue = __import__('queue').Queue(); queue.get()",
                "import asyncio; asyncio.run(asyncio.sleep(60))",
                "class E(Exception):\n def __str__(self): time.sleep(60)\nraise E()",
                "class X:\n def __repr__(self): time.sleep(60)\nX()",
            )
        )
        self.history.append(source)
        with self.survives_stop(), self.stops(self.rng.random() * 0.3):
            self.ranks.exec(source, printer=Kept([]))
            raise AssertionError("the cell did not stop")

    def cell_interrupted_at_its_end(self) -> None:
        seconds = self.rng.random() * 0.05
        with contextlib.suppress(RanksInterrupted), self.stops(seconds):
            self.ranks.exec(f"time.sleep({seconds}); dist.barrier()")

    def cell_interrupted_while_idle(self) -> None:
        assert not self.ranks.interrupt()

    def cell_swallows_the_interrupt(self) -> None:
        with self.survives_stop(), self.stops(0.1):
            self.ranks.exec("try: time.sleep(60)\nexcept KeyboardInterrupt: pass\ndist.barrier()")

    def cell_out_of_time(self) -> None:
        ranks = list(range(len(self.pids)))
        source = self.rng.choice(("time.sleep(60)", "while True: pass", "dist.barrier() if rank else time.sleep(60)"))
        caught = None
        try:
            self.ranks.exec(source, timeout_s=0.2, printer=Kept(ranks))
        except RankError as error:
            caught = error
        assert "time limit of 0.2 s" in str(caught), str(caught)
        if caught is not None and caught.failures[0].kind == "died":  # on a busy machine, 5 s after the limit
            self.lose()

    def cell_stopped_for_good(self) -> None:
        os.kill(self.rng.choice(self.pids), signal.SIGSTOP)
        try:
            self.ranks.exec("dist.barrier()", timeout_s=0.2, printer=Kept([]))
            raise AssertionError("a stopped rank answered")
        except RankError as error:
            died = {failure.rank for failure in error.failures if failure.kind == "died"}
        assert died, "no death was announced"
        self.lose()

    @contextlib.contextmanager
    def few_descriptors(self) -> Iterator[None]:
        """What runs inside can open a handful of files."""
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + self.rng.randint(0, 12), before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)

    def cell_few_descriptors(self) -> None:
        with contextlib.suppress(RankError, LaunchError), self.few_descriptors():
            self.anything()

    def cell_few_descriptors_at_launch(self) -> None:
        try:
            with self.few_descriptors():
                self.ranks.restart()
        except LaunchError:
            assert not self.ranks.usable
            self.ranks.stop()
            self.launch()
        else:
            self.fresh()

    def cell_stuck_collective(self) -> None:
        guilty = self.rng.randrange(len(self.pids))
        with self.fails([guilty], "ValueError: boom"):
            self.ranks.exec(f"if rank == {guilty}: raise ValueError('boom')\ndist.barrier()", printer=Kept([]))

    def cell_killed(self) -> None:
        victim = self.rng.randrange(len(self.pids))
        number = self.rng.choice([9, 9, 11, 6, int(signal.SIGRTMIN) + self.rng.randrange(20)])
        after = self.rng.choice(("time.sleep(60)", "dist.barrier()", "while True: display(1)", "1"))
        source = f"if rank == {victim}: os.kill(os.getpid(), {number}); time.sleep(60)\n{after}"
        if after == "1" and len(self.pids) > 1:
            source = source.replace("\n1", "\ntime.sleep(60)")
        name = "SIGKILL" if number == 9 else ""
        with self.fails([victim], f"was killed by {name}", "died"):
            self.ranks.exec(source, printer=Kept([]))
        self.lose()

    def cell_leaves(self) -> None:
        victim, status = self.rng.randrange(len(self.pids)), self.rng.randrange(256)
        with self.fails([victim], f"exited with code {status}", "died"):
            self.ranks.exec(f"if rank == {victim}: os._exit({status})\ntime.sleep(60)", printer=Kept([]))
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
            self.ranks.exec(source, printer=Kept([]))
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
        until = time.monotonic() + 20
        while self.ranks.usable and time.monotonic() < until:
            time.sleep(0.01)
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
        until = time.monotonic() + 20
        while self.ranks.usable and time.monotonic() < until:
            time.sleep(0.01)
        self.lose()

    def cell_stopped_for_a_while(self) -> None:
        victim = psutil.Process(self.rng.choice(self.pids))
        victim.suspend()
        timer = threading.Timer(self.rng.random() * 0.3, victim.resume)
        timer.start()
        try:
            results = self.ranks.exec("t = torch.ones(1); dist.all_reduce(t); rank", printer=Kept([]))
        finally:
            timer.join()
        assert [result.text for result in results] == [str(rank) for rank in range(len(self.pids))]

    def cell_forks(self) -> None:
        end = self.rng.choice(("1", "raise ValueError(1)", "display(2)", "time.sleep(0.1)", "os.kill(os.getpid(), 9)"))
        source = f"pid = os.fork()\nif pid == 0: {end}\nos.getpid()"
        assert [int(str(result.text)) for result in self.ranks.exec(source, printer=Kept([]))] == self.pids
        assert all(self.ranks.eval("os.waitpid(pid, 0)[0] == pid"))

    def cell_runs_processes(self) -> None:
        self.ranks.exec(
            "import multiprocessing\nwith multiprocessing.get_context('fork').Pool(2) as pool:\n"
            "    squares = pool.map(abs, range(-5, 5))\nassert sum(squares) == 25"
        )

    def cell_starts_daemons(self) -> None:
        self.ranks.exec("import subprocess; d = subprocess.Popen(['sleep', '600'], start_new_session=True)")
        self.started += [psutil.Process(pid) for pid in self.ranks.eval("d.pid")]

    def cell_pushes_and_pulls(self) -> None:
        value = self.random_value(3)
        ranks = self.some_ranks()
        self.ranks.push({"sent": value}, ranks=ranks)
        for back in self.ranks.pull("sent", ranks=ranks):
            assert same(back, value), f"{back!r} came back for {value!r}"

    def random_value(self, depth: int) -> Any:
        kind = self.rng.randrange(9 if depth else 6)
        if kind == 0:
            return self.rng.choice([None, True, 1.5, 2**70, "text \ud800"])
        if kind == 1:
            return self.rng.randbytes(self.rng.choice([0, 10, 100_000]))
        if kind == 2:
            return torch.randint(0, 100, (self.rng.choice([0, 3, 400_000]),))  # the last in shared memory
        if kind == 3:
            return torch.ones(self.rng.choice([2, 2000]), 300).t()
        if kind == 4:
            return torch.nn.Parameter(torch.zeros(self.rng.choice([1, 300_000])))
        if kind == 5:
            return range(self.rng.randrange(10))
        items = [self.random_value(depth - 1) for _ in range(self.rng.randrange(4))]
        return {6: items, 7: tuple(items), 8: dict(enumerate(items))}[kind]

    def cell_cannot_travel(self) -> None:
        ranks = list(range(len(self.pids)))
        with self.fails(ranks):
            self.ranks.eval("(x for x in [1])")

    def cell_asks_meanwhile(self) -> None:
        """Another thread looks at everything while a cell runs."""
        over, errors = threading.Event(), []

        def look() -> None:
            try:
                while not over.is_set():
                    self.ranks.status(), repr(self.ranks), self.ranks.complete("wor"), self.ranks.output(3)
                    self.ranks.posted("nothing")
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            self.cell_value()
            self.ranks.exec("time.sleep(0.05)")
        finally:
            over.set()
            thread.join()
        assert not errors, errors

    def cell_from_two_threads(self) -> None:
        answers: dict[int, Any] = {}

        def ask(number: int) -> None:
            answers[number] = self.ranks.eval(f"({number}, rank)")

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == {n: [(n, rank) for rank in range(len(self.pids))] for n in range(3)}

    def cell_restarts(self) -> None:
        self.ranks.restart()
        self.fresh()

    def cell_launches_again(self) -> None:
        self.ranks.stop()
        self.launch()

    def cell_new_group(self) -> None:
        self.ranks.exec("g = dist.new_group([0]); h = dist.new_group(list(range(world_size)))\ndist.barrier(group=h)")

    def play(self, cells: int) -> Counter[str]:
        """Plays so many cells; how often each kind was played."""
        kinds: list[Callable[[], None]] = [getattr(self, name) for name in dir(self) if name.startswith("cell_")]
        weights = [1 if kind.__name__ in RARE else 3 for kind in kinds]
        played: Counter[str] = Counter()
        for _ in range(cells):
            kind = self.rng.choices(kinds, weights)[0]
            self.history.append(kind.__name__)
            faulthandler.dump_traceback_later(HANG_S, exit=False)
            kind()
            self.check()
            played[kind.__name__] += 1
        return played


def same(first: Any, second: Any) -> bool:
    """Whether two values, tensors among them, are equal and of one type."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return bool(first == second)


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
        until = time.monotonic() + 5
        while (now := (me.num_fds(), threading.active_count())) != before and time.monotonic() < until:
            time.sleep(0.02)
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
