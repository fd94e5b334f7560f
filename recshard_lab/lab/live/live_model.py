"""LiveModel: a model that lives on the launched ranks, as the notebook sees it: where it lies, reshard it, train it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.measure import TIMED, WARM_UP, Measured, other_programs
from recshard_lab.lab.live.ranks_gone import BoundRanks
from recshard_lab.launcher import LaunchError
from recshard_lab.sharding import ShardingPlan

EQUAL = 1e-5  # of the largest output: what another order of the same fp32 sums may make
_RANK_SIDE = "__import__('recshard_lab.lab.live.on_ranks', fromlist=['live'])"


@dataclass(frozen=True)
class Proof:
    """What a live resharding cost, and what it left as it was.

    Attributes:
        ms: of the slowest rank.
        bytes_moved: from one rank to another, over all ranks.
        weights_equal: whether every table has the same weights as before, bit for bit.
        outputs_apart: largest difference of the outputs for one batch, as a share of the largest.
    """

    ms: float
    bytes_moved: int
    weights_equal: bool
    outputs_apart: float

    @property
    def same(self) -> bool:
        """Whether it is the same model: equal weights, and outputs equal to the rounding of fp32 sums."""
        return self.weights_equal and self.outputs_apart <= EQUAL


class LiveModel:
    """A model on the ranks.

    Args:
        ranks: the launched session.
        model: how the model is called on the ranks: a `DistributedModelParallel`.
        step: how one training step is called there, a function without arguments that returns its loss.
        optimizers: how a list of torch optimizers is called there, where tables lie on the dense kernel.

    Attributes:
        plan: where the tables lie now.
        tables: their configs.
        losses: of every step trained through here, of rank 0.
        switched: after how many of those steps the plan changed.
        proof: of the last resharding; None before.
        measured: the median of the last 10 steps under the present plan, its first 3 left out once there are more;
            None where there were none.

    Raises:
        LaunchError: the ranks have ended. RankError: there is no such model on the ranks.
        ValueError: it holds no embedding collection.
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
            raise ValueError(f"{model} on the ranks holds no embedding collection: there is nothing to reshard")
        self.path_of = {table.name: path for path, tables in by_path.items() for table in tables}
        self.losses: list[float] = []
        self.switched: list[int] = []
        self.proof: Proof | None = None
        self.measured: Measured | None = None
        self._take(ShardingPlan.from_json(found[0]["plan"]), found)

    @property
    def gone(self) -> str:
        """Why the model is gone and what to do, in one line; empty while the ranks that hold it run."""
        return self.bound.gone(self.model)

    def reshard(self, plan: ShardingPlan) -> Proof:
        """Moves the tables to `plan` while the model lives, and proves that nothing else changed.

        Tables that it does not name stay where they lie.

        Raises:
            LaunchError: the ranks have ended. PlanError: the plan is not valid. RankError: a rank refused it; the
                tables stay where they were.
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
        """Trains `steps` steps and measures them; their losses, of rank 0.

        Raises:
            LaunchError: the ranks have ended. ValueError: no step is known, or `steps` is not positive.
        """
        if self.step is None:
            raise ValueError('no training step is known: name one, as in step="train_step"')
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
        """Calls a function of `lab.live` on every rank; arguments are expressions there."""
        if gone := self.gone:
            raise LaunchError(gone)
        found: list[dict[str, Any]] = self.ranks.pull(f"{_RANK_SIDE}.{function}({', '.join([self.model, *arguments])})")
        return found

    def _take(self, plan: ShardingPlan, found: list[dict[str, Any]]) -> None:
        self.plan = plan
        self.backends: dict[str, str] = found[0]["backends"]
        self.measured = None
        self._spent: list[list[float]] = [[] for _ in found]  # ms of the last steps under this plan, by rank
