"""What notebooks, README and docs type is public: names of ``rs`` or of a room, and one way to write a plan."""

import re
from pathlib import Path

import nbformat
import pytest

import recshard_lab as rs

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [*NOTEBOOKS, ROOT / "README.md", ROOT / "notebooks/TEACHING.md", *sorted((ROOT / "docs").glob("*.md"))]
IMPORTS = re.compile(r"\b(?:from (recshard_lab[\w.]*) import (\([^)]*\)|[^\n`]*)|import (recshard_lab[\w.]+))")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
every_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


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
