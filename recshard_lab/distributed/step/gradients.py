"""Row-wise optimizers under column splits: the squares of a row are added over its shards before any shard steps.

Row-wise Adagrad keeps one number a row, the mean of its squared gradient over *all* D columns. LAMB and LARS read the
norm of the whole row. Where several ranks store columns of a table, each computes part of the sum. All of them get the
same ids, so they agree on the touched rows and their order. Only the partial sums are exchanged, 4 bytes for each
touched row and sum; no sizes are.

Of each touched row, k sums are exchanged (one or two).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.step.batch import LookupInput, host_list, join, segment_index
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import RankLookup, ShardLookup
from recshard_lab.embedding.kernels import KernelInput
from recshard_lab.embedding.kernels.transposed import FeatureGroups, Looked, TransposedLookup, transpose
from recshard_lab.sparse.ops import complete_cumsum

_Part = tuple[int, slice, Tensor]  # number of a shard, its rows among the touched ones of a slot, their partial sums


class RowNormExchange:
    """Completes squared row norms over the shards of column-split tables.

    Args:
        layout: the layout.
        env: the ranks.
        slots: (table, shard) of this rank's slots, in the kernel's order.
        device: of the shards.
    """

    def __init__(
        self, layout: Layout, env: ShardingEnv, slots: Sequence[tuple[int, int]], device: torch.device
    ) -> None:
        self.env, self.device = env, device
        self.rows = [layout.shards[table][number].rows for table, number in slots]
        self.numbers = [number for _, number in slots]
        #: for each rank: (my slot, row range shared with one of its shards, whether it is all rows of both), sorted the
        #: same way on both ends
        self.sends: list[list[tuple[int, int, int, bool]]] = []
        self.receives: list[list[tuple[int, int, int, bool]]] = []
        self.senders: list[list[int]] = []  # the shard that sends each of them
        for rank in range(env.world_size):
            shared = []
            for position, (table, number) in enumerate(slots):
                mine = layout.shards[table][number]
                for other, theirs in enumerate(layout.shards[table]):
                    start, end = max(mine.rows[0], theirs.rows[0]), min(mine.rows[1], theirs.rows[1])
                    if theirs.rank == rank and other != number and start < end:
                        shared.append((table, number, other, position, start, end, mine.rows == theirs.rows))
            self.sends.append([entry[3:] for entry in sorted(shared)])
            shared.sort(key=lambda entry: (entry[0], entry[2], entry[1]))
            self.receives.append([entry[3:] for entry in shared])
            self.senders.append([entry[2] for entry in shared])
        ranges = {entry for entries in self.sends for entry in entries if not entry[3]}
        cuts = sorted({(slot, row) for slot, start, end, _ in ranges for row in (start, end)})
        #: for each slot the rows, counted from its first, at which a range shared with other rows begins or ends
        self.cuts = [[row - first for own, row in cuts if own == slot] for slot, (first, _) in enumerate(self.rows)]
        self.edges = [torch.tensor(own, dtype=torch.int64, device=device) for own in self.cuts]

    def __call__(self, rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
        """Per slot the touched rows ``[U]`` and partial sums ``[U]`` or ``[U, k]`` -> the sums over all columns."""
        width = max((own.shape[1] for own in squares if own.dim() == 2), default=1)
        outgoing, send_sizes = [], []
        places = self._places(rows)
        for entries in self.sends:
            spans = [self._span(rows, places, *entry) for entry in entries]
            outgoing += [squares[entry[0]][span].reshape(-1) for entry, span in zip(entries, spans, strict=True)]
            send_sizes.append(width * sum(span.stop - span.start for span in spans))
        spans_in = [[self._span(rows, places, *entry) for entry in entries] for entries in self.receives]
        receive_sizes = [width * sum(span.stop - span.start for span in spans) for spans in spans_in]
        message = torch.cat(outgoing) if outgoing else torch.empty(0, device=self.device)
        received = all_to_all(message, send_sizes, receive_sizes, self.env, "row_norms")
        parts: list[list[_Part]] = [
            [(number, slice(0, len(own)), own)] for number, own in zip(self.numbers, squares, strict=True)
        ]
        position = 0
        for entries, senders, spans in zip(self.receives, self.senders, spans_in, strict=True):
            for (slot, *_), sender, span in zip(entries, senders, spans, strict=True):
                shape = squares[slot][span].shape
                parts[slot].append((sender, span, received[position : position + shape.numel()].view(shape)))
                position += shape.numel()
        return self._add(squares, parts)

    def _add(self, squares: list[Tensor], parts: list[list[_Part]]) -> list[Tensor]:
        """Adds in one order on all ranks, so that the states of a row stay equal to the last bit on all of them.

        All slots are added at once, those with the most shards first: one copy, then one addition for each further
        shard of the most split table. A shard that has some of a slot's rows adds zero to the others.
        """
        for own in parts:
            own.sort(key=lambda part: part[0])
        slots = sorted((slot for slot, own in enumerate(parts) if len(own) > 1), key=lambda slot: -len(parts[slot]))
        if not slots:
            return squares
        whole = all(len(part) == len(squares[slot]) for slot in slots for *_, part in parts[slot])
        most = 0 if whole else max(squares[slot].numel() for slot in slots)
        zeros = squares[0].new_zeros(most) if most else squares[0].new_empty(0)
        addends, sizes = [], []
        for at in range(len(parts[slots[0]])):
            some = [slot for slot in slots if at < len(parts[slot])]  # of all slots the first
            sizes.append(sum(squares[slot].numel() for slot in some))
            for slot in some:
                _, span, part = parts[slot][at]
                before, end = span.start * part[:1].numel(), span.stop * part[:1].numel()
                addends += [zeros[:before], part.reshape(-1), zeros[: squares[slot].numel() - end]]
        total, *others = torch.cat(addends).split(sizes)
        for other in others:
            total[: len(other)].add_(other)
        sums = dict(zip(slots, total.split([squares[slot].numel() for slot in slots]), strict=True))
        return [sums[slot].view_as(own) if slot in sums else own for slot, own in enumerate(squares)]

    def nothing(self, rounds: int, _: object = None) -> None:
        """Takes part on a rank without such a shard: the other ranks wait for its empty messages."""
        for _ in range(rounds):
            self([], [])

    def _places(self, rows: list[Tensor]) -> dict[tuple[int, int], int]:
        """(slot, row) -> the first touched row that is not below it, for all `cuts`, with one copy to the host."""
        keys = [(slot, self.rows[slot][0] + cut) for slot, own in enumerate(self.cuts) for cut in own]
        if not keys:
            return {}
        found = [torch.searchsorted(own, edges) for own, edges in zip(rows, self.edges, strict=True)]
        return dict(zip(keys, torch.cat(found).tolist(), strict=True))

    def _span(
        self, rows: list[Tensor], places: dict[tuple[int, int], int], slot: int, start: int, end: int, same: bool
    ) -> slice:
        if same:  # both have the same touched rows, and the same padding after them
            return slice(0, rows[slot].numel())
        return slice(places[slot, start], places[slot, end])


# Deferred steps: backward keeps the gradients of fused tables, and the optimizer's ``step`` applies them.
#
# Between both, all gradients of a step are known. Their norm can be clipped, and those of several batches accumulate::
#
#     backward of batch 1, 2, ...   gradients arrive and are kept          executor.update
#     norm                          of the summed gradient of every row    Deferred.norm_power, one all-reduce
#     step                          each kernel once, for all batches      executor.step_deferred


@dataclass(slots=True)
class KernelGradients:
    """The gradients of one kernel, of one batch or of several.

    Attributes:
        group: the kernel.
        bags: the ids of each batch, from all ranks.
        grads: the gradient of each batch's rows: ``[S, columns]``, flat for sequences.
        kept: what the lookup of a single batch kept for backward; None if nothing was looked up here.
    """

    group: ShardLookup
    bags: list[KernelInput]
    grads: list[Tensor]
    kept: Any = None

    def add(self, other: KernelGradients) -> None:
        """Accumulates the gradients of another batch."""
        self.bags += other.bags
        self.grads += other.grads
        self.kept = None  # the merged batch is another lookup

    def merged(self) -> tuple[KernelInput, Tensor]:
        """All batches as one."""
        if len(self.bags) > 1:
            grad = merge_grads(self.grads, self.bags, self.group)
            self.bags, self.grads = [merge_bags(self.bags, self.group.kernel.pooled)], [grad]
        return self.bags[0], self.grads[0]


class Deferred:
    """The gradients that one collection keeps until the step."""

    def __init__(self) -> None:
        #: the gradients of each kernel of this rank, by its number
        self.kernels: dict[int, KernelGradients] = {}
        #: batches since the last step
        self.batches = 0
        self._sums: dict[int, RowGradients] = {}

    def add(self, kernels: dict[int, KernelGradients]) -> None:
        """Accumulates the gradients of one batch."""
        self.batches += 1
        for number, own in kernels.items():
            known = self.kernels.setdefault(number, own)
            if known is not own:
                known.add(own)

    def take(self) -> dict[int, KernelGradients]:
        """The gradients of all batches; none are kept."""
        kernels, self.kernels, self.batches = self.kernels, {}, 0
        return kernels

    def scale(self, factor: Tensor) -> None:
        """Multiplies all gradients, in place."""
        for own in self.kernels.values():
            for grad in own.grads:
                grad.mul_(factor.to(grad.device))

    def norm_power(self, norm_type: float, replicas: bool, total: Tensor) -> Tensor:
        """``total`` plus ``|g|^p`` of the summed gradients of all touched rows; the maximum for ``p = inf``.

        Args:
            norm_type: p.
            replicas: whether this rank counts the replicated tables, whose gradients all ranks have.
            total: 0-d.
        """
        for key, own in self.kernels.items():
            if own.group.first_copy is not None and not replicas:
                continue
            if key not in self._sums:
                self._sums[key] = RowGradients(own.group)
            for touched in self._sums[key](*own.merged()):
                for _, rows in touched.chunks():
                    if norm_type == float("inf"):
                        total = torch.maximum(total, rows.abs().amax())
                    else:
                        total = total + torch.linalg.vector_norm(rows, norm_type) ** norm_type
        return total


class RowGradients:
    """Sums the gradient of each distinct row of a kernel's shards.

    Args:
        group: the kernel.
    """

    def __init__(self, group: ShardLookup) -> None:
        self.pooled, self.shards, self.dynamic = group.kernel.pooled, group.kernel.shards, group.kind.dynamic
        self.feature_shards = group.kernel.features
        dims = [self.shards[shard].num_cols for shard in self.feature_shards]
        #: shard features of each width
        self.widths = [[n for n, dim in enumerate(dims) if dim == width] for width in sorted(set(dims))]
        self.features, self.device = FeatureGroups(dims, self.widths, group.device), group.device
        self.fixed = [self._bounds([shard.num_rows for shard in self.shards], members) for members in self.widths]

    def _bounds(self, sizes: Sequence[int], members: Sequence[int]) -> tuple[dict[int, int], Tensor]:
        """Shard -> first of its rows, numbered over all shards of a width; and the same numbers with their end."""
        shards = sorted({self.feature_shards[feature] for feature in members})
        edges = list(accumulate((sizes[shard] for shard in shards), initial=0))
        return dict(zip(shards, edges, strict=False)), torch.tensor(edges, device=self.device)

    def __call__(self, bags: KernelInput, grad: Tensor) -> list[TransposedLookup]:
        """The distinct rows of each width, and how to sum the gradient of each."""
        ids, offsets, weights, counts, _ = bags
        sizes = [shard.num_rows for shard in self.shards]
        if self.dynamic:
            ids, sizes = self._numbered(ids, counts)
        spans, samples = self.features.spans(offsets, self.pooled, counts)
        found = []
        for index, members in enumerate(self.widths):
            bounds, edges = self._bounds(sizes, members) if self.dynamic else self.fixed[index]
            uses, parts = dict.fromkeys(bounds, 0), []
            own_ids = self.features.take(ids, index, spans).long().split([counts[feature] for feature in members])
            for feature, own in zip(members, own_ids, strict=True):
                uses[self.feature_shards[feature]] += counts[feature]
                parts.append(own + bounds[self.feature_shards[feature]])
            rows, width = torch.cat(parts), self.features.feature_dims[members[0]]
            own_weights = None if weights is None else self.features.take(weights, index, spans)
            if self.pooled:
                own_offsets = self.features.take_offsets(offsets, index, samples)
                own_grad = self.features.take_pooled_grad(grad, index).view(samples, len(members), width)
                bag_grads = own_grad.transpose(0, 1).reshape(-1, width)
                numbers = torch.arange(len(members) * samples, device=ids.device)
                bag_of_id = numbers.repeat_interleave(own_offsets.diff(), output_size=rows.numel())
            else:
                own_offsets, bag_of_id = offsets, torch.arange(rows.numel(), device=ids.device)
                bag_grads = self.features.take_flat_grad(grad, index, spans)
            most = [min(use, sizes[shard]) for shard, use in uses.items()]
            found.append(transpose(Looked(rows, own_offsets, own_weights, most), bag_grads, bag_of_id, edges))
        return found

    def _numbered(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Ids of dynamic tables have any value: numbers them within each shard. Also how many ids each shard has."""
        parts, sizes = list(ids.split(list(counts))), [0] * len(self.shards)
        for shard in set(self.feature_shards):
            features = [feature for feature, own in enumerate(self.feature_shards) if own == shard]
            numbers = torch.cat([parts[feature] for feature in features]).unique(return_inverse=True)[1]
            sizes[shard] = len(numbers)  # not how many are distinct: that is unknown on the host
            for feature, part in zip(features, numbers.split([counts[n] for n in features]), strict=True):
                parts[feature] = part
        return torch.cat(parts), sizes


