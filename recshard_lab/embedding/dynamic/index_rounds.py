"""The inner part of `ScoredIndex` in torch operators, for every device. The result equals that of `index_loops`.

Ids that share no bucket do not affect each other. Each round therefore inserts every id that is the first one left in
both of its buckets.

Shape letters: N ids, M new ids, C slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SLOTS, WORD = 128, 32
CHUNK = 1 << 16  # ids whose buckets are compared at once: 64 MB of keys
LAST = (1 << 63) - 1
AHEAD = 16  # rounds that are planned before the host waits

_MULTIPLIER, _OTHER = 0xD6E8FEB86659FD93 - (1 << 64), 0x9E3779B97F4A7C15 - (1 << 64)  # as int64
_LOW = 0xFFFFFFFF


def _high(h: Tensor) -> Tensor:
    return (h >> 32) & _LOW  # torch shifts in the sign


def hashes(ids: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` each: the two hashes of 64 bits, as int64."""
    h = (ids ^ _high(ids)) * _MULTIPLIER
    h = (h ^ _high(h)) * _MULTIPLIER
    h = h ^ _high(h)
    return h, h * _OTHER


def partitions_of(ids: Tensor, partitions: int | Tensor) -> Tensor:
    """``[N]`` the partition of each id, of so many in its table."""
    return (_high(hashes(ids)[0]) * partitions) >> 32


