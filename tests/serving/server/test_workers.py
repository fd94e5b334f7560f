"""Several workers: a killed one is restarted, counters are sums, signals reach all of them."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import psutil
import pytest

from recshard_lab.serving.server import Server, serve
from tests.patience import wait_until
from tests.serving.server.stub import LOADER, write
from tests.serving.server.traffic import ROUNDS, Traffic


def workers_of(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def serving(server: Server, version: str) -> float:
    with server.client() as client:
        return client.metrics().get(f'recshard_version{{version="{version}"}}', 0)


def replaced(server: Server, killed: psutil.Process) -> bool:
    """Whether another worker serves in place of a killed one, which is a child until the supervisor waits for it."""
    workers = workers_of(server)
    return killed not in workers and len(workers) == 2 and serving(server, "v1") == 2


@pytest.mark.gate
def test_a_killed_worker_is_restarted_and_nothing_else_is_lost(folder: Path) -> None:
    async def test(server: Server) -> Traffic:
        async with Traffic(server.address, 8, {"v1": 1.0, "v2": 2.0}) as traffic:
            await traffic.answered(100)
            for number in range(ROUNDS):
                killed = workers_of(server)[number % 2]
                killed.send_signal(signal.SIGKILL)
                await traffic.answered(200)
                await asyncio.to_thread(wait_until, partial(replaced, server, killed))
            write(folder, "v2", scale=2.0)
            os.kill(server.pid, signal.SIGHUP)  # every worker swaps
            await asyncio.to_thread(wait_until, lambda: serving(server, "v2") == 2)
            assert serving(server, "v1") == 0
        return traffic

    with serve(folder, workers=2, loader=LOADER, watch_s=0, drain_s=0.1, log_level="warning") as server:
        wait_until(lambda: serving(server, "v1") == 2)
        traffic = asyncio.run(test(server))
        assert set(traffic.statuses) == {200}
        assert (traffic.wrong, traffic.refused) == ([], 0)
        assert traffic.lost <= 8 * ROUNDS  # at most one request of each client was in the killed process
        with server.client() as client:
            metrics = client.metrics()
        # the killed worker's counters remain in the sums; an answer may have been counted and not sent, or not counted
        assert abs(metrics['recshard_requests_total{status="200"}'] - traffic.statuses[200]) <= 8 * ROUNDS
        assert "worker_ended" in server.log_path.read_text()
        running = workers_of(server)
        assert server.stop() == 0
        assert not any(worker.is_running() for worker in running)
