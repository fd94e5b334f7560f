"""What ranks run in the tests of 2D parallel, and the truth: R unsharded models in one process, averaged by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab import ShardingPlan
from recshard_lab.comm import trace
from recshard_lab.comm.trace import CollectiveEvent
from recshard_lab.distributed import DMPCollection
from tests.distributed.jobs import (
    Bags,
    Case,
    Model,
    batch_of,
    join,
    labels_of,
    part_of_loss,
    sharders_of,
    table_optimizer,
)
from tests.distributed.state_jobs import copies_differ, everything


def groups_of(world: int, size: int, contiguous: bool) -> list[list[int]]:
    """The ranks of each sharding group, written down apart from the code under test."""
    if contiguous:
        return [list(range(first, first + size)) for first in range(0, world, size)]
    return [list(range(first, world, world // size)) for first in range(world // size)]


def build(case: Case, size: int, contiguous: bool = False, **more: Any) -> DMPCollection:
    """The case's model in replicas; only rank 0 has the weights that count."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = Model(case)
    if rank:
        for parameter in model.parameters():
            nn.init.constant_(parameter, float(rank))
    plan, everybody = ShardingPlan.from_json(case.plan), torch.distributed.group.WORLD
    more = {"sharders": sharders_of(case), "use_inter_host_allreduce": contiguous} | more
    return DMPCollection(model, case.device, plan, world, size, everybody, **more)


def train(
    dmp: DMPCollection,
    case: Case,
    steps: Sequence[Sequence[Bags]],
    every: int,
    states: bool = True,
    dense: torch.optim.Optimizer | None = None,
) -> list[list[Tensor]]:
    """Steps on this rank's batches, a sync after every so many (0: never); the dense gradients of each."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dense = dense or torch.optim.SGD(dmp.dense_parameters(), lr=case.learning_rate)
    grads = []
    for step, ranks in enumerate(steps):
        _, logits, _ = dmp(batch_of(ranks[rank], case.weighted))
        dense.zero_grad()
        (part_of_loss(logits, list(ranks)) * world).backward()
        grads.append([p.grad.clone() for p in dense.param_groups[0]["params"]])
        dense.step()
        if every and (step + 1) % every == 0:
            dmp.sync(include_optimizer_state=states, optimizers=[dense])
    return grads


@dataclass
class Trained:
    """What a rank of the 2D model has in the end."""

    state: dict[str, Tensor] = field(default_factory=dict)
    grads: list[list[Tensor]] = field(default_factory=list)
    copies_differ: list[str] = field(default_factory=list)
    events: list[CollectiveEvent] = field(default_factory=list)
    held_bytes: int = 0


def train_2d(case: Case, size: int, every: int, contiguous: bool = False, states: bool = True, **more: Any) -> Trained:
    """The case trained in replicas of ``size`` ranks."""
    dmp = build(case, size, contiguous, **more)
    with trace() as traced:
        grads = train(dmp, case, case.steps, every, states)
    held = dmp.memory_bytes()
    return Trained(everything(dmp), grads, copies_differ(dmp), traced.events, held["weights"] + held["optimizer_state"])


def train_truth(
    case: Case, size: int, every: int, contiguous: bool = False, states: bool = True
) -> tuple[list[dict[str, Tensor]], list[list[Tensor]]]:
    """(for each sharding group, weights and states; dense gradients of each step), by plain torch."""
    groups = groups_of(len(case.steps[0]), size, contiguous)
    models = [Model(case) for _ in groups]
    tables = [list(model.collection.parameters()) for model in models]
    sparse = [table_optimizer(case, own) for own in tables]
    dense = [torch.optim.SGD(model.dense.parameters(), lr=case.learning_rate) for model in models]
    grads = []
    for step, ranks in enumerate(case.steps):
        total = sum(len(next(iter(bags.values()))) for bags in ranks)
        for model, optimizer, rest, group in zip(models, sparse, dense, groups, strict=True):
            optimizer.zero_grad()
            rest.zero_grad()
            bags = join([ranks[rank] for rank in group])
            _, logits, _ = model(batch_of(bags, case.weighted))
            loss = nn.functional.binary_cross_entropy_with_logits(logits, labels_of(bags), reduction="sum")
            (loss * len(groups) / total).backward()  # the group's ranks average over themselves alone
            optimizer.step()
        layers = zip(*(model.dense.parameters() for model in models), strict=True)
        means = [torch.stack([p.grad for p in same]).mean(0) for same in layers]
        grads.append(means)
        for model, rest in zip(models, dense, strict=True):
            for parameter, mean in zip(model.dense.parameters(), means, strict=True):
                parameter.grad = mean.clone()
            rest.step()
        if every and (step + 1) % every == 0:
            _average(tables, sparse, states)
    return [_state(model, optimizer) for model, optimizer in zip(models, sparse, strict=True)], grads


@torch.no_grad()
def _average(tables: list[list[Any]], optimizers: list[Any], states: bool) -> None:
    for same in zip(*tables, strict=True):
        mean = torch.stack(list(same)).mean(0)
        for parameter in same:
            parameter.copy_(mean)
        if states and "sum" in optimizers[0].state.get(same[0], {}):
            sums = [optimizer.state[p]["sum"] for optimizer, p in zip(optimizers, same, strict=True)]
            mean = torch.stack(sums).mean(0)
            for total in sums:
                total.copy_(mean)


def _state(model: Model, optimizer: Any) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, parameter in model.collection.named_parameters(prefix="collection"):
        if "sum" in optimizer.state.get(parameter, {}):
            found[f"{name}/{name.split('.')[-2]}.momentum1"] = optimizer.state[parameter]["sum"].clone()
    return found


def dense_states(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Sums that torch's Adagrad keeps about tables on the dense kernel, before and after a sync."""
    dmp = build(case, 2)
    tables = [p for shards in dmp.collections["collection"].table_shards().values() for p in shards.parameters()]
    optimizer = torch.optim.Adagrad(dmp.dense_parameters(), lr=case.learning_rate)
    train(dmp, case, case.steps, 0, dense=optimizer)
    found = []
    for _ in range(2):
        found.append([optimizer.state[p]["sum"].clone() for p in tables])
        dmp.sync(optimizers=[optimizer])
    return found[0], found[1]


def regrouped(case: Case, sizes: list[int], plans: list[str], optimizer: str) -> tuple[list[str], list[int], list[Any]]:
    """Trains, syncs, moves to other sharding groups: what changed on the way, bytes moved; then trains on."""
    dmp = build(case, sizes[0])
    kinds: dict[str, Any] = {"dense": torch.optim.Adagrad}  # one that has something to move
    dense = kinds.get(optimizer, torch.optim.SGD)(dmp.dense_parameters(), lr=case.learning_rate)
    train(dmp, case, case.steps[:4], 0, dense=dense)
    dmp.sync(optimizers=[dense])
    wrong, moved = [], []
    for size, plan in zip(sizes[1:], plans, strict=True):
        before = everything(dmp)
        done = dmp.reshard(ShardingPlan.from_json(plan), sharding_group_size=size, optimizers=[dense])
        moved.append(done.bytes_moved)
        after = everything(dmp)
        wrong += [name for name in sorted(before | after) if not torch.equal(before[name], after[name])]
    grads = train(dmp, case, case.steps[4:], 1, dense=dense)
    return wrong + copies_differ(dmp), moved, [everything(dmp), grads]
