"""One answer to which devices and backends a group carries, and groups that end when they are destroyed."""

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, comm
from recshard_lab.distributed import ShardingEnv, model_parallel
from recshard_lab.launcher import groups as launched_groups
from recshard_lab.launcher import join
from recshard_lab.train.pipelines import base
from tests.patience import wait_until

GPU = torch.device("cuda", 0)


@pytest.fixture
def group(monkeypatch: Any) -> Iterator[Any]:
    """A world of one over Gloo; called with a backend's name, it answers to that name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    world = dist.group.WORLD

    def named(backend: str) -> ShardingEnv:
        config = str(distributed_c10d.BackendConfig(dist.Backend(backend)))
        monkeypatch.setitem(distributed_c10d._world.pg_backend_config, world, config)
        kept = distributed_c10d._world.pg_map[world]
        monkeypatch.setitem(distributed_c10d._world.pg_map, world, (backend, *kept[1:]))
        return ShardingEnv.default()

    yield named
    monkeypatch.undo()
    dist.destroy_process_group()


def test_every_spelling_of_a_backend_gives_one_answer(group: Any) -> None:
    for backend, model, message, gpu in (
        ("gloo", "cpu", "cpu", "gloo"),
        ("cpu:gloo", "cpu", "cpu", None),
        ("cpu:gloo,cuda:gloo", "cpu", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl", "cuda:0", "cpu", "nccl"),
        ("nccl", "cuda:0", "cuda:0", "nccl"),
        ("cuda:nccl", "cuda:0", "cuda:0", "nccl"),
    ):
        env = group(backend)
        assert comm.compute_device(env) == torch.device(model), backend
        assert comm.message_device(env) == torch.device(message), backend
        assert comm.uses_nccl(env) is launched_groups.uses_nccl() is (gpu == "nccl"), (
            backend
        )  # its twin imports no comm
        assert comm.backends_of(env.pg).get("cuda") == gpu, backend


def test_models_metrics_and_join_default_to_the_gpu_of_a_group_with_both_backends(group: Any, monkeypatch: Any) -> None:
    group("cpu:gloo,cuda:nccl")
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    monkeypatch.setattr(model_parallel, "find_collections", lambda *_: [])
    monkeypatch.setattr(EmbeddingBagCollection, "to", lambda self, device: self, raising=False)
    dmp = DistributedModelParallel(EmbeddingBagCollection([table]), init_data_parallel=False)
    assert dmp.device == GPU
    with join() as place:
        assert place.device == GPU


def test_pipelines_use_threads_by_default_on_the_cpu_and_not_on_a_gpu(group: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "usable_cores", lambda: 64)
    for backend, threads in (("gloo", True), ("cpu:gloo,cuda:nccl", False), ("nccl", False)):
        assert base._threads(None, group(backend)) is threads
        assert base._threads(True, group(backend)) is True
    monkeypatch.setenv("RECSHARD_DEVICE", "cuda:0")  # Gloo carries the tensors of a shared GPU
    assert base._threads(None, group("gloo")) is False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_destroyed_groups_leave_no_threads_descriptors_or_objects() -> None:
    counts, groups = [], []
    for _ in range(4):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        env = ShardingEnv.default()
        grid = comm.ReplicaGrid(env, 1)
        envs = [env, *env.node_envs(), grid.sharding, grid.replicas, *env.node_envs()]
        table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        model = DistributedModelParallel(EmbeddingBagCollection([table]))
        groups += [weakref.ref(each.pg) for each in envs]
        del env, envs, grid, model
        dist.destroy_process_group()
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    assert [group for group in groups if group() is not None] == []
    assert counts[1:] == counts[:1] * 3


def test_an_env_that_contradicts_its_process_group_is_refused(group: Any) -> None:
    env = group("gloo")
    with pytest.raises(ValueError, match=r"rank=1 of world_size=2 does not match the process group.*rank 0 of 1"):
        ShardingEnv(2, 1, env.pg)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_one_thread_serves_the_connections_of_rows_and_of_sizes(group: Any) -> None:
    def loops() -> int:
        """A new thread has its creator's name until it names itself, so the count must stay the same for 0.3 s."""
        counts: list[int] = []

        def steady() -> bool:
            names = [name.read_text().strip() for name in Path("/proc/self/task").glob("*/comm")]
            counts.append(names.count("gloo_tcp_loop"))
            return len(counts) >= 15 and len(set(counts[-15:])) == 1

        wait_until(steady, every_s=0.02)
        return counts[-1]

    env = group("gloo")
    before = loops()
    sizes = comm.sizes_env(env)
    assert sizes.pg is not env.pg
    assert comm.sizes_env(env).pg is sizes.pg
    assert comm.all_reduce(torch.ones(2), sizes, "x").tolist() == [1, 1]
    assert loops() == before > 0
    env.duplicate()
    assert loops() == before + 1


def test_ranks_over_nccl_have_a_gloo_group_for_messages_of_hosts(group: Any) -> None:
    env = group("nccl")
    beside = comm.host_env(env)
    assert comm.backends_of(beside.pg)["cpu"] == "gloo"
    assert (beside.rank, beside.world_size) == (env.rank, env.world_size)
    assert comm.host_env(env).pg is beside.pg
    assert comm.host_env(beside) is beside
