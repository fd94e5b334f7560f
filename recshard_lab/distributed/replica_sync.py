"""Replicas of a part become one again: tensors of R ranks averaged in place, every bit the same everywhere.

::

    rank 0  [a0 | a1]        [a0 b0]             m0 = (a0 + b0) / 2               [m0 | m1]
    rank 1  [b0 | b1]   -->  [a1 b1]        -->  m1 = (a1 + b1) / 2          -->  [m0 | m1]
            all-to-all       added in the order of the replicas, in fp32          all-gather

The bytes on the wire are those of a ring all-reduce, ``2 (R - 1) / R`` of what is averaged. Terms are added in one
order wherever a number stands, so that copies inside a replica (data-parallel tables, row states under column splits)
stay copies. Counts (integers) become the largest of theirs.

Shape letters: N numbers of a bucket, R replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.comm import ReplicaGrid, ShardingEnv, all_gather_object, all_to_all, issue_all_gather
from recshard_lab.distributed.reshard import DEFAULT_ROUND_BYTES

AllReduce: TypeAlias = Callable[[list[Tensor]], None]


@torch.no_grad()
def average(tensors: Iterable[Tensor], env: ShardingEnv, label: str, bucket_bytes: int = DEFAULT_ROUND_BYTES) -> None:
    """Replaces every tensor by its mean over the ranks, in place.

    Args:
        tensors: of the same shapes and number formats on every rank, in the same order.
        env: the ranks, R of them.
        label: what they are, in traces.
        bucket_bytes: no message is larger; the extra memory is at most four of them.
    """
    if env.world_size == 1:
        return
    for dtype, own in groupby(sorted(tensors, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
        for bucket in _buckets(own, max(1, bucket_bytes // dtype.itemsize)):
            mean = _mean(bucket, env, label)
            position = 0
            for piece in bucket:
                piece.copy_(mean[position : position + piece.numel()].view(piece.shape))
                position += piece.numel()


def torch_states(
    parameters: Mapping[str, Sequence[nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer], grid: ReplicaGrid
) -> list[Tensor]:
    """What torch optimizers keep about tables on the dense kernel, in the same order on every replica.

    Args:
        parameters: table name -> this rank's parameters of it.
        optimizers: those that step them.
        grid: the replicas. All ranks must come here.

    Raises:
        ValueError: no optimizer steps a table, or one keeps other things about it on another replica; on all ranks.
    """
    found: list[Tensor] = []
    told: list[tuple[str, str, tuple[int, ...]]] = []
    trouble = None
    for table, own in parameters.items():
        for parameter in own:
            holder = next(
                (o for o in optimizers if any(parameter is p for g in o.param_groups for p in g["params"])), None
            )
            if holder is None:
                trouble = f"none of the optimizers given steps table {table!r}, which is on the dense kernel"
                continue
            for key, value in sorted(holder.state.get(parameter, {}).items()):
                if isinstance(value, Tensor):
                    found.append(value)
                    told.append((table, key, tuple(value.shape)))
    everybody = all_gather_object((trouble, told), grid.world)
    for said, _ in everybody:
        if said is not None:
            raise ValueError(said)
    for ranks in grid.replica_groups:
        kept = [everybody[rank][1] for rank in ranks]
        if any(other != kept[0] for other in kept):
            name, key, _ = next(entry for own in kept for entry in own if any(entry not in other for other in kept))
            raise ValueError(
                f"the optimizer keeps {key!r} about table {name!r} on some of ranks {ranks} only: step every replica "
                f"once at least, or sync(include_optimizer_state=False)"
            )
    return found


def _mean(pieces: Sequence[Tensor], env: ShardingEnv, label: str) -> Tensor:
    """``[N]`` means of pieces with N numbers in all; a little more where R does not divide N."""
    ranks = env.world_size
    count = sum(piece.numel() for piece in pieces)
    share = -(-count // ranks)
    message = torch.cat([*(piece.reshape(-1) for piece in pieces), pieces[0].new_zeros(share * ranks - count)])
    terms = all_to_all(message, [share] * ranks, [share] * ranks, env, label).view(ranks, share)
    return issue_all_gather(_combined(terms), env, label).wait()


def _combined(terms: Tensor) -> Tensor:
    """``[R, n]`` -> ``[n]``: their mean, added one after the other; of integers the largest."""
    if not terms.is_floating_point():
        return terms.amax(0)
    total = terms[0].to(torch.promote_types(terms.dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    return total.div_(len(terms)).to(terms.dtype)


def _buckets(tensors: Iterable[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """The tensors by rows, gathered so that a bucket has at most so many numbers (a single row excepted)."""
    bucket: list[Tensor] = []
    left = elements
    for piece in (piece for tensor in tensors for piece in _pieces(tensor, elements)):
        if bucket and piece.numel() > left:
            yield bucket
            bucket, left = [], elements
        bucket.append(piece)
        left -= piece.numel()
    if bucket:
        yield bucket


def _pieces(tensor: Tensor, elements: int) -> Sequence[Tensor]:
    if tensor.numel() <= elements or not tensor.dim():
        return [tensor] if tensor.numel() else []
    return tensor.split(max(1, elements * tensor.shape[0] // tensor.numel()))
