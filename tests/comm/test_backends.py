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

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.comm import (
    ReplicaGrid,
    all_reduce,
    backends_of,
    compute_device,
    host_env,
    message_device,
    sizes_env,
    uses_nccl,
)
from recshard_lab.distributed import ShardingEnv
from recshard_lab.launcher import groups as launched_groups
from recshard_lab.launcher import join
from recshard_lab.train.pipelines import base
from recshard_lab.train.pipelines.sending import READY, Announced, Sender
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
        assert compute_device(env) == torch.device(model), backend
        assert message_device(env) == torch.device(message), backend
        assert uses_nccl(env) is launched_groups.uses_nccl() is (gpu == "nccl"), backend  # its twin imports no comm
        assert backends_of(env.pg).get("cuda") == gpu, backend


def test_the_device_of_the_launched_rank_is_that_of_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_DEVICE", "cuda:1")
    assert compute_device(ShardingEnv.from_local(1, 0)) == torch.device("cuda", 1)


def test_models_metrics_and_join_default_to_the_gpu_of_a_group_with_both_backends(group: Any, monkeypatch: Any) -> None:
    group("cpu:gloo,cuda:nccl")
    table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    asked = []
    monkeypatch.setattr(DistributedModelParallel, "_find", lambda self, *_: asked.append(self.device) or iter(()))
    monkeypatch.setattr(EmbeddingBagCollection, "to", lambda self, device: self, raising=False)
    DistributedModelParallel(EmbeddingBagCollection([table]), init_data_parallel=False)
    assert asked[0] == GPU
    with join() as place:
        assert place.device == GPU


def test_pipelines_use_threads_by_default_on_the_cpu_and_not_on_a_gpu(group: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(base, "usable_cores", lambda: 64)
    for backend, threads in (("gloo", True), ("cpu:gloo,cuda:nccl", False), ("nccl", False)):
        assert base._threads(None, group(backend)) is threads
        assert base._threads(True, group(backend)) is True
    monkeypatch.setenv("RECSHARD_DEVICE", "cuda:0")  # Gloo carries the tensors of a shared GPU
    assert base._threads(None, group("gloo")) is False


def test_a_rank_without_a_batch_uses_the_same_connections_as_ranks_with_one(group: Any, monkeypatch: Any) -> None:
    """At an uneven end of data one rank has no features to take a device from."""
    env = group("cpu:gloo,cuda:nccl")
    monkeypatch.setattr(ShardingEnv, "twin", lambda self: self)
    sender = Sender(env, [], fused=True, uneven="stop", apart=False)
    sent = []

    def recorded(message: torch.Tensor, *_: Any) -> Any:
        sent.append(message.device)
        return type("Pending", (), {"wait": lambda self: message})()

    monkeypatch.setattr("recshard_lab.distributed.step.sizes.issue_all_to_all", recorded)
    for _ in sender._exchange(sender.links[0], READY, Announced(None), []):
        pass
    assert sent == [torch.device("cpu")]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_destroyed_groups_leave_no_threads_descriptors_or_objects() -> None:
    counts, groups = [], []
    for _ in range(4):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        env = ShardingEnv.default()
        grid = ReplicaGrid(env, 1)
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


def test_a_twin_has_the_backends_of_its_group(group: Any) -> None:
    group("gloo")
    env = ShardingEnv.from_process_group(dist.new_group([0], backend="cpu:gloo"))
    assert backends_of(env.twin().pg) == {"cpu": "gloo"}
    assert backends_of(ShardingEnv.default().twin().pg) == backends_of(dist.group.WORLD)


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
    sizes = sizes_env(env)
    assert sizes.pg is not env.pg
    assert sizes_env(env).pg is sizes.pg
    assert all_reduce(torch.ones(2), sizes, "x").tolist() == [1, 1]
    assert loops() == before > 0
    env.twin()
    assert loops() == before + 1


def test_ranks_over_nccl_have_a_gloo_group_for_messages_of_hosts(group: Any) -> None:
    env = group("nccl")
    beside = host_env(env)
    assert backends_of(beside.pg)["cpu"] == "gloo"
    assert (beside.rank, beside.world_size) == (env.rank, env.world_size)
    assert host_env(env).pg is beside.pg
    assert host_env(beside) is beside
