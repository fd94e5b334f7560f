"""Every notebook keeps the rules that lessons have in common."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from recshard_lab.lab import views
from tests.grid import every
from tests.notebooks.outputs import MOST_BYTES, problems, stored_form
from tests.notebooks.runs import FOLDER, NOTEBOOKS

MOST_LINES, MOST_HELPER_LINES, MOST_WORDS = 10, 6, 25
CHECK = re.compile(r"\blab\.check\(\s*mine")

every_notebook = every(NOTEBOOKS, lambda path: path.stem)


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


def test_notebooks_are_numbered_without_gaps() -> None:
    assert [path.stem[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(len(NOTEBOOKS))]
    assert NOTEBOOKS[0].stem == "00_index"


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
