"""What ranks run in the tests of state: models trained, moved and looked into, as plain tensors."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan
from recshard_lab.distributed import (
    DefaultDataParallelWrapper,
    EmbeddingBagCollectionSharder,
    ShardingEnv,
)
from recshard_lab.distributed.state import checkpoint as checkpoint_writer
from recshard_lab.distributed.state.checkpoint import load_checkpoint, save_checkpoint
from recshard_lab.distributed.state.pretrained import load_pretrained
from tests.distributed.jobs import Case, Model, attempted, batch_of, part_of_loss, sharders_of


def build(
    case: Case, plan: str | None = None, env: ShardingEnv | None = None, **fused_params: Any
) -> DistributedModelParallel:
    """The case's model under its plan or another one."""
    sharders = sharders_of(case, **fused_params)
    chosen = ShardingPlan.from_json(plan if plan is not None else case.plan)
    wrapper = DefaultDataParallelWrapper(find_unused_parameters=case.find_unused)
    return DistributedModelParallel(
        Model(case), env, case.device, plan=chosen, sharders=sharders, data_parallel_wrapper=wrapper
    )


def train(dmp: DistributedModelParallel, dense: torch.optim.Optimizer, case: Case, steps: list[Any]) -> list[float]:
    """Losses of some steps on this rank's part of the batches."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    losses = []
    for ranks in steps:
        _, logits, _ = dmp(batch_of(ranks[rank], case.weighted).to(case.device))
        dense.zero_grad()
        loss = part_of_loss(logits, ranks)
        (loss * world).backward()
        dense.step()
        losses.append(float(loss.detach()))
    return losses


def whole(value: Any, group: Any = None) -> Tensor:
    """A tensor, sharded or not, whole on every rank: put together from the ranks' own pieces."""
    if not hasattr(value, "local_shards"):
        return value.detach().cpu().clone()
    told: list[Any] = [None] * torch.distributed.get_world_size(group)
    local = [(tuple(s.metadata.shard_offsets), s.tensor.detach().cpu()) for s in value.local_shards()]
    torch.distributed.all_gather_object(told, local, group=group)
    dtype = value.metadata().tensor_properties.dtype
    hole = float("nan") if dtype.is_floating_point else -1
    joined = torch.full(tuple(value.metadata().size), hole, dtype=dtype)
    for offsets, piece in (entry for each in told for entry in each):
        spot = tuple(slice(start, start + size) for start, size in zip(offsets, piece.shape, strict=True))
        joined[spot] = piece
    return joined


