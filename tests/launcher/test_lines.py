"""Whole lines, marked by rank, common ones once, each rank's order kept, nothing lost."""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.launcher import LineMerger
from recshard_lab.launcher.lines import LINE_CHARS


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


def test_a_common_line_after_differing_ones_is_still_shown_once() -> None:
    merger = Collected(range(3))
    for rank in range(3):
        merger.feed(rank, "stdout", f"rank {rank}\n")
    for rank in range(3):
        merger.feed(rank, "stdout", "same\n")
        merger.finish(rank)
    assert merger.lines[-1] == ((0, 1, 2), "same")
    assert len(merger.lines) == 4


def test_a_progress_bar_is_shown_as_it_moves_and_its_last_state_is_a_line() -> None:
    merger = Collected(range(1))
    for text in ("\r 0%|   |", "\r50%|#  |", "\r100%|###|\n"):
        merger.feed(0, "stderr", text)
    merger.finish(0)
    assert merger.bars == [(0, " 0%|   |"), (0, "50%|#  |"), (0, "")]
    assert merger.lines == [((0,), "100%|###|")]


def test_a_line_without_an_end_is_shown_when_the_cell_ends() -> None:
    merger = Collected(range(1))
    merger.feed(0, "stdout", "almost")
    assert merger.lines == []
    merger.finish(0)
    assert merger.lines == [((0,), "almost")]


def test_a_long_line_is_taken_in_linear_time_and_shown_with_a_count_of_what_is_cut() -> None:
    merger = Collected(range(1))
    text = "x" * 65_536
    began = time.process_time()
    for _ in range(1600):  # 100 MB
        merger.feed(0, "stdout", text)
    merger.feed(0, "stdout", "\nnext\n")
    merger.finish(0)
    assert time.process_time() - began < 3
    ((_, line), (_, after)) = merger.lines
    cut = 1600 * len(text) - LINE_CHARS
    assert line == "x" * LINE_CHARS + f" ... [{cut:,} more characters are not shown]"
    assert after == "next"


def test_a_line_of_exactly_the_limit_is_shown_whole() -> None:
    merger = Collected(range(1))
    merger.feed(0, "stdout", "y" * LINE_CHARS + "\n")
    merger.finish(0)
    assert merger.lines == [((0,), "y" * LINE_CHARS)]


def test_many_lines_that_differ_between_ranks_are_taken_in_linear_time() -> None:
    merger = Collected(range(2))
    began = time.process_time()
    for rank in range(2):
        merger.feed(rank, "stdout", "".join(f"rank {rank} step {step}\n" for step in range(30_000)))
    for rank in range(2):
        merger.finish(rank)
    assert time.process_time() - began < 5
    assert len(merger.lines) == 60_000


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
