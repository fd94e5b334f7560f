"""input_dist: every id goes to the ranks whose rectangles cover its row.

Two messages a step, whatever the plan: the sizes, then one flat integer tensor a destination rank::

    to rank k:   lengths of its lanes [L_k * S]  |  their ids, counted from its first row [n]  |  weights [n]

S is the batch size B for pooled collections. A sequence collection needs no bags on the way: there S is 1, one
length a lane. In a variable batch every lane has an S of its own, and the message begins with these.
Received lanes are turned from source-major to lane-major, as kernels want them::

    rank 0: lane 0, lane 1 | rank 1: lane 0, lane 1     ->     lane 0: rank 0, rank 1 | lane 1: rank 0, rank 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

import torch
from torch import Tensor

from recshard_lab.comm import Pending, ShardingEnv, issue_all_to_all
from recshard_lab.distributed.bucketize import edges_of
from recshard_lab.distributed.fit_ids import fit_ids
from recshard_lab.distributed.layout import Layout
from recshard_lab.distributed.row_router import BlockIds, Found, RowRouter, Run, merge
from recshard_lab.embedding import DataType
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.variable_batch import inverse_of

VARIABLE = -1
"""What a variable batch (every feature has bags of its own number) sends in place of S."""


@dataclass(slots=True)
class Home:
    """What the rank that owns the batch must remember until the rows come back.

    Attributes:
        batch_size: B on this rank.
        lengths: for each block, its bag lengths ``[B]``; ``[S]`` of its own in a variable batch.
        counts: for each block, the number of its ids.
        sent: for each rank and lane there, how many ids went.
        positions: for each row-split (rank, lane), where in the block those ids stood (sequence collections only).
        replicas: what the data-parallel lanes look up here.
        inverse: for each block, which of its bags is each sample's ``[B]``; None where bag b is sample b's.
        kept: for each block, which of its ids are left where some were no rows (see `fit_ids`); ``lengths`` still
            count them all, ``counts`` those that are left.
    """

    batch_size: int
    lengths: list[Tensor]
    counts: list[int]
    sent: list[list[int]]
    positions: dict[tuple[int, int], Tensor]
    replicas: list[BlockIds]
    inverse: list[Tensor] | None = None
    kept: list[Tensor | None] | None = None


@dataclass(slots=True)
class Routed:
    """The ids that this rank must look up.

    Attributes:
        ids: ``[N]`` lane-major, then by source rank; counted from the rectangle's first row.
        weights: ``[N]`` per-sample weights, or None.
        lengths: ``[L, sum of S]``; in a variable batch ``[L, most bags of a lane]``, with empty bags at the end.
        segments: S of each source rank; in a variable batch the width of ``lengths`` alone.
        counts: ids by lane and source rank.
        home: this rank's own batch.
        bags: in a variable batch, bags by source rank and lane; None in all others.
    """

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor
    segments: list[int]
    counts: list[list[int]]
    home: Home
    bags: list[list[int]] | None = None


@dataclass(slots=True)
class PendingInput:
    """Ids under way. ``wait()`` hands them out lane-major."""

    payload: Pending
    segments: list[int]  # S of each source rank, or VARIABLE
    sizes: list[int]
    num_lanes: int
    weight_dtype: torch.dtype | None
    home: Home

    def wait(self) -> Routed:
        """Blocks until every rank's ids have come."""
        chunks = torch.split(self.payload.wait(), self.sizes)
        lanes = self.num_lanes
        bags: list[list[int]] | None = None
        if VARIABLE in self.segments:
            both = list(zip(chunks, self.segments, strict=True))
            bags = [chunk[:lanes].tolist() if own == VARIABLE else [own] * lanes for chunk, own in both]
            chunks = tuple(chunk[lanes:] if own == VARIABLE else chunk for chunk, own in both)
        lengths, ids, weights = [], [], []
        for source, (chunk, segments) in enumerate(zip(chunks, self.segments, strict=True)):
            head = lanes * segments if bags is None else sum(bags[source])
            count = (chunk.numel() - head) // (1 if self.weight_dtype is None else 2)
            lengths.append(chunk[:head])
            ids.append(chunk[head : head + count])
            weights.append(chunk[head + count :])
        if bags is None:
            square = [part.view(lanes, own) for part, own in zip(lengths, self.segments, strict=True)]
            by_source = torch.stack([part.sum(1) for part in square]).tolist()
            joined, segments_in = torch.cat(square, 1) if len(square) > 1 else square[0], self.segments
        else:
            by_source = [list(map(sub, (e := edges_of(p, own))[1:], e)) for p, own in zip(lengths, bags, strict=True)]
            joined = pad_lanes(lengths, bags)
            segments_in = [joined.shape[1]]
        return Routed(
            ids=_lane_major(ids, by_source),
            weights=None
            if self.weight_dtype is None
            else _from_wire(_lane_major(weights, by_source), self.weight_dtype),
            lengths=joined,
            segments=segments_in,
            counts=[list(counts) for counts in zip(*by_source, strict=True)],
            home=self.home,
            bags=bags,
        )


