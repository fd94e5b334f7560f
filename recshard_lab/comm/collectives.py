"""The collectives. Issuing one returns a ``Pending``, whose ``wait()`` returns the result.

Open traces record all of them (``trace.py``). With one rank they run without a process group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recshard_lab.comm.emulation import InterNodeLink
from recshard_lab.comm.env import ShardingEnv
from recshard_lab.comm.errors import is_failing, message_number, note_sent, outgoing, raise_if_marked
from recshard_lab.comm.lost_ranks import issue_and_wait, wait
from recshard_lab.comm.trace import CollectiveEvent, DeviceSpan, record

# torch 2.13 renamed these two functions and deprecated the old names
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(slots=True)
class Received:
    """Which message a rank waits for, on CPU.

    Attributes:
        env: the ranks.
        number: of the message, as `message_number` returned before it was issued.
        label: of the message.
        receives: elements from each rank.
        summed: whether the network adds the messages of all ranks.
    """

    env: ShardingEnv
    number: int
    label: str
    receives: Sequence[int]
    summed: bool = False


@dataclass(slots=True)
class Pending:
    """A running collective. ``sent`` keeps the input alive until the collective has completed."""

    output: Tensor
    work: Any = None
    sent: Tensor | None = None
    event: CollectiveEvent | None = None
    not_before: float = 0.0  # perf_counter of the earliest completion; used by the emulated inter-node link
    received: Received | None = None

    def __post_init__(self) -> None:
        if self.event is not None and self.output.is_cuda:
            self.event.device_span = DeviceSpan(self.output.device)

    def wait(self) -> Tensor:
        """The received tensor. Blocks until it is complete; on a GPU, only the current stream does.

        Raises:
            Failed: another rank failed, and sent a marked message (``errors.py``). Names the rank.
            RankLost: another rank ended, or waits for another message of this rank (``lost_ranks.py``).
        """
        if is_failing() and self.received is not None:
            return self.output.zero_()
        if self.work is not None:
            own, self.received = self.received, None
            if own is None:
                self.work.wait()
            else:
                wait(self.work, own.env, own.number, own.label)
            self.work = self.sent = None
            if self.not_before:
                sleep(max(0.0, self.not_before - perf_counter()))
            if self.event is not None and self.event.device_span is not None:
                self.event.device_span.end()
            elif self.event is not None:
                self.event.ms = (perf_counter() - self.event.start_s) * 1e3
            if own is not None:
                raise_if_marked(self.output, own.receives, own.number, own.env, own.summed)
        return self.output


def issue_all_to_all(
    tensor: Tensor,
    send_splits: Sequence[int],
    recv_splits: Sequence[int],
    env: ShardingEnv,
    label: str,
    output: Tensor | None = None,
) -> Pending:
    """Sends one slice of ``tensor`` to each rank.

    Args:
        tensor: ``[sum(send_splits)]``, flat.
        send_splits: elements for each rank.
        recv_splits: elements from each rank.
        env: the ranks.
        label: label in traces.
        output: ``[sum(recv_splits)]``, the receive buffer. Default: a new tensor.
    """
    event = record("all_to_all", label, [n * tensor.element_size() for n in send_splits], env)
    if env.alone:
        return Pending(tensor, event=event)
    if output is None:
        output = torch.empty(sum(recv_splits), dtype=tensor.dtype, device=tensor.device)

    def send(message: Tensor) -> Any:
        splits = list(recv_splits), list(send_splits)
        return dist.all_to_all_single(output, message, *splits, group=env.pg, async_op=True)

    return _issue(tensor, output, send, send_splits, recv_splits, env, label, event)


def _issue(
    tensor: Tensor,
    output: Tensor,
    send: Callable[[Tensor], Any],
    sends: Sequence[int],
    receives: Sequence[int],
    env: ShardingEnv,
    label: str,
    event: CollectiveEvent | None,
    summed: bool = False,
) -> Pending:
    """Issues a collective. ``sends`` and ``receives`` are elements for and from each rank."""
    message = outgoing(tensor.contiguous(), sends, env)
    if message is None:
        return Pending(output.zero_(), event=event)
    received = None
    if output.device.type == "cpu":
        received = Received(env, message_number(env), label, receives, summed)
        note_sent(received.number, env)
    not_before = _not_before(tensor, sends, receives, env)
    return Pending(output, send(message), message, event, not_before, received)


def _not_before(tensor: Tensor, sends: Sequence[int], receives: Sequence[int], env: ShardingEnv) -> float:
    """Earliest completion over the emulated link; 0 without a link or if the exchange stays inside nodes."""
    link = InterNodeLink.from_environment()
    if link is None:
        return 0.0
    crossing = max(env.across_nodes(list(sends)), env.across_nodes(list(receives))) * tensor.element_size()
    return perf_counter() + link.min_ms(crossing) / 1e3 if crossing else 0.0


def all_to_all(
    tensor: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], env: ShardingEnv, label: str
) -> Tensor:
    """``issue_all_to_all``, then wait."""
    return issue_all_to_all(tensor, send_splits, recv_splits, env, label).wait()


def issue_reduce_scatter(tensor: Tensor, env: ShardingEnv, label: str) -> Pending:
    """Sums ``tensor [W * n]`` over the ranks; rank k receives slice k, ``[n]``."""
    size = tensor.numel() // env.world_size
    event = record("reduce_scatter", label, [size * tensor.element_size()] * env.world_size, env)
    if env.alone:
        return Pending(tensor, event=event)
    output = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    splits = [size] * env.world_size

    def send(message: Tensor) -> Any:
        return _reduce_scatter(output, message, group=env.pg, async_op=True)

    return _issue(tensor, output, send, splits, splits, env, label, event, summed=True)


def issue_all_gather(tensor: Tensor, env: ShardingEnv, label: str, output: Tensor | None = None) -> Pending:
    """Concatenates ``tensor [n]`` of all ranks, ``[W * n]``, into ``output`` if passed. n is equal on all ranks."""
    event = record("all_gather", label, [tensor.numel() * tensor.element_size()] * env.world_size, env)
    if env.alone:
        return Pending(tensor, event=event)
    if output is None:
        output = torch.empty(env.world_size * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    splits = [tensor.numel()] * env.world_size

    def send(message: Tensor) -> Any:
        return _all_gather(output, message, group=env.pg, async_op=True)

    return _issue(tensor, output, send, splits, splits, env, label, event)


def ring_bytes(size: int, env: ShardingEnv) -> list[int]:
    """Bytes sent to each rank by a ring all-reduce of ``size`` bytes, the minimum of all algorithms."""
    sent = [0] * env.world_size
    sent[(env.rank + 1) % env.world_size] = 2 * (env.world_size - 1) * size // env.world_size
    return sent


def all_reduce(tensor: Tensor, env: ShardingEnv, label: str, *, maximum: bool = False) -> Tensor:
    """Sums ``tensor`` over the ranks, in place; with ``maximum``, takes the largest as `all_reduce_maximum` does."""
    message = _with_nans(tensor) if maximum else tensor
    record("all_reduce", label, ring_bytes(message.numel() * message.element_size(), env), env)
    if not env.alone:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        issue_and_wait(lambda: dist.all_reduce(message, op=op, group=env.pg, async_op=True), tensor.device, env, label)
    return _take_maximum(tensor, message) if maximum else tensor


def all_reduce_maximum(tensor: Tensor, pg: Any) -> Tensor:
    """The largest of each float over the ranks of ``pg``, in place. It is NaN if any rank has NaN, as in torch.

    Gloo's MAX and MIN keep a NaN of rank 0 and drop one of any other rank (torch 2.13). So the message also has a flag
    for each number.
    """
    message = _with_nans(tensor)
    dist.all_reduce(message, op=dist.ReduceOp.MAX, group=pg)
    return _take_maximum(tensor, message)


def _with_nans(tensor: Tensor) -> Tensor:
    """``[2, ...]``: the numbers, and 1 for each that is NaN."""
    return torch.stack([tensor, tensor.isnan().to(tensor.dtype)])


def _take_maximum(tensor: Tensor, message: Tensor) -> Tensor:
    """Fills ``tensor`` with the numbers of a reduced `_with_nans`."""
    return tensor.copy_(message[0]).masked_fill_(message[1] > 0, float("nan"))


def broadcast(tensor: Tensor, env: ShardingEnv, label: str, source: int = 0) -> Tensor:
    """Rank ``source``'s ``tensor`` on every rank, in place."""
    size = tensor.numel() * tensor.element_size() if env.rank == source else 0
    record("broadcast", label, [size] * env.world_size, env)
    if not env.alone:
        message = tensor.contiguous()
        issue_and_wait(
            lambda: dist.broadcast(message, group=env.pg, group_src=source, async_op=True), tensor.device, env, label
        )
        if message.data_ptr() != tensor.data_ptr():
            tensor.copy_(message)
    return tensor


def broadcast_object(value: Any, env: ShardingEnv, source: int = 0) -> Any:
    """Rank ``source``'s ``value`` on every rank."""
    if env.alone:
        return value
    box = [value]
    dist.broadcast_object_list(box, group=env.pg, group_src=source)
    return box[0]


def all_gather_object(value: Any, env: ShardingEnv) -> list[Any]:
    """The ``value`` of every rank, in rank order."""
    if env.alone:
        return [value]
    values: list[Any] = [None] * env.world_size
    dist.all_gather_object(values, value, group=env.pg)
    return values


def barrier(env: ShardingEnv) -> None:
    """Blocks until every rank has called it."""
    if not env.alone:
        dist.barrier(group=env.pg)
