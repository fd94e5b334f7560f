"""Ranks on a real Ray cluster of two small machines, both this one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from recshard_lab.launcher import LaunchError, RankError, Ranks, current, launch
from tests.lab.test_magics import Notebook
from tests.launcher.engines import check_stops, check_work
from tests.launcher.waiting import left, then
from tests.refusals import not_refused
from tests.train_job.runs import environment
from tests.train_job.test_export import check_trained, exported

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("default"),  # Ray's own
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: recshard-lab[ray]"),
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster of two machines with two CPUs each, connected to."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": 100 << 20}
    folder = tempfile.mkdtemp(prefix="rs-ray-")  # short: it holds sockets
    os.environ["RAY_TMPDIR"] = folder  # Ray writes its address there, too
    cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    try:
        cluster.add_node(**small)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster.address
    finally:
        ray.shutdown()
        cluster.shutdown()
        del os.environ["RAY_TMPDIR"]
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def placed(address: str) -> Iterator[Ranks]:
    """Two ranks, which fit on one machine, for most of the file."""
    with launch(2, engine="ray", address=address) as ranks:
        yield ranks


@pytest.fixture
def on_ray(placed: Ranks) -> Ranks:
    if not placed.usable:
        placed.restart()
    return placed


def test_they_work_and_stop_as_forked_ranks(on_ray: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(on_ray.shape) == "2 ranks over gloo, engine ray"
    check_work(on_ray, capsys)
    check_stops(on_ray)


def test_a_dead_rank_is_named_with_its_last_words(on_ray: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        on_ray.exec("import os\nif rank == 1: print('so long'); os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "so long" in str(caught.value)


def test_a_lost_actor_takes_its_rank_along_and_is_named(on_ray: Ranks) -> None:
    import ray

    process = psutil.Process(on_ray.pids[0])
    assert on_ray._world is not None
    engine: Any = on_ray._world._engine
    with pytest.raises(RankError, match="rank 0 was lost with its Ray actor"):
        on_ray.exec(f"import time\n{then(on_ray, lambda: ray.kill(engine._actors[0]))}time.sleep(60)")
    assert not left([process])


def test_what_the_cluster_cannot_hold_is_refused_by_name(address: str, placed: Ranks) -> None:
    placed.stop()
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 2, "address": "192.0.2.77:1"}, r"this process is connected to the Ray cluster at .*leave out address"),
        ({"n": 64}, r"no equal shares of ranks fit .*2 CPUs.*fewer ranks"),
        ({"n": 2, "threads": 3}, "a rank takes 3 CPU"),
        ({"n": 2, "backend": "nccl"}, r"the cluster has 0\. Fix: backend='gloo'"),
        ({"n": 4, "nodes": 2, "inter_node_latency_ms": 5}, "between real machines cannot be emulated"),
    ]
    calls = [(lambda asked=asked: launch(engine="ray", **asked), words) for asked, words in refused]
    assert not_refused(calls, LaunchError) == []
    assert current() is None


def test_ranks_that_need_two_machines_live_on_two_nodes(address: str, placed: Ranks) -> None:
    placed.stop()
    with launch(4, engine="ray") as ranks:
        assert "4 ranks on 2 machines over gloo, engine ray" in repr(ranks)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        seen = ranks.run(lambda: tuple(int(os.environ[name]) for name in names))
        assert seen == [(rank % 2, 2, rank // 2) for rank in range(4)]
        with pytest.raises(RankError, match="rank 3 raised"):
            ranks.exec("if rank == 3: 1 / 0\ndist.barrier()")
        ranks.exec("t = torch.ones(1); dist.all_reduce(t)")
        assert ranks.eval("t.item()") == [4.0] * 4
        processes = [psutil.Process(pid) for pid in ranks.pids]
    assert not left(processes)


def test_an_exported_run_trains(address: str, placed: Ranks, tmp_path: Path) -> None:
    placed.stop()
    config = exported(tmp_path, "ray")
    command = [sys.executable, str(tmp_path / "train.py")]
    subprocess.run(command, env={**environment(), "RAY_ADDRESS": address}, check=True)
    check_trained(config, tmp_path)


def test_the_magics_of_a_real_kernel_and_nothing_left_when_it_is_killed(address: str, placed: Ranks) -> None:
    placed.stop()
    notebook = Notebook()
    try:
        notebook.ok("%load_ext recshard_lab")
        assert "engine ray ready in" in notebook.ok(f"%recshard_launch -n 2 --engine ray --address {address}").stdout
        notebook.ok("def twice(x): return 2 * x")
        notebook.ok("%recshard_push twice")
        assert notebook.ok("%%recshard\nprint('hi')\ntwice(rank)").stdout == "[all] hi\n[0] 0\n[1] 2\n"
        pids = notebook.ok("from recshard_lab.launcher import current\nprint(*current().pids)").stdout.split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert not left(processes)  # Ray has to notice first
    finally:
        notebook.close()