def merge_bags(batches: Sequence[KernelInput], pooled: bool) -> KernelInput:
    """The bags of several batches as those of one: of each shard feature, batch after batch."""
    counts = [sum(own) for own in zip(*(bags[3] for bags in batches), strict=True)]
    ids = _by_feature([bags[0] for bags in batches], batches)
    weighted = [bags[2] for bags in batches if bags[2] is not None]
    weights = _by_feature(weighted, batches) if weighted else None
    if pooled:
        lengths = torch.cat([bags[1].diff().view(len(counts), -1) for bags in batches], 1)
        return KernelInput(ids, complete_cumsum(lengths.reshape(-1)), weights, counts)
    return KernelInput(ids, sum((bags[1] for bags in batches[1:]), batches[0][1]), weights, counts)


def merge_grads(grads: Sequence[Tensor], batches: Sequence[KernelInput], group: ShardLookup) -> Tensor:
    """The gradients of several batches in the order of `merge_bags`."""
    if group.kernel.pooled:
        return torch.cat(list(grads))
    dims = [feature.shard.num_cols for feature in group.features]
    sizes = [[count * dim for count, dim in zip(bags[3], dims, strict=True)] for bags in batches]
    return _interleaved([grad.split(own) for grad, own in zip(grads, sizes, strict=True)])


