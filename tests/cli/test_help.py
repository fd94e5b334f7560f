"""Every ``--help`` appears at once, ``--version`` names the versions, shells complete the commands."""

import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
import typer

import recshard_lab
from recshard_lab.cli import app
from recshard_lab.cli.errors import UsageError
from tests.grid import every

MAIN = "from recshard_lab.cli import main; main()"
REPORT_MODULES = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); "
MOST_S = 0.3
HEAVY = {"torch", "numpy", "scipy", "pandas", "numba", "fbgemm_gpu", "plotly", "IPython", "ipywidgets", "pydantic"}
"""Packages that no help text needs. pydantic is one that typer loads to parse options, in 0.1 s."""


def commands(group: Any, *path: str) -> list[tuple[str, ...]]:
    """The words of every command: () is recshard itself."""
    below = getattr(group, "commands", {})
    return [path, *(words for name in below for words in commands(below[name], *path, name))]


COMMANDS = commands(typer.main.get_command(app))


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "100", **environment},
    )


assert {("plan",), ("plan", "make"), ("demo",), ("data", "criteo"), ()} <= set(COMMANDS)


@pytest.mark.gate
@every(COMMANDS, " ".join)
def test_help_loads_nothing_heavy(command: tuple[str, ...]) -> None:
    done = run(REPORT_MODULES + MAIN, *command, "--help")
    assert done.returncode == 0, done.stderr
    assert " ".join(("Usage: recshard", *command)) in done.stdout
    assert "--help" in done.stdout
    assert not HEAVY & set(done.stderr.split())


@pytest.mark.clock
@every(COMMANDS, " ".join)
def test_help_appears_within_three_tenths_of_a_second(command: tuple[str, ...]) -> None:
    seconds = timeit.repeat(lambda: run(MAIN, *command, "--help"), number=1, repeat=3)
    assert min(seconds) < MOST_S, seconds


def test_help_among_other_words_is_what_typer_prints() -> None:
    direct = run("from recshard_lab.cli import app; app(prog_name='recshard')", "plan", "make", "t.yaml", "--help")
    done = run(MAIN, "plan", "make", "t.yaml", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (direct.returncode, direct.stdout, direct.stderr)


def test_a_group_without_a_command_prints_its_help_and_exits_with_two() -> None:
    for words in ((), ("plan",), ("data",)):
        done = run(MAIN, *words)
        assert done.returncode == 2
        assert done.stdout.rstrip() == run(MAIN, *words, "--help").stdout.rstrip()


def example_lines(text: str) -> list[str]:
    """The command lines of this program in a text, without comments, pipes and what starts them."""
    found = re.findall(r"^\W*?((?:torchrun [^\n]*?)?\brecshard [^\n]*)", text, re.MULTILINE)
    return [re.split(r"\s+#|\s*>|\s*\|", line[line.index("recshard ") :])[0].strip() for line in found]


def parse(line: str) -> None:
    """Parses a command line as typer does, without running it. Raises for unknown words."""
    command: Any = typer.main.get_command(app)
    words, context = shlex.split(line)[1:], None
    while True:
        context = command.make_context(words[0] if words else "", list(words), parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "commands") or not rest:
            return
        command, words = command.commands[rest[0]], rest[1:]


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_has_examples_of_its_command_that_parse(command: tuple[str, ...]) -> None:
    words = run(MAIN, *command, "--help", COLUMNS="80").stdout
    lines = example_lines(words.partition("\n Examples")[2])
    assert [line for line in lines if line.startswith(" ".join(("recshard", *command)))]
    for line in lines:
        parse(line)
    assert max(map(len, words.splitlines())) <= 80
    shown = {line.strip() for line in words.splitlines()}
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name]
    assert {line for line in group.epilog.splitlines() if "recshard " in line} <= shown  # none takes two lines


def test_version_names_the_installed_versions_without_importing_torch() -> None:
    done = run(REPORT_MODULES + MAIN, "--version")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[0] == f"recshard {recshard_lab.__version__}"
    assert f"torch {importlib.metadata.version('torch')}" in lines
    assert any(line.startswith("fbgemm-gpu") for line in lines)
    assert f"Python {platform.python_version()} on {platform.system()} {platform.machine()}" in lines
    assert not {"torch", "numpy"} & set(done.stderr.split())


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(shell, marks=pytest.mark.needs(shell)) for shell in ("zsh", "fish"))]
)
def test_a_shell_can_read_its_completion_script(shell: str) -> None:
    done = run(MAIN, "--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_RECSHARD_COMPLETE" in done.stdout
    assert subprocess.run([shell, "-n"], input=done.stdout, text=True, check=False).returncode == 0


ROOT = Path(recshard_lab.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md")), *sorted((ROOT / "notebooks").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_every_command_line_of_a_page_parses(page: Path) -> None:
    text = page.read_text().replace("\\\n", " ")
    quoted = re.findall(r"`(recshard [^`\n]+)`", text)
    blocks = [] if page.suffix == ".ipynb" else example_lines("\n".join(re.findall(r"^    (.+)$", text, re.MULTILINE)))
    for line in [*quoted, *blocks]:
        words = re.split(r"\s+#|\s*[>|]", line.replace("...", "x"))[0]
        if re.match(r"recshard (bench|--\w)", words):  # names of benchmarks are not the command line's
            continue
        try:
            parse(words)
        except UsageError as error:  # a sentence may leave arguments out
            if line not in quoted or type(error).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                raise
