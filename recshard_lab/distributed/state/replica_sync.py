"""Averages the tensors of R replicas in place. The results are bit-identical on all ranks.

A number that each replica stores once is averaged by an all-reduce. Copies of a number inside a replica (data-parallel
tables, row states under column splits) must stay equal across separate exchanges, so their terms are added in a fixed
order::

    rank 0  [a0 | a1]        [a0 b0]             m0 = (a0 + b0) / 2               [m0 | m1]
    rank 1  [b0 | b1]   -->  [a1 b1]        -->  m1 = (a1 + b1) / 2          -->  [m0 | m1]
            all-to-all       added in the order of the replicas                   all-gather in place

The same applies to half-precision numbers, which are added in fp32, and to counts (integers), which become the maximum.
Both exchanges send ``2 (R - 1) / R`` of the averaged bytes.

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

_MIN_MESSAGE_BYTES = 2**16  # smaller tensors share a message

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
        tensors: tensors of the same shapes and dtypes on every rank, in the same order.
        env: the R ranks.
        label: label in traces.
        copies: whether ranks outside ``env`` store and average the same numbers.
        bucket_bytes: maximum bytes of a message; the extra memory is at most three messages.
    """
    if env.world_size == 1:
        return
    for dtype, group in groupby(sorted(tensors, key=lambda t: str(t.dtype)), key=lambda t: t.dtype):
        summed = not copies and dtype in (torch.float32, torch.float64)
        elements = max(1, bucket_bytes // dtype.itemsize // env.world_size) * env.world_size
        rest: list[Tensor] = []
        scratch: Tensor | None = None
        for flat in (flat for tensor in group for flat in _flat(tensor, elements, rest)):
            divisible = flat.numel() // env.world_size * env.world_size
            if divisible * dtype.itemsize >= _MIN_MESSAGE_BYTES:
                if scratch is None and not summed:
                    scratch = flat.new_empty(elements)
                _average(flat[:divisible], scratch, env, label)
                flat = flat[divisible:]
            rest.append(flat)
        for bucket in _buckets(rest, elements):
            _average_joined(bucket, env, label, summed)


def _average(flat: Tensor, scratch: Tensor | None, env: ShardingEnv, label: str) -> None:
    """Averages ``flat [N]``, contiguous; R divides N. In fixed order with ``scratch [>= N]``, else by all-reduce."""
    if scratch is None:
        all_reduce(flat, env, label).div_(env.world_size)
        return
    splits = [flat.numel() // env.world_size] * env.world_size
    terms = issue_all_to_all(flat, splits, splits, env, label, scratch[: flat.numel()]).wait()
    mean = _combined(terms.view(env.world_size, -1))
    issue_all_gather(mean, env, label, flat).wait()


def _average_joined(tensors: Sequence[Tensor], env: ShardingEnv, label: str, summed: bool) -> None:
    """Averages small tensors in one message, padded with zeros to a multiple of R numbers."""
    sizes = [tensor.numel() for tensor in tensors]
    padding = -sum(sizes) % env.world_size
    joined = torch.cat([*(tensor.reshape(-1) for tensor in tensors), tensors[0].new_zeros(padding)])
    _average(joined, None if summed else torch.empty_like(joined), env, label)
    for tensor, mean in zip(tensors, joined.split([*sizes, padding]), strict=False):
        tensor.copy_(mean.view(tensor.shape))


def _combined(terms: Tensor) -> Tensor:
    """``[R, n]`` -> ``[n]``: the mean, added in order; the maximum for integers."""
    if not terms.is_floating_point():
        return terms.amax(0)
    total = terms[0].to(torch.promote_types(terms.dtype, torch.float32))
    for term in terms[1:]:
        total += term  # in place: the terms are scratch
    return total.div_(len(terms)).to(terms.dtype)


def _flat(tensor: Tensor, elements: int, rest: list[Tensor]) -> Sequence[Tensor]:
    """Slices of a contiguous tensor with at most ``elements`` numbers; rows of others are added to ``rest``."""
    if tensor.is_contiguous():
        return tensor.view(-1).split(elements) if tensor.numel() else []
    rest += tensor.split(max(1, elements * tensor.shape[0] // tensor.numel())) if tensor.numel() else []
    return []


def _buckets(tensors: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Groups of tensors with at most ``elements`` numbers (except for a single larger tensor)."""
    bucket: list[Tensor] = []
    left = elements
    for tensor in tensors:
        if not tensor.numel():
            continue
        if bucket and tensor.numel() > left:
            yield bucket
            bucket, left = [], elements
        bucket.append(tensor)
        left -= tensor.numel()
    if bucket:
        yield bucket


def torch_states(
    parameters: Mapping[str, Sequence[nn.Parameter]],
    optimizers: Sequence[torch.optim.Optimizer] | None,
    grid: ReplicaGrid,
) -> list[Tensor]:
    """States in torch optimizers of tables on the dense kernel, in the same order on every replica. Collective.

    Args:
        parameters: table name -> this rank's parameters.
        optimizers: the optimizers that step them; None raises.
        grid: the replicas.

    Raises:
        ValueError: no optimizer steps a table, or replicas have different states; raised on all ranks.
    """

    def read() -> list[tuple[str, str, Tensor]]:
        if optimizers is None:
            raise ValueError(
                f"table {next(iter(parameters))!r} is on the dense kernel, so a torch optimizer has its state. Fix: "
                f"pass optimizers=[that optimizer], or sync(include_optimizer_state=False)"
            )
        states = []
        for table, table_parameters in parameters.items():
            for parameter in table_parameters:
                optimizer = next(
                    (o for o in optimizers if any(parameter is p for g in o.param_groups for p in g["params"])), None
                )
                if optimizer is None:
                    raise ValueError(f"none of the optimizers steps table {table!r}, which is on the dense kernel")
                named = sorted(optimizer.state.get(parameter, {}).items())
                states += [(table, key, value) for key, value in named if isinstance(value, Tensor)]
        return states

    states = agreed(grid.world, read)
    by_rank = all_gather_object([(table, key, tuple(value.shape)) for table, key, value in states], grid.world)
    for ranks in grid.replica_groups:
        entries = [by_rank[rank] for rank in ranks]
        if any(other != entries[0] for other in entries):
            table, key, _ = next(e for listed in entries for e in listed if any(e not in other for other in entries))
            raise ValueError(
                f"the optimizer has state {key!r} of table {table!r} on some of ranks {ranks} only. Fix: step every "
                f"replica at least once, or sync(include_optimizer_state=False)"
            )
    return [value for _, _, value in states]
