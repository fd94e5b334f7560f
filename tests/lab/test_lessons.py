"""Guesses and exercises: what is printed, what counts, and that a wrong answer never raises."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import recshard_lab as rs
from recshard_lab import lab
from recshard_lab.lab import lessons
from tests.lab.test_magics import Notebook


@pytest.fixture(autouse=True)
def no_score() -> Iterator[None]:
    lessons._score.clear()
    yield
    lessons._score.clear()


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("mine", "truth", "unit", "line"),
    [
        (24, 29, "ids", "You guessed 24 ids. It is 29 ids: 17% off. Score in this notebook: 1 of 1 within 20%."),
        (0.8, 1.0, "ms", "You guessed 0.8 ms. It is 1 ms: 20% off. Score in this notebook: 1 of 1 within 20%."),
        (46, 20, "%", "You guessed 46%. It is 20%: 130% off. Score in this notebook: 0 of 1 within 20%."),
        (128, 2, "x", "You guessed 128x. It is 2x: 64 times too high. Score in this notebook: 0 of 1 within 20%."),
        (2.5, 10, "", "You guessed 2.5. It is 10: 4.0 times too low. Score in this notebook: 0 of 1 within 20%."),
        (-1, 10, "", "You guessed -1. It is 10: 110% off. Score in this notebook: 0 of 1 within 20%."),
        (float("nan"), 10, "", "You guessed nan. It is 10: nan off. Score in this notebook: 0 of 1 within 20%."),
        ("row_wise", "table_wise", "", "You guessed row_wise. It is table_wise: not the same."),
        ("twenty", 29, "ids", "You guessed twenty. It is 29 ids: your guess is not a number."),
        (np.float32(2.5), torch.tensor(2.5), "GB", "You guessed 2.5 GB. It is 2.5 GB: 0% off."),
    ],
)
def test_a_guess_prints_one_line(
    mine: Any, truth: Any, unit: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.guess(mine, truth, unit)
    (told,) = printed(capsys).splitlines()
    assert told.startswith(line)
    assert "within 20%." in told


def test_no_guess_shows_the_truth_and_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    lab.guess(None, 1234567, "rows")
    assert printed(capsys) == "No guess yet. It is 1,234,567 rows.\n"
    lab.guess(1, 1)
    assert "1 of 1" in printed(capsys)


def test_each_guess_of_a_notebook_counts_once_with_its_last_value() -> None:
    """JupyterLab names the cell of each request. The file of a cell that runs again is another if its text is."""
    notebook = Notebook()

    def run(cell: str, source: str) -> str:
        content = {"code": f"from recshard_lab import lab\n{source}", "silent": False, "stop_on_error": True}
        message = notebook.client.session.msg("execute_request", content, metadata={"cellId": cell})
        notebook.client.shell_channel.send(message)
        return notebook.hear(message["header"]["msg_id"]).stdout

    try:
        assert "Score in this notebook: 0 of 1 " in run("one", "lab.guess(1, 10)")
        assert "Score in this notebook: 1 of 2 " in run("two", "lab.guess(10, 10)")
        assert "Score in this notebook: 2 of 2 " in run("one", "lab.guess(9, 10)")
        assert "Score in this notebook: 2 of 3 " in run("two", "lab.guess(10, 10)\nlab.guess(1, 10)")
    finally:
        notebook.close()


def equal(mine: Any, truth: Any, capsys: pytest.CaptureFixture[str]) -> bool:
    lab.check(mine, truth)
    return printed(capsys) == "Correct.\n"


SHARDS = [rs.Shard(3, (0, 1000), (0, 16)), rs.Shard(1, (1000, 1682), (0, 16))]


@pytest.mark.parametrize(
    ("mine", "truth", "same"),
    [
        (2.6, 2.56, True),
        (2.5, 2.56, False),
        (1e-9, 0, False),
        (True, 1, False),
        ([0, 4, 4, 7], (0, 4, 4, 7), True),
        ([0, 400], [0, 401], False),  # whole numbers in a list are exact
        ([0, 4], [0, 4, 7], False),
        (torch.tensor([1, 2]), [1, 2], True),
        ({"a": np.array([1.0])}, {"a": [1]}, True),
        ("3", 3, False),
        (SHARDS[::-1], SHARDS, False),
        (None, None, False),
    ],
)
def test_answers_are_compared_by_value(mine: Any, truth: Any, same: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert equal(mine, truth, capsys) == same


def test_what_a_check_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*args: Any, **kwargs: Any) -> str:
        lab.check(*args, **kwargs)
        return printed(capsys).removesuffix("\n")

    assert told(None, 2.56, "Count bytes.", "GB") == "Not answered yet. One solution: 2.56 GB"
    assert told(None, 2.56, solution="a / 8") == "Not answered yet. One solution: a / 8"
    assert told(None, lambda mine: True) == "Not answered yet."
    assert told(None, lambda mine: True, "Count bytes.") == "Not answered yet. Count bytes."
    assert told(3.1, 2.56, "Did you count bytes?", "GB") == "You gave 3.1 GB, expected 2.56 GB. Did you count bytes?"
    assert told(4, lambda mine: mine > 3) == "Correct."
    assert told(4, lambda mine: np.bool_(True)) == "Correct."
    assert told(3, lambda mine: mine > 3, "Count again.") == "Not correct. Count again."
    assert told(3, lambda mine: mine > 3 or "It is too small.") == "Not correct. It is too small."
    raised = told("3", lambda mine: mine > 3, "Give a number.")
    assert raised.startswith("Not correct. Your answer raised TypeError: '>' not supported")
    assert raised.endswith("Give a number.")


def test_a_check_that_returns_no_verdict_is_an_error_of_the_notebook() -> None:
    with pytest.raises(TypeError, match=r"returned None: it must return True, False or a text. Fix: "):
        lab.check(3, lambda mine: None)
