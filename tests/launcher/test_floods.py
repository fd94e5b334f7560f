"""Output that nobody reads fast enough: bounded memory, and a count of what is dropped."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from recshard_lab.launcher import Ranks, RanksInterrupted, launch
from recshard_lab.launcher.lines import Printer
from recshard_lab.launcher.wires import IDLE_CHARS, Event, Inbox

pytestmark = pytest.mark.timeout(60)

FLOOD = """
import threading, time
def flood():
    while not enough: print(1000 * "x")
enough = False
thread = threading.Thread(target=flood, daemon=True)
thread.start()
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with launch(2) as running:
        yield running


def test_output_between_cells_is_bounded_and_the_next_cell_counts_what_is_dropped(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.exec(FLOOD, ranks=[1])
    capsys.readouterr()
    before = psutil.Process().memory_info().rss
    time.sleep(2)
    assert psutil.Process().memory_info().rss - before < 100 << 20  # 200 MB a second without a bound
    ranks.exec("enough = True; thread.join();", ranks=[1])
    told = capsys.readouterr().err
    shown = re.search(r"rank 1 printed ([\d,]+) more lines \(([\d,]+) characters\) between cells", told)
    assert shown is not None
    lines, characters = (int(number.replace(",", "")) for number in shown.groups())
    assert lines > 1000
    assert lines == pytest.approx(characters / 1001, abs=1)
    ranks.exec("1")
    assert "between cells" not in capsys.readouterr().err  # said once


def test_displays_between_cells_are_bounded(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.exec(FLOOD.replace("print(", "display("), ranks=[0])
    time.sleep(1)
    ranks.exec("enough = True; thread.join();", ranks=[0])
    assert ranks._world is not None
    assert ranks._world.wires.inbox._chars <= 2 * IDLE_CHARS
    capsys.readouterr()


class Slow(Printer):
    """A page that takes 1 MB a second."""

    lines, most = 0, 0

    def feed(self, rank: int, stream: str, text: str) -> None:
        time.sleep(len(text) / (1 << 22))
        self.lines += text.count("\n")
        self.most = max(self.most, psutil.Process().memory_info().rss)


@pytest.mark.nightly
@pytest.mark.gate
def test_a_slow_reader_makes_ranks_wait_and_loses_nothing(ranks: Ranks) -> None:
    before = psutil.Process().memory_info().rss
    printer = Slow([0])
    ranks.exec("for _ in range(30_000): print(1000 * 'x')", ranks=[0], printer=printer)
    assert printer.lines == 30_000
    assert printer.most - before < 25 << 20


def test_a_slow_reader_does_not_delay_a_stop(ranks: Ranks) -> None:
    threading.Timer(0.5, ranks.interrupt).start()
    with pytest.raises(RanksInterrupted):
        ranks.exec("while True: print(1000 * 'x')", printer=Slow([0, 1]))


def test_a_line_of_100_mb_is_shown_cut(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.exec("import os\nfor _ in range(1600): os.write(1, 65536 * b'x')", ranks=[0])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(" ... [104,757,600 more characters are not shown]")


def test_the_inbox_drops_the_oldest_output_and_nothing_else() -> None:
    inbox = Inbox()
    inbox.put(Event(0, "done", 3, b"answer"))
    for number in range(3):
        inbox.put(Event(number, "stdout", 0, f"{number}\n" + "x" * (IDLE_CHARS // 2 - 3) + "\n"))
    assert inbox.take(0) == Event(0, "dropped", 0, (2, IDLE_CHARS // 2))
    assert inbox.take(0) == Event(0, "done", 3, b"answer")
    assert [inbox.take(0).rank for _ in range(2)] == [1, 2]
    with pytest.raises(queue.Empty):
        inbox.take(0)


def test_little_is_shown_after_a_stop_however_fast_ranks_print(ranks: Ranks) -> None:
    class Counted(Printer):
        shown = at_stop = 0

        def emit(self, ranks: tuple[int, ...], stream: str, content: object) -> None:
            self.shown += len(ranks) * len(str(content))

    printer = Counted([0, 1])

    def stop() -> None:
        printer.at_stop = printer.shown
        ranks.interrupt()

    threading.Timer(1.0, stop).start()
    with pytest.raises(RanksInterrupted, match="stopped on all 2 ranks"):
        ranks.exec("while True: print('x' * 50)", printer=printer)
    assert 0 < printer.shown - printer.at_stop < 3_500_000  # 4 MB took longer than the patience of a second stop
