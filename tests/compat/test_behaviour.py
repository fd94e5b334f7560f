"""What TorchRec's users rely on is the same under TorchRec and under its names served by this library."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.apparatus.environments import TorchRecEnv
from tests.compat.test_plans import NEEDS_PEERS

JOB = Path(__file__).with_name("behaviour.py")
CPU_RANKS = [f"rank:{rank}/cpu" for rank in range(4)]
GPU_RANKS = [f"rank:{rank}/cuda:{rank % 2}" for rank in range(4)]
EXPECTED: dict[str, Any] = {
    "kernels": {
        "plain": dict.fromkeys("abcd", "dense"),
        "in backward": {"a": "fused", "b": "dense", "c": "dense", "d": "dense"},
        "named": "fused",
    },
    "on cpu": {"a": CPU_RANKS, "b": CPU_RANKS[3:], "c": CPU_RANKS[:2], "d": None},
    "on cuda": {"a": GPU_RANKS, "b": GPU_RANKS[3:], "c": GPU_RANKS[:2], "d": None},
    "unwrapped": {"module is the model": True, "its layer": "Linear"},
    "gradients": {
        "after init_state": [[[0.0, 0.0]], [0.0]],
        "states": ["bias", "weight"],
        "after zero_grad": [None, None],
    },
    "positions": {name: ["row_wise", "fused"] for name in "abcd"},
}


def observed(python: str, library: str) -> dict[str, Any]:
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [python, "-W", "ignore", str(JOB), library],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("OBSERVED ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("OBSERVED "))
    return found


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    return observed(sys.executable, "recshard_lab")


@pytest.mark.gate
@pytest.mark.parametrize("fact", EXPECTED)
def test_served_names_behave_as_torchrec(ours: dict[str, Any], fact: str) -> None:
    assert ours[fact] == EXPECTED[fact]


@NEEDS_PEERS
@pytest.mark.timeout(900)
def test_torchrec_itself_behaves_so() -> None:
    with TorchRecEnv() as env:
        assert observed(env.python, "torchrec") == EXPECTED


def test_arguments_of_the_search_are_refused_beside_parts_that_replace_it(served: None) -> None:
    from torchrec.distributed.planner import EmbeddingShardingPlanner
    from torchrec.distributed.planner.proposers import GreedyProposer

    with pytest.raises(ValueError, match=r"solver are arguments of this library's search, .* Fix: omit them"):
        EmbeddingShardingPlanner(None, 64, None, None, GreedyProposer(), solver="exact")


def test_a_positional_argument_of_torchrecs_order_is_refused_by_this_librarys_planner() -> None:
    from recshard_lab import EmbeddingShardingPlanner, ParameterConstraints, Topology

    for call in (
        lambda: EmbeddingShardingPlanner(None, 64, None),
        lambda: Topology(4, "cpu", 1 << 30, 1 << 34, 2),
        lambda: ParameterConstraints(None, None, None, [], None, None, False, None, [0]),
    ):
        with pytest.raises((TypeError, ValueError), match="positional"):
            call()
