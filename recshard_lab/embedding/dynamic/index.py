"""From ids of any value to the slots of a table, with a score for each.

A bucket has 128 slots. The hash of an id names its partition, two buckets of it, and the place in a bucket at which
searches start. A full index replaces the id with the lowest score of both buckets. Shards of a table are ranges of
partitions, so that an index of all partitions and shards of it choose the same ids.

A batch is a multiset: its result does not depend on the order of its ids. Ids that are present are found first. Absent
ones are inserted in ascending order afterwards. No id that occurs in a batch is replaced during it.

The buckets, scores and operations follow HierarchicalKV (https://github.com/NVIDIA-Merlin/HierarchicalKV). Two buckets
to choose from are the "power of two choices" (Azar et al., Balanced Allocations, STOC 1994).

Shape letters: N ids of a batch, M new ids of it, C slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.embedding.dynamic import index_rounds
from recshard_lab.embedding.dynamic.config import SLOTS, buckets_for, partitions_for
from recshard_lab.embedding.kernels.base import empty, zeros
from recshard_lab.embedding.kernels.numba.compiled import INDEX_LOOPS, loop, why_absent
from recshard_lab.embedding.kernels.numba.threads import run_all, share_out, threads_for

ERASED, SCRATCH = 1, 5 * 512  # these equal those of the loops
SPARE = 16  # free slots of the first bucket from which on an id may go to the second
GROW_AT = 0.9  # load factor beyond which an index below its largest size grows
_LOW = 0xFFFFFFFF  # the accesses in a score of "epoch_lfu"
NEVER = -(1 << 62)  # an access before any step

INDEX_TENSORS = ("ids", "tags", "accesses", "step", "epoch")  # names in `ScoredIndex.tensors`
_ARRAYS = ("keys", "tags", "accesses")
_NUMBERS = ("buckets", "max_buckets", "partitions", "shard", "step", "epoch")
EVICT = ("lru", "lfu", "epoch_lru", "epoch_lfu", "custom")
_SET, _ADD, _ADD_IN_EPOCH, _HIGHEST = range(4)
_HOW = dict(zip(EVICT, (_SET, _ADD, _SET, _ADD_IN_EPOCH, _HIGHEST), strict=True))


@dataclass
class Counters:
    """What an index has counted since it was made. ``hits + misses == lookups``.

    ``inserts - evictions - erasures`` is the size.

    Attributes:
        lookups, hits, misses: ids of batches, duplicates included, of `find` and of `find_or_insert`.
        inserts, evictions, erasures: distinct ids.
        refusals: distinct absent ids of a batch that admission refused.
        overflows: distinct absent ids of a batch for which all slots of their buckets were in use by the batch. A table
            with tiers stores their rows there.
    """

    lookups: int = 0
    hits: int = 0
    misses: int = 0
    inserts: int = 0
    evictions: int = 0
    erasures: int = 0
    refusals: int = 0
    overflows: int = 0

    def as_dict(self) -> dict[str, int]:
        """Name -> count."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Inserted:
    """The result of `ScoredIndex.find_or_insert`.

    Attributes:
        slots: ``[N]`` int64 the slot of each id; -1 for ids that were refused.
        new_ids, new_slots: ``[M]`` ids that were inserted, ascending, and their slots. Their rows must be reset.
        evicted_ids, evicted_scores, evicted_slots: ``[E]`` ids that lost their slot, and the slot. The slot is also in
            `new_slots`.
        moved: if the index grew, slots before and the slots of the same ids now (-1 for an id that was lost), else
            None. Slots above are those after growth.
        lost_ids, lost_scores, lost_slots: ``[L]`` ids that found no slot in a larger index, and the slot before.
        over_ids, over_scores: ``[K]`` distinct ids that admission allows and that found no slot: see
            `Counters.overflows`. None without absent ids.
    """

    slots: Tensor
    new_ids: Tensor
    new_slots: Tensor
    evicted_ids: Tensor
    evicted_scores: Tensor
    evicted_slots: Tensor
    moved: tuple[Tensor, Tensor] | None = None
    lost_ids: Tensor | None = None
    lost_scores: Tensor | None = None
    lost_slots: Tensor | None = None
    over_ids: Tensor | None = None
    over_scores: Tensor | None = None


