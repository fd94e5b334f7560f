"""Every notebook: runs top to bottom, keeps to ten lines a cell, shows something where no code runs."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks.gate.record import Record
from benchmarks.gate.reference import time_reference
from tests.notebooks.runs import FOLDER, STATIC, run

pytestmark = pytest.mark.alone  # `run` measures

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES, MOST_SECONDS, MOST_BYTES = 10, 60, 400_000

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request: pytest.FixtureRequest) -> tuple[Any, float]:
    """A notebook after a run from top to bottom, exercises' assertions included, and its seconds.

    Seconds of the machine of ``.ci/figures.json``: a machine that is twice as slow may take twice as long.
    """
    before = time_reference().wall
    notebook, seconds = run(request.param)
    (recorded,) = {own.step_ms for own in Record(FOLDER.parent / ".ci/figures.json").figures("launch").values()}
    assert recorded
    return notebook, seconds / max(1.0, (before + time_reference().wall) / 2 / recorded)


def test_there_is_a_first_notebook() -> None:
    assert [path.name for path in NOTEBOOKS[:2]] == ["00_index.ipynb", "01_shard_your_first_model.ipynb"]


def test_it_runs_top_to_bottom_in_under_a_minute(executed: tuple[Any, float]) -> None:
    notebook, seconds = executed
    assert all(cell.execution_count for cell in code_cells(notebook) if cell.source)
    assert seconds < MOST_SECONDS


def test_the_teachers_page_says_how_long_it_takes(executed: tuple[Any, float]) -> None:
    """Within a factor of three, and three seconds of a kernel's start."""
    notebook, seconds = executed
    heading = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
    page = (FOLDER / "TEACHING.md").read_text()
    told = int(re.findall(rf"\[\d\d {re.escape(heading)}\]\(.+?\) \| (\d+) s", page)[0])
    assert told / 3 - 3 <= seconds <= 3 * told + 3


def test_every_figure_has_a_static_twin_and_names_its_ratings(executed: tuple[Any, float]) -> None:
    notebook, _ = executed
    shown = [out.get("data", {}).get("text/plain", "") for cell in code_cells(notebook) for out in cell.outputs]
    ratings = [text for text in shown if "RatingsDataset(" in text]
    assert all(re.search(r"RatingsDataset\((.*?);", text) for text in ratings)
    figures = [cell for cell in code_cells(notebook) if tagged(cell, "figure")]
    assert figures
    for cell in figures:
        assert not ratings or "note=ratings.source" in cell.source
        assert any("<img" in output.get("data", {}).get("text/html", "") for output in cell.outputs)


def test_no_cell_writes_to_stderr_or_warns(executed: tuple[Any, float]) -> None:
    for cell in code_cells(executed[0]):
        told = [output.text for output in cell.outputs if output.get("name") == "stderr"]
        assert not told, cell.source


@every_notebook
def test_no_cell_is_longer_than_ten_lines(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert len(cell.source.splitlines()) <= MOST_LINES, cell.source


@every_notebook
def test_it_opens_with_a_question_and_a_picture_that_is_there(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert first.cell_type == "markdown"
    assert "?" in first.source
    pictures = re.findall(r"!\[(.+?)\]\((.+?)\)", first.source)
    assert pictures
    for words, picture in pictures:
        assert len(words) > 20  # said in words too
        assert (FOLDER / picture).is_file()


@every_notebook
def test_stored_outputs_are_static_small_and_only_of_figures(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < MOST_BYTES
    assert "widgets" not in notebook.metadata
    for cell in code_cells(notebook):
        assert cell.execution_count is None
        assert bool(cell.outputs) == tagged(cell, "figure")
        for output in cell.outputs:
            assert set(output.data) <= STATIC


@every_notebook
def test_every_exercise_has_a_folded_answer_and_an_assertion(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    exercises = [i for i, cell in enumerate(cells) if tagged(cell, "exercise")]
    assert exercises
    for i in exercises:
        answer, check = cells[i + 1], cells[i + 2]
        assert tagged(answer, "answer")
        assert answer.metadata["jupyter"]["source_hidden"]
        assert "assert " in check.source


@every_notebook
def test_nothing_installs_restarts_or_edits_the_path(path: Path) -> None:
    for cell in code_cells(nbformat.read(path, as_version=4)):
        assert not re.search(r"pip install|sys\.path|kernel\.restart|do_shutdown|^!", cell.source, re.MULTILINE)
