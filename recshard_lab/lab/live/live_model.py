"""LiveModel: the notebook's handle of a model on the launched ranks: its plan, resharding and training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.measure import TIMED, WARM_UP, Measured, other_programs
from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.launcher import LaunchError
from recshard_lab.sharding import ShardingPlan

EQUAL = 1e-5  # of the largest output: rounding by another order of the same fp32 sums
_RANK_SIDE = "__import__('recshard_lab.lab.live.on_ranks', fromlist=['live'])"


@dataclass(frozen=True)
class Proof:
    """The cost of a live resharding, and whether the model is the same afterwards.

    Attributes:
        ms: of the slowest rank.
        bytes_moved: between ranks, over all ranks.
        weights_equal: whether every table has the same weights as before, bit for bit.
        outputs_apart: largest difference of the outputs for one batch, relative to the largest output.
    """

    ms: float
    bytes_moved: int
    weights_equal: bool
    outputs_apart: float

    @property
    def same(self) -> bool:
        """Whether weights are equal, and outputs equal up to the rounding of fp32 sums."""
        return self.weights_equal and self.outputs_apart <= EQUAL


class LiveModel:
    """A model on the ranks.

    Args:
        ranks: the launched session.
        model: name of the model on the ranks, a `DistributedModelParallel`.
        step: name of a function on the ranks that runs one training step and returns its loss.
        optimizers: name of a list of torch optimizers on the ranks, if tables use the dense kernel.

    Attributes:
        plan: the current plan.
        tables: their configs.
        losses: of every step trained by this object, on rank 0.
        switched: numbers of those steps before each change of the plan.
        proof: of the last resharding; None before.
        measured: the median of the last 10 steps under the current plan, without its first 3 if there are more; None
            without steps.

    Raises:
        LaunchError: the ranks have ended. RankError: the ranks have no model of this name.
        ValueError: it has no embedding collection.
    """

    def __init__(
        self, ranks: Any, model: str = "model", step: str | None = None, optimizers: str | None = None
    ) -> None:
        self.ranks, self.model, self.step, self.optimizers = ranks, model, step, optimizers
        self.bound = BoundRanks.of(ranks)
        found = self._on_ranks("look")
        by_path: dict[str, list[BaseEmbeddingConfig]] = found[0]["tables"]
        self.tables = [table for tables in by_path.values() for table in tables]
        if not self.tables:
            raise ValueError(f"{model} on the ranks has no embedding collection, so nothing can be resharded")
        self.path_of = {table.name: path for path, tables in by_path.items() for table in tables}
        self.losses: list[float] = []
        self.switched: list[int] = []
        self.proof: Proof | None = None
        self.measured: Measured | None = None
        self._take(ShardingPlan.from_json(found[0]["plan"]), found)

    @property
    def gone(self) -> str:
        """Why the model is gone and what to do, in one line; empty while its ranks run."""
        return self.bound.gone(self.model)

    def reshard(self, plan: ShardingPlan) -> Proof:
        """Moves the tables to `plan` in place, and checks that nothing else changed.

        Tables that are not in `plan` keep their placement.

        Raises:
            LaunchError: the ranks have ended. PlanError: the plan is not valid. RankError: a rank refused it; the
                model is as before.
        """
        whole = {path: {**tables, **plan.plan.get(path, {})} for path, tables in self.plan.plan.items()}
        plan = ShardingPlan({**plan.plan, **whole})  # type: ignore[dict-item]
        plan = plan.resolved(self.tables, self.ranks.world_size, self.ranks.local_world_size)
        plan.validate(self.tables, self.ranks.world_size)
        more = [self.optimizers] if self.optimizers else []
        found = self._on_ranks("move_to", repr(plan.to_json()), *more)
        self.proof = Proof(
            ms=max(one["ms"] for one in found),
            bytes_moved=found[0]["bytes_moved"],
            weights_equal=all(same for one in found for same in one["weights"].values()),
            outputs_apart=max(one["outputs_apart"] for one in found),
        )
        self.switched.append(len(self.losses))
        self._take(plan, self._on_ranks("look"))
        return self.proof

    def train(self, steps: int) -> list[float]:
        """Trains `steps` steps, measures them and returns their losses on rank 0.

        Raises:
            LaunchError: the ranks have ended. ValueError: no `step` was named, or `steps` is not positive.
        """
        if self.step is None:
            raise ValueError('no training step was named. Fix: step="train_step"')
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps!r}")
        with other_programs(self.ranks) as others:
            found = self._on_ranks("train_on", self.step, repr(steps))
        self.losses += found[0]["losses"]
        for spent, one in zip(self._spent, found, strict=True):
            spent += one["spent"]
            del spent[: -WARM_UP - TIMED]
        timed = [spent[WARM_UP:] or spent for spent in self._spent]
        found = [{**one, "step_ms": float(np.median(ms))} for one, ms in zip(found, timed, strict=True)]
        self.measured = replace(Measured.of(found, steps, self.backends, self.ranks.times_note), others=others())
        return list(found[0]["losses"])

    def _on_ranks(self, function: str, *arguments: str) -> list[dict[str, Any]]:
        """Calls a function of `on_ranks` on every rank; arguments are expressions there."""
        if gone := self.gone:
            raise LaunchError(gone)
        found: list[dict[str, Any]] = self.ranks.eval(f"{_RANK_SIDE}.{function}({', '.join([self.model, *arguments])})")
        return found

    def _take(self, plan: ShardingPlan, found: list[dict[str, Any]]) -> None:
        self.plan = plan
        self.backends: dict[str, str] = found[0]["backends"]
        self.measured = None
        self._spent: list[list[float]] = [[] for _ in found]  # ms of the last steps under this plan, by rank
