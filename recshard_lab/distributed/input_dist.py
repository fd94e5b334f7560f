"""input_dist: every id goes to the ranks whose rectangles cover its row.

Two messages a step, whatever the plan: the sizes, then one flat integer tensor a destination rank::

    to rank k:   lengths of its lanes [L_k * S]  |  their ids, counted from its first row [n]  |  weights [n]

S is the batch size B for pooled collections. A sequence collection needs no bags on the way: there S is 1, one
length a lane.
Received lanes are turned from source-major to lane-major, as kernels want them::

    rank 0: lane 0, lane 1 | rank 1: lane 0, lane 1     ->     lane 0: rank 0, rank 1 | lane 1: rank 0, rank 1
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from recshard_lab.comm import Pending, ShardingEnv, all_to_all, issue_all_to_all
from recshard_lab.distributed.layout import Layout, RowRouter
from recshard_lab.sparse import KeyedJaggedTensor


@dataclass(slots=True)
class Home:
    """What the rank that owns the batch must remember until the rows come back.

    Attributes:
        batch_size: B on this rank.
        lengths: for each block, its bag lengths ``[B]``.
        counts: for each block, the number of its ids.
        sent: for each rank and lane there, how many ids went.
        positions: for each row-split (rank, lane), where in the block those ids stood (sequence collections only).
    """

    batch_size: int
    lengths: list[Tensor]
    counts: list[int]
    sent: list[list[int]]
    positions: dict[tuple[int, int], Tensor]


@dataclass(slots=True)
class Routed:
    """The ids that this rank must look up.

    Attributes:
        ids: ``[N]`` lane-major, then by source rank; counted from the rectangle's first row.
        weights: ``[N]`` per-sample weights, or None.
        lengths: ``[L, sum of S]``.
        segments: S of each source rank.
        counts: ids by lane and source rank.
        home: this rank's own batch.
    """

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor
    segments: list[int]
    counts: list[list[int]]
    home: Home


@dataclass(slots=True)
class PendingInput:
    """Ids under way. ``wait()`` hands them out lane-major."""

    payload: Pending
    segments: list[int]
    sizes: list[int]
    num_lanes: int
    weighted: bool
    home: Home

    def wait(self) -> Routed:
        """Blocks until every rank's ids have come."""
        chunks = torch.split(self.payload.wait(), self.sizes)
        lengths, ids, weights = [], [], []
        for chunk, segments in zip(chunks, self.segments, strict=True):
            head = self.num_lanes * segments
            count = (chunk.numel() - head) // (2 if self.weighted else 1)
            lengths.append(chunk[:head].view(self.num_lanes, segments))
            ids.append(chunk[head : head + count])
            weights.append(chunk[head + count :])
        by_source = torch.stack([part.sum(1) for part in lengths]).tolist()
        return Routed(
            ids=_lane_major(ids, by_source),
            weights=_from_wire(_lane_major(weights, by_source)) if self.weighted else None,
            lengths=torch.cat(lengths, 1) if len(lengths) > 1 else lengths[0],
            segments=self.segments,
            counts=[list(counts) for counts in zip(*by_source, strict=True)],
            home=self.home,
        )


