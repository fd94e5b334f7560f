"""Counters of several workers are summed, whatever state their files are in."""

import os
import subprocess
import sys
from pathlib import Path

from recshard_lab.serving.server.metrics import FOLDER_VARIABLE

TWO_WORKERS = """
import os
from recshard_lab.serving.server.metrics import Metrics

if os.fork() == 0:
    Metrics().requests.labels("200").inc(2)
    os._exit(0)
os.wait()
metrics = Metrics()
metrics.requests.labels("200").inc(3)
print(metrics.text().decode())
"""


def test_a_worker_that_is_killed_while_it_creates_a_file_stops_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "counter_1.db").touch()
    (tmp_path / "gauge_livesum_1.db").touch()
    found = subprocess.run(
        [sys.executable, "-c", TWO_WORKERS],
        env={**os.environ, FOLDER_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert 'recshard_requests_total{status="200"} 5.0' in found.stdout, found.stderr
