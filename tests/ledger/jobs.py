"""What ranks run on a device: steps, moves, checkpoints and pipelines, beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch

import recshard_lab as rl
from benchmarks import ledger
from recshard_lab.comm import ShardingEnv, uses_nccl
from recshard_lab.distributed import DefaultDataParallelWrapper
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.optim import GradientClipping, GradientClippingOptimizer
from recshard_lab.train import pipelines
from tests.distributed import state_jobs, step_failure_jobs
from tests.distributed.jobs import Case, Result, batch_of, sharded_model, train_sharded
from tests.train import pipeline_jobs


def register(device: str) -> None:
    """Makes the ledger device known in this process."""
    if device == "ledger":
        ledger.register()


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Raises where the host waits for the device inside the block; not over Gloo, where it waits for each message."""
    if device == "cuda" and not uses_nccl(ShardingEnv.default()):
        yield
        return
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with ledger.record() as counts:
        yield
    if counts.syncs:
        raise RuntimeError(f"the host waited: {counts.syncs}")


def beside_cpu(case: Case, device: str) -> tuple[Result, Result]:
    """The case trained on the device and on the CPU."""
    register(device)
    return train_sharded(replace(case, device=device)), train_sharded(case)


def backward_alone(case: Case, device: str) -> int:
    """Trains two steps whose backward must not wait for the device; elements of the first output."""
    register(device)
    dmp, _ = sharded_model(replace(case, device=device))
    rank, seen = torch.distributed.get_rank(), 0
    for ranks in case.steps[:2]:
        out, _, _ = dmp(batch_of(ranks[rank], case.weighted).to(device))
        seen += out.numel()
        gradient = torch.ones(out.shape, device=device)
        with without_waiting(device):
            out.backward(gradient)
    return seen


def forward_waits(case: Case) -> list[list[str]]:
    """Of each step but the first, which fills caches, the lines of the sharded forward where the host waits."""
    register("ledger")
    dmp, _ = sharded_model(replace(case, device="ledger"))
    rank, found = torch.distributed.get_rank(), []
    for ranks in case.steps:
        with ledger.record() as counts:
            out, _, _ = dmp(batch_of(ranks[rank], case.weighted).to("ledger"))
            del out
        found.append([sync.where for sync in counts.syncs if "/distributed/step/" in sync.where])
    return found[1:]


def clipped(case: Case, device: str, batches: int) -> tuple[list[dict[str, torch.Tensor]], list[torch.Tensor]]:
    """Weights and norms of the gradients on the device and on the CPU. Only the first step waits for the device."""
    register(device)
    rank, weights, norms = torch.distributed.get_rank(), [], []
    for place in (device, "cpu"):
        dmp, _ = sharded_model(replace(case, device=place))
        optimizer = GradientClippingOptimizer(dmp.fused_optimizer, GradientClipping.NORM, 0.1)
        for number, ranks in enumerate(case.steps):
            for _ in range(batches):
                out, _, _ = dmp(batch_of(ranks[rank], case.weighted).to(place))
                out.backward(torch.ones(out.shape, device=place))
            with without_waiting(place) if number else nullcontext():
                optimizer.step()
        assert optimizer.last_total_grad_norm is not None
        norms.append(optimizer.last_total_grad_norm.cpu())
        weights.append({name: weight.cpu() for name, weight in dmp.full_state_dict().items()})
    return weights, norms


