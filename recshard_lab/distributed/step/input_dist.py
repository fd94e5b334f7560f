"""input_dist: every id goes to the ranks whose rectangles cover its row.

Two messages a step, whatever the plan: the sizes, then one flat integer tensor a destination rank::

    to rank k:   lengths of its lanes [L_k * S]  |  their ids, counted from its first row [n]  |  weights [n], asked [1]

S is the batch size B for pooled collections. A sequence collection needs no bags on the way: there S is 1, one
length a lane. In a variable batch every lane has an S of its own, and the message begins with these; so it does where
a replicated lane travels as rows (``touched_rows.py``), told apart by a negative number.
Weights are followed by whether they ask for a gradient (``weight_gradients.py``).
Received lanes are turned from source-major to lane-major, as kernels want them::

    rank 0: lane 0, lane 1 | rank 1: lane 0, lane 1     ->     lane 0: rank 0, rank 1 | lane 1: rank 0, rank 1
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from recshard_lab.comm import Pending, ShardingEnv, issue_all_to_all
from recshard_lab.distributed.step.check_ids import fit_ids
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.message_head import VARIABLE as VARIABLE
from recshard_lab.distributed.step.message_head import read_head, with_header_of, without_header
from recshard_lab.distributed.step.packed import Packed
from recshard_lab.distributed.step.route_ids import LOCAL, BlockIds, Found, RowRouter, Run, local_inputs
from recshard_lab.distributed.step.touched_rows import TouchedRows, touched_rows
from recshard_lab.embedding import DataType
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.variable_batch import inverse_of


@dataclass(slots=True)
class LocalBatch:
    """What the rank that owns the batch must remember until the rows come back.

    Attributes:
        batch_size: B on this rank.
        lengths: for each block, its bag lengths ``[B]``; ``[S]`` of its own in a variable batch.
        counts: for each block, the number of its ids.
        sent: for each rank and exchanged lane there, how many ids went.
        positions: for each row-split (rank, lane), where in the block those ids stood; only of sequence collections,
            and where weights ask for gradients.
        layout: the wiring by which they went.
        replicas: what the replicated lanes look up here, counted from the first row of their rectangle.
        touched: for each replicated lane the rows it travels as; None where it travels as bags.
        inverse: for each block, which of its bags is each sample's ``[B]``; None where bag b is sample b's.
        kept: for each block, which of its ids are left where some were no rows (see `fit_ids`); ``lengths`` still
            count them all, ``counts`` those that are left.
        weights: the per-sample weights ``[N]``, where they ask for a gradient.
        spans: for each block, where its ids begin and end among those N.
        ids: for each block of a sequence collection, its ids as they were in the batch.
    """

    batch_size: int
    lengths: list[Tensor]
    counts: list[int]
    sent: list[list[int]]
    positions: dict[tuple[int, int], Tensor]
    replicas: list[BlockIds]
    touched: list[TouchedRows | None]
    layout: Layout
    inverse: list[Tensor] | None = None
    kept: list[Tensor | None] | None = None
    weights: Tensor | None = None
    spans: Sequence[tuple[int, int]] = ()
    ids: Sequence[Tensor] = ()


@dataclass(slots=True)
class LookupInput:
    """The ids that this rank must look up.

    Attributes:
        ids: ``[N]`` lane-major, then by source rank; counted from the rectangle's first row.
        weights: ``[N]`` per-sample weights, or None.
        lengths: of exchanged lanes ``[L, sum of S]``; in a variable batch ``[L, most bags of a lane]``, with empty bags
            at the end.
        copies: the same of replicated lanes; always as in a variable batch, for each may travel as rows or bags.
        copy_bags: bags of replicated lanes by source rank and lane; ids where nothing is pooled.
        segments: S of each source rank; in a variable batch the width of ``lengths`` alone.
        counts: ids by lane and source rank.
        local_batch: this rank's own batch.
        bags: in a variable batch, bags of exchanged lanes by source rank and lane; None in all others.
        looked_up: the rows that came local_batch, where that was done ahead of the forward.
        asked: for each rank, whether its weights ask for a gradient; None where none do.
    """

    ids: Tensor
    weights: Tensor | None
    lengths: Tensor
    copies: Tensor
    copy_bags: list[list[int]]
    segments: list[int]
    counts: list[list[int]]
    local_batch: LocalBatch
    bags: list[list[int]] | None = None
    looked_up: Tensor | None = None
    asked: list[bool] | None = None


@dataclass(slots=True)
class PendingInput:
    """Ids under way. ``wait()`` hands them out lane-major."""

    payload: Pending
    segments: list[int]  # of each source rank S, VARIABLE, or `with_header_of(S)`
    sizes: list[int]
    lanes: tuple[int, int]  # exchanged ones, all
    weight_dtype: torch.dtype | None
    pooled: bool
    local_batch: LocalBatch

    def wait(self) -> LookupInput:
        """Blocks until every rank's ids have come."""
        return self.unpack(list(torch.split(self.payload.wait(), self.sizes)))

    def unpack(self, chunks: list[Tensor]) -> LookupInput:
        """The ids in what each rank has sent."""
        first, lanes = self.lanes
        asked = [False]
        if self.weight_dtype is not None:
            asked = torch.stack([chunk[-1] for chunk in chunks]).bool().tolist()
            chunks = [chunk[:-1] for chunk in chunks]
        if min(self.segments) >= 0:
            heads = [lanes * own for own in self.segments]
            square = [chunk[: lanes * own].view(lanes, own) for chunk, own in zip(chunks, self.segments, strict=True)]
            by_source = torch.stack([part.sum(1) for part in square]).tolist()
            joined = torch.cat(square, 1) if len(square) > 1 else square[0]
            lengths, copies, segments, bags = joined[:first], joined[first:], self.segments, None
            copy_bags = [[own] * (lanes - first) for own in segments]
        else:
            read = [read_head(chunk, own, lanes) for chunk, own in zip(chunks, self.segments, strict=True)]
            heads = [own.head for own in read]
            by_source = [own.counts() for own in read]
            device = chunks[0].device
            lengths = pad_lanes([own.lengths[:first] for own in read], device)
            copies = pad_lanes([own.lengths[first:] for own in read], device)
            copy_bags = [own.bags[first:] for own in read]
            bags = [own.bags[:first] for own in read] if VARIABLE in self.segments else None
            segments = [lengths.shape[1]] if bags else [without_header(own) for own in self.segments]
        parts = 1 if self.weight_dtype is None else 2
        counts = [(chunk.numel() - head) // parts for chunk, head in zip(chunks, heads, strict=True)]
        ids = [chunk[head : head + n] for chunk, head, n in zip(chunks, heads, counts, strict=True)]
        weights = [chunk[head + n :] for chunk, head, n in zip(chunks, heads, counts, strict=True)]
        return LookupInput(
            ids=_lane_major(ids, by_source),
            weights=_from_wire(_lane_major(weights, by_source), self.weight_dtype) if self.weight_dtype else None,
            lengths=lengths,
            copies=copies,
            copy_bags=copy_bags if self.pooled else [own[first:] for own in by_source],
            segments=segments,
            counts=[list(counts) for counts in zip(*by_source, strict=True)],
            local_batch=self.local_batch,
            bags=bags,
            asked=asked if any(asked) else None,
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
        packed = self.pack(features)
        world, device = self.env.world_size, features.device()
        if self.env.pg is None:
            return self.send(packed, packed.sizes, device, self.env)
        mine = torch.tensor(packed.sizes, device=device).view(-1)
        asked = issue_all_to_all(mine, [2] * world, [2] * world, self.env, "input_dist/sizes")
        message = packed.message(self.wire, device)  # while the sizes travel
        return self.send(packed, asked.wait().view(world, 2).tolist(), device, self.env, message)

    def send(
        self,
        packed: Packed,
        theirs: Sequence[Sequence[int]],
        device: torch.device,
        env: ShardingEnv,
        message: Tensor | None = None,
    ) -> PendingInput:
        """Sends what was packed, once every rank has told its ``sizes``; over ``env``, which are the same ranks."""
        if message is None:
            message = packed.message(self.wire, device)
        all_segments, sizes = [own[0] for own in theirs], [own[1] for own in theirs]
        payload = issue_all_to_all(message, packed.splits, sizes, env, "input_dist/ids")
        return self.pending(packed, all_segments, sizes, payload)

    def pending(self, packed: Packed, segments: list[int], sizes: list[int], payload: Pending) -> PendingInput:
        """What is under way, as this rank must read it."""
        lanes = len(self.layout.exchanged_features[self.env.rank]), len(self.layout.rank_features[self.env.rank])
        return PendingInput(payload, segments, sizes, lanes, self.weight_dtype, self.pooled, packed.local_batch)

    def pack(self, features: KeyedJaggedTensor) -> Packed:
        """Makes a local batch up for the wire; nothing is sent.

        Raises:
            ValueError: as `start`.
        """
        layout = self.layout
        position = self._key_positions(features.keys())
        fitted = fit_ids(features, position, layout, self.policy)
        original = [] if self.pooled else _by_block(features, position)
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
        asking = self._asking(features)
        places = not self.pooled or asking is not None
        stripes = {} if self.router.idle else self.router.route(self._global_ids(batch, values), places)
        replicas = local_inputs(stripes, batch, layout)
        touched = self._touch(replicas)
        local_batch = LocalBatch(
            batch_size=features.stride(),
            lengths=[bags[bag_starts[key] : bag_starts[key + 1]] for key in position],
            counts=[per_key[key] for key in position],
            sent=[[per_key[position[lane.block]] for lane in lanes] for lanes in layout.exchanged_features],
            positions={},
            replicas=replicas,
            touched=touched,
            layout=layout,
            inverse=inverse,
            kept=fitted.kept,
            weights=asking,
            spans=whole,
            ids=original,
        )
        if fitted.lengths is not None:
            local_batch.lengths = [own.to(self.wire) for own in fitted.lengths]
        for (rank, place), found in stripes.items():
            if rank != LOCAL:
                local_batch.sent[rank][place] = found.ids[2] - found.ids[1]
            if found.positions is not None:
                local_batch.positions[rank, place] = found.positions
        copies = [lane if own is None else self._as_rows(own) for lane, own in zip(replicas, touched, strict=True)]
        with_header = variable or (self.pooled and any(own is not None for own in touched))
        header_tail = [
            _bags(lane) if own is None else -own.rows.numel() - 1 for lane, own in zip(replicas, touched, strict=True)
        ]
        asked = values.new_full((1,), asking is not None, dtype=self.wire) if self.weighted else None
        runs: list[list[Run]] = []
        bits: dict[int, Tensor] = {}
        for rank, lanes in enumerate(layout.exchanged_features):
            parts = [stripes.get((rank, number), batch[lane.block]) for number, lane in enumerate(lanes)]
            own: list[Run] = []
            if with_header:
                header = torch.tensor([*map(_bags, parts), *header_tail], dtype=self.wire, device=values.device)
                own.append((header, 0, header.numel()))
            parts += copies
            own += [part.lengths for part in parts]
            own += [part.ids for part in parts]
            for part in parts:
                if part.weights is not None:
                    tensor, start, end = part.weights
                    own.append((bits.setdefault(id(tensor), _to_wire(tensor, self.wire)), start, end))
            if asked is not None:
                own.append((asked, 0, 1))
            runs.append(own)
        segments = features.stride() if self.pooled else 1
        return Packed(
            runs, local_batch, VARIABLE if variable else with_header_of(segments) if with_header else segments
        )

    def _global_ids(self, batch: list[BlockIds], values: Tensor) -> list[BlockIds]:
        """The batch with row numbers as wide as the tables need, which a stripe's own need not be."""
        if self.layout.global_rows_fit_int32 or self.wire is torch.int64:
            return batch
        return [BlockIds(own.lengths, (values, *own.ids[1:]), own.weights) for own in batch]

    def _touch(self, replicas: list[BlockIds]) -> list[TouchedRows | None]:
        """For each replicated lane its touched rows; None where bags are smaller, and where nobody else listens."""
        if self.env.world_size == 1:
            return [None] * len(replicas)
        lanes = zip(replicas, self.layout.replicated_features, strict=True)
        return [touched_rows(ids, lane.shard.num_rows, lane.shard.num_cols, self.pooled) for ids, lane in lanes]

    def _as_rows(self, touched: TouchedRows) -> Found:
        """A replicated lane that travels as rows: bags of one id need no lengths."""
        rows, count = touched.rows, touched.rows.numel()
        lengths = rows.new_empty(0, dtype=self.wire) if self.pooled else rows.new_full((1,), count, dtype=self.wire)
        ones = None if self.weight_dtype is None else torch.ones(count, dtype=self.weight_dtype, device=rows.device)
        weights = None if ones is None else (ones, 0, count)
        return Found((lengths, 0, lengths.numel()), (rows, 0, count), weights, None)

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
        return weights.detach().to(self.weight_dtype)

    def _asking(self, features: KeyedJaggedTensor) -> Tensor | None:
        """The weights, if their gradient is wanted."""
        weights = features.weights_or_none() if self.weighted and torch.is_grad_enabled() else None
        return weights if weights is not None and weights.requires_grad else None

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


def _by_block(features: KeyedJaggedTensor, position: list[int]) -> list[Tensor]:
    """The ids of each block, as views."""
    values, starts = features.values(), features.offset_per_key()
    return [values[starts[key] : starts[key + 1]] for key in position]


def _bags(part: BlockIds | Found) -> int:
    return part.lengths[2] - part.lengths[1]


def pad_lanes(lengths: Sequence[Sequence[Tensor]], device: torch.device) -> Tensor:
    """Lengths by source and lane -> ``[L, most bags of a lane]`` on ``device``, a lane's sources in order."""
    lanes = [torch.cat(own) if len(own) > 1 else own[0] for own in zip(*lengths, strict=True)]
    most = max((own.numel() for own in lanes), default=0)
    if not lanes:
        return torch.zeros(0, 0, dtype=torch.int64, device=device)
    return torch.stack([own if own.numel() == most else pad(own, (0, most - own.numel())) for own in lanes])


def _to_wire(weights: Tensor, wire: torch.dtype) -> Tensor:
    """The bits of the weights as integers."""
    bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
    return weights.view(bits).to(wire)


def _from_wire(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int64 if dtype is torch.float64 else torch.int32).view(dtype)
