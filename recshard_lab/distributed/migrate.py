"""Live resharding: the tables of running collections move to another tiling, optimizer state and all.

Two ways, for each collection, the first that keeps within the memory allowed::

    beside      the new kernels are made beside the old ones, overlaps move, the old ones go
                extra memory: the smaller of old and new, and two messages
    parked      what this rank holds is written to a file without a name, the old kernels go, the new ones are
                made and filled from the file, overlap by overlap
                extra memory: two messages

"Extra" is what a rank needs beyond the larger of what it held before and holds after. Only overlaps of a rank's new
rectangles with other ranks' old ones travel (`reshard.transfers`).
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from recshard_lab.comm import ShardingEnv, all_gather_object
from recshard_lab.distributed.dense_tables import DenseStates
from recshard_lab.distributed.parking import parked
from recshard_lab.distributed.regroup import Regrouping, by_rank
from recshard_lab.distributed.reshard import DEFAULT_ROUND_BYTES, Move, Moved, move
from recshard_lab.distributed.sharded_collections import ShardedCollection
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
        tables: names of the tables that lie elsewhere now.
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
        """(whether old and new stand beside each other, bytes of a message), from bytes each rank holds and needs."""
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
    knows_optimizers: bool,
    bound: Bound,
    everyone: ShardingEnv | None = None,
) -> tuple[ShardingPlan, dict[str, dict[str, ParameterSharding]]]:
    """The whole new plan, and module path -> table -> rectangles of every collection that changes.

    All ranks (``everyone``, where ``env`` is a part of them) come here before anything moves, and all of them leave
    with an error if one does.

    Raises:
        PlanError: it names what is not there, does not tile, changes a kernel, or differs between ranks.
        ValueError: no kernel can serve a table there, or the bound is too small.
    """
    error: Exception | None = None
    text = ""
    changed: dict[str, dict[str, ParameterSharding]] = {}
    try:
        whole = _completed(plan, current, collections)
        if collections:
            tables = {path: c.tables for path, c in collections.items()}
            whole = whole.resolved(tables, env.world_size, env.local_world_size)
        changed = {
            path: dict(whole.plan[path]) for path, c in collections.items() if dict(whole.plan[path]) != c.shardings
        }
        for path, shardings in changed.items():
            _check_kernels(collections[path], shardings, knows_optimizers)
        bound.check(collections)
        text = whole.to_json()
    except ValueError as caught:
        error = caught
    everyone = everyone or env
    told = all_gather_object((text, None if error is None else str(error)), everyone)
    if error is not None:
        raise error
    for rank, (other, trouble) in enumerate(told):
        if trouble is not None:
            raise PlanError(f"rank {rank} refuses the plan, nothing was moved: {trouble}")
        if other != text:
            raise PlanError(
                f"rank {rank} was given another plan than rank {everyone.rank}: give every rank the same one"
            )
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
                f"table {name!r} is on the dense kernel, stepped by a torch optimizer that must learn where it lies: "
                f"pass optimizers=[that optimizer]"
            )
    collection.kinds_for(shardings)


@torch.no_grad()
def migrate(
    collections: Mapping[str, ShardedCollection],
    changed: Mapping[str, Shardings],
    env: ShardingEnv,
    device: torch.device,
    bound: Bound,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    regrouping: Regrouping | None = None,
    everyone: ShardingEnv | None = None,
) -> Resharded:
    """Moves collections to new tilings, checked before. All ranks must call it.

    Args:
        collections: module path -> collection, of all that change.
        changed: module path -> table -> its rectangles from now on, of all tables of these collections.
        env: the ranks.
        device: where the tables live.
        bound: how much memory it may take.
        optimizers: those that step the tables on the dense kernel.
        regrouping: from other sharding groups to others; ``env`` are all ranks then.
        everyone: all ranks, where other sharding groups move as well.
    """
    everyone = everyone or env
    begun = time.perf_counter()
    sent = extra = 0
    tables: list[str] = []
    for path, shardings in changed.items():
        collection = collections[path]
        tables += [name for name, sharding in shardings.items() if sharding != collection.shardings[name]]
        held, needed = _held_and_needed(collection, shardings, env, regrouping)
        beside, round_bytes = bound.way(held, needed)
        one = _Migration(collection, shardings, env, device, optimizers, regrouping, everyone)
        moved = one.beside(round_bytes) if beside else one.parked(round_bytes, bound.folder)
        sent += moved.bytes_sent
        extra = max(extra, moved.buffer_bytes + (min(held[env.rank], needed[env.rank]) if beside else 0))
    totals = all_gather_object((sent, time.perf_counter() - begun, extra), everyone)
    return Resharded(
        sum(each[0] for each in totals), max(each[1] for each in totals), max(each[2] for each in totals), tuple(tables)
    )


class _Migration:
    """One collection on its way."""

    def __init__(
        self,
        collection: ShardedCollection,
        shardings: Shardings,
        env: ShardingEnv,
        device: torch.device,
        optimizers: Sequence[torch.optim.Optimizer],
        regrouping: Regrouping | None,
        everyone: ShardingEnv,
    ) -> None:
        self.collection, self.shardings, self.env, self.device = collection, shardings, env, device
        self.regrouping, self.everyone = regrouping, everyone
        before = collection.table_shards()
        dense = {name: shards for name, shards in before.items() if shards.sharding.compute_kernel == "dense"}
        self.changed_dense = [n for n in dense if regrouping is not None or shardings[n] != dense[n].sharding]
        self.kept_dense = {n: list(s.parameters()) for n, s in dense.items() if n not in self.changed_dense}
        self.dense = DenseStates(optimizers, {name: dense[name] for name in self.changed_dense}, env)
        self.sources = {name: list(shards.sharding.shards) for name, shards in before.items()}
        self.parts = {name: shards.parts() for name, shards in before.items()}
        self.held = {(name, p.name): dict(before[name].matrices(p)) for name, own in self.parts.items() for p in own}

    def beside(self, round_bytes: int) -> Moved:
        """New kernels beside the old; if anything fails, the collection is as it was."""
        collection = self.collection
        attributes, modules = dict(vars(collection)), dict(collection._modules)
        try:
            self._place()
            moved = move(self._moves(), self.env, self.device, round_bytes)
        except BaseException:
            vars(collection).update(attributes)
            collection._modules.update(modules)
            raise
        attributes["executor"].retire()
        self._finish()
        return moved

    def parked(self, round_bytes: int, folder: str | Path | None) -> Moved:
        """Old kernels go before the new ones come; what they held waits in a file."""
        flat = {(*key, n): tensor for key, tensors in self.held.items() for n, tensor in tensors.items()}
        trouble = None
        try:
            waiting = parked(flat, folder)
        except OSError as error:
            trouble = f"rank {self.everyone.rank} cannot park {sum(t.nbytes for t in flat.values()):,} bytes: {error}"
        troubles = [each for each in all_gather_object(trouble, self.everyone) if each]
        if troubles:
            raise OSError(f"{troubles[0]}. Nothing was moved: free some space, or name another park_dir")
        for (name, part, n), tensor in waiting.items():
            self.held[name, part][n] = tensor
        del flat
        self.collection.executor.retire()
        for shards in self.collection.table_shards().values():
            shards.let_go()
        self.collection.let_go()
        gc.collect()  # kernels may be parts of cycles
        self._place()
        moved = move(self._moves(), self.env, self.device, round_bytes)
        self._finish()
        return moved

    def _place(self) -> None:
        if self.regrouping is not None:
            self.collection.env = self.regrouping.after.sharding
        self.collection.place(self.shardings)

    def _moves(self) -> list[Move]:
        """Weights and states of every table, from where they lie to where they shall lie."""
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

    def _finish(self) -> None:
        """Torch optimizers go on with the parameters they know, or with the successors of those."""
        self.dense.finish()
        for name, parameters in self.kept_dense.items():
            self.collection.table_shards()[name].keep(parameters)
        self.collection.bind_dense()


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
