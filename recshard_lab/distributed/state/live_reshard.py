"""Live resharding: the tables of running collections move to another tiling, with their optimizer state.

All ranks take the same steps, and agree after each of them. Until the last one every rank can go back::

    check        plan, kernels, routes and memory bound: no memory is allocated
    park         only if new kernels do not fit beside the old ones within the bound: tables and states are copied to a
                 file without a name, then the old kernels are freed
    place        new kernels, empty
    move         overlaps of new shards with old ones (`reshard.transfers`): those on other ranks travel
    finish       optimizers take over the new parameters
    ------------ all ranks have succeeded: the old kernels or the file are dropped

If a step fails on any rank, every rank returns to its old kernels (or rebuilds them from the file) and raises the same
error. "Extra" memory is what a rank needs beyond the larger of what it held before and holds after.
"""

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, agreed, all_gather_object, gathered, refuse_differences
from recshard_lab.distributed.fused_optimizer import EmbeddingFusedOptimizer
from recshard_lab.distributed.rank_facts import plan_facts
from recshard_lab.distributed.sharded_collections import ShardedCollection, create_route_groups
from recshard_lab.distributed.state.dense_tables import DenseStates
from recshard_lab.distributed.state.moves import DEFAULT_ROUND_BYTES, Move, move
from recshard_lab.distributed.state.parking import parked
from recshard_lab.distributed.state.regroup import Regrouping, by_rank
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ParameterSharding, PlanError, ShardingPlan

MESSAGES = 2  # in memory at a time: one out, one in
_LEAST_ROUND_BYTES = 2**18

Shardings: TypeAlias = Mapping[str, ParameterSharding]


@dataclass(frozen=True)
class Resharded:
    """What a live resharding cost.

    Attributes:
        bytes_moved: bytes that travelled from one rank to another, over all ranks.
        seconds: wall clock on the slowest rank.
        peak_extra_bytes: on the rank that needed most, bytes beyond the larger of what it held before and after.
        tables: names of the tables that have moved.
    """

    bytes_moved: int
    seconds: float
    peak_extra_bytes: int
    tables: tuple[str, ...]

    def __repr__(self) -> str:
        what = f"{len(self.tables)} tables" if len(self.tables) != 1 else f"table {self.tables[0]!r}"
        rate = self.bytes_moved / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"Resharded({what}: {self.bytes_moved / 1e6:.1f} MB between ranks in {self.seconds:.3f} s "
            f"({rate:.2f} GB/s), at most {self.peak_extra_bytes / 1e6:.1f} MB of extra memory)"
        )


