"""Mistakes on the command line: each error names the value, the reason and one fix, and never breaks a line."""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from recshard_lab.cli import app, errors, main
from recshard_lab.shipped import example_text
from recshard_lab.sizes import size_in

Told = Callable[[str], str]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """Runs ``recshard WORDS`` in a folder with a tables.yaml, which must exit with 2. Returns what stderr has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("tables.yaml").write_text(example_text("tables.yaml"))

    def run(words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["recshard", *shlex.split(words)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert "Traceback" not in printed.err
        return printed.err.rstrip("\n")

    return run


OLD = {
    "compare tables.yaml planner --to x.html": "recshard plan compare",
    "whatif --help": "recshard plan sweep",
    "plan tables.yaml --topology h100x8": "recshard plan make tables.yaml",
    "plan --example": "recshard plan make --example",
    "plan --schema tables": "recshard plan make --schema for tables, recshard plan check --schema for plans",
    "plan --ranks 4 tables.yaml": "recshard plan make SOURCE --ranks ...",
    "plan make tables.yaml --html x.html": "--out FILE.html",
    "plan make tables.yaml --why-not movies=row_wise": "recshard plan explain SOURCE --why-not TABLE=SCHEME",
    "plan make --check plan.json": "recshard plan check PLAN",
    "plan sweep tables.yaml --world-size 8": "--ranks",
    "plan sweep tables.yaml --html=x.html": "--out FILE.html",
    "export run/checkpoint model/v1": "recshard export RUN --out FOLDER",
}


@pytest.mark.parametrize("words", OLD)
def test_an_old_spelling_is_refused_and_names_the_new_one(told: Told, words: str) -> None:
    assert told(words).endswith(f" Fix: {OLD[words]}")


def test_every_new_spelling_that_an_error_names_exists() -> None:
    group: Any = typer.main.get_command(app)
    for new in errors.COMMANDS.values():
        find(group, new.split()[1:])
    for command, options in errors.OPTIONS.items():
        old = find(group, command.split()[1:])
        for removed, new in options.items():
            assert removed not in names_of(old)
            words = new.partition(" for ")[0].split()
            target = find(group, words[1:3]) if words[0] == "recshard" else old
            named = {word for word in words if word.startswith("--")}
            assert named <= names_of(target), (command, removed)


def find(group: Any, words: list[str]) -> Any:
    for word in words:
        group = group.commands[word]
    return group


def names_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.gate
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("plan make tables.yaml --rank 3", "'--rank' is not an option of recshard plan make (did you mean '--ranks'?). "
         "Fix: --ranks"),
        ("plan make tables.yaml --wishes w.yaml", "'--wishes' is not an option of recshard plan make. "
         "Fix: recshard plan make --help lists its options."),
        ("plan mke tables", "'mke' is not a command of recshard plan (did you mean 'make'?). Fix: recshard plan make"),
        ("plan make tables.yaml --ranks", "--ranks has no value. Fix: write one after --ranks."),
        ("plan make tables.yaml more", "'more' is one argument too many for recshard plan make. Fix: leave it out."),
        ("plan compare tables.yaml", "PLANS is missing: recshard plan compare needs it. "
         "Fix: recshard plan compare SOURCE PLANS"),
        ("plan make tables.yaml --memory-gb 3XB", "--memory-gb 3XB: '3XB' is not a size: 'XB' is not a unit of B, KB, "
         "MB, GB, TB, KiB, MiB, GiB, TiB. Fix: write 80GB, or 80GiB for powers of two."),
        ("serve model --max-body-mb=-1", "--max-body-mb -1: '-1' is not a size: expected a number and a unit. "
         "Fix: write 80MB, or 80MiB for powers of two."),
        ("plan make tables.yaml --out nowhere/plan.json", "--out nowhere/plan.json: folder 'nowhere' does not exist. "
         "Fix: mkdir -p nowhere"),
        ("plan sweep tables.yaml --out a.csv --out b.csv", "--out b.csv: a.csv already has this content. "
         "Fix: one .csv file."),
        ("plan sweep --example meta", "--example meta: no example has this name (did you mean 'meta-3t'?). "
         "Fix: use one of mlperf-dlrm-dcnv2, meta-1.25t, meta-3t."),
        ("plan explain tables.yaml --why-not movies", "--why-not movies: expected TABLE=SCHEME. "
         "Fix: --why-not movies=row_wise"),
        ("plan make tables.yaml -n x", "--ranks x: input should be a valid integer, unable to parse string as an "
         "integer. Fix: pass a value as in recshard plan make --help."),
        ("plan check", "a plan is missing. Fix: recshard plan check plan.json"),
        ("train", "a run is missing: recshard train needs a config. Fix: recshard train --config run.yaml"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_the_value_the_reason_and_a_fix(told: Told, words: str, error: str) -> None:
    assert told(words) == f"Error: {error}"


def test_a_format_that_is_not_supported_names_the_nearest(told: Told) -> None:
    words = told("plan make tables.yaml --out report.htm")
    assert words.startswith("Error: --out report.htm: '.htm' is not a supported format (did you mean '.html'?). ")
    assert words.endswith("Fix: --out report.html")
    assert told("demo --out report.pdf").endswith("Supported: .html (the report). Fix: --out report.html")
    assert told("calibrate --out profile").startswith("Error: --out profile: a path without suffix is not a supported")


def test_planning_without_tables_says_what_to_do_next(told: Told) -> None:
    words = told("plan make")
    assert "recshard plan make --example > tables.yaml\n    recshard plan make tables.yaml\n" in words
    assert "recshard plan make package.module:factory" in words
    assert told("plan sweep").startswith(
        "Error: tables are missing: a sweep needs a file of tables or an example. Fix:"
    )


def test_sizes_are_decimal_unless_their_unit_is_not_and_others_are_refused_with_a_fix() -> None:
    for text, gb in {"80": 80, "80 gb": 80, "80GiB": 80 * 2**30 / 1e9, "1.5TB": 1500, "1e3MB": 1}.items():
        assert size_in("GB", text) == pytest.approx(gb)
    for text in ("", "GB", "-1", "0", "nan", "1e999", "8 0", "80GBs"):
        with pytest.raises(ValueError, match=r"is not a size: .*Fix: write 80GB"):
            size_in("GB", text)