class InputDist:
    """Routes local batches under one layout.

    Args:
        layout: the wiring.
        env: the ranks.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
        policy: what becomes of ids that are no rows.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, *, pooled: bool, weighted: bool, policy: OutOfRange | None = None
    ) -> None:
        self.policy = policy or OutOfRange()
        self.layout, self.env, self.pooled, self.weighted = layout, env, pooled, weighted
        wide = any(table.data_type is DataType.FP64 for table in layout.tables)
        self.weight_dtype = (torch.float64 if wide else torch.float32) if weighted else None
        narrow = layout.rows_fit_int32 and self.weight_dtype is not torch.float64
        self.wire = torch.int32 if narrow else torch.int64
        self.router = RowRouter(layout)
        self._positions: dict[tuple[str, ...], list[int]] = {}

    def start(self, features: KeyedJaggedTensor) -> PendingInput:
        """Sends the local batch on its way.

        Raises:
            ValueError: a feature is missing, ids are out of range, or weights are missing or not asked for.
        """
        runs, home, segments = self._pack(features)
        splits = [sum(end - start for _, start, end in own) for own in runs]
        world, device = self.env.world_size, features.device()
        if self.env.pg is None:
            sizes, all_segments = splits, [segments]
            message = self._message(runs, device)
        else:
            mine = torch.tensor([n for split in splits for n in (segments, split)], device=device)
            asked = issue_all_to_all(mine, [2] * world, [2] * world, self.env, "input_dist/sizes")
            message = self._message(runs, device)  # while the sizes travel
            theirs = asked.wait().tolist()
            all_segments, sizes = theirs[::2], theirs[1::2]
        payload = issue_all_to_all(message, splits, sizes, self.env, "input_dist/ids")
        lanes = len(self.layout.rank_lanes[self.env.rank])
        return PendingInput(payload, all_segments, sizes, lanes, self.weight_dtype, home)

    def _message(self, runs: list[list[Run]], device: torch.device) -> Tensor:
        pieces = merge(run for own in runs for run in own)
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.wire, device=device)

    def _pack(self, features: KeyedJaggedTensor) -> tuple[list[list[Run]], Home, int]:
        """For each rank what it is sent, what must be remembered here, and S."""
        layout = self.layout
        fitted = fit_ids(features, self._key_positions(features.keys()), layout, self.policy)
        features, position = fitted.features, fitted.position
        per_key, starts = features.length_per_key(), features.offset_per_key()
        values, weights = features.values(), self._weights(features)
        inverse = self._inverse(features) if self.pooled else None
        variable = inverse is not None
        bag_starts = features.lengths_offset_per_key()
        bags = features.lengths().reshape(-1).to(self.wire)
        ids = values.to(self.wire)
        if self.pooled:
            heads: list[Run] = [(bags, bag_starts[key], bag_starts[key + 1]) for key in position]
        else:
            counts = torch.tensor(per_key, dtype=self.wire, device=values.device)
            heads = [(counts, key, key + 1) for key in position]
        whole = [(starts[key], starts[key + 1]) for key in position]
        batch = [
            BlockIds(head, (ids, *span), None if weights is None else (weights, *span))
            for head, span in zip(heads, whole, strict=True)
        ]
        home = Home(
            batch_size=features.stride(),
            lengths=[bags[bag_starts[key] : bag_starts[key + 1]] for key in position],
            counts=[per_key[key] for key in position],
            sent=[[per_key[position[lane.block]] for lane in lanes] for lanes in layout.rank_lanes],
            positions={},
            replicas=[batch[lane.block] for lane in layout.replicated_lanes],
            inverse=inverse,
            kept=fitted.kept,
        )
        if fitted.lengths is not None:
            home.lengths = [own.to(self.wire) for own in fitted.lengths]
        stripes = {} if self.router.idle else self.router.route(self._global_ids(batch, values), not self.pooled)
        for (rank, place), found in stripes.items():
            home.sent[rank][place] = found.ids[2] - found.ids[1]
            if found.positions is not None:
                home.positions[rank, place] = found.positions
        runs: list[list[Run]] = []
        bits: dict[int, Tensor] = {}
        for rank, lanes in enumerate(layout.rank_lanes):
            parts = [stripes.get((rank, number), batch[lane.block]) for number, lane in enumerate(lanes)]
            own = [self._header(parts, values.device)] if variable else []
            own += [part.lengths for part in parts]
            own += [part.ids for part in parts]
            for part in parts:
                if part.weights is not None:
                    tensor, start, end = part.weights
                    own.append((bits.setdefault(id(tensor), _to_wire(tensor, self.wire)), start, end))
            runs.append(own)
        segments = VARIABLE if variable else features.stride() if self.pooled else 1
        return runs, home, segments

    def _global_ids(self, batch: list[BlockIds], values: Tensor) -> list[BlockIds]:
        """The batch with row numbers as wide as the tables need, which a stripe's own need not be."""
        if self.layout.global_rows_fit_int32 or self.wire is torch.int64:
            return batch
        return [BlockIds(own.lengths, (values, *own.ids[1:]), own.weights) for own in batch]

    def _header(self, parts: Sequence[BlockIds | Found], device: torch.device) -> Run:
        numbers = [part.lengths[2] - part.lengths[1] for part in parts]
        return torch.tensor(numbers, dtype=self.wire, device=device), 0, len(parts)

    def _inverse(self, features: KeyedJaggedTensor) -> list[Tensor] | None:
        inverse = features.inverse_indices_or_none()
        if inverse is None and not features.variable_stride_per_key():
            return None
        rows = {feature: inverse_of(inverse, feature) for feature in {b.feature for b in self.layout.blocks}}
        return [rows[block.feature] for block in self.layout.blocks]

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
        return weights.detach().to(self.weight_dtype)

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