class ScoredIndex:
    """Ids of any int64 value -> slots ``0`` to ``capacity - 1``, with scores.

    Args:
        capacity: slots at first, rounded up to whole buckets of every partition.
        max_capacity: the most slots. Below it, the index doubles rather than evicting. Default: ``capacity``.
        evict: what a score is. ``"lru"``: the step of the last access. ``"lfu"``: the number of accesses.
            ``"epoch_lru"`` and ``"epoch_lfu"``: the same, after the number of the epoch (`epoch`). ``"custom"``: the
            highest score passed with the id in the last batch that had it.
        choices: buckets to choose from, 1 or 2. With 2, the index fills further before it evicts.
        shard: the first of the table's partitions in this shard, and the one after its last. ``capacity`` and
            ``max_capacity`` are those of the table. Default: all.
        device: where the arrays are stored.
        partitions: of the table. Default: `partitions_for` of ``max_capacity``.
        backend: ``"numba"`` (CPU only) or ``"native"`` (torch operators, any device). Both give the same slots.
            Default: numba where it works.

    Attributes:
        keys: ``[C]`` int64: the id of each slot.
        accesses: ``[C, 2]`` int64: the score of each slot's id, and the step of the last access to it.
        tags: ``[C]`` int16: 0 empty, 1 erased, else negative, with 15 bits of the id's hash.
        step: the number of batches so far. epoch: set it to begin a new epoch.
        counters: see `Counters`.

    Raises:
        ValueError: an argument that is none of these; later, an id of another shard.

    >>> index = ScoredIndex(128)
    >>> found = index.find_or_insert(torch.tensor([7, -3, 7]))
    >>> bool(found.slots[0] == found.slots[2]), found.new_ids.tolist(), index.size
    (True, [-3, 7], 2)
    >>> index.find(torch.tensor([8])).tolist()
    [-1]
    """

    def __init__(
        self,
        capacity: int,
        max_capacity: int | None = None,
        *,
        evict: str = "lru",
        choices: int = 2,
        shard: tuple[int, int] | None = None,
        partitions: int | None = None,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        most = capacity if max_capacity is None else max_capacity
        if not 1 <= capacity <= most:
            raise ValueError(f"capacity={capacity!r} must be from 1 to max_capacity={most!r}")
        if evict not in EVICT:
            raise ValueError(f"evict={evict!r} is not supported. Fix: use one of {', '.join(EVICT)}")
        partitions = partitions_for(most) if partitions is None else partitions
        if shard is not None and not 0 <= shard[0] < shard[1] <= partitions:
            raise ValueError(f"shard={shard!r} is not a range of the {partitions} partitions")
        if choices not in (1, 2):
            raise ValueError(f"choices={choices!r} is not supported. Fix: use 1 or 2")
        self.evict, self.choices, self.device = evict, choices, torch.device(device)
        self.partitions = partitions
        self.shard = (0, partitions) if shard is None else shard
        self.buckets = buckets_for(capacity, self.partitions)
        self.max_buckets = max(self.buckets, buckets_for(most, self.partitions))
        self.backend = _backend(backend, self.device)
        self._numbers = {name: torch.zeros(1, dtype=torch.int64, device=device) for name in ("step", "epoch")}
        self._known: dict[str, tuple[int, int]] = {}  # of `_numbers`: the tensor's version, and the number
        self.counters = Counters()
        self._allocate()

    @property
    def step(self) -> int:
        """Batches so far."""
        return self._number("step")

    @step.setter
    def step(self, step: int) -> None:
        self._set_number("step", step)

    @property
    def epoch(self) -> int:
        """The epoch of scores."""
        return self._number("epoch")

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._set_number("epoch", epoch)

    def _number(self, name: str) -> int:
        """A number that is stored on the device. It is read there only after others have written to the tensor."""
        tensor = self._numbers[name]
        version, number = self._known.get(name, (-1, 0))
        # a tensor of inference mode has no version: it is always read
        if tensor.is_inference() or version != tensor._version:
            number = int(tensor)
            if not tensor.is_inference():
                self._known[name] = tensor._version, number
        return number

    def _set_number(self, name: str, number: int) -> None:
        tensor = self._numbers[name].fill_(number)
        if not tensor.is_inference():
            self._known[name] = tensor._version, number

    # ---- size ----

    @property
    def _own(self) -> int:
        """Partitions of this shard."""
        return self.shard[1] - self.shard[0]

    @property
    def _shape(self) -> tuple[int, int, int, int]:
        """Partitions of the table, the first one here, buckets of each, buckets to choose from."""
        return self.partitions, self.shard[0], self.buckets, self.choices

    @property
    def capacity(self) -> int:
        """Slots."""
        return self._own * self.buckets * SLOTS

    @property
    def max_capacity(self) -> int:
        """The most slots."""
        return self._own * self.max_buckets * SLOTS

    @property
    def size(self) -> int:
        """Ids that are present."""
        return int((self.tags < 0).sum())

    @property
    def load_factor(self) -> float:
        """`size` as a share of `capacity`."""
        return self.size / self.capacity

    @property
    def scores(self) -> Tensor:
        """``[C]`` the first column of `accesses`."""
        return self.accesses[:, 0]

    @property
    def touched(self) -> Tensor:
        """``[C]`` the second column of `accesses`."""
        return self.accesses[:, 1]

    # ---- lookups ----

    def find(self, ids: Tensor) -> Tensor:
        """The slots of ids ``[N]``, -1 for absent ones. Nothing but the counters changes."""
        return find_all([self], ids, [(0, 0, len(self._checked(ids)))])[0]

    def find_or_insert(
        self,
        ids: Tensor,
        scores: Tensor | None = None,
        *,
        admit: Callable[[Tensor, Tensor], Tensor] | None = None,
        pinned_from: int | None = None,
    ) -> Inserted:
        """One step: finds the ids of a batch, updates their scores, and inserts absent ones.

        Args:
            ids: ``[N]`` int64.
            scores: ``[N]`` int64, required by ``evict="custom"``, and refused otherwise.
            admit: is passed the distinct absent ids, ascending, and how often each occurs in the batch. Returns which
                are inserted, ``[M]`` bool. Default: all.
            pinned_from: ids of this step and later ones are not evicted. Default: ids of this batch are not evicted.

        Raises:
            ValueError: ids or scores of another shape or type.
        """
        ids = self._checked(ids)
        given = self._scores(ids, scores)
        slots, (misses,) = access_all([self], ids, [(0, 0, len(ids))], given)
        return self.insert_absent(ids, slots, misses, given, admit=admit, pinned_from=pinned_from)

    def insert_absent(
        self,
        ids: Tensor,
        slots: Tensor,
        misses: int,
        scores: Tensor | None = None,
        *,
        admit: Callable[[Tensor, Tensor], Tensor] | None = None,
        pinned_from: int | None = None,
    ) -> Inserted:
        """The second half of `find_or_insert`, after `access_all`. ``slots [N]`` are changed in place if ``misses``."""
        pinned = self.step if pinned_from is None else min(pinned_from, self.step)
        none = ids.new_empty(0)
        if not misses:
            return Inserted(slots, none, none, none, none, none)
        missing = _places(slots < 0, misses)
        # ascending, so that the result does not depend on the order of the batch
        new, inverse, counts = ids[missing].unique(return_inverse=True, return_counts=True)
        new_scores = self._first_scores(counts, None if scores is None else scores[missing], inverse)
        some = torch.arange(len(new), device=self.device)  # admitted ones
        if admit is not None:
            some = admit(new, counts).nonzero().squeeze(1)
            self.counters.refusals += len(new) - len(some)
        grown, placed, old, overflows = self._insert_all(new[some], new_scores[some], pinned)
        moved = lost = None
        if grown is not None:
            held, now, held_ids, held_scores = grown
            moved, gone = (held, now), now < 0
            lost = (held_ids[gone], held_scores[gone], held[gone])
            # ids that were found before the index grew have other slots now
            slots = _renumbered(slots, *moved)
        of_new = new.new_full((len(new),), -1)
        of_new[some] = placed
        slots[missing] = of_new[inverse]  # all of an id's places
        kept = _places(placed >= 0, len(placed) - overflows)
        over = some[_places(placed < 0, overflows)]
        found = Inserted(slots, new[some[kept]], placed[kept], *old, moved, *(lost or ()))
        return replace(found, over_ids=new[over], over_scores=new_scores[over])

    def access(self, ids: Tensor, scores: Tensor | None = None) -> Tensor:
        """Updates the scores of the ids that are present, as one step, and returns the slots. Inserts nothing."""
        ids = self._checked(ids)
        return access_all([self], ids, [(0, 0, len(ids))], self._scores(ids, scores))[0]

    def contains(self, ids: Tensor) -> Tensor:
        """``[N]`` bool: which ids are present. Nothing changes, not even the counters."""
        return self._find(self._checked(ids)) >= 0

    def add_scores(self, slots: Tensor, scores: Tensor) -> None:
        """Adds the accesses that scores ``[M]`` of an earlier time count, to those of distinct slots ``[M]``.

        Only the scores of ``"lfu"`` and ``"epoch_lfu"`` count accesses.
        """
        if _HOW[self.evict] in (_ADD, _ADD_IN_EPOCH):
            self.scores[slots] = self.added_scores(scores, self.scores[slots])

    def added_scores(self, before: Tensor, own: Tensor) -> Tensor:
        """``[M]`` the scores of ids with accesses of an earlier time and later ones. See `add_scores`."""
        how = _HOW[self.evict]
        if how == _ADD:
            return own + before
        if how == _ADD_IN_EPOCH:
            # the epoch is the later one's; the counts add, up to 32 bits
            return (own & ~_LOW) | ((own & _LOW) + (before & _LOW)).clamp(max=_LOW)
        return own

    # ---- size ----

    def grow(self, buckets: int) -> Inserted:
        """The same ids in more buckets of each partition, as if an insertion of no ids had grown the index."""
        slots = self.slots()
        ids, scores = self.keys[slots], self.scores[slots]
        self._rebuild(min(buckets, self.max_buckets))
        now, none = self._find(ids), ids[:0]
        gone = now < 0
        moved = (slots, now), ids[gone], scores[gone], slots[gone]
        return Inserted(none, none, none, none, none, none, *moved)

    def clear(self, buckets: int) -> None:
        """Removes every id, and has this many buckets of each partition."""
        self.counters.erasures += self.size
        self.buckets = min(buckets, self.max_buckets)
        self._allocate()

    # ---- removal, export ----

    def erase(self, ids: Tensor) -> Tensor:
        """Removes ids ``[N]`` that are present. Returns the slots that become free, ascending."""
        slots = self._find(ids).unique()
        return self._erase(slots[slots >= 0])

    def erase_if(self, condition: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Removes the ids for which ``condition(ids, scores)`` is True. Returns the slots that become free."""
        slots = self.slots()
        return self._erase(slots[condition(self.keys[slots], self.scores[slots])])

    def slots(self) -> Tensor:
        """The slots in use, ascending."""
        return (self.tags < 0).nonzero().squeeze(1)

    def export_batches(self, size: int = 1 << 16, since: int | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Ids, scores and slots of everything present, up to ``size`` at a time, in the order of slots.

        Args:
            size: of a batch.
            since: only ids touched at this step or later.
        """
        slots = self.slots()
        if since is not None:
            slots = slots[self.touched[slots] >= since]
        for some in slots.split(size):
            yield self.keys[some], self.scores[some], some

    # ---- state ----

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the size and the counters: ``ids``, ``tags`` and ``accesses`` by slot, ``step`` and ``epoch``
        ``[1]``. ``tags [C, 2]`` are bytes: Gloo sends no int16."""
        tags = self.tags.view(torch.uint8).view(-1, 2)
        return {"ids": self.keys, "tags": tags, "accesses": self.accesses} | self._numbers

    def state(self) -> dict[str, Any]:
        """Everything of this index, for `load_state`. Tensors are not copied."""
        tensors = {name: getattr(self, name) for name in _ARRAYS}
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return tensors | numbers | {"counters": self.counters.as_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Becomes the index that `state` was read from."""
        for name in _NUMBERS:
            setattr(self, name, state[name])
        for name in _ARRAYS:
            setattr(self, name, state[name].to(self.device, copy=True))
        self.counters = Counters(**state["counters"])

    def refill(
        self, ids: Tensor, scores: Tensor, touched: Tensor, slots: Tensor | None = None, geometry: Any = None
    ) -> Tensor:
        """Becomes an index of these ids and no others, larger if they need it.

        Args:
            ids: ``[N]`` int64, distinct, of this shard.
            scores, touched: ``[N]`` int64.
            slots: ``[N]`` where each was in an index of ``geometry``, counted from the first slot of the table; -1 for
                ids without a slot. If this index can have that geometry, ids get the same slots.
            geometry: ``partitions``, ``buckets`` of each and ``choices``.

        Returns:
            ``[N]`` the slots; -1 for ids without room, whose scores are the lowest of their buckets.
        """
        self.counters.erasures += self.size
        same = slots is not None and geometry is not None and self._can_have(geometry)
        if same:
            assert slots is not None
            self.buckets = geometry["buckets"]
            self._allocate()
            # slots of the table to slots of this shard
            out = torch.where(slots < 0, slots, slots - self.shard[0] * self.buckets * SLOTS)
            self._place(ids, scores, touched, out)
            rest = (out < 0).nonzero().squeeze(1)
        else:
            while len(ids) > GROW_AT * self.capacity and self.buckets < self.max_buckets:
                self.buckets = min(2 * self.buckets, self.max_buckets)
            self._allocate()
            out = torch.full_like(ids, -1)
            rest = torch.arange(len(ids), device=self.device)
        # stable sorts, the main key last: highest scores come first, so that the lowest find no room
        for values in (ids, touched, scores):
            rest = rest[values[rest].argsort(stable=True, descending=True)]
        while len(rest):
            # `NEVER`: everything is pinned, so nothing is evicted
            placed, *_ = self._insert(ids[rest], scores[rest], touched[rest], NEVER)
            out[rest] = placed
            if same or self.buckets == self.max_buckets or bool((placed >= 0).all()):
                break
            self.buckets = min(2 * self.buckets, self.max_buckets)  # a bucket is full: try again with more
            self._allocate()
        lost = int((out < 0).sum())
        self.counters.inserts += len(ids)
        self.counters.evictions += lost
        return out

    # ---- inside ----

    def _can_have(self, geometry: Any) -> bool:
        """Whether slots of an index of this geometry can be slots of this one."""
        same = geometry["partitions"] == self.partitions and geometry["choices"] == self.choices
        return bool(same and self.buckets <= geometry["buckets"] <= self.max_buckets)

    def _place(self, ids: Tensor, scores: Tensor, touched: Tensor, slots: Tensor) -> None:
        """Puts ids into slots of an empty index. A free slot is marked as erased if a search has to go on after it."""
        there = slots >= 0
        ids, slots = ids[there], slots[there]
        self.keys[slots] = ids
        self.accesses[slots] = torch.stack([scores[there], touched[there]], dim=1)
        tags, passed = index_rounds.tags_and_passed(ids, slots, len(self.keys))
        # an empty slot ends a search, an erased one does not; slots in use are written next
        self.tags.view(-1, index_rounds.WORD)[passed] = ERASED
        self.tags[slots] = tags.to(torch.int16)

    def _allocate(self) -> None:
        many, device = self.capacity, self.device
        self.keys, self.tags = zeros([many], torch.int64, device), zeros([many], torch.int16, device)
        self.accesses = zeros([many, 2], torch.int64, device)
        self.accesses[:, 1] = NEVER

    def _checked(self, ids: Tensor) -> Tensor:
        if ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"ids must be int64 or int32 of one axis, got {ids.dtype} {list(ids.shape)}")
        return ids.to(self.device, torch.int64).contiguous()

    def _scores(self, ids: Tensor, scores: Tensor | None) -> Tensor | None:
        if (scores is None) == (self.evict == "custom"):
            fix = "pass scores [N]" if scores is None else "leave scores out"
            raise ValueError(f"evict={self.evict!r} {'needs' if scores is None else 'computes'} scores. Fix: {fix}")
        if scores is not None and (scores.shape != ids.shape or scores.dtype != torch.int64):
            raise ValueError(f"scores must be int64 {list(ids.shape)}, got {scores.dtype} {list(scores.shape)}")
        return None if scores is None else scores.to(self.device).contiguous()

    @property
    def _now(self) -> int:
        """What an access sets a score to, or adds to it above."""
        if self.evict == "epoch_lfu":
            return self.epoch
        return self.step if self.evict == "lru" else (self.epoch << 32) | self.step

    def _first_scores(self, counts: Tensor, given: Tensor | None, inverse: Tensor) -> Tensor:
        """``[M]`` the scores of new ids."""
        how = _HOW[self.evict]
        if how == _SET:
            return torch.full_like(counts, self._now)
        if how == _HIGHEST:
            assert given is not None
            return torch.full_like(counts, NEVER).scatter_reduce_(0, inverse, given, "amax")
        return counts if how == _ADD else (self.epoch << 32) | counts.clamp(max=(1 << 32) - 1)

    def _erase(self, slots: Tensor) -> Tensor:
        self.tags[slots], self.touched[slots] = ERASED, NEVER  # not empty: searches pass here
        self.counters.erasures += len(slots)
        return slots

    def _find(self, ids: Tensor) -> Tensor:
        """As `find`, and counts nothing."""
        ids = self._checked(ids)
        return _located([self], ids, [(0, 0, len(ids))])[0]

    def _row(self, how: int) -> list[int]:
        """What the loop `find` reads of this index."""
        addresses = [array.data_ptr() for array in (self.keys, self.tags, self.accesses)]
        now = self._now if how >= 0 else 0
        return [*addresses, self.partitions, self.shard[0], self._own, self.buckets, self.choices, how, now, self.step]

    def _elsewhere(self, ids: Tensor) -> Tensor:
        """``[N]`` bool: which ids are not of this shard."""
        partition = index_rounds.partitions_of(ids, self.partitions)
        return (partition < self.shard[0]) | (partition >= self.shard[1])

    def _find_natively(self, ids: Tensor) -> Tensor:
        return index_rounds.find(ids, self.keys, self.tags, *self._shape)

    def _touch(self, slots: Tensor, given: Tensor | None) -> None:
        how = _HOW[self.evict]
        if self.backend == "native":
            index_rounds.touch(slots, how, self._now, given, self.step, self.scores, self.touched)
            return
        # without scores their values do not count: any array of this length will do
        run, at, each = loop("touch"), slots.numpy(), (slots if given is None else given).numpy()

        def part(first: int, end: int) -> None:
            run(at, first, end, how, self._now, each, self.step, self.accesses.data_ptr())

        _in_parallel(part, self.capacity, 32 * len(slots))

    def _insert_all(
        self, new: Tensor, scores: Tensor, pinned: int
    ) -> tuple[tuple[Tensor, ...] | None, Tensor, tuple[Tensor, Tensor, Tensor], int]:
        """Inserts absent ids ``[M]``, ascending. Grows rather than evicts.

        Returns:
            None without growth, else the slots before it, the slots of the same ids after it, the ids and their
            scores; the slots ``[M]``; ids, scores and slots of those evicted; how many ids have no slot.
        """
        touched = torch.full_like(new, self.step)
        held: tuple[Tensor, Tensor, Tensor] | None = None
        now: Tensor | None = None
        while self.buckets < self.max_buckets:
            if self.size + len(new) <= GROW_AT * self.capacity:
                # nothing is evicted while the index can grow
                out, *old = self._insert(new, scores, touched, NEVER)
                if bool((out >= 0).all()):
                    break
                self.tags[out[out >= 0]] = ERASED  # a bucket is full: try again with more
            # before the first growth, as several may follow
            if held is None:
                slots = self.slots()
                held = slots, self.keys[slots], self.scores[slots]
            self._rebuild(min(2 * self.buckets, self.max_buckets))
            now = self._find(held[1])
        else:
            out, *old = self._insert(new, scores, touched, pinned)
        # one wait for both; `_places` then needs none
        evictions, overflows = torch.stack([(out < -1).sum(), (out == -1).sum()]).tolist()
        replaced = _places(out < -1, evictions)
        out = torch.where(out < -1, -2 - out, out)
        grown = None if held is None or now is None else (held[0], now, held[1], held[2])
        self.counters.overflows += overflows
        self.counters.inserts += len(out) - overflows
        self.counters.evictions += len(replaced)
        old_ids, old_scores = (each[replaced] for each in old)
        return grown, out, (old_ids, old_scores, out[replaced]), overflows

    def _rebuild(self, buckets: int) -> None:
        """The same ids in more buckets of each partition. Ids without room, which a very uneven hash has, are lost."""
        slots = self.slots()
        # by id, so that the slots do not depend on where the ids were
        slots = slots[self.keys[slots].argsort()]
        ids, scores, touched = self.keys[slots], self.scores[slots], self.touched[slots]
        self.buckets = buckets
        self._allocate()
        out, *_ = self._insert(ids, scores, touched, NEVER)
        self.counters.evictions += int((out < 0).sum())

    def _insert(self, new: Tensor, scores: Tensor, touched: Tensor, pinned: int) -> tuple[Tensor, Tensor, Tensor]:
        """``[M]`` each: the results of `index_loops.insert`."""
        shape = self._shape
        spare = SPARE if self.choices == 2 else 0
        if self.backend == "native":
            arrays = self.keys, self.tags, self.scores, self.touched
            return index_rounds.insert(new, scores, touched, *arrays, *shape, spare, pinned)
        # written for each new id by the thread of its partition
        results = tuple(torch.empty_like(new) for _ in range(3))
        run = loop("insert")
        given, stored, written = (
            [each.contiguous().numpy() for each in group]
            for group in ((new, scores, touched), (self.keys, self.tags, self.accesses), results)
        )

        def part(first: int, end: int) -> None:
            run(*given, first, end, *stored, *shape, spare, pinned, *written)

        _in_parallel(part, self._own, 256 * len(new))
        return results  # type: ignore[return-value]


Span = tuple[int, int, int]
"""Some ids of a batch: the number of their index, the position of the first, and the one after the last."""


def find_all(indexes: Sequence[ScoredIndex], ids: Tensor, spans: Sequence[Span]) -> tuple[Tensor, list[int]]:
    """`ScoredIndex.find` of several indexes at once.

    Args:
        indexes: of one device and backend.
        ids: ``[N]``.
        spans: they cover all ids.

    Returns:
        ``[N]`` slots, and for each index how many of its ids are absent.
    """
    slots, misses = _located(indexes, ids, spans)
    _count(indexes, spans, misses)
    return slots, misses


def access_all(
    indexes: Sequence[ScoredIndex], ids: Tensor, spans: Sequence[Span], scores: Tensor | None = None
) -> tuple[Tensor, list[int]]:
    """`ScoredIndex.access` of several indexes at once. ``scores [N]`` are read for indexes with custom ones.

    Arguments and results are those of `find_all`.
    """
    for index in indexes:
        # before the lookup, which writes the step to each access
        index.step += 1
    slots, misses = _located(indexes, ids, spans, touch=True, scores=scores)
    _count(indexes, spans, misses)
    return slots, misses


def _located(
    indexes: Sequence[ScoredIndex],
    ids: Tensor,
    spans: Sequence[Span],
    *,
    touch: bool = False,
    scores: Tensor | None = None,
) -> tuple[Tensor, list[int]]:
    """The results of `find_all`. If ``touch``, the accesses are recorded."""
    if indexes[0].backend == "native":
        return _located_natively(indexes, ids, spans, touch, scores)
    loads = [0] * len(indexes)
    for number, first, end in spans:
        loads[number] += end - first
    threads = threads_for(32 * len(ids))
    shares, even = share_out(loads, threads)
    if even:
        parts = [[span for span in spans if span[0] in share] for share in shares]
    else:
        # most ids are of one index: every span is cut
        cuts = [(i / threads, (i + 1) / threads) for i in range(threads)]
        parts = [[(n, a + int((b - a) * x), a + int((b - a) * y)) for n, a, b in spans] for x, y in cuts]
    how = [_HOW[index.evict] for index in indexes]
    # several threads may record the same access, but not add to the same score
    inside = [touch and (each == _SET or (even and each != _HIGHEST)) for each in how]
    # [I, 11] as `index_loops.KEYS`... name the columns
    rows = [index._row(each if own else -1) for index, each, own in zip(indexes, how, inside, strict=True)]
    slots, run, table = empty(ids.shape, torch.int64), loop("find"), np.array(rows, np.int64)
    found = [np.array([(*span, 0) for span in part], np.int64).reshape(-1, 4) for part in parts]
    bad = [-1] * len(parts)

    def task(number: int) -> None:
        bad[number] = run(ids.numpy(), table, found[number], slots.numpy(), np.empty(SCRATCH, np.int64))

    run_all(task, [(number,) for number in range(len(parts))])
    _refuse_others(ids, next((position for position in bad if position >= 0), -1))
    misses = [0] * len(indexes)
    for number, _, _, missed in (row for part in found for row in part.tolist()):
        misses[number] += missed
    for number, first, end in spans:
        # the others: by ranges of slots, so that a score has one thread
        if touch and not inside[number]:
            indexes[number]._touch(slots[first:end], None if scores is None else scores[first:end])
    return slots, misses


def _located_natively(
    indexes: Sequence[ScoredIndex], ids: Tensor, spans: Sequence[Span], touch: bool, scores: Tensor | None
) -> tuple[Tensor, list[int]]:
    """`_located` in torch operators. The host waits once, and once more for shards."""
    if any(index._own < index.partitions for index in indexes):
        bad = torch.cat([indexes[number]._elsewhere(ids[first:end]) for number, first, end in spans])
        if bool(bad.any()):
            _refuse_others(ids, int(bad.nonzero()[0]))
    found = [indexes[number]._find_natively(ids[first:end]) for number, first, end in spans]
    missed = torch.stack([(own < 0).sum() for own in found]).tolist() if found else []
    misses = [0] * len(indexes)
    for (number, first, end), own, some in zip(spans, found, missed, strict=True):
        misses[number] += some
        if touch:
            # all present: no wait, no copy
            present = _places(own >= 0, len(own) - some) if some else slice(None)
            indexes[number]._touch(own[present], None if scores is None else scores[first:end][present])
    return torch.cat(found), misses


def _places(mask: Tensor, count: int) -> Tensor:
    """``[count]`` the places of True, of which there are so many: the host waits for no device."""
    return (mask.nonzero() if mask.device.type == "cpu" else torch.nonzero_static(mask, size=count)).squeeze(1)


def _refuse_others(ids: Tensor, bad: int) -> None:
    """Raises ValueError for the id at a position, unless that is -1."""
    if bad >= 0:
        raise ValueError(
            f"id {int(ids[bad])} is not of the partitions of this shard. Fix: send it to the rank that has it"
        )


def _count(indexes: Sequence[ScoredIndex], spans: Sequence[Span], misses: Sequence[int]) -> None:
    for index, missed in zip(indexes, misses, strict=True):
        index.counters.misses += missed
        index.counters.hits -= missed
    for number, first, end in spans:
        indexes[number].counters.lookups += end - first
        indexes[number].counters.hits += end - first


def _backend(name: str | None, device: torch.device) -> str:
    if name not in (None, "native", "numba"):
        raise ValueError(f"backend={name!r} is not supported. Fix: use 'numba' or 'native'")
    if name == "native" or (name is None and device.type != "cpu"):
        return "native"
    reason = f"it runs on cpu, not on {device.type}" if device.type != "cpu" else why_absent(INDEX_LOOPS)
    if reason is None:
        return "numba"
    if name is None:
        return "native"
    raise ValueError(f"backend 'numba' cannot be used: {reason}. Fix: leave backend out")


def _in_parallel(part: Callable[[int, int], None], many: int, load: int) -> None:
    """Calls ``part`` for ranges of ``many``, on the threads that `threads_for` gives for ``load``."""
    threads = max(1, min(threads_for(load), many))
    run_all(part, [(many * i // threads, many * (i + 1) // threads) for i in range(threads)])


def _renumbered(slots: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Slots after growth; -1 stays."""
    table = slots.new_full((int(before.max()) + 2 if len(before) else 1,), -1)
    table[before] = after
    return table[slots]  # the last one is -1
