"""What the README says is so: its example runs, its links lead somewhere, its set-up lines are those that CI uses."""

import json
import math
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


@pytest.mark.gate
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
    gate = (ROOT / ".ci" / "run").read_text()
    assert 'extras="cpu,test,docs"\n' in gate
    assert "} pytest -q --durations=10\n" in gate


def test_every_scheme_has_a_line() -> None:
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted(named) == sorted(scheme_names())


def test_the_mean_error_counts_every_published_step() -> None:
    file = json.loads((ROOT / "benchmarks/published.json").read_text())
    every = {point["name"]: file["recorded"][point["name"]] for point in file["points"]}
    fused = {point["name"]: every[point["name"]] for point in file["points"] if point["executor"] == "fused"}
    assert {name.split(",")[0] for name in every if name not in fused} == {"TF2"}  # sparse Adagrad
    for words, ratios in (
        (f"mean error of predicted steps, beside all {len(every)} published steps on GPUs", every),
        (f"the same, beside the {len(fused)} of them without TensorFlow's sparse Adagrad", fused),
    ):
        logs = [abs(math.log(ratio)) for ratio in ratios.values()]
        ((stated,),) = [
            re.findall(r"([\d.]+) %", row)[:1] for row in README.splitlines() if row.startswith(f"| {words} |")
        ]
        assert float(stated) == pytest.approx(100 * (math.exp(sum(logs) / len(logs)) - 1), abs=0.1)
    assert "the geometric mean of max(predicted / published, published / predicted), minus 1" in " ".join(
        README.split()
    )


def test_the_choices_of_default_figures_are_those_of_the_benchmarks() -> None:
    readme, costs, page = (
        " ".join((ROOT / name).read_text().split())
        for name in ("README.md", "docs/concepts/cost_model.md", "docs/benchmarks.md")
    )
    two, four = (
        re.findall(rf"\| {ranks} ranks: fastest of four schemes chosen[^|]*\| (\d+)% \| (\d+)%", page)[0]
        for ranks in (2, 4)
    )
    (always,) = re.findall(r"table_wise was fastest in ([\d-]+%) of these models. Always choosing it beats both", page)
    assert f"fastest of four schemes in {two[0]}% of the models (2 ranks) and {four[0]}% (4 ranks)" in readme
    assert f"Always choosing table_wise was right in {always}" in readme
    for figures, (first, second) in (("default figures", (two[0], four[0])), ("calibrated", (two[1], four[1]))):
        assert f"schemes, {figures} | the same | chosen in {first}% of the models on 2 ranks, {second}% on 4 |" in costs
    assert f"always table_wise | the same | right in {always} of the models" in costs
    least = int(always.split("-")[0])
    assert least > max(int(two[1]), int(four[1]))  # "right more often, calibrated or not"


def test_it_names_the_version_and_whether_a_gpu_report_exists() -> None:
    assert f"Version {__version__}" in README
    reports = {path.name for path in (ROOT / "benchmarks/results").glob("*.md")} - {"README.md"}
    assert ("It has not run on a GPU yet" in README) == (not reports)
