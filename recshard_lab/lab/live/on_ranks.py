"""Functions that `LiveModel` and `DrawingBoard` call on every rank: report the plan, reshard and check, train.

The ranks call them together. They return numbers and text only.

The check of a resharding has two halves. Weights: a *fingerprint* of each table, the sum over its elements of their
bits times a number drawn from their position, modulo 2^64. Each rank sums over its shards. So the fingerprint does not
depend on the tiling, and differs if any bit of a weight differs, with probability 1 - 2^-64. Outputs: of one batch,
before and after. Partial sums are added in another order, so they are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab.comm import all_reduce, trace
from recshard_lab.lab.compare.measure import TIMED, peak_of, random_batch, sent_by_label, timed_steps, took_by_label
from recshard_lab.planner import Workload
from recshard_lab.sharding import ShardingPlan

PROBE_SAMPLES = 64
LEARNING_RATE = 0.01
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20  # elements at once


def look(model: Any) -> dict[str, Any]:
    """The model's plan, tables by module path, memory and kernels on this rank."""
    return {
        "plan": model.plan.to_json(),
        "tables": {path: list(collection.tables) for path, collection in model.collections.items()},
        "memory": model.memory_bytes(),
        "backends": model.backends(),
    }


def move_to(model: Any, plan_json: str, optimizers: Any = None) -> dict[str, Any]:
    """Reshards in place and compares weights and outputs before and after. Collective.

    Returns:
        ``ms``, ``bytes_moved`` of this rank, ``weights`` (table -> equal bit for bit), ``outputs_apart`` (largest
        difference of the pooled rows of a random batch, as a share of the largest value on any rank).
    """
    prints, outputs = fingerprints(model), _outputs(model)
    begun = perf_counter()
    done = model.reshard(ShardingPlan.from_json(plan_json), optimizers=optimizers)
    ms = 1000 * (perf_counter() - begun)
    after = fingerprints(model)
    apart = torch.zeros(2, dtype=torch.float64)
    for before, now in zip(outputs, _outputs(model), strict=True):
        if before.numel():
            pair = torch.stack([(before - now).abs().max(), before.abs().max()]).double().cpu()
            apart = torch.maximum(apart, pair)
    apart = all_reduce(apart.to(model.device), model.env, "check", maximum=True).cpu()
    return {
        "ms": ms,
        "bytes_moved": done.bytes_moved,
        "weights": {name: prints[name] == after[name] for name in prints},
        "outputs_apart": float(apart[0] / apart[1]) if float(apart[1]) else 0.0,
    }


def train_on(model: Any, step: Callable[[], Any], count: int) -> dict[str, Any]:
    """Calls `step` `count` times on all ranks together and measures it. Collective.

    Args:
        step: one training step; its result is the loss if it is a number or a tensor of one.

    Returns:
        ``losses`` and ``spent`` (ms of each step), ``sent``, ``took``, ``memory``, ``host_memory``.
    """
    losses, spent = [], []
    if dist.is_initialized():
        dist.barrier()  # so that no step contains the wait for a late rank
    with trace() as sent:
        for _ in range(count):
            begun = perf_counter()
            loss = step()
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            spent.append(1000 * (perf_counter() - begun))
            losses.append(_number(loss))
    return {
        "losses": losses,
        "spent": spent,
        "sent": sent_by_label(sent, model.dense_env.world_size, count),
        "took": took_by_label(sent),
        "memory": model.memory_bytes(),
        "host_memory": model.host_memory_bytes(),
    }


@torch.no_grad()
def fingerprints(model: Any) -> dict[str, int]:
    """Table -> its fingerprint, the same on every rank. Collective."""
    found: dict[str, Tensor] = {}
    for collection in model.collections.values():
        for name, shards in collection.table_shards().items():
            columns = shards.config.embedding_dim
            first: dict[Any, int] = {}  # of replicas of a shard only that of the lowest rank counts
            for shard in shards.sharding.shards:
                first[shard.rows, shard.cols] = min(shard.rank, first.get((shard.rows, shard.cols), shard.rank))
            total = torch.zeros((), dtype=torch.int64, device=model.device)
            for shard, weight in shards.shards():
                if first.get((shard.rows, shard.cols)) == shard.rank:
                    for rows, part in _chunks(weight, shard.rows[0]):
                        place = rows[:, None] * columns + torch.arange(*shard.cols, device=part.device)
                        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64)
                        total += (bits * _drawn(place)).sum()
            found[name] = total
    if not found:
        return {}
    sums = torch.stack(list(found.values()))
    if model.env.pg is not None:
        dist.all_reduce(sums, group=model.env.pg)
    return dict(zip(found, sums.tolist(), strict=True))


