"""Test files that need the machine for themselves are found by what they do."""

from pathlib import Path

import pytest

from tests.alone import TESTS, is_alone, why_alone

CLOCK = "perf_" + "counter"  # in one word, this file would be alone
ALONE = {
    "measures": f"begun = time.{CLOCK}()",
    "measures by itself": f"from time import {CLOCK}",
    "keeps the time of a start": "begun = time.mono" + "tonic()\n",
}
BESIDE_OTHERS = {
    "waits until a deadline": "end = time.monotonic() + 20\nwhile time.monotonic() < end: pass",
    "measures its CPU time": "begun = time.process_time()",
    "kills a rank": "os.kill(ranks.pids[1], 9)",
    "interrupts": "signal.SIGINT",
    "names a runtime": "runtime = 3",
    "starts a kernel": "from jupyter_client import KernelManager",
    "starts a browser": "from playwright.sync_api import Page",
}


def written(folder: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> Path:
    """The test file ``test_it.py`` of a folder that stands for ``tests``, beside others."""
    monkeypatch.setattr("tests.alone.TESTS", folder)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "test_it.py"


@pytest.mark.parametrize("line", ALONE.values(), ids=ALONE)
def test_a_file_that_needs_the_machine_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert is_alone(written(tmp_path, monkeypatch, test_it=line))


@pytest.mark.parametrize("line", BESIDE_OTHERS.values(), ids=BESIDE_OTHERS)
def test_other_files_run_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    assert why_alone(written(tmp_path, monkeypatch, test_it=line)) == ""


@pytest.mark.parametrize("name", ["lab/test_soak", "lab/test_answer_times", "launcher/test_ranks"])
def test_files_that_measure_are_alone(name: str) -> None:
    assert is_alone(TESTS / f"{name}.py")


@pytest.mark.parametrize(
    "name",
    [
        "lab/test_report",
        "browser/test_every_widget",
        "calibration/test_fit",
        "comm/test_codecs",
        "distributed/test_parity",
    ],
)
def test_files_that_only_compute_run_beside_others_in_any_room(name: str) -> None:
    assert not is_alone(TESTS / f"{name}.py")


def test_doctests_of_the_library_run_beside_others() -> None:
    assert not is_alone(TESTS.parent / "recshard_lab/cores.py")
