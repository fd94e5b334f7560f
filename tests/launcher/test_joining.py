"""The same script under torchrun on two hosts and on two nodes of one host, on launched ranks, and by itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, Ranks, join, launch
from tests.launcher import hosts, torchrun_job
from tests.launcher.hosts_job import entries, unsharded

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(node: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """One of two agents of two ranks each; they meet on a loopback port."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "--rdzv-id=pair"]
    command += ["--module", "tests.launcher.torchrun_job", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.gate
@hosts.needs_hosts
def test_two_hosts_train_to_the_losses_and_weights_of_the_unsharded_model(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with hosts.two_hosts() as pair:
        agents = pair.torchrun("--module", "tests.launcher.hosts_job", str(tmp_path), "3", log=log)
        codes = hosts.ended(agents, within=90)
        assert codes == [0, 0], "".join(file.read_text() for file in tmp_path.glob("log.*"))
        assert [host.pids() for host in pair] == [[], []]
    losses, weights = unsharded(steps=3, world_size=2)
    for rank, host in enumerate(pair):
        first, *steps = entries(tmp_path, rank)
        assert first["node"] == rank
        assert first["GLOO_SOCKET_IFNAME"] == host.device
        assert set(first["listening"]) == {host.address}  # not the loopback address that the host's own name has
        assert [entry["loss"] for entry in steps] == pytest.approx([step[rank] for step in losses], rel=1e-6)
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.nightly
def test_two_nodes_of_torchrun_train_to_the_weights_of_launched_ranks(tmp_path: Path) -> None:
    port = free_port()
    agents = [torchrun(node, port, tmp_path) for node in range(2)]
    try:
        with launch(4, nodes=2) as ranks:
            launched = ranks.run(torchrun_job.main)
        said = [agent.communicate(timeout=100)[0] for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(20)
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    expected = launched[0][1]
    assert {name.rpartition(".")[0] for name in expected} == {
        "bags.embedding_bags.movies",
        "bags.embedding_bags.users",
        "top",
    }
    nodes = {}
    for rank in range(4):
        (seen, size, local_rank, local_size, node), weights = torch.load(tmp_path / f"{rank}.pt")
        assert (seen, size, local_size) == (rank, 4, 2)
        nodes[node, local_rank] = rank
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-6, msg=name)
    assert nodes == {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}
    assert [where for where, _ in launched] == [(r, 4, r % 2, 2, r // 2) for r in range(4)]


def test_training_changed_what_is_compared() -> None:
    torch.manual_seed(0)
    before = torchrun_job.Model().state_dict()
    with launch(2) as ranks:
        after = ranks.run(torchrun_job.main)[0][1]
    for name in ("bags.embedding_bags.movies.weight", "bags.embedding_bags.users.weight", "top.weight"):
        assert not torch.allclose(before[name], after[name]), name


def test_on_launched_ranks_it_does_nothing_and_leaves_the_group(ranks: Ranks) -> None:
    def inside() -> tuple[int, int, str]:
        group = dist.group.WORLD
        with join() as place:
            assert dist.group.WORLD is group
        assert dist.group.WORLD is group
        return place.rank, place.world_size, str(place.device)

    assert ranks.run(inside) == [(rank, 3, "cpu") for rank in range(3)]


def test_by_itself_it_is_a_world_of_one_on_loopback_and_leaves_nothing() -> None:
    before = dict(os.environ)
    with join("gloo") as place:
        assert (place.rank, place.world_size, place.local_world_size, place.node) == (0, 1, 1, 0)
        listeners = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {connection.laddr.ip for connection in listeners} <= {"127.0.0.1", "::1"}
    assert not dist.is_initialized()
    assert dict(os.environ) == before


def test_half_an_environment_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with (
        pytest.raises(LaunchError, match="set but not LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT: torch"),
        join(),
    ):
        pass


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(LaunchError, match="'gloo', 'nccl' or None"), join("mpi"):
        pass
