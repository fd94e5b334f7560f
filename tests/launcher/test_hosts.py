"""Two hosts under torchrun: a killed rank, a lost host, a link that breaks, and hosts that only pause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recshard_lab.sockets import SILENT_S
from tests.launcher import hosts
from tests.launcher.hosts import TwoHosts, two_hosts
from tests.launcher.hosts_job import entries
from tests.patience import wait_until

pytestmark = [hosts.needs_hosts, pytest.mark.nightly, pytest.mark.clock, pytest.mark.timeout(240)]


def start(pair: TwoHosts, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The job of `hosts_job` on both hosts, once both ranks train. It goes on until it is ended."""
    agents = pair.torchrun("--module", "tests.launcher.hosts_job", str(folder), str(10**9), log=folder / "log")
    wait_for(folder, agents, lambda: min(last_step(folder, rank) for rank in range(2)) >= 3)
    return agents


def wait_for(
    folder: Path, agents: list[subprocess.Popen[bytes]], true: Callable[[], bool], seconds: float = 90
) -> None:
    def known() -> bool:
        return true() or any(agent.poll() is not None for agent in agents)

    wait_until(known, seconds)
    assert true(), "\n".join(file.read_text() for file in sorted(folder.glob("log.*")))


def last_step(folder: Path, rank: int) -> int:
    return max((entry["step"] for entry in entries(folder, rank) if "step" in entry), default=-1)


def error_of(folder: Path, rank: int) -> dict[str, Any]:
    """The last line of a rank, which must be an error."""
    entry = entries(folder, rank)[-1]
    assert "error" in entry, f"rank {rank} wrote no error, but {entry}"
    return entry


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("rank 1", r"it led to host host1 \(rank 1\); rank 1 did not answer"),
        ("host 1", r"it led to host host1 \(rank 1\); rank 1 did not answer"),
        ("host 0", r"it led to host host0 \(rank 0\); the process that serves the store \(rank 0, or torchrun\) has"),
    ],
)
def test_a_killed_rank_or_host_is_named_within_seconds_and_nothing_is_left(
    lost: str, words: str, tmp_path: Path
) -> None:
    number = int(lost[-1])
    with two_hosts() as pair:
        agents = start(pair, tmp_path)
        killed = time.time()
        if lost.startswith("host"):
            pair[number].kill()
        else:
            os.kill(entries(tmp_path, number)[0]["pid"], signal.SIGKILL)
        assert 0 not in hosts.ended(agents, within=40)
        left = [host.pids() for host in pair]
    error = error_of(tmp_path, 1 - number)
    assert error["time"] - killed < 5
    assert re.search(words, error["error"]), error["error"]
    assert left == [[], []]


def test_both_sides_of_a_broken_link_name_the_other_host_within_the_promised_time(tmp_path: Path) -> None:
    with two_hosts() as pair:
        start(pair, tmp_path)
        unplugged = time.time()
        pair.unplug()
        wait_until(lambda: all("error" in entries(tmp_path, rank)[-1] for rank in range(2)), SILENT_S + 15)
    for rank in range(2):
        error = error_of(tmp_path, rank)
        assert SILENT_S - 1 < error["time"] - unplugged < SILENT_S + 10
        words = f"host host{1 - rank} (rank {1 - rank}) acknowledged nothing for {SILENT_S:g} s, so the host or its"
        assert words in error["error"]
        assert "Fix: restore the host or its network" in error["error"]


def test_a_rank_that_is_stopped_or_a_short_break_of_the_link_ends_nothing(tmp_path: Path) -> None:
    with two_hosts() as pair:
        agents = start(pair, tmp_path)
        pid = entries(tmp_path, 1)[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENT_S + 5)
        os.kill(pid, signal.SIGCONT)
        before = last_step(tmp_path, 0)
        wait_for(tmp_path, agents, lambda: last_step(tmp_path, 0) > before + 3, 10)
        pair.unplug()
        time.sleep(SILENT_S / 4)
        pair.plug()
        before = last_step(tmp_path, 0)
        wait_for(tmp_path, agents, lambda: last_step(tmp_path, 0) > before + 3, 15)
