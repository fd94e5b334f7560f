"""What launched ranks run for the checks. Every function is collective and returns plain numbers and text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab import train
from recshard_lab.calibration.batches import random_batch
from recshard_lab.comm import ShardingEnv, compute_device
from recshard_lab.data import Batch, RandomRecDataset
from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig, EmbOptimType, OptimizerSpec
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, ShardSpec, available, kernel_named
from recshard_lab.lab.live.on_ranks import run_beside_truth as run_beside_truth
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.planner import Workload
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.train.launch_costs import graph_dense

__all__ = [
    "copy_speed",
    "device_memory",
    "graphs",
    "lookup_times",
    "pinned_copies",
    "pipeline_losses",
    "rank_facts",
    "run_beside_truth",
]

KEYS = [f"f{i}" for i in range(4)]
ROWS = 500


def rank_facts() -> tuple[str, float, bool]:
    """Device of this rank, the sum of all ranks + 1 computed there, and whether a model is placed there."""
    device = compute_device(ShardingEnv.default())
    total = torch.full((1,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(total)
    table = EmbeddingBagConfig(10, 4, name="t", feature_names=["f"])
    model = DistributedModelParallel(EmbeddingBagCollection([table]))
    return str(device), float(total), model.device == device


def _model(**more: Any) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """A small DLRM with row-wise tables, and the optimizer of its dense part; the same weights at every call."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(ROWS, 16, name=f"t{i}", feature_names=[key]) for i, key in enumerate(KEYS)]
    dlrm = DLRMTrain(DLRM(EmbeddingBagCollection(tables), 13, [32, 16], [32, 1]))
    cuts = {table.name: ParameterSharding("row_wise") for table in tables}
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.05})
    plan = ShardingPlan({"model.embedding_bag_collection": cuts})  # type: ignore[dict-item]
    model = DistributedModelParallel(dlrm, plan=plan, sharders=[sharder], **more)
    return model, torch.optim.SGD(model.dense_parameters(), lr=0.1)


def _batches(count: int, samples: int = 64) -> list[Batch]:
    """This rank's batches, in host memory."""
    return RandomRecDataset(
        KEYS,
        samples,
        hash_size=ROWS,
        ids_per_feature=3,
        num_dense=13,
        manual_seed=dist.get_rank(),
        num_generated_batches=count,
    ).ahead


def pipeline_losses(kinds: list[str], steps: int = 8, **switches: Any) -> dict[str, list[float]]:
    """Losses of equal models, by the name of the pipeline that trains them; ``"plain loop"`` is trained without one.

    Args:
        kinds: class names of `recshard_lab.train`.
        steps: batches.
        switches: options of the pipelines, such as ``pin_memory=True``.
    """
    batches = _batches(steps)
    found = {"plain loop": _plain_losses(*_model(), batches)}
    for kind in kinds:
        model, optimizer = _model()
        with getattr(train, kind)(model, optimizer, model.device, **switches) as pipeline:
            data = iter(batches)
            found[kind] = [float(pipeline.progress(data)[0].detach()) for _ in range(steps)]
    return found


def _plain_losses(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, batches: list[Batch]
) -> list[float]:
    return [_step(model, optimizer, batch.to(model.device)) for batch in batches]


def _step(model: DistributedModelParallel, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    optimizer.zero_grad()
    loss = model(batch)[0]
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def graphs(steps: int = 6) -> dict[str, Any]:
    """Losses with and without CUDA graphs of the dense part, and ms per step of both."""
    batches = _batches(steps)
    plain, optimizer = _model()
    losses = _plain_losses(plain, optimizer, batches)
    graphed, other = _model(init_data_parallel=False)
    recorded = graph_dense(graphed, batches[0].to(graphed.device))
    graphed.init_data_parallel()
    return {
        "recorded": recorded,
        "plain": losses,
        "graphed": _plain_losses(graphed, other, batches),
        "plain_ms": _best_ms(partial(_step, plain, optimizer, batches[0].to(plain.device))),
        "graphed_ms": _best_ms(partial(_step, graphed, other, batches[0].to(graphed.device))),
    }


def _best_ms(work: Callable[[], Any], repeats: int = 10) -> float:
    """Shortest time of `work`, which waits for the device."""
    times = []
    for _ in range(repeats):
        begun = perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1000 * (perf_counter() - begun))
    return min(times)


