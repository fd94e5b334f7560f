"""What ranks run on a device: steps, moves, checkpoints and pipelines, beside the same on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import torch

import recshard_lab as rl
from benchmarks import ledger
from recshard_lab.distributed import DefaultDataParallelWrapper
from recshard_lab.models import DLRM, DLRMTrain
from recshard_lab.train import pipelines
from tests.distributed import state_jobs
from tests.distributed.jobs import Case, Result, batch_of, sharded_model, train_sharded
from tests.train import pipeline_jobs


def register(device: str) -> None:
    """Makes the ledger device known in this process."""
    if device == "ledger":
        ledger.register()


@contextmanager
def without_waiting(device: str) -> Iterator[None]:
    """Raises where the host waits for the device inside the block."""
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


def pipelined(kind: str, device: str) -> tuple[list[str], list[float], list[float]]:
    """Names of what differs from the plain loop on the CPU, and both lists of losses."""
    register(device)
    ours, plain = _dlrm(device), _dlrm("cpu")
    data = pipeline_jobs.batches(5)
    expected = pipeline_jobs.plain_loop(plain, data)
    optimizer = pipeline_jobs.dense_optimizer(ours)
    with getattr(pipelines, kind)(ours, optimizer, torch.device(device)) as pipeline:
        losses = pipeline_jobs.outputs(pipeline, iter(data))
    one, other = ours.full_state_dict(), plain.full_state_dict()
    return [name for name in one if not torch.equal(one[name].cpu(), other[name])], losses, expected


def _dlrm(device: str) -> rl.DistributedModelParallel:
    torch.manual_seed(3)
    ebc = rl.EmbeddingBagCollection(pipeline_jobs.tables())
    model = DLRMTrain(DLRM(ebc, 3, [8], [4, 1]))
    plan = pipeline_jobs.plan_of({"model.embedding_bag_collection": ebc}, pipeline_jobs.place()[1])
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=False)
    sharders = [pipeline_jobs.sharder()]
    return rl.DistributedModelParallel(
        model, plan=plan, sharders=sharders, device=device, data_parallel_wrapper=wrapper
    )


# ---- the ledger device alone ----


def counted(action: Callable[[Any], Any]) -> tuple[dict[str, Any], Any]:
    """What an action on the ledger device costs, as plain data, and what it returns; it gets the room as argument."""
    register("ledger")
    with ledger.record() as counts:
        found = action(ledger)
    return asdict(counts), found
