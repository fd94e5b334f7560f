"""Every notebook: runs as its stored outputs show, within its time, and keeps the rules that lessons have in common."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks.gate.record import Record
from benchmarks.gate.reference import time_reference
from recshard_lab.lab import views
from tests.notebooks.outputs import MOST_BYTES, difference, problems, stored_form, stored_forms
from tests.notebooks.runs import FOLDER, run

pytestmark = pytest.mark.clock  # `run` measures

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_LINES, MOST_HELPER_LINES, MOST_WORDS = 10, 6, 25
MOST_SECONDS, MOST_SECONDS_OF_ALL = 45, 600  # lessons aim at 30 s
CHECK = re.compile(r"\blab\.check\(\s*mine")
SECONDS: dict[str, float] = {}  # of the runs of this session, on a machine as fast as that of .ci/figures.json
FAILED: set[str] = set()  # notebooks that raised, which their own tests report

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path: Path) -> list[Any]:
    return list(nbformat.read(path, as_version=4).cells)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in cells_of(path) if cell.cell_type == "code"]


def tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])


def tree_of(source: str) -> ast.Module:
    """A cell's Python. Of a line with a magic only the names before it are kept."""
    return ast.parse(re.sub(r"^(\w+ = |)%.*$", lambda line: f"{line[1]}None", source, flags=re.MULTILINE))


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    """Calls of ``name``, such as ``views.placement``, also as an attribute of a room."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and f".{ast.unparse(node.func)}".endswith(f".{name}"):
            yield node


def measured(path: Path) -> Any:
    """A notebook after a run from top to bottom. A machine that is twice as slow may take twice as long."""
    before = time_reference().wall
    FAILED.add(path.stem)
    notebook, seconds = run(path)
    FAILED.remove(path.stem)
    (recorded,) = {own.step_ms for own in Record(FOLDER.parent / ".ci/figures.json").figures("launch").values()}
    assert recorded
    SECONDS[path.stem] = seconds / max(1.0, (before + time_reference().wall) / 2 / recorded)
    return notebook


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request: pytest.FixtureRequest) -> tuple[Path, Any]:
    """A notebook's path, and the notebook after a run."""
    return request.param, measured(request.param)


