"""Lines of ranks: whole, marked, common ones once; of output that nobody reads fast enough, some are counted."""

from __future__ import annotations

import re
import time
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.launcher import LineMerger, Ranks, RanksInterrupted
from recshard_lab.launcher.lines import LINE_CHARS, Printer
from recshard_lab.launcher.wires import IDLE_CHARS, Event, Inbox
from tests.launched import launched
from tests.launcher.waiting import interrupt, then
from tests.patience import wait_until

pytestmark = pytest.mark.timeout(60)

FLOOD = """
import threading, time
def flood():
    while not enough: print(1000 * "x")
enough = False
thread = threading.Thread(target=flood, daemon=True)
thread.start()
"""


ranks = launched(2)


def test_output_and_displays_between_cells_are_bounded_and_the_next_cell_counts_what_is_dropped(
    ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ranks._world is not None
    inbox = ranks._world.wires.inbox
    for rank, show in enumerate(("display", "print")):
        ranks.exec(FLOOD.replace("print(", f"{show}("), ranks=[rank])
        capsys.readouterr()
        wait_until(lambda: inbox._dropped, 30)  # since then, more than the limit has been printed
        most = max(inbox._chars for _ in range(1000))
        ranks.exec("enough = True; thread.join();", ranks=[rank])
        assert most <= 2 * IDLE_CHARS
    words = r"rank 1 printed ([\d,]+) more lines \(([\d,]+) characters\) between cells"
    shown = re.search(words, capsys.readouterr().err)
    assert shown is not None
    lines, characters = (int(number.replace(",", "")) for number in shown.groups())
    assert lines == pytest.approx(characters / 1001, abs=1)
    ranks.exec("1")
    assert "between cells" not in capsys.readouterr().err  # said once


class Slow(Printer):
    """A page that takes 4 MB a second."""

    lines, most = 0, 0

    def feed(self, rank: int, stream: str, text: str) -> None:
        time.sleep(len(text) / (1 << 22))
        self.lines += text.count("\n")
        self.most = max(self.most, psutil.Process().memory_info().rss)


@pytest.mark.nightly
def test_a_slow_reader_makes_ranks_wait_and_loses_nothing(ranks: Ranks) -> None:
    before = psutil.Process().memory_info().rss
    printer = Slow([0])
    ranks.exec("for _ in range(30_000): print(1000 * 'x')", ranks=[0], printer=printer)
    assert printer.lines == 30_000
    assert printer.most - before < 25 << 20


def test_a_slow_reader_does_not_delay_a_stop(ranks: Ranks) -> None:
    with pytest.raises(RanksInterrupted):
        ranks.exec(f"{then(ranks, ranks.interrupt)}while True: print(1000 * 'x')", printer=Slow([0, 1]))


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


def test_little_is_shown_after_a_stop_however_fast_ranks_print(ranks: Ranks) -> None:
    class Counted(Printer):
        shown = at_stop = 0

        def emit(self, ranks: tuple[int, ...], stream: str, content: object) -> None:
            self.shown += len(ranks) * len(str(content))
            if self.shown > 100_000 and not self.at_stop:
                self.at_stop = self.shown
                interrupt()

    printer = Counted([0, 1])
    with pytest.raises(RanksInterrupted, match="stopped on all 2 ranks"):
        ranks.exec("while True: print('x' * 50)", printer=printer)
    assert 0 < printer.shown - printer.at_stop < 3_500_000  # 4 MB took longer than the patience of a second stop


class Collected(LineMerger):
    def __init__(self, ranks: range) -> None:
        super().__init__(ranks)
        self.lines: list[tuple[tuple[int, ...], str]] = []
        self.bars: list[tuple[int, str]] = []

    def emit(self, ranks: tuple[int, ...], stream: str, content: Any) -> None:
        self.lines.append((ranks, content))

    def progress(self, rank: int, text: str) -> None:
        self.bars.append((rank, text))


WORDS = st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=5)


@given(texts=st.lists(WORDS, min_size=1, max_size=4), data=st.data())
def test_every_rank_can_read_its_own_lines_in_its_own_order(texts: list[list[str]], data: st.DataObject) -> None:
    merger = Collected(range(len(texts)))
    left = ["".join(f"{line}\n" for line in lines) for lines in texts]
    while any(left):
        rank = data.draw(st.sampled_from([r for r, text in enumerate(left) if text]))
        cut = data.draw(st.integers(1, len(left[rank])))
        merger.feed(rank, "stdout", left[rank][:cut])
        left[rank] = left[rank][cut:]
        if not left[rank]:
            merger.finish(rank)
    merger.flush(everything=True)
    for rank, lines in enumerate(texts):
        assert [content for ranks, content in merger.lines if rank in ranks] == lines


@given(lines=WORDS, size=st.integers(1, 4))
def test_what_all_ranks_print_is_shown_once(lines: list[str], size: int) -> None:
    merger = Collected(range(size))
    for rank in range(size):
        merger.feed(rank, "stdout", "".join(f"{line}\n" for line in lines))
        merger.finish(rank)
    assert merger.lines == [(tuple(range(size)), line) for line in lines]


def shown(size: int, *fed: tuple[int, str]) -> Collected:
    """What a merger of so many ranks has shown of these texts when the cell ends."""
    merger = Collected(range(size))
    for rank, text in fed:
        merger.feed(rank, "stdout", text)
    for rank in range(size):
        merger.finish(rank)
    return merger


def test_a_common_line_after_differing_ones_is_still_shown_once() -> None:
    lines = shown(3, *((rank, f"rank {rank}\n") for rank in range(3)), *((rank, "same\n") for rank in range(3))).lines
    assert lines[-1] == ((0, 1, 2), "same")
    assert len(lines) == 4


def test_a_progress_bar_is_shown_as_it_moves_and_its_last_state_is_a_line() -> None:
    merger = shown(1, (0, "\r 0%|   |"), (0, "\r50%|#  |"), (0, "\r100%|###|\n"), (0, "no end"))
    assert merger.bars == [(0, " 0%|   |"), (0, "50%|#  |"), (0, "")]
    assert merger.lines == [((0,), "100%|###|"), ((0,), "no end")]


def test_a_long_line_is_shown_with_a_count_of_what_is_cut() -> None:
    whole, text = "y" * LINE_CHARS, "x" * 65_536
    lines = shown(1, (0, f"{whole}\n"), *[(0, text)] * 1600, (0, "\nnext\n")).lines  # 100 MB
    cut = 1600 * len(text) - LINE_CHARS
    words = f" ... [{cut:,} more characters are not shown]"
    assert [line for _, line in lines] == [whole, "x" * LINE_CHARS + words, "next"]


@pytest.mark.clock
def test_long_lines_and_many_lines_that_differ_between_ranks_are_taken_in_linear_time() -> None:
    began = time.process_time()
    shown(1, *[(0, "x" * 65_536)] * 1600)
    many = shown(2, *((rank, "".join(f"rank {rank} step {step}\n" for step in range(30_000))) for rank in range(2)))
    assert time.process_time() - began < 8
    assert len(many.lines) == 60_000


@given(data=st.data())
def test_line_ends_of_windows_are_line_ends_wherever_the_text_is_split(data: st.DataObject) -> None:
    text = "one\r\n\r\ntwo\r\n"
    merger = Collected(range(1))
    while text:
        size = data.draw(st.integers(1, len(text)))
        merger.feed(0, "stdout", text[:size])
        text = text[size:]
    merger.finish(0)
    assert [line for _, line in merger.lines] == ["one", "", "two"]