def built_bytes(case: Case, device: str) -> tuple[int, int]:
    """Bytes on the device that a model keeps, and the most that building it took."""
    register(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = sharded_model(replace(case, device=device))
        kept, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        del model
        return kept - before, peak - before
    before = sum(ledger.live.values())
    with ledger.record() as counts:
        model = sharded_model(replace(case, device=device))
    kept = sum(ledger.live.values())
    del model
    return kept - before, counts.peak_extra_bytes


def moved(case: Case, device: str, plans: list[str]) -> tuple[list[str], list[str]]:
    """What a move changes, and what differs after more training between a moved and an unmoved model."""
    register(device)
    wrong, _, _, one, other = state_jobs.train_moving(replace(case, device=device), plans, 2)
    differing = [
        name for name in one if not torch.allclose(one[name].double(), other[name].double(), rtol=1e-5, atol=1e-7)
    ]
    return wrong, differing


def saved_and_loaded(case: Case, device: str, path: str, plan: str) -> list[str]:
    """Names of what differs after saving on the device and loading under another plan, there and on the CPU."""
    register(device)
    case = replace(case, device=device)
    truth, truth_dense = state_jobs.train_and_save(case, path)
    wrong = []
    for place in (device, "cpu"):
        found, dense, _, _ = state_jobs.load_and_tell(replace(case, plan=plan, device=place), path, None)
        wrong += [f"{name} on {place}" for name in state_jobs.same(truth, found)]
        wrong += [
            f"dense {n} on {place}" for n, (a, b) in enumerate(zip(truth_dense, dense, strict=True)) if a.ne(b).any()
        ]
    return wrong


def saved_in_background(case: Case, device: str, path: str) -> list[str]:
    """Names of what differs after a save on the device, whose model changes at once, and a load into the model."""
    register(device)
    dmp = state_jobs.build(replace(case, device=device))
    truth = state_jobs.everything(dmp)
    pending = rl.distributed.async_save_checkpoint(path, dmp)
    state_jobs.scramble(dmp)
    rl.load_checkpoint(pending.result(), dmp)
    return state_jobs.same(truth, state_jobs.everything(dmp))


def pipelined(device: str, kind: str, switches: dict[str, Any]) -> tuple[list[str], list[float], list[float]]:
    """Names of what differs from the pipeline on the CPU, and both lists of losses. The tables move before batch 3."""
    register(device)
    found = []
    for place in (device, "cpu"):
        model = _dlrm(place)
        optimizer = pipeline_jobs.dense_optimizer(model)
        with getattr(pipelines, kind)(model, optimizer, torch.device(place), **switches) as pipeline:
            data = iter(pipeline_jobs.batches(6))
            losses = [float(pipeline.progress(data)[0]) for _ in range(3)]
            model.reshard(_moved_plan(model))
            losses += pipeline_jobs.outputs(pipeline, data)
        weights = model.full_state_dict()
        assert {value.device.type for value in weights.values()} == {place}
        found.append(({name: value.cpu() for name, value in weights.items()}, losses))
    (one, losses), (other, expected) = found
    return state_jobs.same(one, other), losses, expected


def _dlrm(device: str) -> rl.DistributedModelParallel:
    model, plan, more = _parts(pipeline_jobs.place()[1])
    return rl.DistributedModelParallel(model, plan=plan, device=device, **more)


def _parts(world: int) -> tuple[DLRMTrain, rl.ShardingPlan, dict[str, Any]]:
    """A DLRM, its plan for so many ranks, and how it is to be sharded."""
    torch.manual_seed(3)
    ebc = rl.EmbeddingBagCollection(pipeline_jobs.tables())
    plan = pipeline_jobs.plan_of({"model.embedding_bag_collection": ebc}, world)
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=False)
    more = {"sharders": [pipeline_jobs.sharder()], "data_parallel_wrapper": wrapper}
    return DLRMTrain(DLRM(ebc, 3, [8], [4, 1])), plan, more


def _moved_plan(model: rl.DistributedModelParallel) -> rl.ShardingPlan:
    """Every table whole on the last rank."""
    whole = [rl.Shard(pipeline_jobs.place()[1] - 1, (0, 29), (0, 8))]
    entries = {table.name: rl.ParameterSharding("table_wise", shards=whole) for table in pipeline_jobs.tables()}
    return rl.ShardingPlan({path: rl.sharding.EmbeddingModuleShardingPlan(entries) for path in model.collections})


def failing(case: Case, device: str) -> list[Any]:
    """The errors of faults at every place of a step on the device, and whether tables are unchanged."""
    register(device)
    return step_failure_jobs.fail_everywhere(replace(case, device=device))


# ---- the ledger device alone ----


def counted(action: Callable[[Any], Any]) -> tuple[dict[str, Any], Any]:
    """What an action on the ledger device costs, as plain data, and what it returns; it gets the room as argument."""
    register("ledger")
    with ledger.record() as counts:
        found = action(ledger)
    return asdict(counts), found


def gathering_bytes(plan: str, rows: int, rank0_only: bool, cpu_offload: bool) -> int:
    """Peak extra bytes on the ledger device while three tables ``[rows, 32]`` are gathered."""
    register("ledger")
    tables = [
        rl.EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=32, feature_names=[f"f{n}"])
        for n in range(3)
    ]
    model = rl.EmbeddingBagCollection(tables, device="meta")
    dmp = rl.DistributedModelParallel(model, plan=rl.ShardingPlan.from_json(plan), device="ledger")
    with ledger.record() as counts:
        state = dmp.full_state_dict(rank0_only=rank0_only, cpu_offload=cpu_offload)
    assert {value.device.type for value in state.values()} <= {"cpu" if cpu_offload else "ledger"}
    return counts.peak_extra_bytes