def _lane_major(parts: list[Tensor], by_source: list[list[int]]) -> Tensor:
    """Source-major to lane-major. ``parts[s]`` holds source s's lanes end to end, ``by_source[s]`` their sizes."""
    if len(parts) == 1:
        return parts[0]
    ends = [list(accumulate(counts, initial=0)) for counts in by_source]
    lanes = range(len(by_source[0]))
    pieces = [part[end[n] : end[n + 1]] for n in lanes for part, end in zip(parts, ends, strict=True)]
    return torch.cat(pieces) if pieces else parts[0]


def pad_lanes(lengths: list[Tensor], bags: list[list[int]]) -> Tensor:
    """Every source's lengths, lane after lane -> ``[L, most bags of a lane]``, a lane's sources one after the other."""
    if len(bags) == 1 and len(set(bags[0])) == 1:
        return lengths[0].view(len(bags[0]), bags[0][0])
    parts = [part.split(own) for part, own in zip(lengths, bags, strict=True)]
    lanes = len(bags[0])
    most = max((sum(own[lane] for own in bags) for lane in range(lanes)), default=0)
    padded = lengths[0].new_zeros(lanes, most)
    for lane in range(lanes):
        own = torch.cat([part[lane] for part in parts])
        padded[lane, : own.numel()] = own
    return padded


def _to_wire(weights: Tensor, wire: torch.dtype) -> Tensor:
    """The bits of the weights as integers."""
    bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
    return weights.view(bits).to(wire)


def _from_wire(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int64 if dtype is torch.float64 else torch.int32).view(dtype)
