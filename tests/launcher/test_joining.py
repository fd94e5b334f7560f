"""A script under torchrun on two hosts, on launched ranks, and by itself."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, Ranks, join
from tests.launcher import hosts
from tests.launcher.hosts_job import entries, fresh_model, unsharded

pytestmark = pytest.mark.timeout(120)


@pytest.mark.gate
@hosts.needs_hosts
def test_two_hosts_train_to_the_losses_and_weights_of_the_unsharded_model(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with hosts.two_hosts() as pair:
        agents = pair.torchrun("--module", "tests.launcher.hosts_job", str(tmp_path), "3", log=log, ranks=2)
        codes = hosts.ended(agents, within=90)
        assert codes == [0, 0], "".join(file.read_text() for file in tmp_path.glob("log.*"))
        assert [host.pids() for host in pair] == [[], []]
    losses, weights = unsharded(steps=3, world_size=4)
    places = set()
    for rank in range(4):
        first, *steps = entries(tmp_path, rank)
        host = pair[first["node"]]
        places.add((first["node"], first["local_rank"]))
        assert first["GLOO_SOCKET_IFNAME"] == host.device
        assert set(first["listening"]) == {host.address}  # not the loopback address that the host's own name has
        assert [entry["loss"] for entry in steps] == pytest.approx([step[rank] for step in losses], rel=1e-6)
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=1e-7, msg=name)
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    before = fresh_model().state_dict()
    assert [name for name, weight in weights.items() if torch.allclose(weight, before[name])] == []


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
    monkeypatch.undo()
    with pytest.raises(LaunchError, match="'gloo', 'nccl' or None"), join("mpi"):
        pass
