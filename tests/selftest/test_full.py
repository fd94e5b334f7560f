"""``recshard selftest --full``: what is wrong fails by name, and a run that was stopped goes on."""

import json
import subprocess
from pathlib import Path

import pytest

from recshard_lab.selftest import Report, full
from recshard_lab.selftest.checks import Check, Launched, Seen, Way, run_check, run_checks
from recshard_lab.selftest.report import Result
from tests.selftest.test_selftest import COMMAND, launched  # noqa: F401

CPU = Way("2 CPU ranks", 2, {"backend": "gloo"}, "cpu")


def test_a_run_that_is_too_far_from_the_truth_is_named() -> None:
    fine = {"outputs": 1e-7, "weights": 1e-7, "bits": "ab", "kernels": ["native"]}
    seen = full._judged({"adam, fp32": ([fine, fine], 2e-5)})
    other = full._judged({"adam, fp32": ([fine, {**fine, "bits": "cd"}], 2e-5)})
    assert seen.figures["bits"] != other.figures["bits"]
    for value in (1e-3, float("inf"), float("nan")):
        with pytest.raises(RuntimeError, match=r"adam, fp32: weights of rank 1 differ by .*, above 2e-05"):
            full._judged({"adam, fp32": ([fine, {**fine, "weights": value}], 2e-5)})


def test_a_scheme_passes_and_fails_where_ranks_learn_at_another_rate(launched: Launched) -> None:  # noqa: F811
    check = Check("row_wise", lambda: full.check_scheme(launched, CPU, "row_wise", pooled=True))
    first = run_check(check)
    assert first.status == "passed", first.detail
    assert run_check(check).figures == first.figures  # the same bits
    launched.ranks(CPU).exec("from recshard_lab.selftest import full_on_ranks as f\nf.RATE *= 1.01")
    wrong = run_check(check)
    assert wrong.status == "failed"
    assert "exact_sgd, fp32: weights of rank 0 differ by" in wrong.detail


def test_checks_that_passed_before_are_not_run_again(tmp_path: Path) -> None:
    ran = []

    def check(name: str) -> Check:
        return Check(name, lambda: ran.append(name) or Seen(name))  # type: ignore[func-returns-value]

    known = {"a": Result("a", "passed", 1.5, "earlier"), "b": Result("b", "failed", 1.5, "earlier")}
    report = run_checks(checks=[check(name) for name in "abc"], known=known)
    assert ran == ["b", "c"]
    assert [result.detail for result in report.results] == ["earlier", "b", "c"]
    file = tmp_path / "report.json"
    file.write_text(report.as_json())
    assert Report.read(file) == report
    for text in ('{"ok": true}', "[]", '{"ok": tr'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"report.json is not the JSON report of a self-test\. Fix: "):
            Report.read(file)


@pytest.mark.gate
def test_the_command_goes_on_where_it_ended_and_refuses_another_builds_file(tmp_path: Path) -> None:
    file = tmp_path / "full.json"
    skip = [word for text in (", ", "a model", "pipelines", "killed", "interrupt") for word in ("--skip", text)]
    command = [*COMMAND, "--full", "--out", str(file), *skip]  # what is left: the checkup

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run().returncode == 0
    found = json.loads(file.read_text())
    (first, *rest) = found["results"]
    assert (first["name"], first["status"]) == ("checkup", "passed")
    assert {result["status"] for result in rest} == {"skipped"}
    first["detail"] = "seen before"  # and it stays, even if the check is left out now
    command.extend(["--skip", "checkup"])
    file.write_text(json.dumps(found))
    assert run().returncode == 0
    assert json.loads(file.read_text())["results"][0]["detail"] == "seen before"
    file.write_text(json.dumps(found | {"facts": found["facts"] | {"torch": "another"}}))
    refused = run()
    assert refused.returncode == 2
    assert "has results of another machine, or of other sources. Fix: name a new file" in refused.stderr.replace(
        "\n", " "
    )


@pytest.mark.nightly
def test_every_check_passes_on_this_machines_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--full", "--out", str(tmp_path / "full.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
