"""`recshard demo` in a terminal, as a newcomer runs it: first result, end, and the time left that its bar shows."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recshard_lab.lab.demo.training import SHORT_SCHEMES

FIRST_S, END_S, RIGHT_TO = 20.0, 60.0, 0.3
MAIN = "from recshard_lab.cli import main; main()"


def in_terminal(*arguments: str, columns: int) -> tuple[int, list[tuple[float, str]]]:
    """Exit code, and the text that came each time, with the seconds since the start."""
    ours, theirs = pty.openpty()
    began = time.perf_counter()
    program = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"},
    )
    os.close(theirs)
    shown = []
    while select.select([ours], [], [], 120)[0]:
        try:
            text = os.read(ours, 1 << 16)
        except OSError:  # the program closed the terminal
            break
        if not text:
            break
        words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode(errors="replace"))
        shown.append((time.perf_counter() - began, words))
    os.close(ours)
    return program.wait(30), shown


@pytest.mark.clock
@pytest.mark.real_data
def test_the_demo_shows_a_result_in_20_s_and_ends_in_60_s_and_its_time_left_is_right(
    movielens_path: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.html"
    code, shown = in_terminal("demo", "--data", str(movielens_path), "--out", str(report), columns=80)
    text = "".join(words for _, words in shown)
    assert code == 0, text
    assert shown[-1][0] < END_S
    assert next(at for at, words in shown if "test AUC" in words) < FIRST_S
    for name in ("unsharded", *SHORT_SCHEMES, "planner"):
        assert re.search(rf"{name} +test AUC 0\.77\d\d", text), name
    assert "yes random split: test AUCs differ by " in text
    assert "Trained for 2 epochs." in text
    assert "split by time. Run recshard demo --full." in " ".join(text.split())
    page = report.read_text()
    assert all(name.replace("_", "-") in page.lower() for name in SHORT_SCHEMES)

    predictions = [(at, int(left)) for at, words in shown for left in re.findall(r"(\d+) s left", words)]
    end = next(at for at, left in predictions if left == 0 and at > predictions[-1][0] - 1)
    wrong = [(at, left, end - at) for at, left in predictions if abs(left - (end - at)) > RIGHT_TO * (end - at) + 1]
    assert len(predictions) > 50
    assert len(wrong) <= 0.05 * len(predictions), wrong  # the bar shows whole seconds
