"""input_dist: every id goes to the ranks whose shards store its row.

Under every plan, a batch costs one read of the device (`read_all`) and two messages: the sizes, then one
flat integer tensor for each destination rank::

    to rank k:   lengths of its shard features  |  their ids, counted from its shards' first rows  |  weights

Received ids are turned from source-major to feature-major, as kernels read them, by one permutation::

    rank 0: feature 0, feature 1 | rank 1: feature 0, feature 1   ->   feature 0: rank 0, rank 1 | feature 1: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recshard_lab.comm import Pending, RankLost, ShardingEnv, issue_all_to_all, raise_first_error, sizes_env
from recshard_lab.distributed.awaitable import NoWait
from recshard_lab.distributed.step.batch import FeatureIds, LocalBatch, LookupInput, host_list, read_all
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.replicas import DistinctRows, distinct_ids
from recshard_lab.distributed.step.route import (
    Array,
    Checked,
    IdRouter,
    Source,
    Wiring,
    all_are_rows,
    apply_policy,
    check_dtype,
    clamp_to_rows,
    gather_runs,
    padded,
    places_of,
    segment_runs,
)
from recshard_lab.embedding import DataType
from recshard_lab.embedding.inputs import OutOfRange
from recshard_lab.sharding.plan.types import DISTINCT_ROWS
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.sparse.keyed_jagged_tensor import inverse_of

# The sizes message: everything that the host of a rank must know before ids arrive, in one exchange.
#
# ::
#
#     to rank k, for each collection:   state, S, variable, weights require a gradient | bags, ids of each shard feature
#
# ``state`` is `READY`, `OVER` (the rank's data has ended) or `FAILED` (an error before the ids leave). If a rank
# failed, nothing else is sent, and every rank raises the error, which names that rank.
#
# A shard feature with ids but no bags is sent without lengths: each id is a bag. So are all features of sequence
# collections, and replicated features that are sent as distinct rows.
#
# The message is exchanged over CPU connections, so it makes no host wait for a GPU.


READY, OVER, FAILED = 0, 1, 2
_HEAD = 4  # state, S, variable, weights require a gradient


@dataclass(slots=True)
class Sizes:
    """What the ranks send this rank, of one collection.

    Attributes:
        segments: ``[W]`` S.
        variable: whether any of them sends a variable batch.
        weight_gradients: ``[W]`` whether weights require a gradient.
        bags: ``[W, L + R]`` lengths by shard feature.
        ids: ``[W, L + R]`` ids by shard feature.
        parts: elements sent for an id: 1, or 2 with a weight.
    """

    segments: NDArray[np.int64]
    variable: bool
    weight_gradients: NDArray[np.bool_]
    bags: NDArray[np.int64]
    ids: NDArray[np.int64]
    parts: int

    @property
    def elements(self) -> Array:
        """``[W]`` what each rank sends, in elements."""
        return self.bags.sum(1) + self.parts * self.ids.sum(1)


class SizesFormat:
    """The part of the message that belongs to one collection.

    Args:
        layout: of the collection.
        weighted: whether batches carry per-sample weights.
    """

    def __init__(self, layout: Layout, weighted: bool) -> None:
        self.parts = 2 if weighted else 1
        self.widths = [_HEAD + 2 * len(features) for features in layout.rank_features]  # elements for each rank
        ends = np.cumsum([0, *self.widths])
        self._heads = ends[:-1, None] + np.arange(_HEAD)  # [W, 4]
        # [E + W R] where the bags of each shard feature are; its ids are the next element
        self._bags = np.concatenate([np.arange(start + _HEAD, end, 2) for start, end in pairwise(ends)])

    def write(
        self,
        state: int,
        segments: int = 0,
        variable: bool = False,
        weight_gradients: bool = False,
        bags: NDArray[np.int64] | int = 0,
        ids: NDArray[np.int64] | int = 0,
    ) -> NDArray[np.int64]:
        """The parts for all ranks, one after the other. A rank without a batch sends zeros.

        Args:
            state: of this rank.
            segments: S.
            variable: whether this rank sends a variable batch.
            weight_gradients: whether its weights require a gradient.
            bags, ids: of all shard features, rank after rank.
        """
        flat = np.empty(sum(self.widths), dtype=np.int64)
        flat[self._heads] = state, segments, variable, weight_gradients  # one head, for all ranks
        flat[self._bags], flat[self._bags + 1] = bags, ids
        return flat

    def read(self, received: NDArray[np.int64]) -> Sizes:
        """``[W, width of this rank]`` -> sizes."""
        # `PendingSizes.wait` has returned the states
        (_, segments, variable, weight_gradients), bags = received[:, :_HEAD].T, received[:, _HEAD::2]
        ids = received[:, _HEAD + 1 :: 2]
        return Sizes(segments, bool(variable.any()), weight_gradients.astype(bool), bags, ids, self.parts)


@dataclass(slots=True)
class PendingSizes:
    """Sizes on their way."""

    payload: Pending
    widths: list[int]
    world_size: int

    def wait(self) -> tuple[list[int], list[NDArray[np.int64]]]:
        """The state of each rank, and for each collection what `SizesFormat.read` takes."""
        received = self.payload.wait().view(self.world_size, -1).numpy()
        ends = list(accumulate(self.widths, initial=0))
        # the first number of each rank: all collections of a rank have one state
        return received[:, 0].tolist(), [received[:, start:end] for start, end in pairwise(ends)]


def issue_sizes(
    parts: Sequence[tuple[SizesFormat, NDArray[np.int64]]], env: ShardingEnv, label: str, state: int | None = None
) -> PendingSizes:
    """Sends the sizes of several collections, or only this rank's state if there is none.

    Args:
        parts: each collection's format and what its `write` returned.
        state: of this rank, where ``parts`` is empty.
        env: the ranks, over connections that carry CPU tensors.
        label: for traces.
    """
    world = env.world_size
    if len(parts) == 1:
        sends, message = parts[0][0].widths, parts[0][1]
    else:
        by_rank = [np.split(flat, np.cumsum(form.widths)[:-1]) for form, flat in parts]
        by_rank = by_rank or [[np.array([state])] * world]
        message = np.concatenate([own[rank] for rank in range(world) for own in by_rank])
        sends = [sum(len(own[rank]) for own in by_rank) for rank in range(world)]
    widths = [form.widths[env.rank] for form, _ in parts]
    # each rank sends the sizes of this rank's shard features; 1 is a state without collections
    received = [max(1, sum(widths))] * world
    return PendingSizes(issue_all_to_all(torch.from_numpy(message), sends, received, env, label), widths, world)


T = TypeVar("T")
_ELEMENTS, _PARTS = attrgetter("elements"), attrgetter("parts")
_KEPT_WIRINGS = 16  # batches come in few forms; each variable batch is one


@dataclass(slots=True)
class Packed:
    """A local batch ready to be sent.

    Attributes:
        parts: for each rank what it is sent, in order.
        elements: for each rank how many elements these are.
        sizes: this collection's part of the sizes message, for all ranks.
        local_batch: what stays on this rank.
    """

    parts: list[list[Tensor]]
    elements: Array
    sizes: Array
    local_batch: LocalBatch


@dataclass(slots=True)
class PendingIds:
    """Ids of several collections on their way.

    Attributes:
        dists, packed, sizes: of each collection.
        messages: for each message the collections that share it, the message, an error of this rank, and
            ``[W, collections]`` where the ids of each begin.
    """

    dists: Sequence[InputDist]
    packed: Sequence[Packed]
    sizes: Sequence[Sizes]
    messages: list[tuple[list[int], Pending, Exception | None, Array]]

    def wait(self) -> list[LookupInput]:
        """Blocks until the ids of every rank have arrived. Feature-major."""
        found: dict[int, LookupInput] = {}
        while self.messages:
            numbers, pending, error, starts = self.messages.pop(0)
            received = pending.wait()
            for place, n in enumerate(numbers):
                own, local_batch = self.dists[n], self.packed[n].local_batch
                unpack = partial(own.unpack, received, self.sizes[n], local_batch, starts[:, place])
                found[n], also = _shared(unpack)
                found[n].error = error or also  # the lookup raises it on all ranks
                del also
                if own.recorder is not None:
                    own.recorder("send", "unpack", found[n])
            del error  # its traceback has this frame, by those that it called
        # collections that share a message need not be adjacent
        return list(map(found.__getitem__, range(len(self.dists))))


@dataclass(slots=True)
class PendingInput:
    """Ids of one collection on their way."""

    ids: PendingIds

    def wait(self) -> LookupInput:
        """Blocks until the ids of every rank have arrived. Feature-major."""
        return self.ids.wait()[0]


class InputDist:
    """Exchanges the ids of local batches under one layout. All ranks must construct it.

    Args:
        layout: the layout.
        env: the ranks.
        pooled: False for sequence collections.
        weighted: whether batches carry per-sample weights.
        policy: for ids that are no rows; ``"error"`` when left out.
        distinct: whether a sequence collection sends each distinct id of a shard feature once.
    """

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        *,
        pooled: bool,
        weighted: bool,
        policy: OutOfRange | None = None,
        distinct: bool = False,
    ) -> None:
        self.policy = policy or OutOfRange()
        self.layout, self.env, self.pooled, self.weighted = layout, env, pooled, weighted
        self.host_env = sizes_env(env)
        # weights travel as bits among the ids, so 64-bit weights make the whole message 64-bit
        wide = any(table.data_type is DataType.FP64 for table in layout.tables)
        self.weight_dtype = (torch.float64 if wide else torch.float32) if weighted else None
        narrow = layout.rows_fit_int32 and self.weight_dtype is not torch.float64
        self.wire = torch.int32 if narrow else torch.int64
        #: of ids while they are sorted: that of messages, if those of whole tables fit; None as they are
        self._ids_dtype = self.wire if layout.global_rows_fit_int32 else None
        self._any_dynamic = any(layout.dynamic)
        exchanged = [feature for features in layout.exchanged_features for feature in features]
        routed = [n for n, feature in enumerate(exchanged) if feature.route == DISTINCT_ROWS]
        everything = distinct and not pooled and env.world_size > 1
        #: the exchanged shard features, numbered rank after rank, that send distinct ids
        self._distinct = np.arange(len(exchanged)) if everything else np.array(routed, dtype=np.int64)
        self.router = IdRouter(layout, self._distinct.tolist(), pooled=pooled)
        self.format = SizesFormat(layout, weighted)
        self._exchanged = [len(features) for features in layout.exchanged_features]
        self._slots, self._rank_ends, kinds = self._message_slots()
        self._bag_slots, self._id_slots = np.flatnonzero(kinds == 0), np.flatnonzero(kinds == 1)
        self._rank_of = np.repeat(np.arange(env.world_size), np.diff(self._rank_ends))
        self._same_rank = self._rank_of[1:] == self._rank_of[:-1]
        own = layout.rank_features[env.rank]
        whole = all(feature.shard.num_rows == layout.tables[feature.table].num_embeddings for feature in own)
        # whether, on one rank, the kernels read the ids of a batch in its own order
        self._in_order = whole and not routed and [feature.block for feature in own] == list(range(len(layout.blocks)))
        self._wirings: dict[tuple[Any, ...], Wiring] = {}
        #: whether batches keep the places of their ids, for `exchange_rows`
        self.keeps_places = not pooled
        #: an error of the last step that other ranks do not know; sent with the next sizes message
        self.error: Exception | None = None
        #: `Executor.record`
        self.recorder: Callable[[str, str, Any], None] | None = None

    def _message_slots(self) -> tuple[Array, Array, Array]:
        """The elements of all messages in order: (kind * (E + R) + shard feature, ends of ranks, kinds).

        Kinds are 0 for lengths, 1 for ids, 2 for weights.
        """
        first_copy, slots, start = sum(self._exchanged), [], 0
        total = first_copy + len(self.layout.replicated_features)
        first = total * np.arange(1 + self.format.parts)  # of each kind
        for count in self._exchanged:
            # every rank is sent the replicated ones
            features = np.concatenate([np.arange(start, start + count), np.arange(first_copy, total)])
            slots.append((first[:, None] + features).reshape(-1))
            start += count
        flat = np.concatenate(slots)
        return flat, np.cumsum([0, *map(len, slots)]), flat // max(total, 1)

    # ---- sending

    def announce(self, features: KeyedJaggedTensor) -> Callable[[], PendingInput | NoWait[LookupInput]]:
        """Sends the sizes of the local batch. All ranks must call it.

        Returns:
            A function that waits for the sizes of the other ranks, and sends the ids. It raises Exception if packing
            fails on any rank: every rank raises the error, which names the rank. Packing raises ValueError if a
            feature is missing, ids are out of range, or weights are missing.
        """
        if self.env.world_size == 1:
            ready = self._without_exchange(features)
            if ready is not None:
                if self.recorder is not None:
                    self.recorder("send", "unpack", ready)
                return lambda: NoWait(ready)
        packed, error = None, None
        try:
            packed = self.pack(features)
        except Exception as caught:
            if self.env.pg is None:  # without a group no other rank waits
                raise
            error = caught
        own_sizes = self.format.write(FAILED) if packed is None else packed.sizes
        pending = issue_sizes([(self.format, own_sizes)], self.host_env, "input_dist/sizes")
        device = features.device()

        def send() -> PendingInput:
            nonlocal error
            states, (received,) = pending.wait()
            if FAILED in states:
                try:
                    raise_first_error(error, self.host_env)
                finally:
                    del error  # its traceback has the frame of `announce`, and that this function
            assert packed is not None
            sizes = self.format.read(received)
            return PendingInput(issue_ids([self], [packed], [sizes], device, self.env))

        return send

    def _without_exchange(self, features: KeyedJaggedTensor) -> LookupInput | None:
        """On one rank, the batch itself, if its keys are in the order of the tables and all its ids are rows."""
        variable = features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
        if variable or not self._in_order or features.keys() != [block.feature for block in self.layout.blocks]:
            return None
        weights, required = self._weights(features) if self.weighted else (None, None)
        if required is not None:  # the gradient of weights needs places, which `_pack` computes
            return None
        values, batch = features.values(), features.stride()
        limits = self._wiring(features, values).limits
        lengths = features.lengths().view(len(limits), batch).to(self.wire)
        # a GPU's check and counts are one read
        if values.device.type == "cpu":
            counts = features.length_per_key()
            if not all_are_rows(values, features.offset_per_key(), limits):
                return None
        else:
            on_device = lengths.sum(1)
            outside, found = read_all([clamp_to_rows(values, on_device, limits, self._any_dynamic)[1], on_device])
            if outside.any():
                return None
            counts = found.tolist()
        spans = list(pairwise([0, *accumulate(counts)]))
        local = LocalBatch(
            batch_size=batch,
            lengths=list(lengths),
            counts=counts,
            sent=np.asarray(counts, dtype=np.int64),
            replicas=[],
            touched=[],
            layout=self.layout,
            places=torch.arange(values.numel(), device=values.device) if self.keeps_places else None,
            num_places=None if self.pooled else np.asarray(counts),
            spans=spans,
            ids=[] if self.pooled else [values[start:end] for start, end in spans],
        )
        return LookupInput(
            ids=values.to(self.wire),
            weights=weights,
            lengths=lengths if self.pooled else lengths[:0],
            # one rank has no replicas
            copies=lengths[:0],
            copy_bags=np.empty((1, 0), dtype=np.int64),
            segments=[batch if self.pooled else 1],
            counts=np.array(counts, dtype=np.int64)[:, None],
            local_batch=local,
        )

    def pack(self, features: KeyedJaggedTensor) -> Packed:
        """Prepares a local batch; nothing is sent. On a GPU the host waits once, in `read_all`.

        Raises:
            ValueError: a feature is missing, ids are out of range, or weights are missing.
            Exception: an error of the last step that other ranks do not know.
        """
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        values = features.values()
        wiring = self._wiring(features, values)
        # on a GPU, `_pack` has the check in its one read
        if not values.is_cpu or all_are_rows(values, features.offset_per_key(), wiring.limits):
            packed = self._pack(Checked(features, wiring), features, check=not values.is_cpu)
            if packed is not None:
                return packed
        rebuilt, lengths, kept = apply_policy(features, wiring.position, self.layout, self.policy)
        # a rebuilt batch has one key for each block, in the order of blocks
        every = self._wiring(rebuilt, rebuilt.values(), list(range(len(lengths))))
        packed = self._pack(Checked(rebuilt, every, lengths, kept), features)
        assert packed is not None
        return packed

    def _wiring(self, features: KeyedJaggedTensor, values: Tensor, position: list[int] | None = None) -> Wiring:
        """Of batches of this form; ``position`` is for each block its key, and is found by the names of features."""
        keys, bags = features.keys(), features.stride_per_key()
        known = values.is_cpu or features.length_per_key_or_none() is not None
        # dtype and axes, so that a known form has passed `check_dtype`
        form = tuple(keys), tuple(bags), known, values.dtype, values.dim(), position is None
        wiring = self._wirings.get(form)
        if wiring is None:
            check_dtype(values)
            if len(self._wirings) >= _KEPT_WIRINGS:
                self._wirings.clear()
            position = self._position(keys) if position is None else position
            wiring = self.router.wiring(position, bags, known, values[:0].to(self._ids_dtype or values.dtype))
            self._wirings[form] = wiring
        return wiring

    def _pack(self, checked: Checked, original: KeyedJaggedTensor, check: bool = False) -> Packed | None:
        """Packs ``checked``, made of ``original``. With ``check``, None if one of its ids is out of range."""
        features, wiring = checked.features, checked.wiring
        values, known = features.values(), None
        inverse = self._inverse(features) if self.pooled else None
        if inverse is not None and len(self._distinct):
            raise ValueError(
                f"a variable batch arrived, but the plan has tables on route {DISTINCT_ROWS!r}, which sends no bags. "
                f"Fix: route='direct' for these tables"
            )
        # lengths, ids and weights share a message, so all have its dtype
        lengths, read = features.lengths().reshape(-1).to(self.wire), list[Tensor]()
        weights, required = self._weights(features) if self.weighted else (None, None)
        batch = Source(lengths, values, weights, None, wiring.bags)
        if wiring.counts_known:
            known = np.array(features.length_per_key(), dtype=np.int64)
        else:
            read.append(batch.counts())
        if check:
            on_device = host_list(known, values.device) if known is not None else read[0]
            # clamped ids keep the sorts in bounds until the host has read the flag
            values, flag = clamp_to_rows(values, on_device, wiring.limits, self._any_dynamic)
        every = self.keeps_places or required is not None
        want_places = every or len(self._distinct) > 0
        batch.ids = values.to(self._ids_dtype or values.dtype)
        sources = self.router.sources(wiring, batch, known, want_places)
        for own in wiring.distinct:
            sources.append(distinct_ids(sources[own.source], own.segments, own.rows))
        # only now: ids of a whole table may need 64 bits, and ids counted from a shard's first row 32
        batch.ids = batch.ids.to(self.wire)
        for source in sources[1:]:
            source.ids = source.ids.to(self.wire)
            read.append(source.counts())
        num_counts, replicas = len(read), None
        if check:
            read.append(flag)
        if self.env.world_size > 1 and self.layout.replicated_features:
            replicas = DistinctRows(self.layout, self.pooled)
            if not values.is_cpu:
                # before the read, which then has the numbers of distinct rows
                replicas.sort_on_device(sources, wiring, read)
        numbers = read_all(read)
        if check and numbers[num_counts].any():
            return None
        counts = numbers[:num_counts] if known is None else [known, *numbers[:num_counts]]
        runs = segment_runs(counts, wiring.segment)
        local = self._local_batch(checked, original, sources, counts[0], runs, inverse, required)
        if want_places:
            shard_features = np.arange(len(wiring.source)) if every else self._distinct
            local.places, local.num_places, local.uses = places_of(wiring, sources, counts, shard_features)
        if replicas is not None:
            if values.is_cpu:
                # after the read: with the counts, features that bags serve better are not sorted
                replicas.sort_on_host(local.replicas, wiring.copies)
            local.touched = replicas.split(local.replicas, wiring.copies, numbers)
        packed = self._messages(checked, sources, runs, local)
        if self.recorder is not None:
            self.recorder("route", "pack", packed)
        return packed

    def _local_batch(
        self,
        checked: Checked,
        original: KeyedJaggedTensor,
        sources: Sequence[Source],
        key_counts: Array,
        runs: tuple[Array, Array],
        inverse: list[Tensor] | None,
        required: Tensor | None,
    ) -> LocalBatch:
        features, wiring = checked.features, checked.wiring
        position, first_copy = wiring.position, sum(self._exchanged)
        key_lengths = sources[0].lengths.split(wiring.bags.tolist())
        lengths = remaining = list(map(key_lengths.__getitem__, position))
        if checked.lengths is not None:
            lengths = [own.to(self.wire) for own in checked.lengths]
        ends, counts = np.cumsum(key_counts)[position], key_counts[position]
        spans = given = list(zip((ends - counts).tolist(), ends.tolist(), strict=True))
        if original is not features:  # ids were left out
            offsets = original.offset_per_key()
            given = [(offsets[key], offsets[key + 1]) for key in self._position(original.keys())]
        copies = range(first_copy, len(wiring.source))
        return LocalBatch(
            batch_size=features.stride(),
            lengths=lengths,
            counts=counts.tolist(),
            sent=runs[1][:first_copy] - runs[0][:first_copy],
            replicas=list(map(partial(_feature, sources, wiring, runs), copies)),
            touched=[None] * len(copies),
            layout=self.layout,
            remaining=remaining,
            inverse=inverse,
            kept=checked.kept,
            weights=required,
            spans=spans,
            ids=[] if self.pooled else [original.values()[start:end] for start, end in given],
        )

    def _messages(
        self, checked: Checked, sources: Sequence[Source], runs: tuple[Array, Array], local: LocalBatch
    ) -> Packed:
        """Adjacent runs of one tensor become one part of the message, found for all ranks at once."""
        wiring, tensors = checked.wiring, checked.wiring.tensors
        total, first_copy, kinds = len(wiring.segment), sum(self._exchanged), 1 + self.format.parts
        # [kinds * (E + R)]: all lengths, all ids, all weights
        starts = np.concatenate([wiring.bag_runs[0], *[runs[0]] * (kinds - 1)])
        ends = np.concatenate([wiring.bag_runs[1], *[runs[1]] * (kinds - 1)])
        without_bags = self._distinct if self.pooled else np.arange(total)
        ends[without_bags] = starts[without_bags]  # each id is a bag: no lengths are sent
        # three tensors for each source, as `Wiring.tensors` counts them
        table: list[Tensor | None] = []
        for source in sources:
            bits = None if source.weights is None else _to_wire(source.weights, self.wire)
            table += [source.lengths, source.ids, bits]
        for place, touched in enumerate(local.touched):
            if touched is not None:
                tensors = tensors.copy()  # batches share the wiring
                number, rows = first_copy + place, touched.rows.numel()
                # a distinct row is a bag of one id with weight 1: its gradient has the weights already
                starts[number::total], ends[number::total] = 0, [0, rows, rows][:kinds]
                tensors[number::total] = len(table), len(table), len(table) + 1
                bits = None
                if self.weight_dtype is not None:
                    bits = _to_wire(torch.ones_like(touched.rows, dtype=self.weight_dtype), self.wire)
                table += [touched.rows, bits]
        starts, ends, tensors = starts[self._slots], ends[self._slots], tensors[self._slots]
        # a run that begins where the one before it ends is the same part
        joined = (starts[1:] == ends[:-1]) & (tensors[1:] == tensors[:-1]) & self._same_rank
        # the slices are for messages without any shard feature
        first = np.concatenate([[0], np.flatnonzero(~joined) + 1])[: len(starts)]
        last = np.concatenate([first[1:], [len(starts)]])[: len(starts)] - 1
        parts: list[list[Tensor]] = list(map(list, repeat((), self.env.world_size)))
        found = np.stack([self._rank_of[first], tensors[first], starts[first], ends[last]])
        for rank, tensor, start, end in found.T.tolist():
            whole = table[tensor]
            if whole is not None and start < end:
                parts[rank].append(whole[start:end])
        # a feature of a sequence collection is one bag
        segments, sizes = local.batch_size if self.pooled else 1, ends - starts
        totals = np.concatenate([[0], sizes.cumsum()])[self._rank_ends]
        bags, ids, variable = sizes[self._bag_slots], sizes[self._id_slots], local.inverse is not None
        message = self.format.write(READY, segments, variable, local.weights is not None, bags, ids)
        return Packed(parts, np.diff(totals), message, local)

    # ---- receiving

    def unpack(self, received: Tensor, sizes: Sizes, local: LocalBatch, offsets: Array) -> LookupInput:
        """The ids in what all ranks have sent.

        Args:
            received: flat.
            sizes: of this collection.
            local: this rank's batch.
            offsets: ``[W]`` where each rank's part begins in ``received``.
        """
        first = self._exchanged[self.env.rank]
        counts = np.concatenate([sizes.bags, *[sizes.ids] * sizes.parts], 1)  # [W, kinds * (L + R)]
        starts = counts.cumsum().reshape(counts.shape) - counts
        # with several collections in a message, the parts of the ranks are not end to end
        if starts.size:
            starts += (offsets - starts[:, 0])[:, None]
        # transposed: what came by source is read by shard feature
        moved = gather_runs(received, starts.T.reshape(-1), counts.T.reshape(-1))
        num_ids = int(sizes.ids.sum())
        num_lengths = moved.numel() - sizes.parts * num_ids
        exchanged_lengths = num_lengths - int(sizes.bags[:, first:].sum())
        weights = None
        if self.weight_dtype is not None:
            weights = _from_wire(moved[num_lengths + num_ids :], self.weight_dtype)
        segments, bags = sizes.segments.tolist(), None
        copy_bags, copy_ids = sizes.bags[:, first:], sizes.ids[:, first:]
        # no bags but ids: these are distinct rows, each of them a bag
        copy_bags = np.where((copy_bags == 0) & (copy_ids > 0), copy_ids, copy_bags)
        if not self.pooled:
            lengths = copies = moved[:0].view(0, 0)
            copy_bags = copy_ids
        else:
            if sizes.variable:
                bags = sizes.bags[:, : self.layout.pooled_counts[self.env.rank]]
                lengths = padded(moved[:exchanged_lengths], bags, bags)
                segments = [lengths.shape[1]]
            else:
                # shard features of the path "distinct_rows" are last, and sent no lengths
                pooled = self.layout.pooled_counts[self.env.rank]
                lengths = moved[:exchanged_lengths].view(pooled, int(sizes.segments.sum()))
            copies = lengths[:0]
            if copy_bags.size:
                copies = padded(moved[exchanged_lengths:num_lengths], sizes.bags[:, first:], copy_bags)
        return LookupInput(
            ids=moved[num_lengths : num_lengths + num_ids],
            weights=weights,
            lengths=lengths,
            copies=copies,
            copy_bags=copy_bags,
            segments=segments,
            counts=sizes.ids.T,
            local_batch=local,
            bags=bags,
            weight_gradients=sizes.weight_gradients.tolist() if sizes.weight_gradients.any() else None,
        )

    # ---- what a batch carries

    def _inverse(self, features: KeyedJaggedTensor) -> list[Tensor] | None:
        inverse = features.inverse_indices_or_none()
        if inverse is None and not features.variable_stride_per_key():
            return None
        rows = {feature: inverse_of(inverse, feature) for feature in {b.feature for b in self.layout.blocks}}
        return [rows[block.feature] for block in self.layout.blocks]

    def _weights(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor | None]:
        """The per-sample weights, and again as they are if they require a gradient."""
        weights = features.weights_or_none()
        if weights is None:
            raise ValueError(
                "the batch has no weights: the collection was built with is_weighted=True. "
                "Fix: pass KeyedJaggedTensor(..., weights=...)"
            )
        required = weights if weights.requires_grad and torch.is_grad_enabled() else None
        return weights.detach().to(self.weight_dtype), required

    def _position(self, keys: list[str]) -> list[int]:
        """For each block, the position of its feature in the batch."""
        for block in self.layout.blocks:
            if block.feature not in keys:
                table = self.layout.tables[block.table].name
                raise ValueError(
                    f"feature {block.feature!r} of table {table!r} is missing from the batch: its features are "
                    f"{list(keys)}. Fix: add the feature, with empty bags if it has no ids"
                )
        return [keys.index(block.feature) for block in self.layout.blocks]


def _feature(sources: Sequence[Source], wiring: Wiring, runs: tuple[Array, Array], number: int) -> FeatureIds:
    """The local ids of one shard feature."""
    source, (first, last) = sources[wiring.source[number]], wiring.bag_runs
    start, end = int(runs[0][number]), int(runs[1][number])
    return FeatureIds(
        (source.lengths, int(first[number]), int(last[number])),
        (source.ids, start, end),
        None if source.weights is None else (source.weights, start, end),
    )


def issue_ids(
    dists: Sequence[InputDist],
    packed: Sequence[Packed],
    sizes: Sequence[Sizes],
    device: torch.device,
    env: ShardingEnv,
    fused: bool = True,
) -> PendingIds:
    """Sends what several collections packed, once the sizes are known.

    ::

        to rank k:   ids of collection 0  |  ids of collection 1

    Args:
        dists: the collections' input dists, over the same ranks.
        packed: what each collection sends.
        sizes: what each collection receives.
        device: of the batch.
        env: the connections to send over.
        fused: whether collections whose ids have the same dtype share a message.
    """
    by_wire: dict[object, list[int]] = {}
    for number, dist in enumerate(dists):
        by_wire.setdefault(dist.wire if fused else number, []).append(number)
    messages = []
    for numbers in by_wire.values():
        own = list(map(packed.__getitem__, numbers))
        receives = np.array(list(map(_ELEMENTS, map(sizes.__getitem__, numbers))))

        def issue(
            own: list[Packed] = own, receives: Array = receives, wire: torch.dtype = dists[numbers[0]].wire
        ) -> Pending:
            sends = np.sum(list(map(_ELEMENTS, own)), 0).tolist()
            message = _joined(own, wire, device)
            return _issue_ids(message, sends, receives.sum(0).tolist(), env)

        pending, error = _shared(issue)
        starts = (np.cumsum(receives.T) - receives.T.reshape(-1)).reshape(receives.T.shape)  # by rank, then collection
        messages.append((numbers, pending, error, starts))
        del error
    return PendingIds(dists, packed, sizes, messages)


def _issue_ids(message: Tensor, sends: list[int], receives: list[int], env: ShardingEnv) -> Pending:
    return issue_all_to_all(message, sends, receives, env, "input_dist/ids")


def _joined(packed: Sequence[Packed], wire: torch.dtype, device: torch.device) -> Tensor:
    """The parts for all ranks, one after the other, of several collections."""
    by_rank = chain.from_iterable(zip(*map(_PARTS, packed), strict=True))
    parts = list(chain.from_iterable(by_rank))
    return torch.cat(parts) if parts else torch.empty(0, dtype=wire, device=device)


def _shared(action: Callable[[], T]) -> tuple[T, Exception | None]:
    """Runs a part of the exchange. If it raises, once more: the other ranks wait for the messages of this step.

    Returns:
        The result, and the error of the first attempt. The caller must pass it to the lookup, which raises it on all
        ranks.

    Raises:
        Exception: the second attempt failed, too. The other ranks then raise RankLost.
    """
    try:
        return action(), None
    except RankLost:
        raise
    except Exception as error:
        return action(), error


def _to_wire(weights: Tensor, wire: torch.dtype) -> Tensor:
    """The bits of the weights as integers."""
    bits = torch.int64 if weights.dtype is torch.float64 else torch.int32
    return weights.view(bits).to(wire)  # 32 bits may travel among 64-bit ids


def _from_wire(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.to(torch.int64 if dtype is torch.float64 else torch.int32).view(dtype)
