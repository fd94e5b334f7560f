"""The output exchange in four halves, so that its messages travel while other work runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from torch import Tensor

from recshard_lab.comm import CommOp, QuantizedCommCodecs, ShardingEnv
from recshard_lab.distributed.step.layout import Layout, ShardFeature
from recshard_lab.distributed.step.output_dist.columns import Ints, Run
from recshard_lab.distributed.step.output_dist.wire import Arriving
from recshard_lab.distributed.step.types import LocalBatch, LookupInput


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


class OutputPath(ABC):
    """Brings the pooled rows of the shards that take one path to the ranks of their samples, as flat areas.

    Attributes:
        features: for each rank, the shard features that take this path.
        width: columns of this rank's shard features.
        area_widths: columns of each area that arrives.
        runs: from the areas to the columns of the output.
    """

    name: ClassVar[str]
    op: ClassVar[CommOp] = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    """The kind of message whose codecs this path uses."""
    area_widths: list[int]
    runs: list[Run]

    def __init__(
        self,
        layout: Layout,
        env: ShardingEnv,
        codecs: QuantizedCommCodecs,
        features: list[list[ShardFeature]] | None = None,
    ) -> None:
        self.layout, self.env, self.codecs = layout, env, codecs
        self.features = features or layout.features_of(self.name)
        self.width = sum(widths_of(self.features[env.rank]))

    @abstractmethod
    def begin(self, rows: Tensor, lookup_input: LookupInput) -> Arriving:
        """Sends this rank's partial rows ``[T, width]``, which are ordered by source rank."""

    def finish(self, begun: Arriving, lookup_input: LookupInput) -> Tensor:
        """The areas for the local batch, flat."""
        return begun.wait()

    @abstractmethod
    def area_rows(self, lookup_input: LookupInput) -> Ints:
        """Rows of each area; the first B of them are samples."""

    @abstractmethod
    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> Arriving:
        """Sends this path's columns of the output's gradient, times ``scale``."""

    @abstractmethod
    def finish_backward(self, begun: Arriving, lookup_input: LookupInput) -> tuple[Tensor, ...]:
        """``[T, width]``: the gradient of the rows that `begin` sent; then that of replicas, if this path sends it."""


def widths_of(features: Sequence[ShardFeature]) -> tuple[int, ...]:
    """Columns of each shard feature."""
    return tuple(feature.shard.num_cols for feature in features)


class Target:
    """Where the columns of blocks are in the output.

    Side by side in one area ``[B, output width]``. In a variable batch, blocks have different numbers of bags: each is
    an area ``[bags, columns]``, one after the other.

    Args:
        layout: the wiring.
        variable: whether batches are variable.

    Attributes:
        widths: columns of each area.
        places: for each block, its area, and its first column there.
    """

    def __init__(self, layout: Layout, variable: bool) -> None:
        self.variable, blocks = variable, layout.blocks
        self.widths = [block.dim for block in blocks] if variable else [layout.output_width]
        self.places = [(n, 0) if variable else (0, block.start) for n, block in enumerate(blocks)]

    def rows(self, local_batch: LocalBatch) -> list[int]:
        """Rows of each area."""
        return [bags.numel() for bags in local_batch.lengths] if self.variable else [local_batch.batch_size]


def runs_of(
    features: Sequence[ShardFeature], sender: int, places: Sequence[tuple[int, int]] | Mapping[int, tuple[int, int]]
) -> list[Run]:
    """From an area with these features side by side to the area and first column of each block in ``places``."""
    runs = []
    for feature, source in zip(features, accumulate(widths_of(features), initial=0), strict=False):
        receiver, start = places[feature.block]
        runs.append(Run(sender, source, start + feature.shard.cols[0], feature.shard.num_cols, receiver))
    return runs
