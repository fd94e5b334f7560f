"""Local batches made up for the wire, and several of them sent in one message.

A model may have several sharded collections. Each on its own costs two messages a step, sizes and ids; together they
cost two in all, where their ids travel in one dtype::

    to rank k:   sizes     S, n of collection 0  |  S, n of collection 1
                 ids       what collection 0 sends  |  what collection 1 sends
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recshard_lab.comm import Pending, ShardingEnv, issue_all_to_all
from recshard_lab.distributed.step.route_ids import Run, merge

if TYPE_CHECKING:
    from recshard_lab.distributed.step.input_dist import InputDist, LocalBatch, LookupInput


@dataclass(slots=True)
class Packed:
    """A local batch made up for the wire.

    Attributes:
        runs: for each rank what it is sent.
        local_batch: what must be remembered here.
        segments: S, or a negative number where messages begin with the lanes' own.
    """

    runs: list[list[Run]]
    local_batch: LocalBatch
    segments: int

    @property
    def splits(self) -> list[int]:
        """Elements for each rank."""
        return [sum(end - start for _, start, end in own) for own in self.runs]

    @property
    def sizes(self) -> list[list[int]]:
        """What each rank must know before the ids come: S, and how many elements they are."""
        return [[self.segments, split] for split in self.splits]

    def message(self, wire: torch.dtype, device: torch.device) -> Tensor:
        """What the ranks are sent, one after the other."""
        pieces = merge(run for own in self.runs for run in own)
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=wire, device=device)


def exchange_ids(
    dists: Sequence[InputDist],
    packed: Sequence[Packed],
    theirs: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
    env: ShardingEnv,
    fused: bool = True,
) -> Generator[None, None, list[LookupInput]]:
    """Sends what several collections packed, once the sizes are known; waits for all of it after its one ``yield``.

    Args:
        dists: the collections' input dists, over the same ranks.
        packed: one a collection.
        theirs: for each collection and rank, what that rank told as its ``sizes``.
        device: where the batch lives.
        env: the connections to send over.
        fused: one message for all that travel in one dtype; one a collection otherwise.
    """
    by_wire: dict[object, list[int]] = {}
    for number, dist in enumerate(dists):
        by_wire.setdefault(dist.wire if fused else number, []).append(number)
    sent = []
    for places in by_wire.values():
        own = [packed[n] for n in places]
        sent.append((places, _send([dists[n] for n in places], own, [theirs[n] for n in places], device, env)))
    yield
    found: list[LookupInput | None] = [None] * len(dists)
    for places, payload in sent:
        sizes = [[theirs[n][rank][1] for n in places] for rank in range(env.world_size)]
        chunks = torch.split(payload.wait(), [size for own in sizes for size in own])
        for place, number in enumerate(places):
            segments, received = ([pair[part] for pair in theirs[number]] for part in (0, 1))
            pending = dists[number].pending(packed[number], segments, received, payload)
            found[number] = pending.unpack(list(chunks[place :: len(places)]))
    return [lookup_input for lookup_input in found if lookup_input is not None]


def _send(
    dists: Sequence[InputDist],
    packed: Sequence[Packed],
    theirs: Sequence[Sequence[Sequence[int]]],
    device: torch.device,
    env: ShardingEnv,
) -> Pending:
    """One message for these collections: to each rank what the first sends it, then the second, ..."""
    ranks = range(env.world_size)
    pieces = merge(run for rank in ranks for own in packed for run in own.runs[rank])
    message = torch.cat(pieces) if pieces else torch.empty(0, dtype=dists[0].wire, device=device)
    outgoing = [own.splits for own in packed]
    splits = [sum(own[rank] for own in outgoing) for rank in ranks]
    return issue_all_to_all(
        message, splits, [sum(own[rank][1] for own in theirs) for rank in ranks], env, "input_dist/ids"
    )
