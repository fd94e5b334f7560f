"""The teacher's page and the map say what the notebooks are: which there are, their titles, exercises and pictures."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
PAGE = (FOLDER / "TEACHING.md").read_text()
TIMES = re.findall(
    r"^\| \[(.+?)\]\((\S+?\.ipynb)\) \| (\d+|\?) s \| (\d+) min \| ([\d.]+|\?) GB \|", PAGE, re.MULTILINE
)
ROWS = {name: title for title, name, *_ in TIMES}
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def cells(name: str) -> list[Any]:
    return list(nbformat.read(FOLDER / name, as_version=4).cells)


def sections() -> dict[str, str]:
    """Heading -> text of what to ask in each lesson, in their order."""
    heads, texts = re.findall(r"^### (.+)$", PAGE, re.MULTILINE), re.split(r"^### .+$", PAGE, flags=re.MULTILINE)[1:]
    return dict(zip(heads, texts, strict=True))


def test_it_lists_every_notebook_in_order_and_no_other() -> None:
    assert list(ROWS) == NOTEBOOKS


def test_times_and_memory_are_measured_for_every_notebook() -> None:
    missing = [name for _, name, seconds, _, gigabytes in TIMES if "?" in seconds + gigabytes]
    assert not missing, "Fix: paste the rows that `recshard bench notebooks` prints"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_titles_are_those_of_the_notebooks(name: str) -> None:
    heading = cells(name)[0].source.splitlines()[0].removeprefix("# ")
    assert ROWS[name] == f"{name[:2]} {heading}"


def test_every_lesson_has_a_section_in_order() -> None:
    assert list(sections()) == [title for title, name, *_ in TIMES if name != "00_index.ipynb"]


@pytest.mark.parametrize("name", NOTEBOOKS[1:])
def test_every_lesson_has_questions_and_an_answer_to_each_exercise(name: str) -> None:
    section = sections()[ROWS[name]]
    exercises = [cell for cell in cells(name) if "exercise" in cell.metadata.get("tags", [])]
    answers = section.split("Answers:")[1]
    assert re.findall(r"\*\*([a-z])\*\*", answers) == [chr(ord("a") + i) for i in range(len(exercises))]
    assert section.count("\n- *") >= 3, "questions to ask"


def test_each_day_has_90_minutes_and_the_course_has_every_lesson() -> None:
    minutes: dict[tuple[int, str], int] = defaultdict(int)
    plans = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    for number, plan in enumerate(plans):
        for day, each in re.findall(r"^\| (\d+|one) \| (\d+) \|", plan, re.MULTILINE):
            minutes[number, day] += int(each)
    assert len(minutes) == 10 + 4 + 1
    assert set(minutes.values()) == {90}
    (course,) = [plan for plan in plans if plan.startswith("A course")]
    known = {title: int(each) for title, _, _, each, _ in TIMES}
    assert {
        title: int(each) for each, title in re.findall(r"^\| \d+ \| (\d+) \| (.+) \|$", course, re.MULTILINE)
    } == known


def test_the_map_and_the_index_show_every_lesson() -> None:
    drawn = (FOLDER / "images" / "00_map.svg").read_text()
    index = "\n".join(cell.source for cell in cells("00_index.ipynb") if cell.cell_type == "markdown")
    for title, name, _, minutes, _ in TIMES[1:]:
        assert re.search(rf"\[{re.escape(title)}\]\({name}\) \| [A-Z].*\? \|", index), "its question"
        assert re.search(rf">{re.escape(title)}</text>.*?>{minutes} min", drawn), (
            "Fix: python notebooks/images/boxes.py"
        )
    for number, name in enumerate(re.findall(r"\]\((\S+\.ipynb)\)", index), 1):
        assert name.startswith(f"{number:02}_")
