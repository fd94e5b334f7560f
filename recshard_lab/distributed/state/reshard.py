"""Moves the tables of a running model to another plan, with the states of their optimizers.

`DenseStates` moves those of torch optimizers, for tables on the dense kernel. `Reshard` moves everything.
"""

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from recshard_lab.comm import (
    ReplicaGrid,
    ShardingEnv,
    agreed,
    all_gather_object,
    gathered,
    refuse_differences,
    times_note,
)
from recshard_lab.distributed.discover import plan_facts
from recshard_lab.distributed.sharded_collections import ShardedCollection, create_route_groups
from recshard_lab.distributed.state.dumps import TierRows
from recshard_lab.distributed.state.moves import DEFAULT_ROUND_BYTES, Move, Regrouping, Tiles, in_file, move
from recshard_lab.distributed.state.table import ShardedTable, TableTensor, sized
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ParameterSharding, PlanError, ShardingPlan


def tensor_state(value: Any, name: str, key: str) -> Tensor:
    """An optimizer's state of a parameter, if it is a tensor.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(value, Tensor):
        raise ValueError(
            f"the optimizer's state {key}={value!r:.40} of {name!r} is not a tensor and cannot be saved or moved"
        )
    return value


@dataclass
class _Entry:
    """An optimizer's states of one table, the same on all ranks."""

    optimizer: int
    group: int
    states: list[tuple[TableTensor, int, str]]  # part, number of axes, device type


