"""An index over two ranks that torchrun starts finds what one index finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recshard_lab.serving.retrieval import GroupRanks, load_index
from tests.serving.retrieval.spaces import whole_numbers

ROOT = Path(__file__).parents[3]


def test_two_ranks_of_torchrun_find_what_one_index_finds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--rdzv-id=index"]
    command += ["--module", "tests.serving.retrieval.torchrun_job", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] == [True] * 9
    assert (found["kinds"], found["items"], found["after"]) == (["exact", "exact"], 80, True)
    assert found["error"] == "rank 0: ValueError: this rank refuses"
    assert (tmp_path / "followed1").exists()
    _, ids, _ = whole_numbers()
    assert load_index(tmp_path / "1").ids().tolist() == sorted(torch.cat([ids[:20], ids[30:]]).tolist())


def test_without_a_process_group_it_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"no process group exists\. Fix: start the script with torchrun"):
        GroupRanks()
