"""Cores of a container are its share of the host's, wherever the limit is written down."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recshard_lab.cores import quota, usable_cores

SIXTEEN = set(range(16))


def machine(root: Path, membership: str, **files: str) -> Path:
    """A made-up /proc and /sys."""
    texts = {"proc/self/cgroup": membership, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "files", "share"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # a container's own view: Docker, Kubernetes, Binder
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/user/lab\n", {"user/cpu.max": "300000 100000\n", "user/lab/cpu.max": "max 100000\n"}, 3.0),  # around it
        ("0::/user/lab\n", {"user/cpu.max": "300000 100000\n", "user/lab/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/user\n", {"other/cpu.max": "100000 100000\n"}, None),  # another's
        ("4:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.cfs_quota_us": "90", "cpu,cpuacct/cpu.cfs_period_us": "20"}, 4.5),
        ("4:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "400000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 4.0),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("4:memory:/\n0::/\n", {"unified/cpu.max": "700000 100000\n", "memory/cpu.max": "1 1"}, 7.0),  # both layouts
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("", {}, None),
    ],
)
def test_the_strictest_limit_around_a_process_is_its_share(
    tmp_path: Path, membership: str, files: dict[str, str], share: float | None
) -> None:
    assert quota(machine(tmp_path, membership, **files)) == share


@pytest.mark.parametrize(("told", "cores"), [("200000", 2), ("150000", 2), ("50000", 1), ("max", 16), ("9900000", 16)])
def test_a_share_is_whole_cores_rounded_up_and_never_more_than_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: SIXTEEN)
    assert usable_cores(machine(tmp_path, "0::/\n", **{"cpu.max": f"{told} 100000\n"})) == cores


def test_outside_linux_all_cores_are_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(tmp_path) == os.cpu_count()


def test_on_one_core_launch_plan_and_pipeline_count_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from recshard_lab import Topology\n"
        "from recshard_lab.launcher.shape import Shape\n"
        "from recshard_lab.train.pipelines.base import _threads\n"
        "from recshard_lab.comm import ShardingEnv\n"
        "print(Topology(2).cores_per_host, _threads(None, ShardingEnv(1, 0)), Shape.checked(2).notice())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 False 2 ranks x 1 thread share 1 core: results are exact")