@dataclass(frozen=True)
class Bound:
    """How much extra memory a move may take, and where tensors wait if that is too little to make new ones beside.

    Args:
        max_extra_bytes: on every rank; None for as much as the fast way takes.
        folder: where parked tensors wait; the system's temporary folder when left out.
    """

    max_extra_bytes: int | None = None
    folder: str | Path | None = None

    def check(self, collections: Mapping[str, ShardedCollection]) -> None:
        """Refuses a bound below two messages of one row.

        Raises:
            ValueError: saying how much is needed.
        """
        if self.max_extra_bytes is None:
            return
        widest = max(
            (
                part.bytes_of(shard) // shard.num_rows
                for collection in collections.values()
                for shards in collection.table_shards().values()
                for part in shards.parts()
                for shard in shards.sharding.shards
            ),
            default=0,
        )
        if self.max_extra_bytes < MESSAGES * widest:
            raise ValueError(
                f"max_extra_bytes={self.max_extra_bytes!r} is less than {MESSAGES} messages of one row, "
                f"{MESSAGES * widest} bytes: "
                f"allow at least that"
            )

    def way(self, held: Sequence[int], needed: Sequence[int]) -> tuple[bool, int]:
        """(whether new kernels fit beside the old ones, bytes of a message), from bytes each rank holds and needs."""
        beside = max((min(pair) for pair in zip(held, needed, strict=True)), default=0)
        if self.max_extra_bytes is None:
            return True, DEFAULT_ROUND_BYTES
        left = (self.max_extra_bytes - beside) // MESSAGES
        if left >= _LEAST_ROUND_BYTES:
            return True, min(left, DEFAULT_ROUND_BYTES)
        return False, min(self.max_extra_bytes // MESSAGES, DEFAULT_ROUND_BYTES)


def agreed_plan(
    plan: ShardingPlan,
    current: ShardingPlan,
    collections: Mapping[str, ShardedCollection],
    env: ShardingEnv,
    optimizers: Sequence[torch.optim.Optimizer] | None,
    bound: Bound,
    everyone: ShardingEnv | None = None,
) -> tuple[ShardingPlan, dict[str, dict[str, ParameterSharding]]]:
    """The whole new plan, and module path -> table -> sharding of every collection that changes.

    All ranks (``everyone``, if ``env`` is one group of them) must call it. Nothing has moved when it returns or raises.

    Raises:
        PlanError: a module or table that does not exist, a tiling with holes, another kernel, a route that the codec
            cannot serve, or plans that differ between ranks. The error is the same on all ranks.
        ValueError: no kernel can serve a table there, or the bound is too small.
    """
    everyone = everyone or env

    def checked() -> tuple[ShardingPlan, dict[str, dict[str, ParameterSharding]]]:
        whole = _completed(plan, current, collections)
        if collections:
            tables = {path: c.tables for path, c in collections.items()}
            whole = whole.resolved(tables, env.world_size, env.local_world_size)
        changed = {
            path: dict(whole.plan[path]) for path, c in collections.items() if dict(whole.plan[path]) != c.shardings
        }
        for path, shardings in changed.items():
            _check_kernels(collections[path], shardings, optimizers is not None)
        bound.check(collections)
        return whole, changed

    whole, changed = agreed(everyone, checked)
    steppers = None if optimizers is None else [type(optimizer).__name__ for optimizer in optimizers]
    others = {"max_extra_bytes": bound.max_extra_bytes, "optimizers": steppers}
    facts = {"plan": plan_facts(whole), "arguments of reshard": others}
    refuse_differences(everyone, facts, PlanError, "Nothing was moved. ")
    create_route_groups(whole, env)

    def routed() -> None:
        for path, shardings in changed.items():
            collections[path].check(shardings, env)

    agreed(everyone, routed)
    return whole, changed


def _completed(plan: ShardingPlan, current: ShardingPlan, collections: Mapping[str, ShardedCollection]) -> ShardingPlan:
    """The plan, with what it does not name as it is now."""
    for path in plan.plan:
        if path not in collections:
            raise PlanError(
                f"the plan names module {path!r}, but the sharded collections are {sorted(collections)}: use one of "
                f"these paths ('' is the model itself)"
            )
    return ShardingPlan(
        {path: EmbeddingModuleShardingPlan({**now, **plan.plan.get(path, {})}) for path, now in current.plan.items()}
    )


def _check_kernels(collection: ShardedCollection, shardings: Shardings, knows_optimizers: bool) -> None:
    for name, sharding in shardings.items():
        now = collection.shardings[name]
        if (sharding.compute_kernel == "dense") != (now.compute_kernel == "dense"):
            raise PlanError(
                f"table {name!r} runs on the {now.compute_kernel} kernel and the plan asks for "
                f"{sharding.compute_kernel}: resharding moves tables, it does not change who steps them"
            )
        if sharding.compute_kernel == "dense" and sharding != now and not knows_optimizers:
            raise PlanError(
                f"table {name!r} is on the dense kernel, and the torch optimizer that steps it must get the new "
                f"parameters. Fix: pass optimizers=[that optimizer]"
            )
    collection.kinds_for(shardings)


@torch.no_grad()
def migrate(
    collections: Mapping[str, ShardedCollection],
    changed: Mapping[str, Shardings],
    env: ShardingEnv,
    device: torch.device,
    bound: Bound,
    fused: EmbeddingFusedOptimizer,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    regrouping: Regrouping | None = None,
    everyone: ShardingEnv | None = None,
) -> Resharded:
    """Moves collections to new tilings that `agreed_plan` has checked. All ranks must call it.

    Args:
        collections: module path -> collection, of all collections of the model.
        changed: module path -> table -> its new sharding, of the collections that change.
        env: the ranks.
        device: where the tables live.
        bound: how much memory it may take.
        fused: the optimizer over all collections.
        optimizers: those that step the tables on the dense kernel.
        regrouping: from other sharding groups to others; ``env`` are all ranks then.
        everyone: all ranks, where other sharding groups move as well.

    Raises:
        Exception: an error on any rank is raised on all ranks, and every collection is as it was.
    """
    everyone = everyone or env
    begun = time.perf_counter()

    def settled() -> None:
        for collection in collections.values():
            collection.settle()

    agreed(everyone, settled)
    steps = agreed(
        everyone, lambda: [_Migration(collections[p], changed[p], env, device, optimizers, regrouping) for p in changed]
    )
    for step in steps:
        step.dense.exchange(env)
    agreed(everyone, lambda: _each(steps, lambda step: step.dense.check()))
    held, needed = [0] * env.world_size, [0] * env.world_size
    for step in steps:
        for totals, own in zip((held, needed), step.held_and_needed(), strict=True):
            totals[:] = map(sum, zip(totals, own, strict=True))
    beside, round_bytes = bound.way(held, needed)

    def placed() -> list[Move]:
        for step in steps:
            step.place()
        return [one for step in steps for one in step.moves()]

    def finished() -> None:
        for step in steps:
            step.finish()
        fused.bind(collections)

    try:
        if not beside:
            agreed(everyone, lambda: _each(steps, lambda step: step.park(bound.folder)))
            fused.release()
            for step in steps:
                step.release()
            gc.collect()  # kernels may be parts of cycles
        moves = agreed(everyone, placed)
        moved = agreed(everyone, lambda: move(moves, env, device, round_bytes))
        extra = moved.buffer_bytes + (min(held[env.rank], needed[env.rank]) if beside else 0)
        totals = all_gather_object((moved.bytes_sent, time.perf_counter() - begun, extra), everyone)
        agreed(everyone, finished)
    except BaseException as error:
        _clear_frames(error)  # they hold the new kernels
        agreed(everyone, lambda: _restore(steps, collections, fused))
        raise
    for step in steps:
        step.retire()
    tables = tuple(name for step in steps for name in step.tables)
    sent, seconds, peaks = zip(*totals, strict=True)
    return Resharded(sum(sent), max(seconds), max(peaks), tables)


def _each(steps: "Sequence[_Migration]", action: "Callable[[_Migration], None]") -> None:
    for step in steps:
        action(step)


def _restore(
    steps: "Sequence[_Migration]", collections: Mapping[str, ShardedCollection], fused: EmbeddingFusedOptimizer
) -> None:
    """Every collection as it was, the last one first. Each gets its turn, also if another one fails."""
    failures = []
    for step in reversed(steps):
        try:
            step.restore()
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    fused.bind(collections)


def recover(
    collections: Mapping[str, ShardedCollection], everyone: ShardingEnv, fused: EmbeddingFusedOptimizer
) -> None:
    """Rebuilds tables that still wait in a file, because memory was short when a failed move tried. Collective."""
    waiting = [c.executor.migration for c in collections.values() if isinstance(c.executor, _Waiting)]
    if any(gathered(everyone, lambda: bool(waiting))):
        agreed(everyone, lambda: _restore(waiting, collections, fused))


def _clear_frames(error: BaseException | None) -> None:
    """Frees what the frames of an error and of its causes hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Migration:
    """One collection on its way: its old state until all ranks have succeeded."""

    def __init__(
        self,
        collection: ShardedCollection,
        shardings: Shardings,
        env: ShardingEnv,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        regrouping: Regrouping | None,
    ) -> None:
        self.collection, self.shardings, self.device = collection, shardings, device
        self.env, self.regrouping = env, regrouping
        self.old_env, self.old_shardings = collection.env, collection.shardings
        self.tables = [name for name, sharding in shardings.items() if sharding != self.old_shardings[name]]
        before = collection.table_shards()
        dense = {name: shards for name, shards in before.items() if shards.sharding.compute_kernel == "dense"}
        self.changed_dense = [n for n in dense if regrouping is not None or shardings[n] != dense[n].sharding]
        self.kept_dense = {n: list(s.parameters()) for n, s in dense.items() if n not in self.changed_dense}
        self.dense = DenseStates(optimizers, {name: dense[name] for name in self.changed_dense})
        self.sources = {name: list(shards.sharding.shards) for name, shards in before.items()}
        self.parts = {name: shards.parts() for name, shards in before.items()}
        self.held = {(name, p.name): dict(before[name].matrices(p)) for name, own in self.parts.items() for p in own}
        self.parameters = {name: list(shards.parameters()) for name, shards in before.items()}
        #: what restores a collection whose old kernels are alive; None once they are freed
        self.snapshot: _Snapshot | None = _Snapshot(collection)
        self.own_optimizer = collection._own_optimizer

    def held_and_needed(self) -> tuple[list[int], list[int]]:
        """Bytes of weights and states on each rank, before and after."""
        return _held_and_needed(self.collection, self.shardings, self.env, self.regrouping)

    def park(self, folder: str | Path | None) -> None:
        """Copies what this rank holds to a file. Changes nothing else."""
        flat: dict[Any, torch.Tensor] = {
            (*key, n): tensor for key, tensors in self.held.items() for n, tensor in tensors.items()
        }
        try:
            waiting = parked(flat, folder)
        except OSError as error:
            size = sum(tensor.nbytes for tensor in flat.values())
            raise OSError(
                f"cannot park {size:,} bytes in {folder or 'the temporary folder'}: {error}. Nothing was moved. Fix: "
                f"free disk space, or pass another park_dir"
            ) from error
        for (name, part, n), tensor in waiting.items():
            self.held[name, part][n] = tensor

    def release(self) -> None:
        """Frees the old kernels; their contents are in the file."""
        self.grads = {name: [parameter.grad for parameter in own] for name, own in self.parameters.items()}
        self.snapshot = None
        self.collection.executor.retire()
        for shards in self.collection.table_shards().values():
            shards.release()
        if self.own_optimizer is not None:
            self.own_optimizer.release()
        self.collection.release()

    def place(self) -> None:
        """New kernels for the new sharding."""
        if self.regrouping is not None:
            self.collection.env = self.regrouping.after.sharding
        self.collection.place(self.shardings)

    def moves(self) -> list[Move]:
        """Weights and states of every table, from the old shards to the new ones."""
        after = self.collection.table_shards()
        moves = [
            Move(
                part.dtype,
                part.shards(self.sources[name]),
                part.shards(after[name].sharding.shards),
                self.held[name, part.name],
                after[name].matrices(part),
            )
            for name, own in self.parts.items()
            for part in own
        ]
        moves += self.dense.moves({name: after[name] for name in self.changed_dense}, self.device)
        return moves if self.regrouping is None else [self.regrouping.over_all_ranks(each) for each in moves]

    def finish(self) -> None:
        """Torch optimizers keep the parameters of tables that stay, and get the new ones of tables that moved."""
        self.dense.finish()
        for name, parameters in self.kept_dense.items():
            self.collection.table_shards()[name].keep(parameters)
        self.collection.bind_dense()

    def retire(self) -> None:
        """All ranks have succeeded: batches that were sent to the old kernels are refused from now on."""
        if self.snapshot is not None:
            self.snapshot.attributes["executor"].retire()

    def restore(self) -> None:
        """The collection as it was before the move, whatever step failed.

        Raises:
            RuntimeError: memory is too short to rebuild kernels that were freed. The file is kept, and the next
                `DistributedModelParallel.reshard` tries again.
        """
        self.dense.undo()
        if self.snapshot is not None:
            self.snapshot.restore(self.collection)
            return
        collection = self.collection
        collection.release()
        gc.collect()
        collection.env = self.old_env
        try:
            collection.place(self.old_shardings)
            for name, shards in collection.table_shards().items():
                for part in self.parts[name]:
                    for position, matrix in shards.matrices(part).items():
                        matrix.copy_(self.held[name, part.name][position])
        except BaseException as error:
            collection.executor = _Waiting(self)  # type: ignore[assignment]
            setattr(collection, collection.tables_name, _WaitingTables())
            raise RuntimeError(f"{type(error).__name__}: {error}: {_IN_FILE}") from error
        for name, shards in collection.table_shards().items():
            shards.keep(self.parameters[name])
            for parameter, grad in zip(self.parameters[name], self.grads[name], strict=True):
                parameter.grad = grad
        collection.bind_dense()
        collection._own_optimizer = self.own_optimizer
        if self.own_optimizer is not None:
            self.own_optimizer.bind({"": collection})


class _Snapshot:
    """A collection's attributes, modules and parameters, while its kernels are alive."""

    def __init__(self, collection: ShardedCollection) -> None:
        self.attributes, self.modules = dict(vars(collection)), dict(collection._modules)
        self.shown = [
            (shards, dict(shards._parameters), [(own, own.data, own.grad) for own in shards.parameters()])
            for shards in collection.table_shards().values()
        ]

    def restore(self, collection: ShardedCollection) -> None:
        vars(collection).update(self.attributes)
        collection._modules.clear()
        collection._modules.update(self.modules)
        for shards, parameters, shown in self.shown:
            shards._parameters.update(parameters)
            for parameter, data, grad in shown:
                parameter.data, parameter.grad = data, grad


_IN_FILE = (
    "the tables wait in a file, because a reshard failed and memory was too short to build the old kernels again. "
    "Fix: free memory on this rank and call reshard() on all ranks: it restores the tables first"
)


class _Waiting:
    """In the place of an executor while the tables wait in a file: refuses every use."""

    def __init__(self, migration: _Migration) -> None:
        self.migration = migration

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_IN_FILE)


class _WaitingTables(nn.ModuleDict):
    """In the place of the tables while they wait in a file: refuses to be read, saved or loaded."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_IN_FILE)

    items = _save_to_state_dict = _load_from_state_dict = _refuse


def _held_and_needed(
    collection: ShardedCollection, shardings: Shardings, env: ShardingEnv, regrouping: Regrouping | None
) -> tuple[list[int], list[int]]:
    """Bytes of weights and states on each rank, before and after."""
    if regrouping is None:
        return _bytes_by_rank(collection, collection.shardings, env), _bytes_by_rank(collection, shardings, env)
    before, after = regrouping.before, regrouping.after
    held = _bytes_by_rank(collection, collection.shardings, before.sharding)
    return by_rank(held, before), by_rank(_bytes_by_rank(collection, shardings, after.sharding), after)


def _bytes_by_rank(collection: ShardedCollection, shardings: Shardings, env: ShardingEnv) -> list[int]:
    """Bytes of weights and states that each rank holds under some tiling."""
    totals = [0] * env.world_size
    for name, shards in collection.table_shards().items():
        for part in shards.parts():
            for shard in shardings[name].shards:
                totals[shard.rank] += part.bytes_of(shard)
    return totals
