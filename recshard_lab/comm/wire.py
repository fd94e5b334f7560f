"""What carries the tensors of a group of ranks. A new kind of connection is one class here.

``LoopbackWire``        one rank: what it sends is what it receives
``ProcessGroupWire``    a process group of torch, over Gloo, NCCL or another backend
``LinkedWire``          the same, slowed down as if a slow link joined the virtual nodes

Ranks on virtual nodes share one machine's memory, so an exchange across nodes costs nothing more, and node-aware
schemes show no benefit. Over a `LinkedWire`, an exchange across nodes takes at least as long as over its link::

    end >= start + latency + bytes to or from other nodes / bandwidth        (the larger direction)

Collectives of user code and the dense all-reduce of DistributedDataParallel are not delayed. A rank sleeps while it
waits, so other ranks may use its core. Results are labelled as emulated.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter, sleep
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

LATENCY_VARIABLE = "RECSHARD_INTER_NODE_LATENCY_MS"
BANDWIDTH_VARIABLE = "RECSHARD_INTER_NODE_GBPS"
_CPU = torch.device("cpu")
_SINGLE: dict[str, Any] = {  # torch 2.13 renamed these two functions and deprecated the old names
    "reduce_scatter": getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor,
    "all_gather": getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor,
}
Counts = Sequence[int]  # elements, by rank
Issued = tuple[Tensor, Any]  # the result of a message, and its work


class Wire(Protocol):
    """Issues messages. ``collectives`` adds labels, traces and errors.

    A message returns torch's work, whose ``wait()`` ends when it is complete, or None if it is complete at once.
    """

    @property
    def issued(self) -> int:
        """How many messages of CPU tensors were issued. All ranks count alike."""

    @property
    def polls(self) -> bool:
        """Whether a wait for a CPU tensor can end without its message, and begin again."""

    def exchange(self, op: str, message: Tensor, sends: Counts, receives: Counts, output: Tensor | None) -> Issued:
        """Issues one of the collectives that give each rank another part: its result, and the work.

        Args:
            op: ``all_to_all``, ``all_gather`` or ``reduce_scatter``.
            message: flat.
            sends, receives: elements for and from each rank.
            output: receives the result; a new tensor for None.
        """

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> Any:
        """Issues the sum over ranks, in place; or the largest number, which is NaN if any rank has NaN, as in torch."""

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        """Issues rank ``source``'s tensor to all ranks, in place."""


class LoopbackWire:
    """One rank: nothing is copied, and every message is complete at once."""

    issued, polls = 0, False

    def exchange(self, op: str, message: Tensor, sends: Counts, receives: Counts, output: Tensor | None) -> Issued:
        return message, None

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> None: ...

    def broadcast(self, tensor: Tensor, source: int) -> None: ...


@dataclass(frozen=True)
class ProcessGroupWire:
    """The connections of a process group.

    Torch counts the messages, in the backend. A launcher that repairs a group after an interrupt gives it new
    backends, so all ranks count from 0 again, also if they had issued different numbers.
    """

    pg: Any

    @cached_property
    def polls(self) -> bool:
        """Gloo's waits do."""
        return isinstance(self.pg._get_backend(_CPU), dist.ProcessGroupGloo)

    @property
    def issued(self) -> int:
        number: int = self.pg._get_backend(_CPU)._get_sequence_number_for_group()
        return number

    def exchange(self, op: str, message: Tensor, sends: Counts, receives: Counts, output: Tensor | None) -> Issued:
        if output is None:
            output = message.new_empty(receives[0] if op == "reduce_scatter" else sum(receives))
        if op == "all_to_all":
            splits = list(receives), list(sends)
            return output, dist.all_to_all_single(output, message, *splits, group=self.pg, async_op=True)
        return output, _SINGLE[op](output, message, group=self.pg, async_op=True)

    def all_reduce(self, tensor: Tensor, maximum: bool = False) -> Any:
        if not maximum:
            return dist.all_reduce(tensor, group=self.pg, async_op=True)
        # Gloo's MAX keeps a NaN of rank 0 and drops one of any other rank (torch 2.13), so each number has a flag
        message = torch.stack([tensor, tensor.isnan().to(tensor.dtype)])
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self.pg, async_op=True)
        return Then(work, lambda: tensor.copy_(message[0]).masked_fill_(message[1] > 0, torch.nan))

    def broadcast(self, tensor: Tensor, source: int) -> Any:
        return dist.broadcast(tensor, group=self.pg, group_src=source, async_op=True)


class Then(NamedTuple):
    """Work, and what a wait does when it is complete."""

    work: Any
    end: Callable[[], object]

    def wait(self, *timeout: Any) -> None:
        self.work.wait(*timeout)
        self.end()


@dataclass(frozen=True)
class InterNodeLink:
    """The link of each rank to other nodes.

    Args:
        latency_ms: latency in ms of every exchange across nodes.
        gbps: bandwidth per rank and direction in gigabits per second; None for no limit.

    Raises:
        ValueError: a negative latency, or a bandwidth of 0 or below.

    >>> InterNodeLink(latency_ms=0.5, gbps=1.0).min_ms(1_000_000)
    8.5
    """

    latency_ms: float = 0.0
    gbps: float | None = None

    def __post_init__(self) -> None:
        if not self.latency_ms >= 0:
            raise ValueError(f"inter-node latency must be at least 0 ms, got {self.latency_ms!r}")
        if self.gbps is not None and not self.gbps > 0:
            raise ValueError(f"inter-node bandwidth must be above 0 Gbit/s, got {self.gbps!r}")

    def min_ms(self, num_bytes: int) -> float:
        """Minimum time in ms of ``num_bytes`` across nodes."""
        return self.latency_ms + (num_bytes * 8e-6 / self.gbps if self.gbps is not None else 0.0)

    @classmethod
    def from_environment(cls) -> "InterNodeLink | None":
        """The link that the launcher configured, or None."""
        latency, gbps = os.environ.get(LATENCY_VARIABLE), os.environ.get(BANDWIDTH_VARIABLE)
        if latency is None and gbps is None:
            return None
        return cls(float(latency or 0.0), float(gbps) if gbps else None)


@dataclass(frozen=True)
class LinkedWire(ProcessGroupWire):
    """A process group whose exchanges across nodes take the time of a link.

    Args:
        link: between the nodes.
        across_nodes: elements for or from each rank -> those of ranks on other nodes.
    """

    link: InterNodeLink
    across_nodes: Callable[[Counts], int]

    def exchange(self, op: str, message: Tensor, sends: Counts, receives: Counts, output: Tensor | None) -> Issued:
        crossing = max(self.across_nodes(sends), self.across_nodes(receives)) * message.element_size()
        not_before = perf_counter() + self.link.min_ms(crossing) / 1e3
        output, work = super().exchange(op, message, sends, receives, output)
        return output, Then(work, lambda: sleep(max(0.0, not_before - perf_counter()))) if crossing else work
