"""Drift: operators that became slower than in the profile are reported by name, and others are not.

No rank is launched and nothing is measured; `test_calibrate.py` measures.
"""

from typing import Any

import pytest

from recshard_lab.calibration import calibrate, check
from recshard_lab.calibration.calibrating import REFERENCE
from recshard_lab.calibration.clock import TimedOperator, as_dicts
from tests.calibration.simulated import FakeRanks, ms_of, simulate_check
from tests.calibration.test_device_profile import profile

SIZES = [("gather", (64, 8)), ("gather", (64, 64)), ("all_to_all", (256, 2)), ("read", (1,))]
STORED = [TimedOperator(op, sizes, ms_of(op, sizes)) for op, sizes in SIZES]
RANKS: Any = FakeRanks(machine={"torch": "2.13.0", "cores": "2", "processor": "x"})


def test_slower_and_faster_operators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    then = profile(operators=tuple(as_dicts([*STORED, TimedOperator(REFERENCE, (), 2.0)])))
    for slower in ({}, {"gather": 1.6}, {"all_to_all": 0.5, REFERENCE: 1.4}):
        simulate_check(monkeypatch, STORED, slower)
        found = check(RANKS, then)
        assert set(found.moved) == set(slower)
        assert {row.op for row in found.rows} == {one["op"] for one in then.operators}
        text = " ".join(str(found).split())
        assert ("Fix: calibrate again" in text) is bool(slower)
        assert ("No operator moved" in text) is not bool(slower)
        assert all(f"{op} {ratio:.2f}x moved" in text for op, ratio in slower.items())


def test_changed_versions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_check(monkeypatch, STORED, {})
    machine = {"torch": "1.0", "cores": "99", "system": "x", "processor": "x"}
    found = check(RANKS, profile(operators=tuple(as_dicts(STORED)), machine=machine))
    assert found.changed == ("cores 99 -> 2", "torch 1.0 -> 2.13.0")
    assert "Changed: torch 1.0 -> 2.13.0" in str(found)


def test_what_cannot_be_checked_or_calibrated_is_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"profile has 4 cpu ranks, but 2 cpu ranks .*Fix: launch\(4, devices='cpu'"):
        check(RANKS, profile(world_size=4, local_world_size=4))
    with pytest.raises(ValueError, match=r"no operators to time again\. Fix"):
        check(RANKS, profile(operators=()))
    with pytest.raises(ValueError, match="threshold must be positive"):
        check(RANKS, profile(), 0.0)
    with pytest.raises(ValueError, match="from 5 on"):
        calibrate(RANKS, 1)
    with pytest.raises(ValueError, match="not negative"):
        calibrate(RANKS, seed=-1)
    with pytest.raises(ValueError, match="no link that could"):
        calibrate(FakeRanks(4, nodes=2))
    shared = FakeRanks(4, "cuda")
    shared.devices = shared.devices[:1] * 4
    with pytest.raises(ValueError, match=r"4 ranks share cuda:0: .*Fix: launch\(1\)"):
        calibrate(shared)
