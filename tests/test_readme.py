"""What the README says is so: its example runs, its links lead somewhere, its set-up lines are those that CI uses."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab import __version__
from recshard_lab.sharding import scheme_names

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def shape_of(text: str) -> str:
    """The text with each number as one digit: what stays from machine to machine.

    >>> shape_of("measured: 19.2 ms, at most 66.5 MB")
    'measured: 0 ms, at most 0 MB'
    """
    return re.sub(r"\d[\d.,]*(?<=\d)", "0", text)


def test_it_is_read_in_three_minutes() -> None:
    assert len(README.splitlines()) <= 130


def test_the_example_has_ten_lines_and_prints_what_the_readme_states(tmp_path: Path) -> None:
    ((code, output),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line]) == 10
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    stated, printed = output.splitlines(), done.stdout.splitlines()
    assert printed[:-2] == stated[:-2]
    for line in (-2, -1):  # predicted for this machine's cores, and measured on them
        assert shape_of(printed[line]) == shape_of(stated[line])
    predicted, measured = (float(re.findall(r"([\d.]+) MB on a rank", line)[0]) for line in printed[-2:])
    assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\((?!https?:)(.+?)\)", README))))
def test_every_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).is_file()


def test_the_set_up_lines_are_the_two_promised() -> None:
    lines = [line.split("#")[0].strip() for line in README.splitlines() if line.startswith("    pip install")]
    assert lines == ['pip install -e ".[cpu]" && recshard lab', 'pip install -e ".[cpu,test]" && pytest']
    assert '".[cpu,test]"' in (ROOT / ".ci" / "run").read_text()


def test_every_scheme_has_a_line() -> None:
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(named) == sorted(scheme_names())


def test_it_names_the_version_and_whether_a_gpu_report_exists() -> None:
    assert f"Version {__version__}" in README
    reports = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")} - {"README.md"}
    assert ("It has not run on a GPU yet" in README) == (not reports)
