"""Local batches made up for the wire, and several of them sent in one message.

A model may have several sharded collections. Each on its own costs two messages a step, sizes and ids; together they
cost two in all, where their ids travel in one dtype::

    to rank k:   sizes     S, n of collection 0  |  S, n of collection 1
                 ids       what collection 0 sends  |  what collection 1 sends
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, issue_all_to_all
from recshard_lab.distributed.row_router import Run, merge

if TYPE_CHECKING:
    from recshard_lab.distributed.input_dist import Home, InputDist, Routed


@dataclass(slots=True)
class Packed:
    """A local batch made up for the wire.

    Attributes:
        runs: for each rank what it is sent.
        home: what must be remembered here.
        segments: S, or a negative number where messages begin with the lanes' own.
    """

    runs: list[list[Run]]
    home: Home
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
) -> list[Routed]:
    """Sends what several collections packed, once the sizes are known, and waits for all of it.

    Args:
        dists: the collections' input dists, over the same ranks.
        packed: one a collection.
        theirs: for each collection and rank, what that rank told as its ``sizes``.
        device: where the batch lives.
        env: the connections to send over.
        fused: one message for all that travel in one dtype; one a collection otherwise.
    """
    found: list[Routed | None] = [None] * len(dists)
    by_wire: dict[torch.dtype, list[int]] = {}
    for number, own in enumerate(dists):
        by_wire.setdefault(own.wire, []).append(number)
    together = [group for group in by_wire.values() if fused and len(group) > 1]
    for group in together:
        _fused([dists[n] for n in group], [packed[n] for n in group], [theirs[n] for n in group], env, group, found)
    joined = {number for group in together for number in group}
    alone = {
        number: dists[number].send(packed[number], theirs[number], device, env)
        for number in range(len(dists))
        if number not in joined
    }
    for number, pending in alone.items():
        found[number] = pending.wait()
    return [routed for routed in found if routed is not None]


def _fused(
    dists: Sequence[InputDist],
    packed: Sequence[Packed],
    theirs: Sequence[Sequence[Sequence[int]]],
    env: ShardingEnv,
    places: Sequence[int],
    found: list[Routed | None],
) -> None:
    ranks = range(len(packed[0].runs))
    pieces = merge(run for rank in ranks for own in packed for run in own.runs[rank])
    message = torch.cat(pieces) if pieces else torch.empty(0, dtype=dists[0].wire)
    splits = [sum(own.splits[rank] for own in packed) for rank in ranks]
    sizes = [[own[rank][1] for own in theirs] for rank in ranks]
    payload = issue_all_to_all(message, splits, [sum(own) for own in sizes], env, "input_dist/ids")
    chunks = torch.split(payload.wait(), [size for own in sizes for size in own])
    for number, (dist, own, told) in enumerate(zip(dists, packed, theirs, strict=True)):
        mine: list[Tensor] = list(chunks[number :: len(dists)])
        segments, received = [pair[0] for pair in told], [pair[1] for pair in told]
        found[places[number]] = dist.pending(own, segments, received, payload).unpack(mine)
