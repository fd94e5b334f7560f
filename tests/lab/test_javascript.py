"""The JavaScript of the widgets: node reads every file, its functions are tested, and no file imports another."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recshard_lab.lab.widgets.components import STATIC, script

TESTS = Path(__file__).parent / "javascript"
COMPONENTS = [path.stem for path in sorted(STATIC.glob("*.js"))]
needs_node = pytest.mark.needs("node")


def node(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(["node", *arguments], input=text, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_node
@pytest.mark.parametrize("name", COMPONENTS)
def test_every_file_and_every_script_that_is_sent_to_the_page_is_valid(name: str, tmp_path: Path) -> None:
    node("--check", str(STATIC / f"{name}.js"))
    sent = tmp_path / f"{name}.mjs"
    sent.write_text(script(name))
    node("--check", str(sent))


@needs_node
def test_the_functions_of_the_components_do_what_they_say() -> None:
    files = [str(path) for path in sorted(TESTS.glob("*.test.js"))]
    assert len(files) == 2
    assert "# fail 0" in node("--test", "--test-reporter=tap", *files)


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_script_that_is_sent_to_the_page_imports_nothing(name: str) -> None:
    assert "import {" not in script(name)
    is_component = (STATIC / f"{name}.css").exists() or name == "keys"
    assert is_component == ("export default { render };" in script(name))


def test_scripts_and_styles_are_in_the_package() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["recshard_lab.lab.widgets"]
    packed = {path.name for pattern in patterns for path in STATIC.parent.glob(pattern)}
    assert packed == {path.name for path in STATIC.iterdir()}
