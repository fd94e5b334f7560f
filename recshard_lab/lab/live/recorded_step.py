"""RecordedStep: one training step of the launched ranks, with the tensors that every stage handed to the next one.

Shape letters: B samples of a rank, D columns of a block, N ids, S bags of a source rank, U distinct ids, W ranks,
d columns of a shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.launcher import LaunchError
from recshard_lab.sharding import ShardingPlan

STAGES = {
    "batch": "Local batch",
    "ids_sent": "Input dist: ids leave",
    "ids_arrived": "Input dist: ids arrive",
    "lookup": "Lookup",
    "partial_rows": "Partial rows",
    "output": "Output dist",
    "dense": "Dense layers and loss",
    "gradient": "Gradient of the output",
    "gradients_arrived": "Gradients arrive",
    "optimizer": "Optimizer",
}
"""The stages in the order of the step, and their titles."""

_RANK_SIDE = "__import__('recshard_lab.lab.live.record_step', fromlist=['live'])"


@dataclass(frozen=True)
class BlockInfo:
    """One (table, feature) pair: columns ``[start, start + dim)`` of the output."""

    table: str
    feature: str
    start: int
    dim: int
    mean: bool


@dataclass(frozen=True)
class ShardInfo:
    """Which block's ids a shard serves: rows ``[r0, r1)`` and columns ``[c0, c1)`` of the table, on one rank."""

    block: int
    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    replicated: bool


@dataclass(frozen=True, eq=False)
class SourceRows:
    """What one shard feature received from one rank, and what it computed of it.

    Attributes:
        ids: ``[N]`` counted from the shard's first row.
        lengths: ``[S]`` ids of each bag; None where distinct ids arrived instead of bags.
        rows: ``[S, d]`` pooled rows, without bags ``[N, d]`` rows of the ids. None of a replicated shard for other
            ranks, which look up their own batches.
        grads: ``[S, d]`` or ``[N, d]``: their gradients as the kernel got them, averaged over ranks.
    """

    ids: np.ndarray
    lengths: np.ndarray | None
    rows: np.ndarray | None
    grads: np.ndarray


@dataclass(frozen=True, eq=False)
class ShardFeatureRecord:
    """One shard feature of a rank during the step.

    Attributes:
        shard: what it serves.
        sources: by source rank.
        touched: ``[U]`` distinct ids that were looked up, counted from the shard's first row.
        before: ``[U, d]`` their rows as the lookup read them.
        after: ``[U, d]`` the same rows after the optimizer.
    """

    shard: ShardInfo
    sources: tuple[SourceRows, ...]
    touched: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True, eq=False)
