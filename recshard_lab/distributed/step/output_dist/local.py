"""World size 1: the kernel's rows are the output, and its gradient is the gradient of the rows. Nothing is copied."""

from collections.abc import Sequence

from torch import Tensor

from recshard_lab.distributed.step.layout import Layout
from recshard_lab.distributed.step.output_dist.base import Columns, OutputExchange, PendingOutput
from recshard_lab.distributed.step.types import LookupInput


class LocalOutput(OutputExchange):
    """Returns the rows of the kernel. Used if `is_enough` returns True."""

    def begin(
        self, exchanged: Sequence[Tensor], replicated: Sequence[Tensor], lookup_input: LookupInput
    ) -> PendingOutput:
        return PendingOutput(lookup_input, exchanged[0])

    def finish(self, pending: PendingOutput) -> Tensor:
        """``[B, output width]``."""
        rows: Tensor = pending.state
        return rows

    def begin_backward(self, grad: Tensor, scale: float, lookup_input: LookupInput) -> PendingOutput:
        return PendingOutput(lookup_input, grad)

    def finish_backward(self, pending: PendingOutput) -> Columns:
        """The gradient as it is."""
        return Columns([pending.state])


def is_enough(layout: Layout, groups: int) -> bool:
    """Whether one kernel on one rank looks up the output's columns in order, and no bag is averaged.

    Args:
        layout: of the collection.
        groups: kernels of this rank.
    """
    features = layout.rank_features[0]
    in_order = [feature.block for feature in features] == list(range(len(layout.blocks)))
    whole = all(feature.shard.num_cols == layout.blocks[feature.block].dim for feature in features)
    direct = all(route == "direct" for route in layout.table_routes)
    return layout.world_size == 1 and groups == 1 and in_order and whole and direct and not layout.mean_blocks
