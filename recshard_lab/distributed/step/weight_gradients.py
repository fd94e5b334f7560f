"""Gradients of per-sample weights: computed by the rank that stores the row, returned to the source rank.

The gradient of the weight of an id is the dot product of the id's row and the gradient of its bag. Kernels compute it
when they step. One more message a step returns it, only if the weights of some rank require a gradient::

    owner    of each shard feature, by source rank [n]
    source   added over column shards, at the places of the ids

The weights of replicated shard features get their gradients on the source rank. The rows of ids of managed tables
return in the same way (`exchange_rows`).

Shape letters: N ids of the local batch, n ids of a shard feature, S bags of a block, D columns of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all
from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.lookup import RankLookup
from recshard_lab.distributed.step.types import LookupInput, host_list, join, segment_index


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
        for number, (feature, slot) in enumerate(zip(group.features, group.kernel.feature_slots, strict=True)):
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