class RankRecord:
    """One rank's part of the step.

    Attributes:
        batch_size: B.
        batch: feature -> lengths ``[B]`` and ids ``[N]`` of the local batch.
        sent: for each shard feature of every rank, rank after rank: its ids in the message, counted from the shard's
            first row. Empty on one rank, which sends nothing.
        shard_features: those of this rank.
        output: ``[B, output width]``.
        grad: ``[B, output width]`` gradient of this rank's loss.
        loss: of this rank.
        traffic: ``(label, bytes to each rank, ms)`` of each collective, as the trace counted it.
        ms: stage -> milliseconds between the records of this rank.
    """

    batch_size: int
    batch: dict[str, tuple[np.ndarray, np.ndarray]]
    sent: tuple[tuple[ShardInfo, np.ndarray], ...]
    shard_features: tuple[ShardFeatureRecord, ...]
    output: np.ndarray
    grad: np.ndarray
    loss: float
    traffic: tuple[tuple[str, tuple[int, ...], float], ...]
    ms: dict[str, float]


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One training step of one collection of pooled tables, on all ranks.

    Attributes:
        plan: of the tables.
        path: module path of the collection.
        blocks: columns of its output.
        ranks: what each rank recorded.
        dense_parameters: number of parameters of the dense layers.
        dense_stepped: whether an optimizer stepped them.
        name: of the plan, where several are compared.
        times_note: what to print beside the times, see `Ranks.times_note`.
    """

    plan: ShardingPlan
    path: str
    blocks: tuple[BlockInfo, ...]
    ranks: tuple[RankRecord, ...]
    dense_parameters: int = 0
    dense_stepped: bool = False
    name: str = ""
    times_note: str = ""

    @classmethod
    def of(cls, found: Sequence[dict[str, Any]], name: str = "", times_note: str = "") -> RecordedStep:
        """From what `record_step` returned on every rank."""
        first = found[0]
        return cls(
            ShardingPlan.from_json(first["plan"]),
            first["path"],
            tuple(first["blocks"]),
            tuple(one["record"] for one in found),
            first["dense_parameters"],
            first["dense_stepped"],
            name,
            times_note,
        )

    @property
    def world_size(self) -> int:
        """W."""
        return len(self.ranks)

    @cached_property
    def schemes(self) -> dict[str, str]:
        """Table -> its scheme."""
        return {name: sharding.sharding_type for name, sharding in self.plan.tables().items()}

    def traffic(self, stage: str) -> np.ndarray:
        """``[W, W]`` bytes of a stage, from row to column, with those that stay on the rank."""
        found = np.zeros((self.world_size,) * 2, dtype=np.int64)
        for rank, record in enumerate(self.ranks):
            for label, bytes_to, _ in record.traffic:
                if stage_of(label) == stage:
                    found[rank] += np.array(bytes_to)
        return found

    def ms(self, stage: str) -> float:
        """Milliseconds of a stage on the slowest rank."""
        return max((record.ms.get(stage, 0.0) for record in self.ranks), default=0.0)


def stage_of(label: str) -> str:
    """The stage to which a collective belongs, by its label in the trace.

    >>> stage_of("output_dist_backward/rows"), stage_of("dense")
    ('gradients_arrived', 'dense')
    """
    known = {
        "input_dist": "ids_arrived",
        "output_dist": "output",
        "output_dist_backward": "gradients_arrived",
        "input_dist_backward": "gradients_arrived",
        "row_norms": "optimizer",
    }
    return known.get(label.split("/")[0], "dense")


def record(
    ranks: Any,
    model: str,
    batch: str,
    *,
    loss: str | None = None,
    optimizer: str | None = None,
    path: str | None = None,
) -> RecordedStep:
    """Trains one step on the launched ranks and records it.

    Args:
        ranks: the launched session.
        model: name of a `DistributedModelParallel` on the ranks.
        batch: expression on the ranks for the argument of the model.
        loss: expression on the ranks for a function of the model's output that returns the loss. Left out, the model
            returns its loss, alone or first in a tuple.
        optimizer: name of the torch optimizer that steps the dense layers.
        path: module path of the collection. Left out, the model's only collection.

    Raises:
        LaunchError: the ranks have ended. RankError: a rank raised, such as for a name that it does not have.
        ValueError: a name is not text.
    """
    call = _call("record_step", model, batch, loss, optimizer, path)
    return RecordedStep.of(_pull(ranks, model, call), times_note=ranks.times_note)


def record_under(
    ranks: Any,
    plans: dict[str, ShardingPlan],
    model: str,
    batch: str,
    *,
    loss: str | None = None,
    optimizer: str | None = None,
    path: str | None = None,
) -> list[RecordedStep]:
    """Records the same step under several plans, from the same weights. Then restores plan, weights and states.

    Args:
        plans: name -> plan. Tables that a plan does not name keep their shards.
        ranks, model, batch, loss, optimizer, path: as for `record`.

    Raises:
        As `record`. RankError: a rank refused a plan.
    """
    texts = {name: plan.to_json() for name, plan in plans.items()}
    call = _call("record_under", model, batch, loss, optimizer, path, repr(texts))
    found = _pull(ranks, model, call)
    return [RecordedStep.of([one[name] for one in found], name=name, times_note=ranks.times_note) for name in plans]


def _call(
    function: str,
    model: str,
    batch: str,
    loss: str | None,
    optimizer: str | None,
    path: str | None,
    *more: str,
) -> str:
    for name, value in {"model": model, "batch": batch, "loss": loss, "optimizer": optimizer}.items():
        if not isinstance(value, str) and not (value is None and name in ("loss", "optimizer")):
            raise ValueError(
                f"{name} must be text, an expression on the ranks, got {value!r:.60}. Fix: {name}={name!r}, and "
                f"define {name} on the ranks"
            )
    return f"{_RANK_SIDE}.{function}({', '.join([model, batch, str(loss), str(optimizer), repr(path), *more])})"


def _pull(ranks: Any, model: str, call: str) -> list[dict[str, Any]]:
    if not hasattr(ranks, "pull"):
        raise ValueError(f"ranks must be a launched session, got {ranks!r:.60}. Fix: ranks = launch(2)")
    if gone := BoundRanks.of(ranks).gone(model):
        raise LaunchError(gone)
    found: list[dict[str, Any]] = ranks.eval(call)
    return found