class DenseStates:
    """Replaces the parameters and states of dense tables in the optimizers that step them.

    The constructor reads this rank's optimizers. Call `exchange` and `check`, then `moves`, then `finish`; `undo`
    reverts `finish`.

    Args:
        optimizers: torch optimizers, the same on every rank, in the same order.
        tables: name -> dense table that will move.

    Raises:
        ValueError: a state that is not a tensor.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], tables: Mapping[str, ShardedTable]) -> None:
        self.optimizers = list(optimizers)
        self.sources: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.replacements: list[tuple[_Entry, list[nn.Parameter], list[nn.Parameter], list[dict[str, Tensor]]]] = []
        self.old = {name: list(shards.parameters()) for name, shards in tables.items()}
        self.shardings = {name: shards.sharding for name, shards in tables.items()}
        self.entries: dict[str, _Entry] = {}
        self._local: dict[str, _Entry] = {}
        self._before: list[tuple[torch.optim.Optimizer, list[list[Any]], dict[Any, Any]]] = []
        for name, shards in tables.items():
            place = self._find(self.old[name])
            if place is not None:
                self._local[name] = _Entry(*place, self._read(name, shards, self.optimizers[place[0]]))

    def exchange(self, env: ShardingEnv) -> None:
        """Collects the states of all ranks. Collective."""
        for local in all_gather_object(self._local, env) if self.old else []:
            for name, own in local.items():
                entry = self.entries.setdefault(name, own)
                # a rank whose shards were not stepped yet has no states
                entry.states = max(entry.states, own.states, key=len)

    def check(self) -> None:
        """Checks that an optimizer steps each table.

        Raises:
            ValueError: a table that no optimizer of any rank steps.
        """
        for name in self.old:
            if name not in self.entries:
                raise ValueError(
                    f"table {name!r} is on the dense kernel, but none of the optimizers steps it. Fix: pass the torch "
                    f"optimizer over dense_parameters() in optimizers="
                )

    def _find(self, parameters: Sequence[nn.Parameter]) -> tuple[int, int] | None:
        for number, optimizer in enumerate(self.optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                # by identity: `==` of tensors compares their numbers
                if any(parameter is other for parameter in parameters[:1] for other in group["params"]):
                    return number, group_number
        return None

    def _read(
        self, name: str, shards: ShardedTable, optimizer: torch.optim.Optimizer
    ) -> list[tuple[TableTensor, int, str]]:
        states: list[tuple[TableTensor, int, str]] = []
        for position, parameter in shards.local_parameters().items():
            weight = shards.local_weights[position]
            for key, value in optimizer.state.get(parameter, {}).items():
                part = TableTensor.of(key, tensor_state(value, name, key), weight.shape[0], weight.shape[1])
                # every shard has the same states: one entry is enough
                if all(part.name != other.name for other, _, _ in states):
                    states.append((part, value.dim(), value.device.type))
                self.sources.setdefault((name, part.name), {})[position] = part.matrix(value)
        return states

    def moves(self, tables: Mapping[str, ShardedTable], device: torch.device) -> list[Move]:
        """Moves that fill the states of the new tables."""
        moves = []
        for name, shards in tables.items():
            entry, parameters = self.entries[name], shards.local_parameters()
            states: dict[int, dict[str, Tensor]] = {position: {} for position in parameters}
            for part, axes, kind in entry.states:
                for position, weight in shards.local_weights.items():
                    shapes = {"element": weight.shape, "row": (len(weight), 1)[:axes], "table": (1,) * axes}
                    # torch keeps `step` on the CPU
                    on = "cpu" if kind == "cpu" else device
                    states[position][part.name] = torch.empty(shapes[part.extent], dtype=part.dtype, device=on)
                tensors = {position: part.matrix(state[part.name]) for position, state in states.items()}
                old = Tiles(
                    part.dtype, part.shards(self.shardings[name].shards), self.sources.get((name, part.name), {})
                )
                moves.append(Move(old, shards.tiles(part, tensors)))
            self.replacements.append((entry, self.old[name], list(parameters.values()), list(states.values())))
        return moves

    def finish(self) -> None:
        """Replaces the old parameters and states with the new ones."""
        self._before = [(o, [list(g["params"]) for g in o.param_groups], dict(o.state)) for o in self.optimizers]
        for entry, old, new, states in self.replacements:
            optimizer = self.optimizers[entry.optimizer]
            replaced = {id(parameter) for parameter in old}
            members: list[Any] = optimizer.param_groups[entry.group]["params"]
            place = next((n for n, member in enumerate(members) if id(member) in replaced), len(members))
            kept = [member for member in members[place:] if id(member) not in replaced]
            # in place, at the same position: optimizers number parameters by position in state dicts
            members[place:] = [*new, *kept]
            for parameter in old:
                optimizer.state.pop(parameter, None)
            for parameter, state in zip(new, states, strict=True):
                # a table without a step yet has no states
                if state:
                    optimizer.state[parameter] = state

    def undo(self) -> None:
        """Reverts `finish`."""
        for optimizer, groups, state in self._before:
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = members
            # in place: wrappers of the optimizer share its state
            optimizer.state.clear()
            optimizer.state.update(state)
        self._before, self.replacements = [], []


# Live resharding: moves the tables of running collections to another tiling, with their optimizer state.
#
# All ranks run the same steps and agree after each one. Until all have succeeded, every step can be reverted::
#
#     check        plan, kernels, routes and memory bound; allocates nothing
#     park         only if new kernels do not fit beside the old ones within the bound: copies tables and states to an
#                  unnamed file, then frees the old kernels
#     place        creates empty kernels
#     move         copies the overlaps of new and old shards (`moves.transfers`), across ranks where necessary
#     tiers        empties the tiers of the old shards of dynamic tables, then fills those of the new ones (`TierRows`)
#     finish       gives the new parameters to the optimizers
#     ------------ all ranks have succeeded: drops the old kernels or the file
#
# If a step fails on any rank, every rank restores its old kernels (from the file if parked) and raises the same error.
# "Extra" memory is the memory beyond the larger of a rank's tables before and after.


MESSAGES = 2  # in memory at the same time: one sent, one received
_MIN_ROUND_BYTES = 2**18

_K = TypeVar("_K")
_T = TypeVar("_T")
Shardings: TypeAlias = Mapping[str, ParameterSharding]


@dataclass(frozen=True)
class Resharded:
    """Cost of a live resharding.

    Attributes:
        bytes_moved: bytes sent between ranks, over all ranks.
        seconds: wall-clock time of the slowest rank.
        peak_extra_bytes: maximum over ranks of the memory beyond the larger of its tables before and after.
        tables: names of the moved tables.
    """

    bytes_moved: int
    seconds: float
    peak_extra_bytes: int
    tables: tuple[str, ...]

    def __repr__(self) -> str:
        moved = f"{len(self.tables)} tables" if len(self.tables) != 1 else f"table {self.tables[0]!r}"
        rate = self.bytes_moved / self.seconds / 1e9 if self.seconds else 0.0
        times = f"; {times_note()}" if times_note() else ""
        return (
            f"Resharded({moved}: {self.bytes_moved / 1e6:.1f} MB between ranks in {self.seconds:.3f} s "
            f"({rate:.2f} GB/s{times}), at most {self.peak_extra_bytes / 1e6:.1f} MB of extra memory)"
        )


def _check_kernels(collection: ShardedCollection, shardings: Shardings, knows_optimizers: bool) -> None:
    for name, sharding in shardings.items():
        now = collection.shardings[name]
        if (sharding.compute_kernel == "dense") != (now.compute_kernel == "dense"):
            raise PlanError(
                f"table {name!r} runs on the {now.compute_kernel} kernel, but the plan has {sharding.compute_kernel}: "
                f"resharding does not change a table's optimizer. Fix: compute_kernel={str(now.compute_kernel)!r}"
            )
        if sharding.compute_kernel == "dense" and sharding != now and not knows_optimizers:
            raise PlanError(
                f"table {name!r} is on the dense kernel, so its torch optimizer must receive the new parameters. "
                f"Fix: pass optimizers=[that optimizer]"
            )
    collection.kinds_for(shardings)


@dataclass(frozen=True)
class Reshard:
    """Moves the tables of a running model to another plan.

    Args:
        model: the model.
        max_extra_bytes: limit of the extra memory of a rank; None for no limit.
        folder: folder for parked tensors, if the limit requires parking. Default: the system's temporary folder.
        optimizers: the torch optimizers of tables on the dense kernel. None if the caller has passed none.
        regrouping: the change of sharding groups. Every table moves then, and the plan names each.
    """

    model: Any  # a DistributedModelParallel, whose file imports this one
    max_extra_bytes: int | None
    folder: str | Path | None
    optimizers: Sequence[torch.optim.Optimizer] | None
    regrouping: Regrouping | None = None

    @property
    def env(self) -> ShardingEnv:
        """The ranks that exchange shards."""
        return self.model.env if self.regrouping is None else self.model.dense_env

    def run(self, plan: ShardingPlan) -> Resharded:
        """Moves the tables to ``plan``. Collective over all ranks.

        Raises:
            PlanError: a module or table that does not exist, a tiling with holes, another kernel, a route that the
                codec does not support, or plans that differ between ranks. The error is the same on all ranks.
            ValueError: no kernel supports a table's new sharding, or the memory limit is too small.
            Exception: an error on any rank is raised on all ranks, and every collection is unchanged.
        """
        model = self.model
        model.fused_optimizer.refuse_deferred("dmp.reshard")
        self._recover()
        plan, changed = self._agreed(plan)
        done = self._migrate(changed)
        plan.plan = model.plan.plan | plan.plan
        model.plan = plan
        return done

    def _agreed(self, plan: ShardingPlan) -> tuple[ShardingPlan, dict[str, dict[str, ParameterSharding]]]:
        """The complete new plan, and module path -> table -> sharding of every collection that changes. Moves nothing.

        Collective.
        """
        everyone, collections = self.model.dense_env, self.model.collections
        env = self.model.env if self.regrouping is None else self.regrouping.after.sharding

        def checked() -> tuple[ShardingPlan, dict[str, dict[str, ParameterSharding]]]:
            whole = self._completed(plan)
            if collections:
                tables = {path: c.tables for path, c in collections.items()}
                whole = whole.resolved(tables, env.world_size, env.local_world_size)
            changed = {path: dict(whole.plan[path]) for path in collections}
            if self.regrouping is None:
                changed = {path: own for path, own in changed.items() if own != collections[path].shardings}
            for path, shardings in changed.items():
                _check_kernels(collections[path], shardings, self.optimizers is not None)
            self._check_limit()
            return whole, changed

        whole, changed = agreed(everyone, checked)
        steppers = None if self.optimizers is None else [type(optimizer).__name__ for optimizer in self.optimizers]
        others = {"max_extra_bytes": self.max_extra_bytes, "optimizers": steppers}
        facts = {"plan": plan_facts(whole), "arguments of reshard": others}
        refuse_differences(everyone, facts, PlanError, "Nothing was moved. ")
        # creating groups is collective; placing kernels, which may fail on one rank, then is not
        create_route_groups(whole, env)
        agreed(everyone, lambda: _each(changed, lambda path: collections[path].check(changed[path], env)))
        return whole, changed

    def _completed(self, plan: ShardingPlan) -> ShardingPlan:
        """``plan``, with the current shardings of the tables that it does not name."""
        collections = self.model.collections
        for path in plan.plan:
            if path not in collections:
                raise PlanError(
                    f"the plan names module {path!r}, but the sharded collections are {sorted(collections)}. Fix: use "
                    f"one of these paths ('' is the model itself)"
                )
        whole = {}
        for path, collection in collections.items():
            now = collection.shardings if self.regrouping is None else {}
            whole[path] = EmbeddingModuleShardingPlan({**now, **plan.plan.get(path, {})})
        return ShardingPlan(whole)

    def _check_limit(self) -> None:
        """Raises ValueError if the limit does not allow two messages of one row. The error names the required bytes."""
        if self.max_extra_bytes is None:
            return
        tables = self.model.table_shards().values()
        rows = [(part, shard) for own in tables for part in own.parts() for shard in own.sharding.shards]
        widest = max((part.bytes_of(shard) // shard.num_rows for part, shard in rows), default=0)
        if self.max_extra_bytes < MESSAGES * widest:
            raise ValueError(
                f"max_extra_bytes={self.max_extra_bytes!r} is less than {MESSAGES} messages of one row "
                f"({MESSAGES * widest} bytes). Fix: max_extra_bytes={MESSAGES * widest}"
            )

    def _strategy(self, current: Sequence[int], needed: Sequence[int]) -> tuple[bool, int]:
        """(whether new kernels fit beside the old ones, bytes per message), from each rank's current and new bytes."""
        # with old and new kernels at once, the extra memory is the smaller of both
        beside = max((min(pair) for pair in zip(current, needed, strict=True)), default=0)
        if self.max_extra_bytes is None:
            return True, DEFAULT_ROUND_BYTES
        left = (self.max_extra_bytes - beside) // MESSAGES
        if left >= _MIN_ROUND_BYTES:
            return True, min(left, DEFAULT_ROUND_BYTES)
        return False, min(self.max_extra_bytes // MESSAGES, DEFAULT_ROUND_BYTES)

    @torch.no_grad()
    def _migrate(self, changed: Mapping[str, Shardings]) -> Resharded:
        """Moves collections to new tilings that were checked. Collective."""
        collections, fused = self.model.collections, self.model.fused_optimizer
        everyone, env = self.model.dense_env, self.env
        start = time.perf_counter()

        agreed(everyone, lambda: _each(collections.values(), lambda collection: collection.settle()))
        for path in changed:
            collections[path].level_tables()
        steps = agreed(everyone, lambda: [_Migration(collections[path], changed[path], self) for path in changed])
        for step in steps:
            step.dense.exchange(env)
            step.tiers.exchange(env)
        # after the exchange: another rank's optimizer may step the table
        agreed(everyone, lambda: _each(steps, lambda step: step.dense.check()))
        current, needed = [0] * env.world_size, [0] * env.world_size
        for step in steps:
            for totals, amounts in zip((current, needed), step.current_and_needed(), strict=True):
                totals[:] = map(sum, zip(totals, amounts, strict=True))
        beside, round_bytes = self._strategy(current, needed)

        def placed() -> list[Move]:
            for step in steps:
                step.place()
            return [move for step in steps for move in step.moves()]

        def finished() -> None:
            for step in steps:
                step.finish()
            fused.bind(collections)

        try:
            if not beside:
                agreed(everyone, lambda: _each(steps, lambda step: step.park(self.folder)))
                fused.release()
                for step in steps:
                    step.release()
                gc.collect()  # kernels may be in reference cycles
            moves = agreed(everyone, placed)
            moved = agreed(everyone, lambda: move(moves, env, self.model.device, round_bytes))
            extra = moved.buffer_bytes + (min(current[env.rank], needed[env.rank]) if beside else 0)
            totals = all_gather_object((moved.bytes_sent, time.perf_counter() - start, extra), everyone)
            agreed(everyone, lambda: _each(steps, lambda step: step.tiers.clear()))
            agreed(everyone, lambda: _each(steps, lambda step: step.tiers.fill()))
            agreed(everyone, finished)
        except BaseException as error:
            _clear_frames(error)  # they reference the new kernels
            agreed(everyone, lambda: _each(steps, lambda step: step.tiers.drop()))
            agreed(everyone, lambda: self._restore(steps))
            raise
        for step in steps:
            step.retire()
        tables = tuple(name for step in steps for name in step.tables)
        sent, seconds, peaks = zip(*totals, strict=True)
        return Resharded(sum(sent), max(seconds), max(peaks), tables)

    def _restore(self, steps: "Sequence[_Migration]") -> None:
        """Restores every collection, the last one first, even if another one fails."""
        failures = []
        for step in reversed(steps):
            try:
                step.restore()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        self.model.fused_optimizer.bind(self.model.collections)

    def _recover(self) -> None:
        """Rebuilds tables that a failed move left in a file because memory was short. Collective."""
        executors: list[Any] = [collection.executor for collection in self.model.collections.values()]
        steps = [executor.migration for executor in executors if isinstance(executor, _Parked)]
        if any(gathered(self.model.dense_env, lambda: bool(steps))):
            agreed(self.model.dense_env, lambda: self._restore(steps))


def _each(items: Iterable[_T], action: Callable[[_T], None]) -> None:
    for item in items:
        action(item)


def _clear_frames(error: BaseException | None) -> None:
    """Frees the local variables in the frames of an error and of its causes."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _Migration:
    """The move of one collection, with its old state until all ranks have succeeded."""

    def __init__(self, collection: ShardedCollection, shardings: Shardings, reshard: Reshard) -> None:
        self.collection, self.shardings, self.reshard = collection, shardings, reshard
        self.regrouping = reshard.regrouping
        self.old_env, self.old_shardings = collection.env, collection.shardings
        self.tables = [name for name, sharding in shardings.items() if sharding != self.old_shardings[name]]
        before = collection.table_shards()
        dense = {name: shards for name, shards in before.items() if shards.sharding.compute_kernel == "dense"}
        self.changed_dense = [n for n in dense if self.regrouping is not None or shardings[n] != dense[n].sharding]
        self.kept_dense = {n: list(s.parameters()) for n, s in dense.items() if n not in self.changed_dense}
        self.dense = DenseStates(reshard.optimizers or (), {name: dense[name] for name in self.changed_dense})
        #: (table, part) -> its shards before
        self.before = {(name, part): shards.tiles(part) for name, shards in before.items() for part in shards.parts()}
        # users and optimizers refer to these: a restored collection has them again
        self.parameters = {name: list(shards.parameters()) for name, shards in before.items()}
        self.frozen = [name for name, shards in before.items() if shards.is_frozen]
        #: restores the collection while its old kernels exist; None once they are freed
        self.snapshot: _Snapshot | None = _Snapshot(collection)
        self.own_optimizer = collection._own_optimizer
        self.tiers = TierRows({"": collection}, reshard.folder)

    def current_and_needed(self) -> tuple[list[int], list[int]]:
        """Bytes of weights and states per rank, before and after."""
        before, after = (None, None) if self.regrouping is None else self.regrouping
        return self._bytes_by_rank(self.collection.shardings, before), self._bytes_by_rank(self.shardings, after)

    def _bytes_by_rank(self, shardings: Shardings, grid: ReplicaGrid | None) -> list[int]:
        world_size = self.reshard.env.world_size
        totals = [0] * world_size
        groups = [range(world_size)] if grid is None else grid.sharding_groups
        tables = {table.name: table for table in self.collection.tables}
        for name, part in self.before:
            for shard in sized(tables[name], shardings[name], self.collection.sizes.get(name))[1].shards:
                for ranks in groups:
                    totals[ranks[shard.rank]] += part.bytes_of(shard)
        return totals

    def park(self, folder: str | Path | None) -> None:
        """Copies this rank's tensors to a file. Changes nothing else."""
        tensors = {(key, n): tensor for key, tiles in self.before.items() for n, tensor in tiles.tensors.items()}
        try:
            copies = parked(tensors, folder)
        except OSError as error:
            size = sum(tensor.nbytes for tensor in tensors.values())
            raise OSError(
                f"cannot park {size:,} bytes in {folder or 'the temporary folder'}: {error}. Nothing was moved. Fix: "
                f"free disk space, or pass another park_dir"
            ) from error
        for key, tiles in self.before.items():
            # the moves then read from the file
            self.before[key] = replace(tiles, tensors={n: copies[key, n] for n in tiles.tensors})

    def release(self) -> None:
        """Frees the old kernels, whose contents are in the file."""
        # releasing a shard drops them
        self.grads = {name: [p.grad for p in parameters] for name, parameters in self.parameters.items()}
        # it refers to the kernels that are freed here
        self.snapshot = None
        self.collection.executor.retire()
        for shards in self.collection.table_shards().values():
            shards.release()
        if self.own_optimizer is not None:
            self.own_optimizer.release()
        self.collection.release()

    def place(self) -> None:
        """Creates the kernels of the new sharding."""
        if self.regrouping is not None:
            self.collection.env = self.regrouping.after.sharding
        self.collection.place(self.shardings)
        for name in self.frozen:
            # new parameters require gradients at first
            self.collection.table_shards()[name].requires_grad_(False)

    def moves(self) -> list[Move]:
        """Weights and states of every table, from the old shards to the new ones."""
        after = self.collection.table_shards()
        moves = [Move(tiles, after[name].tiles(part)) for (name, part), tiles in self.before.items()]
        moves += self.tiers.moves()
        moves += self.dense.moves({name: after[name] for name in self.changed_dense}, self.collection.device)
        return moves if self.regrouping is None else [self.regrouping.over_all_ranks(move) for move in moves]

    def finish(self) -> None:
        """Keeps the parameters of unmoved tables in torch optimizers, and replaces those of moved tables."""
        self.collection.recount()
        self.dense.finish()
        for name, parameters in self.kept_dense.items():
            self.collection.table_shards()[name].keep(parameters)
        self.collection.bind_parameters()

    def retire(self) -> None:
        """Marks the old executor stale after all ranks have succeeded. In-flight batches raise."""
        if self.snapshot is not None:
            self.snapshot.attributes["executor"].retire()

    def restore(self) -> None:
        """Restores the collection after a failure in any step.

        Raises:
            RuntimeError: too little memory to rebuild freed kernels. The file is kept, and the next call of
                `DistributedModelParallel.reshard` tries again.
        """
        self.dense.undo()
        collection = self.collection
        if self.snapshot is not None:
            self.snapshot.restore(collection)
            self.tiers.undo()
            return
        collection.release()
        gc.collect()
        collection.env = self.old_env
        try:
            collection.place(self.old_shardings)
            for (name, part), tiles in self.before.items():
                for position, matrix in collection.table_shards()[name].matrices(part).items():
                    matrix.copy_(tiles.tensors[position])
            collection.recount()
            self.tiers.undo()
        except BaseException as error:
            collection.executor = _Parked(self)  # type: ignore[assignment]
            collection.hold_tables(_ParkedTables())
            raise RuntimeError(f"{type(error).__name__}: {error}: {_IN_FILE}") from error
        for name, shards in collection.table_shards().items():
            shards.keep(self.parameters[name])
            for parameter, grad in zip(self.parameters[name], self.grads[name], strict=True):
                parameter.grad = grad
        collection.bind_parameters()
        collection._own_optimizer = self.own_optimizer
        if self.own_optimizer is not None:
            self.own_optimizer.bind({"": collection})


class _Snapshot:
    """A collection's attributes, modules and parameters while its kernels exist."""

    def __init__(self, collection: ShardedCollection) -> None:
        self.attributes, self.modules = dict(vars(collection)), dict(collection._modules)
        self.parameters = [
            (shards, dict(shards._parameters), [(p, p.data, p.grad) for p in shards.parameters()])
            for shards in collection.table_shards().values()
        ]

    def restore(self, collection: ShardedCollection) -> None:
        # the collection stays the same object: the model refers to it
        vars(collection).update(self.attributes)
        collection._modules.clear()
        collection._modules.update(self.modules)
        for shards, parameters, contents in self.parameters:
            shards._parameters.update(parameters)
            for parameter, data, grad in contents:
                parameter.data, parameter.grad = data, grad


def parked(tensors: Mapping[_K, Tensor], folder: str | Path | None = None) -> dict[_K, Tensor]:
    """Copies of the tensors on disk. The file is deleted with the last copy.

    Args:
        tensors: of any device.
        folder: folder of the file. Default: the system's folder for temporary files.

    Raises:
        OSError: the disk is full, or the folder does not exist.

    >>> parked({"t": torch.arange(3)})["t"].tolist()
    [0, 1, 2]
    """
    copies = in_file({key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}, folder, "parked")
    for key, tensor in tensors.items():
        copies[key].copy_(tensor)
    return copies


_IN_FILE = (
    "the tables are in a file because a reshard failed and there was too little memory to rebuild the old kernels. "
    "Fix: free memory on this rank and call reshard() on all ranks, which restores the tables first"
)


class _Parked:
    """Replaces the executor while the tables are in a file. Every use raises."""

    def __init__(self, migration: _Migration) -> None:
        self.migration = migration

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_IN_FILE)


class _ParkedTables(nn.ModuleDict):
    """Replaces the tables while they are in a file. Reading, saving and loading raise."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_IN_FILE)

    items = _save_to_state_dict = _load_from_state_dict = _refuse
