"""Odd exceptions, displays, streams and forks in cells: the rank keeps its variables, and the cell shows the reason."""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from unittest.mock import MagicMock

import psutil
import pytest

from recshard_lab.launcher import RankError, Ranks
from recshard_lab.launcher.cell import bundle
from recshard_lab.launcher.channel import Channel
from recshard_lab.launcher.rank import DEPTH
from tests.launched import launched
from tests.launcher.waiting import left
from tests.patience import scaled, wait_until

pytestmark = pytest.mark.timeout(60)


pair = launched(2)


@pytest.fixture(autouse=True)
def _survives(pair: Ranks) -> Iterator[None]:
    """Every test leaves the ranks as they were: same processes, same variables, no answer of another cell."""
    if not pair.usable:
        pair.restart()  # after a failed test
    pair.exec("kept = rank + 1\nimport os, sys, time")
    pids = pair.pids
    yield
    assert pair.usable
    assert pair.pids == pids
    assert [result.text for result in pair.exec("kept")] == ["1", "2"]
    assert pair.run(os.getpid) == pids


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("class E(Exception):\n def __str__(self): raise ValueError(1)\nraise E", "E: <its __str__ raised ValueError>"),
        ("class S(str): 0\nclass E(Exception):\n def __str__(self): return S('text')\nraise E", "E: text"),
        ("class E(BaseException):\n def __str__(self): raise self\nraise E", "E: <its __str__ raised E>"),
        ("class S(str): 0\nclass E(Exception): 0\nE.__name__ = S('Odd')\nraise E('x')", "Odd: x"),
        ("class M(type):\n __name__ = property(lambda c: 1 / 0)\nclass E(Exception, metaclass=M): 0\nraise E", "E"),
        ("e = ValueError('x'); e.__notes__ = 5\nraise e", "ValueError: x"),
        ("raise BaseExceptionGroup('many', [SystemExit(1)])", "BaseExceptionGroup: many (1 sub-exception)"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_an_odd_exception_is_reported_as_text(pair: Ranks, cell: str, words: str) -> None:
    with pytest.raises(RankError) as caught:
        pair.exec(cell)
    assert caught.value.headline() == f"all 2 ranks raised {words}"


REPRS = [
    ("_repr_html_", "lambda s: (lambda: 0)", "_repr_html_: TypeError: expected str or bytes, got function"),
    ("_repr_json_", "lambda s: {'a': [s]}", "_repr_json_: TypeError: expected text or JSON values, got X"),
    ("_repr_json_", "lambda s: {1: 2}", "_repr_json_: TypeError: expected str as the keys of JSON values"),
    ("_repr_mimebundle_", "lambda s: ()", "_repr_mimebundle_: TypeError: expected a dict, got tuple"),
    ("_repr_mimebundle_", "lambda s: {s: 'x'}", "_repr_mimebundle_: TypeError: expected text or JSON values, got X"),
    ("__repr__", "lambda s: 1 / 0", "__repr__: ZeroDivisionError: division by zero"),
    ("__repr__", "lambda s: 5", "__repr__: TypeError: __repr__ returned non-string (type int)"),
    ("__getattr__", "lambda s, name: 1 / 0", "_repr_html_: ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize(("method", "body", "words"), REPRS)
def test_a_representation_that_cannot_be_shown_is_named(pair: Ranks, method: str, body: str, words: str) -> None:
    for result in pair.exec(f"class X: 0\nX.{method} = {body}\nX()"):
        assert set(result.data) == {"text/plain"}
        assert f"(X.{words})" in str(result.text)


def test_classes_of_a_rank_do_not_travel_in_what_it_shows(pair: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    source = "class S(str): 0\nclass N(int): 0\nclass D(dict): 0\nclass X:\n def __repr__(self): return S('text')\n"
    source += " def _repr_mimebundle_(self): return {S('a/json'): D(n=N(2), s=S('s'), l=(1.5, None, True))}\nX()"
    for result in pair.exec(source):
        assert result.data == {"a/json": {"n": 2, "s": "s", "l": [1.5, None, True]}, "text/plain": "text"}
    pair.exec("display(X())")
    assert capsys.readouterr().out == "[all] text\n"
    mock = MagicMock()  # has every attribute
    assert bundle(mock) == {"text/plain": repr(mock)}


@pytest.mark.parametrize(
    "replaced",
    ["None", "Tee()", "type('Bad', (), {'write': print, 'flush': lambda s: sys.exit(2)})()", "0; del sys.stdout"],
)
def test_any_object_may_be_the_output_stream(pair: Ranks, replaced: str) -> None:
    pair.exec("class Tee:\n def write(self, text): pass\nbefore = sys.stdout, sys.stderr")
    pair.exec(f"sys.stdout = sys.stderr = {replaced}")
    assert [result.text for result in pair.exec("display(1)\nrank")] == ["0", "1"]
    pair.exec("sys.stdout, sys.stderr = before")


@pytest.mark.parametrize(
    ("cell", "undo"),
    [
        ("globals()[1] = 2", "del globals()[1]"),
        ("class S(str): 0\nglobals()[S('odd')] = 2", "del odd"),
        ("class X:\n __class__ = property(lambda self: 1 / 0)\nx = X()", "del x"),
        ("sys.setrecursionlimit(40)", "sys.setrecursionlimit(1000)"),
    ],
)
def test_any_name_and_value_may_be_a_variable(pair: Ranks, cell: str, undo: str) -> None:
    pair.exec(cell)
    assert "kept" in pair.complete("ke")
    pair.exec(undo)


LOWEST_LIMIT = """
for limit in range(1, 99):
    try: sys.setrecursionlimit(limit); break
    except RecursionError: pass
"""


def test_a_rank_answers_after_a_cell_that_left_the_lowest_recursion_limit(pair: Ranks) -> None:
    with suppress(RankError):  # a RecursionError: the end of the cell needs more
        pair.exec(LOWEST_LIMIT)
    assert pair.eval("sys.getrecursionlimit()") == [DEPTH] * 2
    pair.exec("sys.setrecursionlimit(1000)")


def test_a_signal_handler_may_raise_between_cells(pair: Ranks) -> None:
    pair.exec("import signal\nsignal.signal(signal.SIGUSR1, lambda *_: 1 / 0)\nme = os.getpid()")
    for pid in pair.pids:
        os.kill(pid, signal.SIGUSR1)
    assert pair.pull("me") == pair.pids


@pytest.fixture
def signals(pair: Ranks) -> Iterator[None]:
    """Thousands of signals a second to each rank, whose handler raises."""
    pair.exec(
        "import signal, threading\nsignal.signal(signal.SIGUSR2, lambda *_: 1 / 0)\non = threading.Event()\n"
        "def kill():\n    while not on.wait(1e-3): os.kill(os.getpid(), signal.SIGUSR2)\n"
        "errors = os.dup(2)\nos.dup2(os.open(os.devnull, os.O_WRONLY), 2)"  # the tracebacks
    )
    with suppress(RankError):  # the first signals may arrive in the cell that starts them
        pair.exec("killer = threading.Thread(target=kill); killer.start()")
    yield
    for _ in range(20):  # a signal may end this cell before it does anything
        with suppress(RankError):
            pair.exec("on.set()\nkiller.join()")
            break
    pair.exec("killer.join()\nos.dup2(errors, 2)\nsignal.signal(signal.SIGUSR2, signal.SIG_DFL)")


@pytest.mark.usefixtures("signals")
def test_signals_whose_handler_raises_lose_no_message_and_end_no_rebuild_of_groups(pair: Ranks) -> None:
    """Thousands of signals, so that some arrive between taking a message and beginning its cell."""
    came = 0
    for _ in range(100):
        with suppress(RankError):  # the handler has raised while the cell ran
            came += len(pair.exec("os.getpid()", timeout_s=scaled(10)))
        assert pair.usable
    assert came > 0
    for _ in range(3):
        with pytest.raises(RankError, match="Process groups were rebuilt"):
            pair.exec("if rank == 1: raise ValueError('boom')\ndist.barrier()")


def test_a_profiler_that_raises_and_a_report_that_cannot_be_made_are_errors_of_their_cell(pair: Ranks) -> None:
    pair.exec("import recshard_lab.launcher.groups as inside; count = inside.group_count")
    for cell in ("sys.setprofile(lambda *_: 1 / 0)", "inside.group_count = lambda: 1 / 0"):
        with pytest.raises(RankError, match="ZeroDivisionError"):
            pair.exec(cell)
    pair.exec("inside.group_count = count")


def test_a_time_limit_ends_a_message_without_end_and_a_rank_without_descriptors(pair: Ranks) -> None:
    pair.exec("import resource; limits = resource.getrlimit(resource.RLIMIT_NOFILE)")
    for cell in (
        "class E(Exception):\n def __str__(self): time.sleep(60)\nraise E",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))\ntime.sleep(60)",
    ):
        with pytest.raises(RankError, match=r"time limit of 0\.3 s"):
            pair.exec(cell, timeout_s=0.3)
    pair.exec("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")


def test_a_cell_may_fork_and_the_child_leaves_when_it_comes_back(
    pair: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        (first, second) = pair.exec("print('once', end='')\npid = os.fork()\nif not pid: print(', child')\nos.getpid()")
        assert [int(str(first.text)), int(str(second.text))] == pair.pids
        assert pair.eval("os.waitpid(pid, 0)[1]") == [0, 0]
        assert capsys.readouterr().out.count("once") <= 2  # flushed before the fork, not once more by the child


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [("raise ValueError('boom')", 1, "boom"), ("sys.exit('a reason')", 1, "a reason"), ("display(7)", 0, "7")],
)
def test_a_fork_ends_with_the_status_of_its_end(pair: Ranks, end: str, status: int, words: str) -> None:
    pair.exec(f"pid = os.fork()\nif pid == 0: {end}")
    assert pair.eval("os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])") == [status] * 2
    wait_until(lambda: words in "\n".join(pair.output(4)))  # what the forks printed may come later


def test_a_fork_has_no_channel_and_posts_nothing(pair: Ranks) -> None:
    pair.exec(
        "from recshard_lab.launcher import board\n"
        "board.post('where', 'rank')\n"
        "here = os.readlink(f'/proc/self/fd/{board._rank.channel.sock.fileno()}')\n"
        "read, write = os.pipe()\n"
        "if (pid := os.fork()) == 0:\n"
        "    board.post('where', 'fork')\n"
        "    names = [f'/proc/self/fd/{n}' for n in os.listdir('/proc/self/fd')]\n"
        "    links = [os.readlink(name) for name in names if os.path.lexists(name)]\n"
        "    os.write(write, b'still there' if here in links else b'closed')\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0); seen = os.read(read, 99).decode(); os.close(read); os.close(write)"
    )
    assert pair.pull("seen") == ["closed"] * 2
    assert pair.posted("where") == ["rank"] * 2


def test_processes_and_loaders_of_multiprocessing_work_in_ranks(
    pair: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.exec(
        "import multiprocessing\n"
        "context = multiprocessing.get_context('fork')\n"
        "def square(x): print('at work', flush=True); return x * x\n"
        "with context.Pool(2) as pool: squares = pool.map(square, range(4))\n"
        "class Ids(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index): return index + 10 * dist.get_rank()\n"
        "loaded = [int(x) for x in torch.utils.data.DataLoader(Ids(), batch_size=None, num_workers=2)]"
    )
    assert pair.pull("squares") == [[0, 1, 4, 9]] * 2
    assert pair.pull("loaded") == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert capsys.readouterr().out == "[all] at work\n" * 4
    children = [child for pid in pair.pids for child in psutil.Process(pid).children()]
    assert not left(children)


def test_a_message_that_breaks_off_leaves_no_descriptor_open() -> None:
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/dev/fd"))
    channel, read = Channel(ours), os.open(os.devnull, os.O_RDONLY)
    start = struct.pack("!IQ", 5, 100)  # a header and a payload that do not follow
    socket.send_fds(theirs, [start], [read])
    os.close(read)
    assert channel.receive_some() == []
    channel.close()
    assert len(os.listdir("/dev/fd")) == before - 1
    theirs.close()