def _by_feature(values: Sequence[Tensor], batches: Sequence[KernelInput]) -> Tensor:
    return _interleaved([own.split(bags.counts) for own, bags in zip(values, batches, strict=True)])


def _interleaved(parts: Sequence[Sequence[Tensor]]) -> Tensor:
    return torch.cat([part for feature in zip(*parts, strict=True) for part in feature])


# Gradients of per-sample weights: computed by the rank that stores the row, returned to the source rank.
#
# The gradient of the weight of an id is the dot product of the id's row and the gradient of its bag. Kernels compute it
# when they step. One more message a step returns it, only if the weights of some rank require a gradient::
#
#     owner    of each shard feature, by source rank [n]
#     source   added over column shards, at the places of the ids
#
# The weights of replicated shard features get their gradients on the source rank. The rows of ids of managed tables
# return in the same way (`exchange_rows`).


def of_replicas(lookup: RankLookup, layout: Layout, grad: Tensor, lookup_input: LookupInput) -> dict[int, Tensor]:
    """For each replicated shard feature the gradient ``[n]`` of its weights. Call it before the tables step.

    Args:
        grad: of the output.
    """
    local_batch = lookup_input.local_batch
    if local_batch.weights is None or not lookup.replicated:
        return {}
    found: dict[int, Tensor] = {}
    blocks = _by_block(grad, layout, lookup_input)
    for group in lookup.replicated:
        assert group.first_copy is not None
        weights = group.kernel.weights()
        for number, (feature, slot) in enumerate(zip(group.features, group.kernel.features, strict=True)):
            place = group.first - group.first_copy + number
            own = local_batch.replicas[place]
            ids, lengths = join([own.ids]).long(), join([own.lengths]).long()
            bags = torch.repeat_interleave(lengths, output_size=ids.numel())
            rows = weights[slot].index_select(0, ids.to(weights[slot].device)).to(grad)
            found[place] = (rows * blocks[feature.block][:, slice(*feature.shard.cols)].index_select(0, bags)).sum(1)
    return found