def _drawn(place: Tensor) -> Tensor:
    """An odd 64-bit number for every position, by the mixing steps of splitmix64 (Steele et al., 2014)."""
    mixed = place * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    return (mixed ^ (mixed >> 27)) * -7723592293110705685 | 1


def _chunks(weight: Tensor, first_row: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers and rows, in chunks that need little extra memory."""
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows]
        yield torch.arange(len(part), device=weight.device) + (first_row + start), part


@torch.no_grad()
def _outputs(model: Any) -> list[Tensor]:
    """The output of every collection for a random batch, the same batch each time. Collective."""
    found = []
    for collection in model.collections.values():
        load = Workload(PROBE_SAMPLES, 3.0, weighted=bool(collection.is_weighted()))
        rng = np.random.default_rng([7, model.env.rank])
        output = collection(random_batch(collection.tables, load, rng).to(model.device))
        parts = output.values() if isinstance(output.values(), Tensor) else [one.values() for one in output.values()]
        found += [parts.clone()] if isinstance(parts, Tensor) else [part.clone() for part in parts]
    return found


def _number(loss: Any) -> float:
    """A loss as a number; NaN if `step` returns something else."""
    if isinstance(loss, Tensor):
        return float(loss.detach()) if loss.numel() == 1 else float("nan")
    return float(loss) if isinstance(loss, (int, float)) else float("nan")


def run_beside_truth(plan_json: str, tables: list[Any], workload: Workload, steps: int) -> dict[str, Any]:
    """Trains tables under a plan and, on every rank separately, unsharded, and compares both. Collective.

    Both start with the same weights and see the same batches, with plain SGD, so that the reference is plain torch.
    Afterwards the sharded tables alone are timed, as `measure_plan` does.

    Returns:
        ``outputs_apart`` and ``weights_apart`` (largest difference, as a share of the largest value), ``step_ms``,
        ``sent``, ``memory``.
    """
    from recshard_lab.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder
    from recshard_lab.embedding import EmbeddingBagCollection

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # every rank has the same reference
        truth, twin = EmbeddingBagCollection(tables), EmbeddingBagCollection(tables)
    twin.load_state_dict(truth.state_dict())
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_sgd", "learning_rate": LEARNING_RATE})
    model = DistributedModelParallel(twin, plan=ShardingPlan.from_json(plan_json), sharders=[sharder])
    rank, world_size = model.env.rank, model.env.world_size
    plain = torch.optim.SGD(truth.parameters(), lr=LEARNING_RATE)
    apart = 0.0
    mine = []
    for number in range(steps):
        batches = [random_batch(tables, workload, np.random.default_rng([number, r])) for r in range(world_size)]
        mine.append(batches[rank].to(model.device))
        output = model(mine[-1]).values()
        output.square().sum().backward()
        expected = [truth(batch).values() for batch in batches]
        apart = float(np.maximum(apart, _apart(output.detach().cpu(), expected[rank].detach())))  # keeps a NaN
        plain.zero_grad()
        torch.stack([one.square().sum() for one in expected]).mean().backward()  # as ranks average gradients
        plain.step()
    whole = model.full_state_dict(cpu_offload=True)
    weights = float(np.max([_apart(whole[name], value) for name, value in truth.state_dict().items()]))

    def step(number: int) -> None:
        values = model(mine[number % len(mine)]).values()
        values.backward(torch.full_like(values, 1e-3))
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    timed, sent = timed_steps(step, TIMED)
    return {
        "outputs_apart": apart,
        "weights_apart": weights,
        "step_ms": float(np.median(timed)),
        "sent": sent_by_label(sent, world_size, TIMED),
        "took": took_by_label(sent),
        "memory": model.memory_bytes(),
        "host_memory": model.host_memory_bytes(),
        "in_use": peak_of(lambda: step(0), model.device),
        "backends": model.backends(),
    }


def _apart(one: Tensor, other: Tensor) -> float:
    largest = float(other.abs().max()) if other.numel() else 0.0
    return float((one - other).abs().max()) / largest if largest else 0.0
