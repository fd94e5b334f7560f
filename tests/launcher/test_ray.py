"""Ranks on a real Ray cluster of two small machines, both this one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from recshard_lab.launcher import LaunchError, RankError, Ranks, RanksInterrupted, current, launch
from tests.lab.test_magics import Notebook, gone

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


def test_functions_cells_and_output_are_as_with_forked_ranks(on_ray: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    assert str(on_ray.shape) == "2 ranks over gloo, engine ray"
    assert on_ray.run(lambda x: x + dist.get_rank(), 10) == [10, 11]
    on_ray.exec(
        "import sys\nfor i in range(3): print(rank, i)\nprint('both'); print('oh', file=sys.stderr); display(7)"
    )
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] 0 0", "[0] 0 1", "[0] 0 2"]
    assert [line for line in lines if line.startswith("[all]")] == ["[all] both", "[all] 7"]
    assert err == "[all] oh\n"
    assert [status.state for status in on_ray.status()] == ["idle", "idle"]
    assert min(status.memory_bytes for status in on_ray.status()) > 50 << 20
    assert on_ray.run(torch.get_num_threads) == [1, 1]


def test_large_values_go_there_and_back_whole(on_ray: Ranks) -> None:
    sent = torch.arange(2_000_000)  # 16 MB, many chunks
    on_ray.push({"big": sent}, ranks=[1])
    (back,) = on_ray.eval("big + 1", ranks=[1])
    assert torch.equal(back, sent + 1)


def test_a_rank_that_raises_is_named_the_other_is_freed_and_groups_can_be_made_again(on_ray: Ranks) -> None:
    on_ray.exec("kept = rank")
    with pytest.raises(RankError, match=r"rank 1 raised ValueError: boom; rank 0 was waiting in a collective"):
        on_ray.exec("if rank == 1: raise ValueError('boom')\ndist.barrier()")
    on_ray.exec("pair = dist.new_group([0, 1]); t = torch.ones(1); dist.all_reduce(t, group=pair)")
    assert on_ray.eval("t.item(), kept") == [(2.0, 0), (2.0, 1)]


def test_an_interrupt_stops_python_code_and_frees_a_collective(on_ray: Ranks) -> None:
    on_ray.exec("kept = rank")
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(RanksInterrupted):
        on_ray.exec("import time\nif rank: dist.barrier()\nelse: time.sleep(60)")
    assert on_ray.pull("kept") == [0, 1]


def test_ranks_hold_no_listener_beyond_loopback(on_ray: Ranks) -> None:
    listeners = [c for pid in on_ray.pids for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]
    assert {connection.laddr.ip for connection in listeners} <= {"127.0.0.1", "::1"}


def test_a_dead_rank_is_named_with_its_last_words_and_cells_are_refused(on_ray: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as caught:
        on_ray.exec("import os\nif rank == 1: print('so long'); os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "so long" in str(caught.value)
    with pytest.raises(LaunchError, match="rank 1 was killed by SIGKILL; nothing runs on fewer than 2"):
        on_ray.exec("1")


def test_a_lost_actor_takes_its_rank_along_and_is_named(on_ray: Ranks) -> None:
    import ray

    process = psutil.Process(on_ray.pids[0])
    assert on_ray._world is not None
    engine: Any = on_ray._world._engine
    threading.Timer(0.3, lambda: ray.kill(engine._actors[0])).start()
    with pytest.raises(RankError, match="rank 0 was lost with its Ray actor"):
        on_ray.exec("import time; time.sleep(30)")
    assert not psutil.wait_procs([process], timeout=2)[1]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n": 2, "start_method": "spawn"}, "leave out start_method"),
        ({"n": 2, "address": "192.0.2.77:1"}, r"this process is connected to the Ray cluster at .*leave out address"),
        ({"n": 64}, r"no equal shares of ranks fit .*2 CPUs.*fewer ranks"),
        ({"n": 2, "threads": 3}, "a rank takes 3 CPU"),
        ({"n": 2, "backend": "nccl"}, r"the cluster has 0\. Fix: backend='gloo'"),
    ],
)
def test_what_the_cluster_cannot_hold_is_refused_by_name(
    address: str, placed: Ranks, asked: dict[str, Any], words: str
) -> None:
    placed.stop()
    with pytest.raises(LaunchError, match=words):
        launch(**{"engine": "ray", **asked})
    assert current() is None


def test_ranks_that_need_two_machines_live_on_two_nodes_and_a_link_between_real_ones_is_refused(
    address: str, placed: Ranks
) -> None:
    placed.stop()
    with pytest.raises(LaunchError, match="between real machines cannot be emulated"):
        launch(4, nodes=2, engine="ray", inter_node_latency_ms=5)
    with launch(4, engine="ray") as ranks:
        assert "4 ranks on 2 machines over gloo, engine ray" in repr(ranks)
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
        assert ranks.run(lambda: tuple(int(os.environ[name]) for name in names)) == [
            (0, 2, 0),
            (1, 2, 0),
            (0, 2, 1),
            (1, 2, 1),
        ]
        assert [status.node for status in ranks.status()] == [0, 0, 1, 1]
        with pytest.raises(RankError, match="rank 3 raised"):
            ranks.exec("if rank == 3: 1 / 0\ndist.barrier()")
        ranks.exec("t = torch.ones(1); dist.all_reduce(t)")
        assert ranks.eval("t.item()") == [4.0] * 4
        processes = [psutil.Process(pid) for pid in ranks.pids]
    assert gone(processes, within=2)


def test_the_magics_of_a_real_kernel_and_nothing_left_when_it_is_killed(address: str, placed: Ranks) -> None:
    placed.stop()
    notebook = Notebook()
    try:
        notebook.ok("%load_ext recshard_lab")
        assert "engine ray ready in" in notebook.ok(f"%recshard_launch -n 2 --engine ray --address {address}").stdout
        notebook.ok("def twice(x): return 2 * x")
        notebook.ok("%recshard_push twice")
        assert notebook.ok("%%recshard\nprint('hi')\ntwice(rank)").stdout == "[all] hi\n[0] 0\n[1] 2\n"
        said = notebook.run("%%recshard\na = 1\nb = a / 0")
        assert "b = a / 0" in said.error
        number = notebook.send(
            "%%recshard\nprint('go')\nif rank: dist.barrier()\nelse:\n    import time; time.sleep(60)"
        )
        notebook.hear(number, until="go")
        notebook.manager.interrupt_kernel()
        stopped = notebook.hear(number)
        assert stopped.name == "RanksInterrupted"
        pids = notebook.ok("from recshard_lab.launcher import current\nprint(*current().pids)").stdout.split()
        processes = [psutil.Process(int(pid)) for pid in pids]
        os.kill(notebook.manager.provisioner.pid, signal.SIGKILL)  # type: ignore[union-attr]
        assert gone(processes, within=5)  # Ray has to notice first
    finally:
        notebook.close()