def _by_block(grad: Tensor, layout: Layout, lookup_input: LookupInput) -> list[Tensor]:
    """The gradient of each block's bags, ``[S, D]``, means divided."""
    lengths = lookup_input.local_batch.lengths
    if lookup_input.bags is None:
        blocks = [grad[:, block.start : block.start + block.dim] for block in layout.blocks]
    else:
        sizes = [own.numel() * block.dim for own, block in zip(lengths, layout.blocks, strict=True)]
        flat = grad.split(sizes)
        blocks = [own.view(-1, block.dim) for own, block in zip(flat, layout.blocks, strict=True)]
    for index in layout.mean_blocks:
        blocks[index] = blocks[index] / lengths[index].clamp(min=1).to(grad.dtype).unsqueeze(1)
    return blocks


def exchange_weight_gradients(
    of_kernels: Sequence[Tensor],
    of_copies: dict[int, Tensor],
    lookup_input: LookupInput,
    layout: Layout,
    env: ShardingEnv,
) -> Tensor | None:
    """The gradient ``[N]`` of this rank's weights; None where they ask for none. All ranks must call it.

    Args:
        of_kernels: for each exchanged kernel, the gradients of its ids, by shard feature.
        of_copies: as `of_replicas` returns them.
    """
    required = lookup_input.weight_gradients
    if required is None:
        return None
    local_batch = lookup_input.local_batch
    assert lookup_input.weights is not None
    flat = torch.cat(list(of_kernels)) if of_kernels else lookup_input.weights[:0]
    arrived = _at_sources(flat, required, lookup_input, layout, env, "input_dist_backward/weights")
    # kernels were given gradients of the mean over ranks; these are of this rank's loss
    arrived = arrived * env.world_size
    if local_batch.weights is None:
        return None
    assert local_batch.places is not None
    copies = [of_copies[place].to(arrived.dtype) for place in range(len(local_batch.replicas))]
    total = arrived.new_zeros(local_batch.weights.numel())
    total.index_add_(0, local_batch.places, torch.cat([arrived, *copies]))
    return total.to(local_batch.weights.dtype).view(local_batch.weights.shape)


