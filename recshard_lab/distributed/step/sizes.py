"""The sizes message: everything that the host of a rank must know before ids arrive, in one exchange.

::

    to rank k, for each collection:   state, S, variable, weights require a gradient | bags, ids of each shard feature

``state`` is `READY`, `OVER` (the rank's data has ended) or `FAILED` (an error before the ids leave). If a rank failed,
nothing else is sent, and every rank raises the error, which names that rank.

A shard feature with ids but no bags is sent without lengths: each id is a bag. So are all features of sequence
collections, and replicated features that are sent as distinct rows.

The message is exchanged over CPU connections, so it makes no host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from recshard_lab.comm import Pending, ShardingEnv, issue_all_to_all
from recshard_lab.distributed.step.layout import Layout

READY, OVER, FAILED = 0, 1, 2
_HEAD = 4  # state, S, variable, weights require a gradient


@dataclass(slots=True)
class Sizes:
    """What the ranks send this rank, of one collection.

    Attributes:
        segments: ``[W]`` S.
        variable: whether any of them sends a variable batch.
        weight_gradients: ``[W]`` whether weights require a gradient.
        bags: ``[W, L + R]`` lengths by shard feature.
        ids: ``[W, L + R]`` ids by shard feature.
        parts: elements sent for an id: 1, or 2 with a weight.
    """

    segments: NDArray[np.int64]
    variable: bool
    weight_gradients: NDArray[np.bool_]
    bags: NDArray[np.int64]
    ids: NDArray[np.int64]
    parts: int

    @property
    def elements(self) -> list[int]:
        """``[W]`` what each rank sends, in elements."""
        found: list[int] = (self.bags.sum(1) + self.parts * self.ids.sum(1)).tolist()
        return found


class SizesFormat:
    """The part of the message that belongs to one collection.

    Args:
        layout: of the collection.
        weighted: whether batches carry per-sample weights.
    """

    def __init__(self, layout: Layout, weighted: bool) -> None:
        self.parts = 2 if weighted else 1
        self.widths = [_HEAD + 2 * len(features) for features in layout.rank_features]
        ends = np.cumsum([0, *self.widths])
        self._heads = ends[:-1, None] + np.arange(_HEAD)
        self._bags = np.concatenate([np.arange(start + _HEAD, end, 2) for start, end in pairwise(ends)])

    def write(
        self,
        state: int,
        segments: int = 0,
        variable: bool = False,
        weight_gradients: bool = False,
        bags: NDArray[np.int64] | int = 0,
        ids: NDArray[np.int64] | int = 0,
    ) -> NDArray[np.int64]:
        """The parts for all ranks, one after the other. A rank without a batch sends zeros.

        Args:
            state: of this rank.
            segments: S.
            variable: whether this rank sends a variable batch.
            weight_gradients: whether its weights require a gradient.
            bags, ids: of all shard features, rank after rank.
        """
        flat = np.empty(sum(self.widths), dtype=np.int64)
        flat[self._heads] = state, segments, variable, weight_gradients
        flat[self._bags], flat[self._bags + 1] = bags, ids
        return flat

    def read(self, received: NDArray[np.int64]) -> Sizes:
        """``[W, width of this rank]`` -> sizes."""
        return Sizes(
            received[:, 1],
            bool(received[:, 2].any()),
            received[:, 3].astype(bool),
            received[:, _HEAD::2],
            received[:, _HEAD + 1 :: 2],
            self.parts,
        )


@dataclass(slots=True)
class PendingSizes:
    """Sizes on their way."""

    payload: Pending
    widths: list[int]
    world_size: int

    def wait(self) -> tuple[list[int], list[NDArray[np.int64]]]:
        """The state of each rank, and for each collection what `SizesFormat.read` takes."""
        received = self.payload.wait().view(self.world_size, -1).numpy()
        ends = list(accumulate(self.widths, initial=0))
        return received[:, 0].tolist(), [received[:, start:end] for start, end in pairwise(ends)]


def issue_sizes(
    parts: Sequence[tuple[SizesFormat, NDArray[np.int64]]], env: ShardingEnv, label: str, state: int | None = None
) -> PendingSizes:
    """Sends the sizes of several collections, or only this rank's state if there is none.

    Args:
        parts: each collection's format and what its `write` returned.
        state: of this rank, where ``parts`` is empty.
        env: the ranks, over connections that carry CPU tensors.
        label: for traces.
    """
    world = env.world_size
    if len(parts) == 1:
        sends, message = parts[0][0].widths, parts[0][1]
    else:
        by_rank = [np.split(flat, np.cumsum(form.widths)[:-1]) for form, flat in parts]
        by_rank = by_rank or [[np.array([state])] * world]
        message = np.concatenate([own[rank] for rank in range(world) for own in by_rank])
        sends = [sum(len(own[rank]) for own in by_rank) for rank in range(world)]
    widths = [form.widths[env.rank] for form, _ in parts]
    received = [max(1, sum(widths))] * world
    return PendingSizes(issue_all_to_all(torch.from_numpy(message), sends, received, env, label), widths, world)