def copy_speed(num_bytes: int = 1 << 30) -> float:
    """Bandwidth of this rank's GPU in GB/s: bytes read and written by a copy inside its memory, over its time."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=compute_device(ShardingEnv.default()))
    target = torch.empty_like(source)
    return 2 * num_bytes / _best_ms(lambda: target.copy_(source)) / 1e6


def lookup_times(tables: list[EmbeddingBagConfig], workload: Workload) -> dict[str, tuple[float, float]]:
    """Milliseconds of (lookup, its backward with the optimizer) of each kernel alone, on this rank's GPU.

    Every turn has ids of its own, drawn uniformly on the GPU; events time the kernels.
    """
    device = compute_device(ShardingEnv.default())
    shards = [ShardSpec(t.name, t.num_embeddings, t.embedding_dim, t.data_type, t.embedding_dim) for t in tables]
    features, bags = list(range(len(tables))), len(tables) * workload.batch_size
    pooling = round(workload.pooling_factor(tables[0].feature_names[0]))
    offsets = torch.arange(0, bags * pooling + 1, pooling, device=device)
    batches = [torch.randint(tables[0].num_embeddings, (bags * pooling,), device=device) for _ in range(4)]
    grad = torch.randn(workload.batch_size, sum(t.embedding_dim for t in tables), device=device)
    found = {}
    for name in available():
        for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD):
            spec = KernelSpec(shards, features, OptimizerSpec(optimizer, 0.01), device=device)
            if kernel_named(name).refuses(spec) is not None:
                continue
            kernel = kernel_named(name)(spec)
            for weight in kernel.weights():
                weight.normal_()
            counts = [workload.batch_size * pooling] * len(tables)
            inputs = [KernelInput(ids, offsets, None, counts) for ids in 3 * batches]
            times = [_event_times(kernel, own, grad) for own in inputs][len(batches) :]
            forward, backward = (median(column) for column in zip(*times, strict=True))
            found[f"{name}, {optimizer}"] = (forward, backward)
            del kernel
            torch.cuda.empty_cache()
    return found


def _event_times(kernel: LookupKernel, batch: KernelInput, grad: Tensor) -> tuple[float, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    marks[0].record()
    _, saved = kernel.forward(batch, True)
    marks[1].record()
    kernel.backward(saved, grad)
    marks[2].record()
    torch.cuda.synchronize()
    return marks[0].elapsed_time(marks[1]), marks[1].elapsed_time(marks[2])


def pinned_copies(num_bytes: int = 1 << 28) -> dict[str, float]:
    """GB/s from host memory to this rank's GPU: ``pageable`` and ``pinned``."""
    device = compute_device(ShardingEnv.default())
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    pinned = pageable.pin_memory()
    if not pinned.is_pinned():
        raise RuntimeError("pin_memory() returned a tensor that is not pinned")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    found = {}
    for name, host in (("pageable", pageable), ("pinned", pinned)):
        found[name] = num_bytes / _best_ms(lambda host=host: target.copy_(host, non_blocking=True)) / 1e6  # type: ignore[misc]
    return found


def device_memory(plan_json: str, tables: list[EmbeddingBagConfig], workload: Workload) -> dict[str, int]:
    """Bytes of the allocator on this rank's GPU: ``held`` by the tables, and ``peak`` of three training steps."""
    device = compute_device(ShardingEnv.default())
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder({"optimizer": workload.optimizer, "learning_rate": 0.01})
    model = DistributedModelParallel(collection, plan=ShardingPlan.from_json(plan_json), sharders=[sharder])
    held = torch.cuda.memory_allocated(device) - before
    torch.cuda.reset_peak_memory_stats(device)
    batch = random_batch(tables, workload, np.random.default_rng(dist.get_rank())).to(device)
    for _ in range(3):
        values = model(batch).values()
        values.backward(torch.full_like(values, 1e-3))
    torch.cuda.synchronize(device)
    return {"held": held, "peak": torch.cuda.max_memory_allocated(device) - before}
