"""The collectives. Issuing one returns a ``Pending``, whose ``wait()`` returns the result.

Open traces record all of them (``trace.py``). A `Wire` carries them (``wire.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from recshard_lab.comm.env import ShardingEnv
from recshard_lab.comm.errors import is_failing, note_sent, outgoing, raise_if_marked
from recshard_lab.comm.lost_ranks import issue_and_wait, wait
from recshard_lab.comm.trace import CollectiveEvent, DeviceSpan, open_traces, record


class Received(NamedTuple):
    """Which message a rank waits for, on CPU.

    Attributes:
        env: the ranks.
        number: of the message, as `Wire.issued` was before it.
        label: of the message.
        receives: elements from each rank.
        summed: whether the network adds the messages of all ranks.
    """

    env: ShardingEnv
    number: int
    label: str
    receives: Sequence[int]
    summed: bool


@dataclass(slots=True)
class Pending:
    """A running collective. ``sent`` keeps the input alive until the collective has completed."""

    output: Tensor
    work: Any = None
    sent: Tensor | None = None
    event: CollectiveEvent | None = None
    received: Received | None = None

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
    return _issue("all_to_all", tensor, send_splits, recv_splits, env, label, output)


def issue_reduce_scatter(tensor: Tensor, env: ShardingEnv, label: str) -> Pending:
    """Sums ``tensor [W * n]`` over the ranks; rank k receives slice k, ``[n]``."""
    splits = [tensor.numel() // env.world_size] * env.world_size
    return _issue("reduce_scatter", tensor, splits, splits, env, label)


def issue_all_gather(tensor: Tensor, env: ShardingEnv, label: str, output: Tensor | None = None) -> Pending:
    """Concatenates ``tensor [n]`` of all ranks, ``[W * n]``, into ``output`` if passed. n is equal on all ranks."""
    splits = [tensor.numel()] * env.world_size
    return _issue("all_gather", tensor, splits, splits, env, label, output)


def _issue(
    op: str,
    tensor: Tensor,
    sends: Sequence[int],
    receives: Sequence[int],
    env: ShardingEnv,
    label: str,
    output: Tensor | None = None,
) -> Pending:
    """Issues a collective. ``sends`` and ``receives`` are elements for and from each rank."""
    summed, wire = op == "reduce_scatter", env.wire
    event = record(op, label, sends, tensor.element_size(), env) if open_traces else None
    if event is not None and tensor.is_cuda:
        event.device_span = DeviceSpan(tensor.device)
    message = outgoing(tensor.contiguous(), sends, env)
    if message is None:  # it was issued before an error, and nothing that it brings matters
        length = receives[0] if summed else sum(receives)
        return Pending(tensor.new_zeros(length) if output is None else output.zero_(), event=event)
    number = wire.issued if tensor.is_cpu else 0
    output, work = wire.exchange(op, message, sends, receives, output)
    if work is None or not tensor.is_cpu:
        return Pending(output, work, message, event)
    note_sent(number, env)
    return Pending(output, work, message, event, Received(env, number, label, receives, summed))


def all_to_all(
    tensor: Tensor, send_splits: Sequence[int], recv_splits: Sequence[int], env: ShardingEnv, label: str
) -> Tensor:
    """``issue_all_to_all``, then wait."""
    return issue_all_to_all(tensor, send_splits, recv_splits, env, label).wait()


def ring_bytes(size: int, env: ShardingEnv) -> list[int]:
    """Bytes sent to each rank by a ring all-reduce of ``size`` bytes, the minimum of all algorithms."""
    sent = [0] * env.world_size
    sent[(env.rank + 1) % env.world_size] = 2 * (env.world_size - 1) * size // env.world_size
    return sent


def all_reduce(tensor: Tensor, env: ShardingEnv, label: str, *, maximum: bool = False) -> Tensor:
    """Sums ``tensor`` over the ranks, in place; with ``maximum``, takes the largest, or NaN if any rank has NaN."""
    sent = (1 + maximum) * tensor.numel() * tensor.element_size()  # a maximum also sends which numbers are NaN
    record("all_reduce", label, ring_bytes(sent, env), 1, env)
    issue_and_wait(lambda wire: wire.all_reduce(tensor, maximum), tensor.device, env, label)
    return tensor


def broadcast(tensor: Tensor, env: ShardingEnv, label: str, source: int = 0) -> Tensor:
    """Rank ``source``'s ``tensor`` on every rank, in place."""
    size = tensor.numel() * tensor.element_size() if env.rank == source else 0
    record("broadcast", label, [size] * env.world_size, 1, env)
    message = tensor.contiguous()
    issue_and_wait(lambda wire: wire.broadcast(message, source), tensor.device, env, label)
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