class InputDist:
    """Routes local batches under one layout.

    Args:
        layout: the wiring.
        env: the ranks.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
    """

    def __init__(self, layout: Layout, env: ShardingEnv, *, pooled: bool, weighted: bool) -> None:
        self.layout, self.env, self.pooled, self.weighted = layout, env, pooled, weighted
        self.wire = torch.int32 if layout.rows_fit_int32 else torch.int64
        self._positions: dict[tuple[str, ...], list[int]] = {}

    def start(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends the local batch on its way.

        Raises:
            ValueError: a feature is missing, ids are out of range, or weights are missing or not asked for.
        """
        message, splits, home, segments = self._pack(features)
        world = self.env.world_size
        if self.env.pg is None:
            sizes, all_segments = splits, [segments]
        else:
            mine = torch.tensor([[segments, n] for n in splits], device=message.device)
            theirs = all_to_all(mine.view(-1), [2] * world, [2] * world, self.env, "input_dist/sizes")
            all_segments, sizes = (list(column) for column in zip(*theirs.view(world, 2).tolist(), strict=True))
        payload = issue_all_to_all(message, splits, sizes, self.env, "input_dist/ids")
        lanes = len(self.layout.rank_lanes[self.env.rank])
        return PendingInput(payload, all_segments, sizes, lanes, self.weighted, home)

    def _pack(self, features: KeyedJaggedTensor) -> tuple[Tensor, list[int], Home, int]:
        layout, batch = self.layout, features.stride()
        position = self._key_positions(features.keys())
        per_key, starts = features.length_per_key(), features.offset_per_key()
        values, weights = features.values(), self._weights(features)
        self._check_ids(values, starts, position)
        bags = features.lengths().view(len(per_key), batch).to(self.wire)
        lengths = bags if self.pooled else bags.sum(1, keepdim=True, dtype=self.wire)
        segments = batch if self.pooled else 1
        wire_ids = values.to(self.wire)
        wire_weights = None if weights is None else _to_wire(weights, self.wire)
        home = Home(
            batch_size=batch,
            lengths=[bags[key] for key in position],
            counts=[per_key[key] for key in position],
            sent=[[per_key[position[lane.block]] for lane in lanes] for lanes in layout.rank_lanes],
            positions={},
        )

        stripes: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        if layout.router is not None:
            router = layout.router
            chosen = [position[block] for block in router.blocks]
            order, lane_lengths, lane_ids = self._route_rows(router, values, bags, starts, chosen, segments)
            lane_counts = lane_lengths.sum(1).tolist()
            parts = torch.split(lane_ids.to(self.wire), lane_counts)
            origins = torch.split(order, lane_counts)
            for number, (rank, place) in enumerate(router.lanes):
                origin = origins[number]
                weight = None if wire_weights is None else wire_weights[origin]
                stripes[rank, place] = (lane_lengths[number], parts[number], weight)
                home.sent[rank][place] = lane_counts[number]
                if not self.pooled:
                    home.positions[rank, place] = origin - starts[position[layout.rank_lanes[rank][place].block]]

        pieces: list[Tensor] = []
        splits: list[int] = []
        for rank, lanes in enumerate(layout.rank_lanes):
            heads, ids, tails = [], [], []
            for number, lane in enumerate(lanes):
                if (rank, number) in stripes:
                    head, part, weight = stripes[rank, number]
                else:
                    key = position[lane.block]
                    span = slice(starts[key], starts[key + 1])
                    head, part = lengths[key], wire_ids[span]
                    weight = None if wire_weights is None else wire_weights[span]
                heads.append(head)
                ids.append(part)
                if weight is not None:
                    tails.append(weight)
            chunk = [*heads, *ids, *tails]
            pieces += chunk
            splits.append(sum(piece.numel() for piece in chunk))
        message = torch.cat(pieces) if pieces else wire_ids.new_empty(0)
        return message, splits, home, segments

    def _route_rows(
        self,
        router: RowRouter,
        values: Tensor,
        bags: Tensor,
        starts: list[int],
        chosen: list[int],
        segments: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Lane-major: (position in ``values`` [M], lengths [lanes, S], ids from their rectangle's first row [M])."""
        shifts, cuts, lanes_at, targets, first_rows = router.tensors(values.device)
        spans = [(starts[key], starts[key + 1]) for key in chosen]
        ids = torch.cat([values[a:b] + shifts[n] for n, (a, b) in enumerate(spans)])
        origin = torch.cat([torch.arange(a, b, device=values.device) for a, b in spans])
        interval = torch.searchsorted(cuts, ids, right=True).sub_(1)
        if router.fans_out:
            copies = lanes_at[interval]
            first = torch.cumsum(lanes_at, 0) - lanes_at
            copy_ends = torch.cumsum(copies, 0)
            total = int(copy_ends[-1]) if copy_ends.numel() else 0
            source = torch.repeat_interleave(torch.arange(ids.numel(), device=ids.device), copies, output_size=total)
            nth = torch.arange(total, device=ids.device) - (copy_ends - copies)[source]
            lane = targets[first[interval[source]] + nth]
            origin = origin[source]
        else:
            lane = targets[interval]
        small = lane.to(torch.int16) if len(router.lanes) < 2**15 else lane
        order = torch.sort(small, stable=True).indices
        origin, lane = origin[order], lane[order]
        if segments == 1 and not self.pooled:
            key, width = lane, 1
        else:
            width = bags.shape[1]
            bag = torch.repeat_interleave(bags.view(-1).long(), output_size=values.numel())
            key = lane * width + bag[origin] % max(width, 1)
        lengths = torch.bincount(key, minlength=len(router.lanes) * width).view(len(router.lanes), width)
        return origin, lengths.to(self.wire), values[origin] - first_rows[lane]

    def _weights(self, features: KeyedJaggedTensor) -> Tensor | None:
        weights = features.weights_or_none()
        if not self.weighted:
            return None
        if weights is None:
            raise ValueError(
                "the collection was built with is_weighted=True but the batch has no weights: "
                "give KeyedJaggedTensor(..., weights=...)"
            )
        if weights.requires_grad:
            raise ValueError("gradients for per-sample weights do not travel between ranks yet: detach the weights")
        return weights

    def _key_positions(self, keys: list[str]) -> list[int]:
        """For each block, the position of its feature in the batch."""
        known = self._positions.get(tuple(keys))
        if known is None:
            for block in self.layout.blocks:
                if block.feature not in keys:
                    table = self.layout.tables[block.table].name
                    raise ValueError(
                        f"feature {block.feature!r} of table {table!r} is missing from the batch, "
                        f"which has {list(keys)}: add it (empty bags will do)"
                    )
            known = [keys.index(block.feature) for block in self.layout.blocks]
            self._positions[tuple(keys)] = known
        return known

    def _check_ids(self, values: Tensor, starts: list[int], position: list[int]) -> None:
        spans = [(block, starts[key], starts[key + 1]) for block, key in enumerate(position)]
        spans = [span for span in spans if span[2] > span[1]]
        if not spans:
            return
        extremes = [torch.aminmax(values[a:b]) for _, a, b in spans]
        low = torch.stack([e.min for e in extremes]).tolist()
        high = torch.stack([e.max for e in extremes]).tolist()
        for (index, _, _), smallest, largest in zip(spans, low, high, strict=True):
            block = self.layout.blocks[index]
            table = self.layout.tables[block.table]
            if smallest < 0 or largest >= table.num_embeddings:
                bad = smallest if smallest < 0 else largest
                raise ValueError(
                    f"id {bad} of feature {block.feature!r} is out of range: table {table.name!r} has rows "
                    f"0 to {table.num_embeddings - 1}. Map ids into that range or raise num_embeddings"
                )


def _lane_major(parts: list[Tensor], by_source: list[list[int]]) -> Tensor:
    """Source-major to lane-major. ``parts[s]`` holds source s's lanes end to end, ``by_source[s]`` their sizes."""
    if len(parts) == 1:
        return parts[0]
    ends = [list(accumulate(counts, initial=0)) for counts in by_source]
    lanes = range(len(by_source[0]))
    pieces = [part[end[n] : end[n + 1]] for n in lanes for part, end in zip(parts, ends, strict=True)]
    return torch.cat(pieces) if pieces else parts[0]


def _to_wire(weights: Tensor, wire: torch.dtype) -> Tensor:
    return weights.detach().float().view(torch.int32).to(wire)


def _from_wire(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
