"""The output exchange in four halves, so that its messages travel while other work runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from recshard_lab.comm import CommOp, QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.columns import Run

FORWARD, BACKWARD = "output_dist/rows", "output_dist_backward/rows"


@dataclass(slots=True)
class PendingOutput:
    """An output exchange between its two halves.

    Attributes:
        lookup_input: the batch.
        state: what the second half needs.
        buffer_bytes: bytes of the messages, sent and received. Final after the second half.
    """

    lookup_input: LookupInput
    state: Any
    buffer_bytes: int = 0


class OutputExchange(ABC):
    """Sends looked-up rows to the ranks of their samples, and gradients back.

    `begin` and `begin_backward` issue the messages and return at once. `finish` and `finish_backward` wait for them.
    All ranks call the halves of their exchanges in the same order.
    """

    @abstractmethod
    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        """Issues the messages of forward.

        Args:
            exchanged: rows of each exchanged kernel of this rank, for the samples of all ranks.
            replicated: rows of each replicated kernel, for the local batch.
            lookup_input: the batch that was looked up.
        """

    @abstractmethod
    def finish(self, pending: PendingOutput) -> Tensor:
        """Waits for the messages of `begin`. Returns the collection's output for the local batch."""

    @abstractmethod
    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        """Issues the messages of backward: the gradient of what `finish` returned, times ``scale``."""

    @abstractmethod
    def finish_backward(self, pending: PendingOutput) -> Columns:
        """Waits for the messages of `begin_backward`.

        Returns:
            For each exchanged kernel, then each replicated kernel, the gradient of its rows from all ranks.
        """


class Columns:
    """Gradients ``[n, width]`` side by side, read from the left; flat ones end to end."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.shape[-1]]
        self._position, self._example = 0, tensors[0]

    def take(self, width: int) -> Tensor:
        """The next ``width`` columns, contiguous. One call never spans two tensors."""
        if width == 0:
            return self._example.narrow(-1, 0, 0)
        first = self._tensors[0]
        start, self._position = self._position, self._position + width
        taken = first.narrow(-1, start, width).contiguous()
        if self._position == first.shape[-1]:
            self._tensors, self._position = self._tensors[1:], 0
        return taken


class Route(ABC):
    """Brings the pooled rows of one route's lanes home.

    Attributes:
        lanes: for each rank, the lanes that take this route.
        width: columns of this rank's lanes.
        buffer_bytes: what the messages of the last pass needed.
    """

    name: ClassVar[str]
    op: ClassVar[CommOp] = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL  # whose codecs it takes

    def __init__(self, layout: Layout, env: ShardingEnv, codecs: QuantizedCommCodecs) -> None:
        self.layout, self.env, self.codecs = layout, env, codecs
        self.lanes = layout.features_of(self.name)
        self.width = sum(lane.shard.num_cols for lane in self.lanes[env.rank])
        self.buffer_bytes = 0

    @abstractmethod
    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Any:
        """Sends off this rank's partial rows ``[sum of B, width]``, source rank after source rank."""

    @abstractmethod
    def finish(self, begun: Any, out: Tensor, lookup_input: LookupInput) -> None:
        """Writes this route's columns of ``out [B, output width]``."""

    @abstractmethod
    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Any:
        """Sends off this route's columns of ``grad [B, output width]``, times ``scale``."""

    @abstractmethod
    def finish_backward(self, begun: Any, lookup_input: LookupInput) -> Tensor:
        """``[sum of B, width]``: the gradient of what `begin` was given."""


def widths_of(lanes: list[ShardFeature]) -> tuple[int, ...]:
    """Columns of each lane."""
    return tuple(lane.shard.num_cols for lane in lanes)


def runs_of(lanes: list[ShardFeature], sender: int, target: dict[int, int]) -> list[Run]:
    """Where the columns of a sender's lanes belong, given the target of each block's column 0."""
    runs, source = [], 0
    for lane in lanes:
        width = lane.shard.num_cols
        runs.append(Run(sender, source, target[lane.block] + lane.shard.cols[0], width))
        source += width
    return runs