def test_notebooks_are_numbered_without_gaps() -> None:
    assert [path.stem[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(len(NOTEBOOKS))]
    assert NOTEBOOKS[0].stem == "00_index"


def test_it_runs_top_to_bottom_in_time_and_writes_nothing_to_stderr(executed: tuple[Path, Any]) -> None:
    path, notebook = executed
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
    assert not [
        cell.source for cell in notebook.cells for out in cell.get("outputs", []) if out.get("name") == "stderr"
    ]
    assert SECONDS[path.stem] < MOST_SECONDS


def test_its_outputs_are_those_that_are_stored(executed: tuple[Path, Any], movielens_path: Path) -> None:
    """Of cells tagged ``timed`` their kinds and words; of all others everything."""
    path, notebook = executed
    stored = code_cells(path)
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    found = [
        f"cell {cell.source.splitlines()[:1]}: {apart}"
        for cell, now in zip(stored, ran, strict=True)
        if (apart := difference(stored_forms(cell.outputs), stored_forms(now.outputs), tagged(cell, "timed")))
    ]
    assert not found, f"Fix: python -m tests.notebooks.refresh {path.stem[:2]}\n" + "\n".join(found)


def test_the_teachers_page_says_how_long_it_takes(executed: tuple[Path, Any]) -> None:
    """Within a factor of three, and three seconds of a kernel's start."""
    path, _ = executed
    page = (FOLDER / "TEACHING.md").read_text()
    (told,) = re.findall(rf"\({path.name}\) \| (\d+) s \|", page)
    assert int(told) / 3 - 3 <= SECONDS[path.stem] <= 3 * int(told) + 3


@pytest.mark.timeout(1200)  # alone, it runs all notebooks
def test_all_notebooks_run_within_ten_minutes() -> None:
    for path in NOTEBOOKS:
        if path.stem not in SECONDS.keys() | FAILED:
            measured(path)
    assert sum(SECONDS.values()) < MOST_SECONDS_OF_ALL, SECONDS


@every_notebook
def test_it_opens_with_a_title_one_question_a_picture_and_a_link_to_the_glossary(path: Path) -> None:
    first = cells_of(path)[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# \S", first.source)
    assert len(re.findall(r"\*\*[^*]+\?\*\*", first.source)) == 1, "one bold question"
    assert "](../docs/glossary.md" in first.source
    pictures = re.findall(r"!\[(.+?)\]\((.+?)\)", first.source)
    assert len(pictures) == 1
    for words, picture in pictures:
        assert len(words) > 20, "the picture is described in words too"
        assert picture.startswith(f"images/{path.stem[:3]}")
        assert (FOLDER / picture).is_file()


@every_notebook
def test_links_lead_to_files(path: Path) -> None:
    text = "\n".join(cell.source for cell in cells_of(path) if cell.cell_type == "markdown")
    for target in re.findall(r"\]\((?!https?:|#)([^)\s]+?)(?:#[^)]*)?\)", text):
        assert (FOLDER / target).is_file(), target


@every_notebook
def test_cells_have_at_most_ten_lines_and_helpers_six(path: Path) -> None:
    for cell in code_cells(path):
        assert len(cell.source.splitlines()) <= MOST_LINES, cell.source
        if not cell.source.startswith("%%writefile"):
            for node in ast.walk(tree_of(cell.source)):
                if isinstance(node, ast.FunctionDef):
                    assert (node.end_lineno or 0) - node.lineno < MOST_HELPER_LINES, (
                        f"{node.name} belongs in the library"
                    )


def sentences(markdown: str) -> list[str]:
    """The sentences of a cell. A cell of a table, an item of a list and a heading end one; code is a word.

    >>> sentences("# A b\\n\\nOne two.\\nThree `x = 1` four: five (see [this](a.md)).\\n\\n- six\\n- seven\\n\\n| e |")
    ['A b', 'One two.', 'Three CODE four:', 'five (see this).', 'six', 'seven', 'e']
    """
    text = re.sub(r"```.*?```|<!--.*?-->|!\[.*?\]\(.*?\)", "\n\n", markdown, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "CODE", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"^\s*(?:[-*]|\d+\.|#+|>)\s+", "\n\n", text, flags=re.MULTILINE)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n|\||\n(?=\|)", text)]
    return [part for block in blocks for part in re.split(r"(?<=[.?!:])[*_)\"]*\s+", block) if re.search(r"\w", part)]


@every_notebook
def test_sentences_have_at_most_25_words(path: Path) -> None:
    for cell in cells_of(path):
        if cell.cell_type == "markdown":
            long = [found for found in sentences(cell.source) if len(found.split()) > MOST_WORDS]
            assert not long


@every_notebook
def test_every_guess_begins_as_none(path: Path) -> None:
    """``mine = None``, then ``lab.guess(mine, ...)``: a learner's first number is not given."""
    guesses = 0
    for cell in code_cells(path):
        if "lab.guess(" in cell.source:
            tree = tree_of(cell.source)
            empty = {
                ast.unparse(target)
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign) and ast.unparse(node.value) == "None"
                for target in node.targets
            }
            for call in calls(tree, "lab.guess"):
                assert ast.unparse(call.args[0]) in {"None", *empty}, cell.source
                guesses += 1
    assert guesses, "a guess before a number"


@every_notebook
def test_every_exercise_is_a_question_an_empty_answer_and_a_check(path: Path) -> None:
    cells = cells_of(path)
    exercises = [i for i, cell in enumerate(cells) if tagged(cell, "exercise")]
    assert exercises
    for i in exercises:
        assert cells[i - 1].cell_type == "markdown", "the question"
        assert re.match(r"mine\w* = None  # your answer", cells[i].source)
        checks = [cell for cell in cells[i : i + 2] if cell.cell_type == "code" and CHECK.search(cell.source)]
        assert checks
        shown = "".join(out.get("text", "") for cell in checks for out in cell.outputs)
        assert shown.startswith("Not answered yet.")
    for i, cell in enumerate(cells):
        assert not tagged(cell, "answer")
        assert not cell.metadata.get("jupyter", {}).get("source_hidden")
        if cell.cell_type == "code" and not cell.source.startswith("%%writefile"):
            tree = tree_of(cell.source)
            assert not [node for node in ast.walk(tree) if isinstance(node, ast.Assert)], cell.source
            assert not re.search(r"^(\w+) = \1 or ", cell.source, re.MULTILINE)
            if list(calls(tree, "lab.check")):
                assert any(tagged(other, "exercise") for other in cells[i - 1 : i + 1])


@every_notebook
def test_every_figure_names_its_data(path: Path) -> None:
    """With ``note=``, where the view takes one."""
    for cell in code_cells(path):
        for name in re.findall(r"\bviews\.(\w+)\(", cell.source):
            if "note" in inspect.signature(getattr(views, name)).parameters:
                for call in calls(tree_of(cell.source), f"views.{name}"):
                    named = {keyword.arg for keyword in call.keywords}
                    assert "note" in named or (None in named and '"note": ' in cell.source), cell.source


@every_notebook
def test_stored_outputs_are_static_and_small_and_name_nothing_of_a_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size <= MOST_BYTES
    assert "widgets" not in notebook.metadata
    for cell in code_cells(path):
        assert cell.execution_count is None
        for output in cell.outputs:
            assert stored_form(output) == output
            assert not problems(output), cell.source


@every_notebook
def test_its_prose_is_tested(path: Path) -> None:
    """A test reads the stored outputs; see ``claims.py``."""
    texts = [test.read_text() for test in Path(__file__).parent.glob("test_prose_*.py")]
    assert any(re.search(rf"stored\(\"{path.stem[:2]}\"\)", text) for text in texts)


@every_notebook
def test_nothing_installs_restarts_or_edits_the_path(path: Path) -> None:
    for cell in code_cells(path):
        assert not re.search(r"pip install|sys\.path|kernel\.restart|do_shutdown|^!", cell.source, re.MULTILINE)
