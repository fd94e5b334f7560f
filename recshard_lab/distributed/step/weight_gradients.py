"""Gradients of per-sample weights: computed where the rows lie, brought back to the batch that the weights came with.

The gradient of the weight of an id is the dot product of the id's row and the gradient of its bag. Kernels have both at
hand when they step; one more message a step returns the numbers, and only where some rank's weights ask for them::

    owner   of each lane, source after source [n]   ->   home   added up over the column pieces, at the ids' places

Replicated lanes are looked up at local_batch, and so are these.

Shape letters: N ids of the local batch, n ids of a lane, S bags of a block, D columns of a lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.step.input_dist import LocalBatch, LookupInput
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import RankLookup
from recshard_lab.distributed.step.route_ids import LOCAL, join


def of_replicas(lookup: RankLookup, layout: Layout, grad: Tensor, lookup_input: LookupInput) -> dict[int, Tensor]:
    """For each replicated lane the gradient ``[n]`` of its weights; to be asked before the rows are stepped.

    Args:
        grad: of the local batch's rows, as the routes take it.
    """
    local_batch = lookup_input.local_batch
    if local_batch.weights is None or not lookup.replicated:
        return {}
    found: dict[int, Tensor] = {}
    blocks = _by_block(grad, layout, lookup_input)
    for group in lookup.replicated:
        assert group.first_copy is not None
        weights = group.kernel.weights()
        for number, (lane, slot) in enumerate(zip(group.lanes, group.kernel.feature_slots, strict=True)):
            place = group.first_lane - group.first_copy + number
            own = local_batch.replicas[place]
            ids, lengths = join([own.ids]).long(), join([own.lengths]).long()
            bags = torch.repeat_interleave(lengths, output_size=ids.numel())
            rows = weights[slot].index_select(0, ids.to(weights[slot].device)).to(grad)
            found[place] = (rows * blocks[lane.block][:, slice(*lane.shard.cols)].index_select(0, bags)).sum(1)
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


def exchange_output(
    of_kernels: Sequence[Tensor],
    of_copies: dict[int, Tensor],
    lookup_input: LookupInput,
    layout: Layout,
    env: ShardingEnv,
) -> Tensor | None:
    """The gradient ``[N]`` of this rank's weights; None where they ask for none. All ranks must call it.

    Args:
        of_kernels: for each exchanged kernel, the gradients of what came to it, lane-major.
        of_copies: see `of_replicas`.
    """
    asked = lookup_input.asked
    if asked is None:
        return None
    local_batch = lookup_input.local_batch
    counts = lookup_input.counts[: len(layout.exchanged_features[env.rank])]
    flat = torch.cat(list(of_kernels)) if of_kernels else _none(lookup_input)
    pieces = list(flat.split([count for lane in counts for count in lane]))
    world = env.world_size
    by_source = [pieces[source::world] if asked[source] else [] for source in range(world)]
    message = torch.cat([_none(lookup_input).to(flat.dtype), *(piece for own in by_source for piece in own)])
    sends = [sum(piece.numel() for piece in own) for own in by_source]
    receives = [sum(own) if asked[env.rank] else 0 for own in local_batch.sent]
    arrived = all_to_all(message, sends, receives, env, "input_dist_backward/weights")
    arrived = arrived * world  # kernels were given gradients of the mean over ranks; these are of this rank's loss
    if local_batch.weights is None:
        return None
    total = arrived.new_zeros(local_batch.weights.numel())
    position = 0
    for rank, lanes in enumerate(layout.exchanged_features):
        ends = accumulate(local_batch.sent[rank], initial=position)
        for number, (lane, (start, end)) in enumerate(zip(lanes, pairwise(ends), strict=True)):
            _add(total, local_batch, lane.block, (rank, number), arrived[start:end])
            position = end
    for place, own in of_copies.items():
        _add(total, local_batch, layout.replicated_features[place].block, (LOCAL, place), own.to(total.dtype))
    return total.to(local_batch.weights.dtype).view(local_batch.weights.shape)


def _none(lookup_input: LookupInput) -> Tensor:
    assert lookup_input.weights is not None
    return lookup_input.weights[:0]


def _add(total: Tensor, local_batch: LocalBatch, block: int, lane: tuple[int, int], own: Tensor) -> None:
    start, end = local_batch.spans[block]
    positions = local_batch.positions.get(lane)
    if positions is None:
        total[start:end] += own
    else:
        total[start:end].index_add_(0, positions, own)
