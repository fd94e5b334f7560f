"""A Ray cluster of two hosts: training, a killed rank, a lost host, an exported run, and who may connect."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.launcher import hosts
from tests.launcher.hosts import Host, TwoHosts, two_hosts
from tests.launcher.hosts_job import entries, unsharded
from tests.train_job.test_export import check_trained, exported

pytestmark = [
    hosts.needs_hosts,
    pytest.mark.nightly,
    pytest.mark.clock,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: recshard-lab[ray]"),
]

PORT = 6379
TOKEN = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
}
LOST_S = 100.0  # Ray's own detector needs 60 s for a host that is silent


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoHosts]:
    """Two hosts with two CPUs each. Host 0 is the head."""
    folder = tempfile.mkdtemp(prefix="rs-ray-")  # short: it holds sockets
    small = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
    try:
        with two_hosts() as pair:
            for host in pair:
                head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
                role = head if host is pair[0] else [f"--address={pair[0].address}:{PORT}"]
                command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={host.address}"]
                log = Path(folder, f"{host.name}.start")
                assert hosts.ended([host.start(*command, *role, *small, log=log, **TOKEN)], within=120) == [0], (
                    log.read_text()
                )
            yield pair
    finally:
        shutil.rmtree(folder)


def driver(host: Host, folder: Path, steps: int) -> subprocess.Popen[bytes]:
    address = f"10.77.0.1:{PORT}"
    command = [sys.executable, "-m", "tests.launcher.ray_hosts_job", address, str(folder), str(steps)]
    return host.start(*command, log=folder / "driver.log", **TOKEN)


def wait_until(true: Callable[[], bool], folder: Path, within: float) -> None:
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            pytest.fail((folder / "driver.log").read_text())
        time.sleep(0.05)


def report(folder: Path) -> tuple[float, str]:
    """When the driver reported an error, and the error."""
    lines = [line for line in (folder / "driver.log").read_text().splitlines() if "rank 1 was" in line]
    moment, _, words = lines[0].partition(" ")
    return float(moment), words


def test_ranks_on_two_hosts_of_a_ray_cluster_train_to_the_weights_of_the_unsharded_model(
    cluster: TwoHosts, tmp_path: Path
) -> None:
    assert hosts.ended([driver(cluster[0], tmp_path, 3)], within=150) == [0], (tmp_path / "driver.log").read_text()
    assert "2 ranks on 2 machines over gloo, engine ray" in (tmp_path / "driver.log").read_text()
    losses, weights = unsharded(steps=3, world_size=2)
    seen = {}
    for rank in range(2):
        first, *steps = entries(tmp_path, rank)
        seen[first["GLOO_SOCKET_IFNAME"]] = set(first["listening"])
        assert [entry["loss"] for entry in steps] == pytest.approx([step[rank] for step in losses], rel=1e-6)
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)
    assert seen == {host.device: {host.address} for host in cluster}


def test_an_exported_run_trains_on_two_hosts_of_a_ray_cluster(cluster: TwoHosts, tmp_path: Path) -> None:
    config = exported(tmp_path, "ray")
    log = tmp_path / "driver.log"
    run = cluster[0].start(
        sys.executable, str(tmp_path / "train.py"), log=log, RAY_ADDRESS=f"10.77.0.1:{PORT}", **TOKEN
    )
    assert hosts.ended([run], within=150) == [0], log.read_text()
    check_trained(config, tmp_path)


def test_only_who_has_the_token_connects_to_ray(cluster: TwoHosts, tmp_path: Path) -> None:
    connect = f"import ray; ray.init(address='10.77.0.1:{PORT}'); print('connected')"
    for name, token in (("right", TOKEN["RAY_AUTH_TOKEN"]), ("wrong", secrets.token_hex(32))):
        log = tmp_path / name
        run = cluster[1].start(sys.executable, "-c", connect, log=log, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token)
        hosts.ended([run], within=100)
        assert ("connected" in log.read_text().split()) == (name == "right"), log.read_text()


def test_a_killed_rank_on_another_host_is_named_within_seconds(cluster: TwoHosts, tmp_path: Path) -> None:
    run = driver(cluster[0], tmp_path, 10**9)
    wait_until(lambda: len(entries(tmp_path, 1)) > 3, tmp_path, within=150)
    killed = time.time()
    os.kill(entries(tmp_path, 1)[0]["pid"], signal.SIGKILL)
    assert hosts.ended([run], within=30) == [0]
    moment, words = report(tmp_path)
    assert words.startswith("rank 1 was killed by SIGKILL")
    assert moment - killed < 8


def test_a_host_behind_a_broken_link_is_named_by_its_rank_in_time(cluster: TwoHosts, tmp_path: Path) -> None:
    """The last test of the file: the cluster does not recover."""
    run = driver(cluster[0], tmp_path, 10**9)
    wait_until(lambda: len(entries(tmp_path, 1)) > 3, tmp_path, within=150)
    cluster.unplug()
    unplugged = time.time()
    assert hosts.ended([run], within=LOST_S + 20) == [0]
    moment, words = report(tmp_path)
    assert words.startswith("rank 1 was lost with its Ray actor")
    assert moment - unplugged < LOST_S