def send_any_weight_gradients(lookup_input: LookupInput, layout: Layout, env: ShardingEnv) -> None:
    """Issues the message of `exchange_weight_gradients` with any numbers in it."""
    assert lookup_input.weights is not None
    assert lookup_input.weight_gradients is not None
    ids = int(lookup_input.counts[: len(layout.exchanged_features[env.rank])].sum())
    any_numbers, required = lookup_input.weights[:ids], lookup_input.weight_gradients
    _at_sources(any_numbers, required, lookup_input, layout, env, "input_dist_backward/weights")


def exchange_rows(rows: Tensor, total: int, lookup_input: LookupInput, layout: Layout, env: ShardingEnv) -> Tensor:
    """``[total]`` the row of each id of this rank's batch, 0 for ids of other collections. All ranks must call it.

    Args:
        rows: ``[n]`` of the ids that this rank looks up, by shard feature.
        total: ids of this rank's batch.
    """
    every = [True] * env.world_size
    arrived = _at_sources(rows, every, lookup_input, layout, env, "output_dist/rows")
    places = lookup_input.local_batch.places
    assert places is not None
    return rows.new_zeros(total).index_copy_(0, places, arrived)  # column shards of a table have the same rows


def _at_sources(
    flat: Tensor, required: Sequence[bool], lookup_input: LookupInput, layout: Layout, env: ShardingEnv, tag: str
) -> Tensor:
    """A number for each id, at its source rank: by shard feature, rank after rank.

    Args:
        flat: the numbers of the ids that this rank looks up, by shard feature.
        required: for each rank, whether it receives any.
        tag: of the message.
    """
    local_batch, features = lookup_input.local_batch, layout.exchanged_features
    counts = lookup_input.counts[: len(features[env.rank])]
    sizes = counts.T * np.array(required)[:, None]  # by source rank and shard feature
    starts = (np.cumsum(counts).reshape(counts.shape) - counts).T
    sends = sizes.sum(1).tolist()
    order = segment_index(host_list(starts.ravel(), flat.device), host_list(sizes.ravel(), flat.device), sum(sends))
    ends = np.cumsum([0, *local_batch.sent])[np.cumsum([0, *map(len, features)])]
    receives = (np.diff(ends) * required[env.rank]).tolist()
    return all_to_all(flat.index_select(0, order), sends, receives, env, tag)
