"""Drift: operators that became slower than in the profile are reported by name, and others are not."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import recshard_lab
from recshard_lab.calibration import check, drift
from recshard_lab.calibration.alone import time_alone
from recshard_lab.calibration.calibrating import REFERENCE
from recshard_lab.calibration.clock import TimedOperator, as_dicts
from recshard_lab.calibration.drift import compared
from recshard_lab.calibration.steps import Timed
from recshard_lab.cli import app
from tests.calibration.test_device_profile import profile

pytestmark = pytest.mark.clock  # it measures


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    with recshard_lab.launch(2, devices="cpu") as launched:
        yield launched


@pytest.fixture(scope="module")
def stored(ranks: Any) -> list[TimedOperator]:
    return time_alone(ranks)


def as_measured(monkeypatch: pytest.MonkeyPatch, stored: list[TimedOperator], slower: dict[str, float]) -> None:
    """The times of the profile again, some of them longer by a factor; no time of this machine is in the result."""
    now = [replace(one, ms=one.ms * slower.get(one.op, 1.02)) for one in stored]
    monkeypatch.setattr(drift, "time_alone", lambda ranks, short: now)
    ms = 2.0 * slower.get(REFERENCE, 1.0)
    step = Timed(ms, None, None, ms)  # type: ignore[arg-type]
    monkeypatch.setattr(drift, "time_cases", lambda ranks, cases, turns: [step])


@pytest.mark.parametrize("slower", [{}, {"gather": 1.6}, {"all_to_all": 0.5, REFERENCE: 1.4}])
def test_slower_and_faster_operators_are_named(
    ranks: Any, stored: list[TimedOperator], slower: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    then = profile(operators=tuple(as_dicts([*stored, TimedOperator(REFERENCE, (), 2.0)])))
    as_measured(monkeypatch, stored, slower)
    found = check(ranks, then)
    assert set(found.moved) == set(slower)
    assert {row.op for row in found.rows} == {one["op"] for one in then.operators}
    text = str(found)
    assert ("Fix: calibrate again" in " ".join(text.split())) is bool(slower)
    assert ("No operator moved" in text) is not bool(slower)
    for op, ratio in slower.items():
        assert f"{op} {ratio:.2f}x moved" in " ".join(text.split())


def test_a_slower_rank_is_noticed_by_measuring(ranks: Any, stored: list[TimedOperator]) -> None:
    """Each rank reads rows eight times; nothing is simulated."""
    then = profile(operators=tuple(as_dicts([one for one in stored if one.op == "gather"])))
    ranks.exec(
        "from recshard_lab.calibration import operators\nonce = operators._call\n"
        "def slowly(*args, **options):\n    call = once(*args, **options)\n"
        "    return lambda: [call() for _ in range(8)]\noperators._call = slowly"
    )
    try:
        found = check(ranks, then)
    finally:
        ranks.exec("operators._call = once")
    assert found.moved == ("gather",)
    assert found.rows[0].ratio > 2


def test_changed_versions_are_reported(
    ranks: Any, stored: list[TimedOperator], monkeypatch: pytest.MonkeyPatch
) -> None:
    as_measured(monkeypatch, stored, {})
    then = profile(operators=tuple(as_dicts(stored)), machine={"torch": "1.0", "cores": "99", "system": "x"})
    found = check(ranks, then)
    assert [fact.split()[0] for fact in found.changed] == ["cores", "torch"]
    assert "Changed: torch 1.0 -> " in str(found)


def test_other_ranks_and_profiles_without_operators_are_refused(ranks: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the profile has 4 cpu ranks, but 2 cpu ranks .*Fix: launch\(4, devices='cpu'"
    ):
        check(ranks, profile(world_size=4, local_world_size=4))
    with pytest.raises(ValueError, match=r"no operators to time again\. Fix"):
        check(ranks, profile(operators=()))
    with pytest.raises(ValueError, match="threshold must be positive"):
        check(ranks, profile(), 0.0)


def test_the_command_checks_a_profile_and_exits_with_1_on_drift(stored: list[TimedOperator], tmp_path: Path) -> None:
    path = tmp_path / "then.json"
    fast = [replace(one, ms=one.ms / 1000) for one in stored]
    profile(operators=tuple(as_dicts(fast))).save(path)
    assert json.loads(path.read_text())["version"] == 4
    done = CliRunner().invoke(app, ["calibrate", "--check", str(path)])
    assert done.exit_code == 1, done.output
    assert "gather" in done.output
    assert "operators moved" in done.output


def test_sizes_that_only_one_side_has_do_not_count() -> None:
    then = [TimedOperator("gather", (8, 4), 1.0), TimedOperator("gather", (8, 8), 1.0)]
    now = [
        TimedOperator("gather", (8, 4), 1.1),
        TimedOperator("gather", (8, 16), 9.0),
        TimedOperator("read", (1,), 9.0),
    ]
    (row,) = compared(then, now, 0.25)
    assert (row.op, row.moved) == ("gather", False)
    assert row.ratio == pytest.approx(1.1)