def _places(ids: Tensor, partitions: int, offset: int, buckets: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, 2]`` both buckets, ``[N]`` the tag, ``[N]`` the slot of a bucket at which searches start."""
    h, g = hashes(ids)
    first = (((_high(h) * partitions) >> 32) - offset) * buckets
    both = torch.stack([first + (((h & _LOW) * buckets) >> 32), first + ((_high(g) * buckets) >> 32)], dim=1)
    return both, (g & 0x7FFF) - 0x8000, ((g >> 15) & (SLOTS // WORD - 1)) * WORD


def find(ids: Tensor, keys: Tensor, tags: Tensor, partitions: int, offset: int, buckets: int, choices: int) -> Tensor:
    """``[N]`` slots, -1 for absent ids."""
    by_bucket, tag_of = keys.view(-1, SLOTS), tags.view(-1, SLOTS)
    found = []
    for some in ids.split(CHUNK):
        both, tag, _ = _places(some, partitions, offset, buckets)
        slots = torch.full_like(some, -1)
        for choice in range(choices):
            bucket = both[:, choice]
            same = (tag_of[bucket] == tag[:, None]) & (by_bucket[bucket] == some[:, None])
            slots = torch.where(same.any(dim=1), bucket * SLOTS + same.byte().argmax(dim=1), slots)
        found.append(slots)
    return torch.cat(found)


def tags_and_passed(ids: Tensor, slots: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """The tags of ids ``[N]`` in slots ``[N]``, and ``[C / WORD]`` bool which words their searches pass."""
    _, tags, start = _places(ids, 1, 0, 1)
    words = SLOTS // WORD
    first, at = start // WORD, (slots % SLOTS) // WORD
    passed = torch.zeros(capacity // WORD, dtype=torch.bool, device=ids.device)
    # a search passes every word between its start and the slot
    for step in range(words - 1):
        on_the_way = step < (at - first) % words
        passed[(slots // SLOTS * words + (first + step) % words)[on_the_way]] = True
    return tags, passed


def touch(at: Tensor, how: int, now: int, given: Tensor | None, step: int, scores: Tensor, touched: Tensor) -> None:
    """An access to each of the slots ``[N]``. See `index_loops` for ``how``."""
    if how == 0:
        scores[at] = now
    elif how == 3:
        assert given is not None
        # the highest score of this batch replaces those of earlier ones
        scores[at] = torch.where(touched[at] != step, torch.iinfo(torch.int64).min, scores[at])
        scores.scatter_reduce_(0, at, given, "amax")
    else:
        if how == 2:
            scores[at] = (now << 32) | (scores[at] & _LOW)
        scores.index_add_(0, at, torch.ones_like(at))
        if how == 2:  # the low 32 bits count no further
            scores[at] = scores[at].clamp(max=(now << 32) | _LOW)
    touched[at] = step


def insert(
    new: Tensor,
    new_scores: Tensor,
    new_touched: Tensor,
    keys: Tensor,
    tags: Tensor,
    scores: Tensor,
    touched: Tensor,
    partitions: int,
    offset: int,
    buckets: int,
    choices: int,
    spare: int,
    pinned: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inserts the absent ids ``new [M]``. See `index_loops.insert` for the rule and the results."""
    out, old_keys, old_scores = (torch.full_like(new, -1) for _ in range(3))
    both, tag, start = _places(new, partitions, offset, buckets)
    tag = tag.to(torch.int16)
    if choices == 1:
        both[:, 1] = both[:, 0]
    for now in _rounds(both, len(keys) // SLOTS):
        _insert_round(
            now, new, new_scores, new_touched, both, tag, start, keys, tags, scores, touched, spare, pinned,
            out, old_keys, old_scores,
        )  # fmt: skip
    return out, old_keys, old_scores


def _rounds(both: Tensor, buckets: int) -> Iterator[Tensor]:
    """The numbers of the ids that each round inserts, of ids with these buckets ``[M, 2]``.

    Off the CPU the host waits once for `AHEAD` rounds.
    """
    left = torch.arange(len(both), device=both.device)
    first = torch.empty(buckets, dtype=torch.int64, device=both.device)

    def ready(mine: Tensor, waiting: Tensor) -> Tensor:
        # the first id left in each bucket; one that is first in both can be inserted
        first.fill_(LAST)
        for choice in range(2):
            first.scatter_reduce_(0, mine[:, choice], waiting, "amin")
        return (first[mine] == waiting[:, None]).all(dim=1)

    while len(left):
        mine = both[left]
        if both.device.type == "cpu":
            own = ready(mine, left)
            # stable: ids stay in their order
            now, left = left[own.argsort(descending=True, stable=True)].tensor_split([int(own.sum())])
            yield now
            continue
        level, sizes = torch.full_like(left, AHEAD), list[Tensor]()
        for number in range(AHEAD):
            waits = level == AHEAD
            own = ready(mine, torch.where(waits, left, LAST)) & waits
            level.masked_fill_(own, number)
            sizes.append(own.sum())
        ends = torch.stack(sizes).cumsum(0).tolist()
        *rounds, left = left[level.argsort(stable=True)].tensor_split(ends)
        yield from (own for own in rounds if len(own))


def _insert_round(
    at: Tensor,
    new: Tensor,
    new_scores: Tensor,
    new_touched: Tensor,
    both: Tensor,
    tag: Tensor,
    start: Tensor,
    keys: Tensor,
    tags: Tensor,
    scores: Tensor,
    touched: Tensor,
    spare: int,
    pinned: int,
    out: Tensor,
    old_keys: Tensor,
    old_scores: Tensor,
) -> None:
    """Inserts the new ids number ``at``, no two of which share a bucket."""
    lanes = torch.arange(SLOTS, device=new.device)
    buckets = both[at]  # [n, 2]
    free = tags.view(-1, SLOTS)[buckets] >= 0  # [n, 2, 128]
    many = free.sum(dim=2)
    choice = ((many[:, 0] <= spare) & (many[:, 1] > many[:, 0])).long()
    rows = torch.arange(len(at), device=new.device)
    # [n, 128] how far a slot is from where the search starts
    order = (lanes - start[at][:, None]) % SLOTS
    chosen = torch.where(free[rows, choice], order, SLOTS)
    room = many.amax(dim=1) > 0
    slot = buckets[rows, choice] * SLOTS + (chosen.argmin(dim=1))
    masked = new.device.type != "cpu"  # the host does not wait for the number of full buckets
    full = rows if masked else (~room).nonzero().squeeze(1)
    if len(full):
        slots = (buckets[full][:, :, None] * SLOTS + lanes).flatten(1)  # [f, 256]
        kept = touched[slots] >= pinned
        for values in (scores, touched, keys):  # the lowest in this order
            own = torch.where(kept, LAST, values[slots])
            kept = kept | (own != own.amin(dim=1, keepdim=True))
        victim = slots.gather(1, kept.byte().argmin(dim=1, keepdim=True)).squeeze(1)
        none = kept.all(dim=1)
        victims = torch.where(none, -1, victim)
        slot[full], own = torch.where(room, slot, victims) if masked else victims, at[full]
        none = none | room if masked else none
        old_keys[own] = torch.where(none, old_keys[own], keys[victim])
        old_scores[own] = torch.where(none, old_scores[own], scores[victim])
    out[at] = torch.where(room | (slot < 0), slot, -2 - slot)
    pairs = (keys, new), (scores, new_scores), (touched, new_touched), (tags, tag)
    if masked:  # an id without a slot writes what is there: no other id of this round has its bucket
        put, where = slot >= 0, torch.where(slot >= 0, slot, buckets[:, 0] * SLOTS)
        for stored, given in pairs:
            stored[where] = torch.where(put, given[at], stored[where])
        return
    placed = (slot >= 0).nonzero().squeeze(1) if len(full) else rows
    where, which = slot[placed], at[placed]
    for stored, given in pairs:
        stored[where] = given[which]
