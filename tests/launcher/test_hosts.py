"""Two hosts under torchrun: slow links, a killed rank, a lost host, a link that breaks, and hosts that only pause."""

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

from recshard_lab.comm import InterNodeLink
from recshard_lab.sockets import SILENT_S
from tests.launcher import hosts
from tests.launcher.hosts import TwoHosts, two_hosts
from tests.launcher.hosts_job import entries

pytestmark = [hosts.needs_hosts, pytest.mark.nightly, pytest.mark.clock, pytest.mark.timeout(240)]

FOREVER = 10**9


def start(pair: TwoHosts, folder: Path, steps: int, *elements: int) -> list[subprocess.Popen[bytes]]:
    """The job of `hosts_job` on both hosts."""
    numbers = [str(number) for number in (steps, *elements)]
    return pair.torchrun("--module", "tests.launcher.hosts_job", str(folder), *numbers, log=folder / "log")


def wait_until(
    true: Callable[[], bool], agents: list[subprocess.Popen[bytes]], folder: Path, within: float = 90.0
) -> None:
    deadline = time.monotonic() + within
    while not true():
        late = time.monotonic() > deadline
        if late or any(agent.poll() is not None for agent in agents):
            logs = "\n".join(file.read_text() for file in sorted(folder.glob("log.*")))
            pytest.fail(f"{'it took too long' if late else 'an agent ended'}:\n{logs}")
        time.sleep(0.05)


def last_step(folder: Path, rank: int) -> int:
    return max((entry["step"] for entry in entries(folder, rank) if "step" in entry), default=-1)


def training(folder: Path) -> Callable[[], bool]:
    return lambda: min(last_step(folder, rank) for rank in range(2)) >= 3


def error_of(folder: Path, rank: int) -> dict[str, Any]:
    """The last line of a rank, which must be an error."""
    entry = entries(folder, rank)[-1]
    assert "error" in entry, f"rank {rank} wrote no error, but {entry}"
    return entry


def timed(folder: Path, delay_ms: float, rate: str, *elements: int) -> tuple[float, int, dict[int, float]]:
    """Least ms of a step, exchanges in a step, and elements -> ms of an exchange, over a shaped link."""
    folder.mkdir()
    with two_hosts(delay_ms) as pair:
        if rate:
            pair.shape("tbf", "rate", rate, "burst", "64kb", "latency", "2s")
        assert hosts.ended(start(pair, folder, 12, *elements), within=200) == [0, 0]
    found = entries(folder, 0)
    steps = [entry for entry in found if "step" in entry][4:]
    exchanged = {entry["elements"]: entry["ms"] for entry in found if "elements" in entry}
    return min(entry["ms"] for entry in steps), steps[0]["exchanges"], exchanged


def test_a_step_takes_a_round_trip_longer_for_each_of_its_exchanges(tmp_path: Path) -> None:
    (short, exchanges, one), (long, _, other) = (timed(tmp_path / f"{ms}", ms, "", 1) for ms in (10.0, 50.0))
    round_trip = 2 * (50.0 - 10.0)  # Gloo's receiver lets its sender know that it is ready
    assert other[1] - one[1] == pytest.approx(round_trip, rel=0.15)
    assert long - short == pytest.approx(exchanges * round_trip, rel=0.15)


def test_an_exchange_takes_the_time_that_the_rate_of_the_link_allows(tmp_path: Path) -> None:
    elements, ms = 500_000, {}
    for mbit in (50, 100):
        _, _, found = timed(tmp_path / f"{mbit}", 0.0, f"{mbit}mbit", elements)
        ms[mbit] = found[elements]
        least = InterNodeLink(gbps=mbit / 1e3).min_ms(4 * elements)
        assert 0.95 * least <= ms[mbit] <= 2.3 * least  # Gloo sends one direction after the other
    assert ms[50] / ms[100] == pytest.approx(2, rel=0.15)


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
        agents = start(pair, tmp_path, FOREVER)
        wait_until(training(tmp_path), agents, tmp_path)
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
        agents = start(pair, tmp_path, FOREVER)
        wait_until(training(tmp_path), agents, tmp_path)
        unplugged = time.time()
        pair.unplug()
        deadline = time.monotonic() + SILENT_S + 15
        while any("error" not in entries(tmp_path, rank)[-1] for rank in range(2)):
            assert time.monotonic() < deadline, "a rank still waits"
            time.sleep(0.1)
    for rank in range(2):
        error = error_of(tmp_path, rank)
        assert SILENT_S - 1 < error["time"] - unplugged < SILENT_S + 10
        words = f"host host{1 - rank} (rank {1 - rank}) acknowledged nothing for {SILENT_S:g} s, so the host or its"
        assert words in error["error"]
        assert "Fix: restore the host or its network" in error["error"]


def test_a_rank_that_is_stopped_or_a_short_break_of_the_link_ends_nothing(tmp_path: Path) -> None:
    with two_hosts() as pair:
        agents = start(pair, tmp_path, FOREVER)
        wait_until(training(tmp_path), agents, tmp_path)
        pid = entries(tmp_path, 1)[0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(SILENT_S + 5)
        os.kill(pid, signal.SIGCONT)
        before = last_step(tmp_path, 0)
        wait_until(lambda: last_step(tmp_path, 0) > before + 3, agents, tmp_path, within=10)
        pair.unplug()
        time.sleep(SILENT_S / 4)
        pair.plug()
        before = last_step(tmp_path, 0)
        wait_until(lambda: last_step(tmp_path, 0) > before + 3, agents, tmp_path, within=15)