def everything(dmp: DistributedModelParallel) -> dict[str, Tensor]:
    """Weights and fused states, whole; of replicas, those of this rank's sharding group."""
    group = getattr(dmp, "sharding_pg", dmp.env.pg)
    found = {name: whole(value, group) for name, value in dmp.state_dict().items()}
    for key, entry in dmp.fused_optimizer.state_dict()["state"].items():
        found |= {f"{key}/{name}": whole(value, group) for name, value in entry.items()}
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what differs in any bit, or is on one side only."""
    names = sorted(set(one) | set(other))
    return [name for name in names if name not in one or name not in other or not torch.equal(one[name], other[name])]


def copies_differ(dmp: DistributedModelParallel) -> list[str]:
    """Row states and replicas that ranks hold several times, and that are not the same bits."""
    own: dict[tuple[str, str, tuple[int, int], tuple[int, int]], list[bytes]] = {}
    for collection in dmp.collections.values():
        for name, shards in collection.table_shards().items():
            for part in shards.parts():
                where = part.shards(shards.sharding.shards)
                for n, matrix in shards.matrices(part).items():
                    key = (name, part.name, where[n].rows, where[n].cols)
                    own.setdefault(key, []).append(
                        matrix.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                    )
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, own)
    return [str(key) for key in own if len({bits for other in told for bits in other.get(key, [])}) > 1]


def scramble(dmp: DistributedModelParallel) -> None:
    """Every weight and state becomes its own known number, copies alike."""
    for number, collection in enumerate(dmp.collections.values()):
        for place, shards in enumerate(collection.table_shards().values()):
            for part_number, part in enumerate(shards.parts()):
                rows, cols = part.size(*shards.size)
                truth = torch.arange(rows * cols, dtype=torch.float64).view(rows, cols)
                truth = truth + 1000 * (number + place + part_number)
                truth = truth / 8192 if part.dtype.is_floating_point else truth
                where = part.shards(shards.sharding.shards)
                for position, matrix in shards.matrices(part).items():
                    matrix.copy_(truth[slice(*where[position].rows), slice(*where[position].cols)])


def train_moving(case: Case, plans: list[str], first: int) -> tuple[list[str], list[float], list[float], dict, dict]:
    """Trains, moves through the plans, trains on; and the same without moving.

    Returns:
        What changed in a move, losses moved, losses unmoved, state moved, state unmoved.
    """
    wrong: list[str] = []
    results = []
    for moving in (True, False):
        dmp = build(case)
        dense = torch.optim.Adagrad(dmp.dense_parameters(), lr=case.learning_rate)
        schedule = torch.optim.lr_scheduler.StepLR(dmp.fused_optimizer, step_size=1, gamma=0.9)
        losses = train(dmp, dense, case, case.steps[:first])
        schedule.step()
        if moving:
            for plan in plans:
                before = everything(dmp)
                dmp.reshard(ShardingPlan.from_json(plan), optimizers=[dense])
                wrong += same(before, everything(dmp))
        losses += train(dmp, dense, case, case.steps[first:])
        results.append((losses, everything(dmp)))
    return wrong, results[0][0], results[1][0], results[0][1], results[1][1]


def move_scrambled(case: Case, plans: list[str], bound: int | None) -> tuple[list[str], list[int], list[int]]:
    """Known numbers through some plans: (what differs afterwards, bytes moved, peaks)."""
    dmp = build(case)
    scramble(dmp)
    truth = everything(dmp)
    wrong, moved, peaks = [], [], []
    for plan in plans:
        done = dmp.reshard(ShardingPlan.from_json(plan), max_extra_bytes=bound, optimizers=[])
        moved.append(done.bytes_moved)
        peaks.append(done.peak_extra_bytes)
        wrong += same(truth, everything(dmp))
    return wrong, moved, peaks


def refused(case: Case, action: Callable[[DistributedModelParallel], Any]) -> tuple[str, list[str]]:
    """The error of an action with the model, and what it changed nevertheless."""
    dmp = build(case)
    before = everything(dmp)
    return attempted(lambda: action(dmp)), same(before, everything(dmp))


def refused_reshard(case: Case, plans: list[str]) -> tuple[str, list[str]]:
    """The error of a plan for each rank."""
    plan = ShardingPlan.from_json(plans[torch.distributed.get_rank() % len(plans)])
    return refused(case, lambda dmp: dmp.reshard(plan))


def overtaken(case: Case, plan: str, bound: int | None) -> tuple[list[str], list[str]]:
    """What is said to a batch sent, and to one looked up, before a move and ended after it; what that changed."""
    rank = torch.distributed.get_rank()
    dmp = build(case)
    batch = batch_of(case.steps[0][rank], case.weighted)
    (collection,) = dmp.collections.values()
    pending, output = collection.send(batch), collection(batch).values()
    before = everything(dmp)
    dmp.reshard(ShardingPlan.from_json(plan), max_extra_bytes=bound)
    said = [
        attempted(lambda: collection.compute(collection.create_context(), pending.wait())),
        attempted(lambda: output.sum().backward()),
    ]
    wrong = same(before, everything(dmp))
    collection(batch).values().sum().backward()
    return said, wrong


def old_kernels_left(case: Case, plan: str, bound: int | None) -> int:
    """How many of the kernels before a move are alive after it."""
    dmp = build(case)
    old = [weakref.ref(g.kernel) for c in dmp.collections.values() for g in c.executor.lookup.groups]
    dmp.reshard(ShardingPlan.from_json(plan), max_extra_bytes=bound)
    gc.collect()
    return sum(kernel() is not None for kernel in old)


class _Sampler(threading.Thread):
    """The largest anonymous memory of this process while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.over = 0, threading.Event()

    @staticmethod
    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))

    def run(self) -> None:
        while not self.over.is_set():
            self.peak = max(self.peak, self.now())
            time.sleep(0.001)


