"""What times something is never run beside other tests."""

from pathlib import Path

import pytest

from tests.alone import BESIDE_OTHERS, OF_ITS_JOBS, TESTS, is_alone


@pytest.mark.parametrize("line", ["time.process_time() - begun", "from time import perf_counter", "time.monotonic()"])
def test_a_module_that_looks_at_a_clock_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr("tests.alone.TESTS", tmp_path)
    (tmp_path / "sparse").mkdir()
    for name, text in (("test_clock.py", line), ("test_pure.py", "runtime = 3")):
        (tmp_path / "sparse" / name).write_text(text)
    assert is_alone(tmp_path / "sparse/test_clock.py")
    assert not is_alone(tmp_path / "sparse/test_pure.py")


def test_a_room_that_nobody_named_is_alone() -> None:
    assert is_alone(TESTS / "a_new_room/test_it.py")
    assert BESIDE_OTHERS.isdisjoint(
        {"browser", "notebooks", "launcher", "lab", "bench", "calibration", "binder", "comm"}
    )


def test_what_is_named_is_there() -> None:
    assert all((TESTS / name).exists() for name in (*BESIDE_OTHERS, *OF_ITS_JOBS))


def test_doctests_of_the_library_are_beside_others() -> None:
    assert not is_alone(TESTS.parent / "recshard_lab/cores.py")


def test_ci_runs_both_halves() -> None:
    script = (TESTS.parent / ".ci/run").read_text()
    halves = [line.partition(" -m ")[2] for line in script.splitlines() if line.startswith("pytest ")]
    assert [half.split(" -n ")[0] for half in halves] == ['"not alone"', "alone"]
