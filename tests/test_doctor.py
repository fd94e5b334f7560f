"""``recshard doctor``, as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable

import psutil
import pytest
from typer.testing import CliRunner

from recshard_lab.cli import app
from recshard_lab.launcher import LaunchError, doctor
from recshard_lab.launcher.doctor import Finding

pytestmark = pytest.mark.timeout(120)


def finds(*findings: Finding) -> Callable[[], list[Finding]]:
    return lambda: list(findings)


def test_it_tries_two_real_ranks_and_leaves_none_behind() -> None:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert "2 ranks over gloo" in done.stdout
    assert "all_reduce" in done.stdout
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert len(left) <= 1  # the process that ranks are forked from, which ends with this one


def test_json_is_one_object_with_every_finding() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    told = json.loads(done.stdout)
    assert (told["ok"], done.exit_code) == (True, 0)
    assert {"torch", "Gloo", "fbgemm", "2 ranks over gloo"} <= {finding["name"] for finding in told["findings"]}
    assert all(set(finding) == {"name", "value", "ok", "fix"} for finding in told["findings"])


def test_something_needed_that_is_broken_ends_in_code_one_and_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Finding("fbgemm", "built for torch 2.11", False, "pip install fbgemm-gpu-cpu==1.8.0")
    monkeypatch.setattr(doctor, "CHECKS", [finds(broken)])
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "pip install fbgemm-gpu-cpu==1.8.0" in done.stdout
    assert json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["ok"] is False


def test_ranks_that_do_not_start_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object, **kwargs: object) -> None:
        raise LaunchError("the ranks did not come up: no loopback")

    monkeypatch.setattr(doctor, "launch", refuses)
    monkeypatch.setattr(doctor, "CHECKS", [])
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "the ranks did not come up: no loopback" in done.stdout
