"""The load of other programs: measured, kept, and never explained away."""

import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from recshard_lab.calibration.load import OtherLoad, load_before


def test_a_program_that_computes_beside_is_seen_and_this_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"wall": 0.0, "busy": 0.0, "own": 0.0, "ranks": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(time, "process_time", lambda: clock["own"])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_times", lambda: SimpleNamespace(user=clock["busy"], idle=99.0, iowait=5.0))
    ranks = SimpleNamespace(run=lambda fn: [clock["ranks"], clock["ranks"]])
    load = OtherLoad(ranks)
    clock.update(wall=10.0, busy=35.0, own=3.0, ranks=8.0)  # 40 core seconds: 3 + 2 * 8 ours, 16 of others
    assert load.share() == pytest.approx(16 / 40)
    clock.update(busy=10.0)
    assert load.share() == 0.0


@pytest.mark.clock
def test_a_real_program_that_computes_beside_is_seen() -> None:
    code = "print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as spin:
        try:
            assert spin.stdout is not None
            spin.stdout.readline()
            assert load_before(None) > 0.25 / psutil.cpu_count()
        finally:
            spin.kill()
