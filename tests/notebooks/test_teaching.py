"""The teacher's page and the map say what the notebooks are: which there are, their titles, exercises and pictures."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks import benchmark_named

FOLDER = Path(__file__).parents[2] / "notebooks"
PAGE = (FOLDER / "TEACHING.md").read_text()
TIMES = re.findall(r"^\| \[(.+?)\]\((\S+?\.ipynb)\) \| (\d+) s \| (\d+) min", PAGE, re.MULTILINE)
ROWS = {name: title for title, name, _, _ in TIMES}
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[Any]:
    return list(nbformat.read(FOLDER / name, as_version=4).cells)


def test_it_lists_every_notebook_and_no_other() -> None:
    assert sorted(ROWS) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_titles_are_those_of_the_notebooks(name: str) -> None:
    heading = cells(name)[0].source.splitlines()[0].removeprefix("# ")
    assert ROWS[name] == f"{name[:2]} {heading}"


@pytest.mark.parametrize("name", NOTEBOOKS[1:])
def test_every_exercise_has_an_answer_in_a_line(name: str) -> None:
    section = re.split(rf"^### {re.escape(ROWS[name])}$", PAGE, flags=re.MULTILINE)[1].split("\n#")[0]
    asked = [cell for cell in cells(name) if "exercise" in cell.metadata.get("tags", [])]
    answers = section.split("Answers:")[1]
    assert re.findall(r"\*\*([a-z])\*\*", answers) == [chr(ord("a") + i) for i in range(len(asked))]
    assert section.count("\n- *") >= 3  # what to ask, and what answers tell


def test_each_lesson_is_as_long_as_it_says() -> None:
    minutes: dict[str, int] = defaultdict(int)
    for day, each in re.findall(r"^\| (\d|one) \| (\d+) \|", PAGE, re.MULTILINE):
        minutes[day] += int(each)
    assert minutes == {"1": 90, "2": 90, "3": 90, "4": 90, "one": 90}


def test_the_map_shows_every_notebook_and_its_times() -> None:
    drawn = (FOLDER / "images" / "00_map.svg").read_text()
    listed = cells("00_index.ipynb")[0].source
    for _, name, seconds, minutes in TIMES:
        if name != "00_index.ipynb":
            assert f"({name})" in listed
            assert f"{seconds} s to run, {minutes} min in class" in drawn, "python notebooks/images/boxes.py"
            assert name[:2] in drawn


def test_the_command_that_prints_the_times_is_there() -> None:
    assert "`recshard bench notebooks`" in PAGE
    assert benchmark_named("notebooks").about.startswith("Seconds that each notebook takes")
    with pytest.raises(ValueError, match="no notebook has '99'"):
        benchmark_named("notebooks").run(only=["99"])
