"""Replicas of a part become one again: tensors of R ranks averaged in place, every bit the same everywhere.

A number that a replica holds once goes through an all-reduce. One that it holds several times (data-parallel tables,
row states under column splits) must come out alike on ranks that do not meet here, so that its terms are added in one
order wherever it stands::

    rank 0  [a0 | a1]        [a0 b0]             m0 = (a0 + b0) / 2               [m0 | m1]
    rank 1  [b0 | b1]   -->  [a1 b1]        -->  m1 = (a1 + b1) / 2          -->  [m0 | m1]
            all-to-all       added in the order of the replicas                   all-gather in place

So do half-precision numbers, added in fp32, and counts (integers), which become the largest of theirs. Bytes on the
wire are the same in both: ``2 (R - 1) / R`` of what is averaged.

Shape letters: N numbers of a bucket, R replicas.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor, nn

from recshard_lab.comm import (
    ReplicaGrid,
    ShardingEnv,
    agreed,
    all_gather_object,
    all_reduce,
    issue_all_gather,
    issue_all_to_all,
)
from recshard_lab.distributed.state.moves import DEFAULT_ROUND_BYTES

_ALONE_BYTES = 2**16  # smaller tensors share a message

AllReduce: TypeAlias = Callable[[list[Tensor]], None]


@torch.no_grad()
def average(
    tensors: Iterable[Tensor],
    env: ShardingEnv,
    label: str,
    *,
    copies: bool = True,
    bucket_bytes: int = DEFAULT_ROUND_BYTES,
) -> None:
    """Replaces every tensor by its mean over the ranks, in place.

    Args:
        tensors: of the same shapes and number formats on every rank, in the same order.
        env: the ranks, R of them.
        label: what they are, in traces.
        copies: whether ranks outside ``env`` hold the same numbers and average them, too.
        bucket_bytes: no message is larger; the extra memory is at most three of them.
    """
    if env.world_size == 1:
        return
    for dtype, own in groupby(sorted(tensors, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
        summed = not copies and dtype in (torch.float32, torch.float64)
        elements = max(1, bucket_bytes // dtype.itemsize // env.world_size) * env.world_size
        rest: list[Tensor] = []
        scratch: Tensor | None = None
        for flat in (flat for tensor in own for flat in _flat(tensor, elements, rest)):
            whole = flat.numel() // env.world_size * env.world_size
            if whole * dtype.itemsize >= _ALONE_BYTES:
                if scratch is None and not summed:
                    scratch = flat.new_empty(elements)
                _average(flat[:whole], scratch, env, label)
                flat = flat[whole:]
            rest.append(flat)
        for bucket in _buckets(rest, elements):
            _average_joined(bucket, env, label, summed)


def _average(flat: Tensor, scratch: Tensor | None, env: ShardingEnv, label: str) -> None:
    """Of ``[N]``, contiguous; R divides N. In order by way of ``scratch [>= N]``, or by all-reduce without one."""
    if scratch is None:
        all_reduce(flat, env, label).div_(env.world_size)
        return
    splits = [flat.numel() // env.world_size] * env.world_size
    terms = issue_all_to_all(flat, splits, splits, env, label, scratch[: flat.numel()]).wait()
    mean = _combined(terms.view(env.world_size, -1))
    issue_all_gather(mean, env, label, flat).wait()


def _average_joined(pieces: Sequence[Tensor], env: ShardingEnv, label: str, summed: bool) -> None:
    """Of small pieces, in one message; zeros at its end where R does not divide their numbers."""
    sizes = [piece.numel() for piece in pieces]
    padding = -sum(sizes) % env.world_size
    joined = torch.cat([*(piece.reshape(-1) for piece in pieces), pieces[0].new_zeros(padding)])
    _average(joined, None if summed else torch.empty_like(joined), env, label)
    for piece, mean in zip(pieces, joined.split([*sizes, padding]), strict=False):
        piece.copy_(mean.view(piece.shape))


def _combined(terms: Tensor) -> Tensor:
    """``[R, n]`` -> ``[n]``: their mean, added one after the other; of integers the largest."""
    if not terms.is_floating_point():
        return terms.amax(0)
    total = terms[0].to(torch.promote_types(terms.dtype, torch.float32))
    for term in terms[1:]:
        total += term  # in place: the terms are scratch
    return total.div_(len(terms)).to(terms.dtype)


def _flat(tensor: Tensor, elements: int, rest: list[Tensor]) -> Sequence[Tensor]:
    """A tensor as runs of at most so many numbers; one that has gaps goes to the rest, by rows."""
    if tensor.is_contiguous():
        return tensor.view(-1).split(elements) if tensor.numel() else []
    rest += tensor.split(max(1, elements * tensor.shape[0] // tensor.numel())) if tensor.numel() else []
    return []


def _buckets(pieces: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """The pieces gathered so that a bucket has at most so many numbers (a single one excepted)."""
    bucket: list[Tensor] = []
    left = elements
    for piece in pieces:
        if not piece.numel():
            continue
        if bucket and piece.numel() > left:
            yield bucket
            bucket, left = [], elements
        bucket.append(piece)
        left -= piece.numel()
    if bucket:
        yield bucket


def torch_states(
    parameters: Mapping[str, Sequence[nn.Parameter]],
    optimizers: Sequence[torch.optim.Optimizer] | None,
    grid: ReplicaGrid,
) -> list[Tensor]:
    """What torch optimizers keep about tables on the dense kernel, in the same order on every replica.

    Args:
        parameters: table name -> this rank's parameters of it.
        optimizers: those that step them; None is refused.
        grid: the replicas. All ranks must come here.

    Raises:
        ValueError: no optimizer steps a table, or one keeps other things about it on another replica; on all ranks.
    """

    def read() -> list[tuple[str, str, Tensor]]:
        if optimizers is None:
            raise ValueError(
                f"table {next(iter(parameters))!r} is on the dense kernel, and a torch optimizer keeps its state: pass "
                f"optimizers=[that optimizer], or sync(include_optimizer_state=False)"
            )
        found = []
        for table, own in parameters.items():
            for parameter in own:
                holder = next(
                    (o for o in optimizers if any(parameter is p for g in o.param_groups for p in g["params"])), None
                )
                if holder is None:
                    raise ValueError(f"none of the optimizers steps table {table!r}, which is on the dense kernel")
                states = sorted(holder.state.get(parameter, {}).items())
                found += [(table, key, value) for key, value in states if isinstance(value, Tensor)]
        return found

    found = agreed(grid.world, read)
    everybody = all_gather_object([(table, key, tuple(value.shape)) for table, key, value in found], grid.world)
    for ranks in grid.replica_groups:
        kept = [everybody[rank] for rank in ranks]
        if any(other != kept[0] for other in kept):
            name, key, _ = next(entry for own in kept for entry in own if any(entry not in other for other in kept))
            raise ValueError(
                f"the optimizer keeps {key!r} about table {name!r} on some of ranks {ranks} only: step every replica "
                f"once at least, or sync(include_optimizer_state=False)"
            )
    return [value for _, _, value in found]
