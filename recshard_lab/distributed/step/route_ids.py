"""Finds, for the blocks whose tables are cut by rows, what each lane's rectangle is to receive.

Where every rectangle of a table is one stripe of it (cut at the same rows as its neighbours), one pass sorts the ids
of all such tables by stripe, and a lane's ids are a run of the result; lanes that hold other columns of the same
stripe read the same run. Tables whose rectangles overlap each other's rows otherwise (drawn by hand) are searched
once for each of their row ranges.

Shape letters: S bags of a block, N ids.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recshard_lab.distributed.step.bucketize import Stripes, edges_of
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.sparse.ops import complete_cumsum

Run = tuple[Tensor, int, int]
"""``tensor[start:end]``, not cut yet: runs that lie side by side are sent as one."""


@dataclass(slots=True)
class Found:
    """What one lane is to receive.

    Attributes:
        lengths: its bags.
        ids: counted from the first row of its rectangle.
        weights: None without them.
        positions: ``[n]`` where in the block these ids stood; None unless asked for.
    """

    lengths: Run
    ids: Run
    weights: Run | None
    positions: Tensor | None


@dataclass(slots=True)
class BlockIds:
    """The batch's ids of one block.

    Attributes:
        lengths: its bags.
        ids: its ids.
        weights: None without them.
    """

    lengths: Run
    ids: Run
    weights: Run | None


LOCAL = -1
"""In place of a rank: the k-th replicated lane, which is looked up at home, is ``(LOCAL, k)``."""


@dataclass(slots=True)
class _Plan:
    """What is known before any batch."""

    blocks: list[int] = field(default_factory=list)  # cut into stripes
    stripe_of: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)  # (rank, lane) -> stripe, block
    range_of: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)  # -> block, first row, end


class RowRouter:
    """Routes the ids of row-split blocks.

    Args:
        layout: the wiring.
    """

    def __init__(self, layout: Layout) -> None:
        self._plan = plan = _Plan()
        starts: list[list[int]] = []
        place: dict[int, int] = {}
        for index, block in enumerate(layout.blocks):
            shards = layout.shards[block.table]
            cuts = sorted({shard.rows[0] for shard in shards})
            ends = [*cuts[1:], layout.tables[block.table].num_embeddings]
            if len(cuts) > 1 and all(shard.rows in zip(cuts, ends, strict=True) for shard in shards):
                place[index] = len(plan.blocks)
                plan.blocks.append(index)
                starts.append(cuts)
        for rank, lanes in [*enumerate(layout.exchanged_features), (LOCAL, layout.replicated_features)]:
            for number, lane in enumerate(lanes):
                if lane.block in place:
                    own = place[lane.block]
                    plan.stripe_of[rank, number] = starts[own].index(lane.shard.rows[0]), own
                elif lane.shard.num_rows < layout.tables[lane.table].num_embeddings:
                    plan.range_of[rank, number] = lane.block, *lane.shard.rows
        rows = [layout.tables[layout.blocks[index].table].num_embeddings for index in plan.blocks]
        self.stripes = Stripes(rows, starts) if plan.blocks else None

    @property
    def idle(self) -> bool:
        """Whether every rectangle has all rows of its table."""
        return self.stripes is None and not self._plan.range_of

    def route(self, batch: list[BlockIds], want_positions: bool) -> dict[tuple[int, int], Found]:
        """(rank, lane) -> what it is to receive, for every lane of a row-split block; a replica's under `LOCAL`.

        Args:
            batch: for each block, its part of the local batch.
            want_positions: whether rows must find back to their ids (sequence collections).
        """
        found = self._ranges(batch, want_positions) if self._plan.range_of else {}
        if self.stripes is not None:
            found |= self._striped(self.stripes, [batch[index] for index in self._plan.blocks], want_positions)
        return found

    def _striped(self, stripes: Stripes, batch: list[BlockIds], want_positions: bool) -> dict[tuple[int, int], Found]:
        bags = [_size(own.lengths) for own in batch]
        weighted = [own.weights for own in batch if own.weights is not None]
        made = stripes.sort(
            join(own.lengths for own in batch),
            join(own.ids for own in batch),
            join(weighted) if weighted else None,
            bags,
            want_positions,
        )
        ids = made.ids.to(made.lengths.dtype)  # numbers inside a stripe may be narrower than those of the table
        ends = edges_of(made.lengths, bags * stripes.count)
        bag_ends, id_starts = [0], [0]
        for own, number in zip(batch, bags, strict=True):
            bag_ends.append(bag_ends[-1] + number)
            id_starts.append(id_starts[-1] + _size(own.ids))
        positions = self._positions(made.order, ends, id_starts) if want_positions else None
        found = {}
        for key, (stripe, block) in self._plan.stripe_of.items():
            number = stripe * len(batch) + block
            start, end = ends[number], ends[number + 1]
            first = stripe * bag_ends[-1]
            found[key] = Found(
                (made.lengths, first + bag_ends[block], first + bag_ends[block + 1]),
                (ids, start, end),
                None if made.weights is None else (made.weights, start, end),
                None if positions is None else positions[start:end],
            )
        return found

    def _positions(self, order: Tensor | None, ends: list[int], id_starts: list[int]) -> Tensor:
        """Places in the joined batch -> places in the block."""
        assert order is not None
        blocks = len(id_starts) - 1
        for number in range(len(ends) - 1):
            if id_starts[number % blocks]:
                order[ends[number] : ends[number + 1]] -= id_starts[number % blocks]
        return order

    def _ranges(self, batch: list[BlockIds], want_positions: bool) -> dict[tuple[int, int], Found]:
        known: dict[tuple[int, int, int], Found] = {}
        for span in self._plan.range_of.values():
            if span not in known:
                known[span] = _within(batch[span[0]], span[1], span[2], want_positions)
        return {key: known[span] for key, span in self._plan.range_of.items()}


def local_inputs(found: Mapping[tuple[int, int], Found], batch: list[BlockIds], layout: Layout) -> list[BlockIds]:
    """What each replicated lane looks up: its whole block, or the ids that are rows of its rectangle."""
    own = [(found.get((LOCAL, k)), batch[lane.block]) for k, lane in enumerate(layout.replicated_features)]
    return [block if part is None else BlockIds(part.lengths, part.ids, part.weights) for part, block in own]


def _within(block: BlockIds, start: int, end: int, want_positions: bool) -> Found:
    """The ids of a block that are rows ``[start, end)``."""
    ids, lengths = join([block.ids]), join([block.lengths])
    chosen = (ids >= start) & (ids < end)
    positions = chosen.nonzero().view(-1)
    ends = complete_cumsum(lengths)
    own_lengths = complete_cumsum(chosen, torch.int64)[ends].diff().to(lengths.dtype)
    weights = None if block.weights is None else join([block.weights]).index_select(0, positions)
    return Found(
        (own_lengths, 0, own_lengths.numel()),
        ((ids.index_select(0, positions) - start).to(lengths.dtype), 0, positions.numel()),
        None if weights is None else (weights, 0, weights.numel()),
        positions if want_positions else None,
    )


def merge(runs: Iterable[Run]) -> list[Tensor]:
    """The runs as tensors; those that lie side by side are one."""
    merged: list[Run] = []
    for tensor, start, end in runs:
        if start == end:
            continue
        if merged and merged[-1][0] is tensor and merged[-1][2] == start:
            merged[-1] = tensor, merged[-1][1], end
        else:
            merged.append((tensor, start, end))
    return [tensor if end - start == tensor.numel() else tensor[start:end] for tensor, start, end in merged]


def join(runs: Iterable[Run]) -> Tensor:
    """The runs end to end; no copy where they lie side by side."""
    runs = list(runs)
    parts = merge(runs)
    if not parts:
        return runs[0][0][:0]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _size(run: Run) -> int:
    return run[2] - run[1]
