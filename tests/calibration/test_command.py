"""``recshard calibrate``, as people type it."""

import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab.sharding import Topology

pytestmark = pytest.mark.gate


def test_the_command_writes_a_profile_and_says_how_to_use_it(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    command = [
        sys.executable,
        "-m",
        "recshard_lab.cli",
        "calibrate",
        "--ranks",
        "1",
        "--seconds",
        "5",
        "--out",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"--topology {out}" in done.stdout
    assert Topology.from_profile(out).world_size == 1
    refused = subprocess.run([*command, "--seconds", "0"], capture_output=True, text=True, check=False, timeout=120)
    assert refused.returncode == 2
    assert "seconds must be a number from 5 on" in refused.stderr
