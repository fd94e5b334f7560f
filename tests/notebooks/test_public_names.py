"""What notebooks, README and docs type is public: names of ``rs`` or of a room, and one way to write a plan.

Every public name, view, widget, magic and command occurs in a notebook or in a page of the docs. The page is one that
was written by hand, not generated.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import nbformat
import typer

import recshard_lab as rs
from recshard_lab import lab
from recshard_lab.cli import app
from recshard_lab.lab.magics import RecshardMagics
from tests.grid import every

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BUILT = [ROOT / "docs" / name for name in ("_build", "tutorials", "reference/api", "reference/cli")]
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not set(BUILT) & set(page.parents)]
PAGES = [*NOTEBOOKS, ROOT / "README.md", ROOT / "notebooks/TEACHING.md", *DOCS]
NO_NAMES = {"load_ipython_extension", "unload_ipython_extension", "__version__", "cli", "selftest"}
"""Of ``rs``: what %load_ext calls, what ``recshard --version`` prints, and rooms that are commands."""
IMPORTS = re.compile(r"\b(?:from (recshard_lab[\w.]*) import (\([^)]*\)|[^\n`]*)|import (recshard_lab[\w.]+))")

every_notebook = every(NOTEBOOKS, lambda path: path.stem)
every_page = every(PAGES, lambda path: str(path.relative_to(ROOT)))


def text_of(path: Path) -> str:
    """A page's text; of a notebook all cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    return "\n\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)


@every_notebook
def test_it_imports_from_the_library_or_a_room_and_from_nothing_deeper(path: Path) -> None:
    for module, names, plain in IMPORTS.findall(text_of(path)):
        assert (module or plain).count(".") <= 1, f"{module or plain} is deeper than a room"
        for name in re.findall(r"\w+", re.sub(r" as \w+|#.*", "", names)):
            exec(f"from {module} import {name}", {})


@every_page
def test_every_name_after_rs_is_public(path: Path) -> None:
    for name, inner in re.findall(r"(?<![\w.])rs\.([A-Za-z]\w*)(?:\.([A-Za-z]\w*))?", text_of(path)):
        assert name in dir(rs), f"rs.{name}"
        assert not inner or hasattr(getattr(rs, name), inner), f"rs.{name}.{inner}"


@every_page
def test_a_plan_of_schemes_is_written_with_rs_plan(path: Path) -> None:
    assert not re.findall(r"ShardingPlan\(\{\"\": .*", text_of(path))


@cache
def all_text() -> str:
    """Notebooks, and pages of the docs that were written by hand."""
    return "\n\n".join(map(text_of, [*NOTEBOOKS, *DOCS]))


def occurs(name: str, *owners: str) -> bool:
    """Whether code has the name: after its owner and a dot, in an import, or alone between backticks.

    A class occurs as a word.
    """
    if name[0].isupper():
        return bool(re.search(rf"\b{name}\b", all_text()))
    owned = rf"\b(?:{'|'.join(owners)})\.{name}\b"
    imported = rf"from recshard_lab[\w.]* import (?:\([^)]*|[^\n]*)\b{name}\b"
    return bool(re.search(rf"{owned}|{imported}|`{name}[`(]", all_text()))


def commands(group: typer.Typer, words: str = "recshard") -> Iterator[str]:
    """Every command and subcommand, with the words before it."""
    from typer.main import get_command

    def inside(command: Any, words: str) -> Iterator[str]:
        for name, below in getattr(command, "commands", {}).items():
            if not below.hidden:
                yield from inside(below, f"{words} {name}")
        if not getattr(command, "commands", {}):
            yield words

    return inside(get_command(group), words)


def test_every_public_name_occurs_in_a_notebook_or_in_the_docs() -> None:
    missing = [
        *(f"rs.{name}" for name in dir(rs) if name not in NO_NAMES and not occurs(name, "rs", "recshard_lab")),
        *(f"lab.{name}" for name in dir(lab) if not occurs(name, "lab", "rs", "recshard_lab.lab")),
        *(f"views.{name}" for name in lab.view_names() if not occurs(name, "views")),
    ]
    assert not missing, f"{len(missing)} names are in no notebook and on no page of docs/: {', '.join(missing)}"


def test_every_magic_occurs_in_a_notebook_or_in_the_docs() -> None:
    known = [f"{'%' * sign}{name}" for sign, kind in ((1, "line"), (2, "cell")) for name in RecshardMagics.magics[kind]]
    assert len(known) > 5
    missing = [name for name in known if not re.search(rf"(?<!%){name}\b", all_text())]
    assert not missing, f"{len(missing)} magics are in no notebook and on no page of docs/: {', '.join(missing)}"


def test_every_command_occurs_in_a_notebook_or_in_the_docs() -> None:
    known = list(commands(app))
    assert {"recshard lab", "recshard plan make"} <= set(known)
    missing = [words for words in known if not re.search(rf"\b{words}\b", all_text())]
    assert not missing, f"{len(missing)} commands are in no notebook and on no page of docs/: {', '.join(missing)}"