def measured_peak(plans: list[str], rows: int, bound: int | None) -> tuple[int, int, int]:
    """(peak of anonymous memory in a move beyond before, what was reported, bytes held before)."""
    tables = [
        EmbeddingBagConfig(name=f"t{n}", num_embeddings=rows, embedding_dim=64, feature_names=[f"f{n}"])
        for n in range(4)
    ]
    dmp = DistributedModelParallel(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        plan=ShardingPlan.from_json(plans[0]),
        sharders=[EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"}, backend="native")],
    )
    dmp.reshard(ShardingPlan.from_json(plans[0]), max_extra_bytes=bound)  # imports are no part of it
    held = dmp.memory_bytes()
    done: list[Any] = []
    target = ShardingPlan.from_json(plans[1])
    peak = memory_of(lambda: done.append(dmp.reshard(target, max_extra_bytes=bound)))
    return peak, done[0].peak_extra_bytes, held["weights"] + held["optimizer_state"]


# ---- checkpoints ----


def dense_states(dense: torch.optim.Optimizer) -> list[Tensor]:
    """What a torch optimizer keeps about parameters that are whole on every rank."""
    return [
        v.cpu().clone()
        for group in dense.param_groups
        for p in group["params"]
        for _, v in sorted(dense.state[p].items())
    ]


def train_and_save(case: Case, path: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Trains a case's model, saves it, and tells the truth about it."""
    dmp = build(case)
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=0.01)
    train(dmp, dense, case, case.steps)
    save_checkpoint(path, dmp, dense, extra={"epoch": 3, "rng": torch.arange(3)})
    return everything(dmp), dense_states(dense)


def load_and_tell(case: Case, path: str, again: str | None) -> tuple[dict[str, Tensor], list[Tensor], Any, float]:
    """Loads into an untrained model under another plan; saves it once more if asked."""
    dmp = build(case)
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=0.5)
    loaded = load_checkpoint(path, dmp, dense)
    assert copies_differ(dmp) == []
    if again is not None:
        save_checkpoint(again, dmp, dense, extra=loaded.extra)
    return everything(dmp), dense_states(dense), loaded.extra, dense.param_groups[0]["lr"]


def dense_table_round_trip(case: Case, plan: str, path: str) -> tuple[list[float], list[float]]:
    """Losses after saving and loading under another plan, and after just going on; tables on the dense kernel."""
    dmp = build(case)
    dense = torch.optim.Adam(dmp.dense_parameters(), lr=0.05)
    train(dmp, dense, case, case.steps[:3])
    save_checkpoint(path, dmp, dense)
    other = build(case, plan)
    second = torch.optim.Adam(other.dense_parameters(), lr=0.9)
    load_checkpoint(path, other, second)
    return train(other, second, case, case.steps[3:]), train(dmp, dense, case, case.steps[3:])


def refused_load(case: Case, path: str) -> tuple[str, list[str]]:
    """The error of loading."""
    return refused(case, lambda dmp: load_checkpoint(path, dmp))


@contextmanager
def blocks_of(size: int) -> Iterator[None]:
    """Saves in blocks of so many bytes."""
    usual, checkpoint_writer.BLOCK_BYTES = checkpoint_writer.BLOCK_BYTES, size
    try:
        yield
    finally:
        checkpoint_writer.BLOCK_BYTES = usual


def memory_of(action: Callable[[], Any]) -> int:
    """Anonymous memory at its peak, beyond before."""
    gc.collect()
    before, sampler = _Sampler.now(), _Sampler()
    sampler.start()
    action()
    sampler.over.set()
    sampler.join()
    return sampler.peak - before


def between_worlds(cases: dict[tuple[int, int], tuple[Case, Case]], folder: str) -> list[str]:
    """For (m, n): known numbers saved by the first m of these ranks, loaded by the first n. What went wrong."""
    rank, wrong = torch.distributed.get_rank(), []
    groups = {n: torch.distributed.new_group(list(range(n))) for n in range(1, torch.distributed.get_world_size() + 1)}
    for (m, n), (saved, loaded) in cases.items():
        path, truth = f"{folder}/{m}_{n}", {}
        if rank < m:
            dmp = build(saved, env=ShardingEnv.from_process_group(groups[m]))
            scramble(dmp)
            truth = everything(dmp)
            with blocks_of(100 if (m + n) % 2 else checkpoint_writer.BLOCK_BYTES):
                save_checkpoint(path, dmp, extra=truth)
        torch.distributed.barrier()
        if rank < n:
            dmp = build(loaded, env=ShardingEnv.from_process_group(groups[n]))
            truth = load_checkpoint(path, dmp).extra
            wrong += [f"{m} to {n}: {name}" for name in same(truth, everything(dmp))]
        torch.distributed.barrier()
    return wrong


# ---- pretrained tables ----


def load_given(case: Case, plans: list[str], given: dict[str, Any], only: int | None) -> list[dict[str, Tensor]]:
    """For each plan, the whole model after tables were loaded; in memory on one rank alone if ``only`` is a rank."""
    here = only is None or only == torch.distributed.get_rank()
    found = []
    for plan in plans:
        dmp = build(case, plan)
        load_pretrained(dmp, {name: source if here else None for name, source in given.items()})
        found.append(dmp.full_state_dict())
    return found


def refused_pretrained(case: Case, given: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The error of tables given on each rank."""
    return refused(case, lambda dmp: load_pretrained(dmp, given[torch.distributed.get_rank() % len(given)]))


def pretrained_peak(case: Case, warm: dict[str, Any], given: dict[str, Any]) -> int:
    """Anonymous memory at its peak while a table is read, beyond before."""
    dmp = build(case)
    load_pretrained(dmp, warm)  # imports are no part of it
    return memory_of(lambda: load_pretrained(dmp, given))
