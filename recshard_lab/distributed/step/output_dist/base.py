"""What a route does: four halves of two passes, so that several routes can be under way at once."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from recshard_lab.comm import CommOp, QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.input_dist import LookupInput
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.columns import Run

FORWARD, BACKWARD = "output_dist/rows", "output_dist_backward/rows"


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
