"""The collectives, each in two halves: issuing returns a ``Pending``, ``wait()`` hands the result out.

All of them are recorded in open traces (``trace.py``) and run without a process group when the world is one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab.comm.emulation import InterNodeLink
from recshard_lab.comm.groups import ShardingEnv
from recshard_lab.comm.trace import CollectiveEvent, record

# torch 2.13 has new names for these two and calls the old ones deprecated
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Pending:
    """A collective under way. ``sent`` keeps the input alive until the wire is done with it."""

    output: Tensor
    work: Any = None
    sent: Tensor | None = None
    event: CollectiveEvent | None = None
    not_before: float = 0.0  # perf_counter; later than now only over an emulated inter-node link

    def wait(self) -> Tensor:
        """The received tensor; blocks until it is there."""
        if self.work is not None:
            self.work.wait()
            self.work = self.sent = None
            if self.not_before:
                sleep(max(0.0, self.not_before - perf_counter()))
            if self.event is not None:
                self.event.ms = (perf_counter() - self.event.start_s) * 1e3
        return self.output


def issue_all_to_all(
    tensor: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    env: ShardingEnv,
    label: str,
    output: Tensor | None = None,
) -> Pending:
    """Sends ``tensor[splits]`` to each rank.

    Args:
        tensor: ``[sum(send_splits)]``, flat.
        send_splits: elements for each rank.
        recv_splits: elements from each rank.
        env: the ranks.
        label: what it is for, in traces.
        output: ``[sum(recv_splits)]`` to receive into; made when left out.
    """
    event = record("all_to_all", label, [n * tensor.element_size() for n in send_splits], env)
    if env.pg is None:
        return Pending(tensor, event=event)
    if output is None:
        output = torch.empty(sum(recv_splits), dtype=tensor.dtype, device=tensor.device)
    work = dist.all_to_all_single(
        output, tensor.contiguous(), list(recv_splits), list(send_splits), group=env.pg, async_op=True
    )
    return Pending(output, work, tensor, event, _not_before(tensor, send_splits, recv_splits, env))


def _not_before(tensor: Tensor, sends: Sequence[int], receives: Sequence[int], env: ShardingEnv) -> float:
    """When the exchange may end over the emulated link, if there is one and the exchange crosses nodes."""
    link = InterNodeLink.from_environment()
    if link is None:
        return 0.0
    crossing = max(env.across_nodes(list(sends)), env.across_nodes(list(receives))) * tensor.element_size()
    return perf_counter() + link.least_ms(crossing) / 1e3 if crossing else 0.0


def all_to_all(
    tensor: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], env: ShardingEnv, label: str
) -> Tensor:
    """``issue_all_to_all`` and wait."""
    return issue_all_to_all(tensor, send_splits, recv_splits, env, label).wait()


def issue_reduce_scatter(tensor: Tensor, env: ShardingEnv, label: str) -> Pending:
    """Sums ``tensor [W * n]`` over the ranks; rank k receives part k, ``[n]``. NCCL adds in the network."""
    size = tensor.numel() // env.world_size
    event = record("reduce_scatter", label, [size * tensor.element_size()] * env.world_size, env)
    if env.pg is None:
        return Pending(tensor, event=event)
    output = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    work = _reduce_scatter(output, tensor.contiguous(), group=env.pg, async_op=True)
    splits = [size] * env.world_size
    return Pending(output, work, tensor, event, _not_before(tensor, splits, splits, env))


def issue_all_gather(tensor: Tensor, env: ShardingEnv, label: str, output: Tensor | None = None) -> Pending:
    """Sends ``tensor [n]``, of one size everywhere, to every rank: ``[W * n]``, received into ``output`` if given."""
    event = record("all_gather", label, [tensor.numel() * tensor.element_size()] * env.world_size, env)
    if env.pg is None:
        return Pending(tensor, event=event)
    if output is None:
        output = torch.empty(env.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    work = _all_gather(output, tensor.contiguous(), group=env.pg, async_op=True)
    splits = [tensor.numel()] * env.world_size
    return Pending(output, work, tensor, event, _not_before(tensor, splits, splits, env))


def ring_bytes(size: int, env: ShardingEnv) -> list[int]:
    """What an all-reduce of so many bytes sends to each rank: a ring's, which no algorithm undercuts."""
    sent = [0] * env.world_size
    sent[(env.rank + 1) % env.world_size] = 2 * (env.world_size - 1) * size // env.world_size
    return sent


def all_reduce(tensor: Tensor, env: ShardingEnv, label: str) -> Tensor:
    """Sums ``tensor`` over the ranks, in place."""
    record("all_reduce", label, ring_bytes(tensor.numel() * tensor.element_size(), env), env)
    if env.pg is not None:
        dist.all_reduce(tensor, group=env.pg)
    return tensor


def broadcast(tensor: Tensor, env: ShardingEnv, label: str, source: int = 0) -> Tensor:
    """Rank ``source``'s ``tensor`` on every rank, in place."""
    size = tensor.numel() * tensor.element_size() if env.rank == source else 0
    record("broadcast", label, [size] * env.world_size, env)
    if env.pg is not None:
        message = tensor.contiguous()
        dist.broadcast(message, group=env.pg, group_src=source)
        if message.data_ptr() != tensor.data_ptr():
            tensor.copy_(message)
    return tensor


def broadcast_object(value: Any, env: ShardingEnv, source: int = 0) -> Any:
    """Rank ``source``'s ``value`` on every rank."""
    if env.pg is None:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=env.pg, group_src=source)
    return box[0]


def all_gather_object(value: Any, env: ShardingEnv) -> list[Any]:
    """Every rank's ``value``, in the order of the ranks."""
    if env.pg is None:
        return [value]
    found: list[Any] = [None] * env.world_size
    dist.all_gather_object(found, value, group=env.pg)
    return found


def barrier(env: ShardingEnv) -> None:
    """Returns when every rank has come here."""
    if env.pg is not None:
        dist.barrier(group=env.pg)
