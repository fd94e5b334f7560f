"""The planner's predictions of many cases for many topologies, which a fit needs thousands of times.

Cases of one optimizer become one cost model. Its tables are those of all cases, and its loads have one more axis.

Shape letters: C cases, P phases, W ranks, K loads, n rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from recshard_lab.calibration.cases import Case
from recshard_lab.planner.model.cost import PHASES, CostModel
from recshard_lab.planner.model.estimate import PlanRects, plan_rects
from recshard_lab.planner.workload import Array, TableLoads
from recshard_lab.sharding import Topology


@dataclass(frozen=True, eq=False)
class _Group:
    """Cases of one optimizer."""

    cases: NDArray[np.intp]  # [c] their indices among all cases
    model: CostModel  # of the tables of all cases
    step_bytes: Array  # [T] of each table's case
    rects: PlanRects  # [n] of all cases; their tables are numbered consecutively
    at: NDArray[np.intp]  # [n] rank + W * case

    def phases(self, topology: Topology) -> Array:
        """``[P, c, W]``."""
        model, count, ranks = self.model.on(topology), len(self.cases), topology.world_size
        model.lookups.step_bytes = self.step_bytes
        rows = [np.bincount(self.at, weights=row, minlength=count * ranks) for row in self.rects.loads(model)]
        return model.phases(np.stack(rows).reshape(-1, count, ranks).astype(float))


class Predictions:
    """The cost model's predictions of cases.

    Args:
        cases: all for the same number of ranks.
        topology: of these ranks; its figures do not matter.
    """

    def __init__(self, cases: Sequence[Case], topology: Topology) -> None:
        self.count = len(cases)
        self.groups = []
        optimizers = [case.model.workload.optimizer for case in cases]
        for optimizer in dict.fromkeys(optimizers):
            numbers = [i for i, own in enumerate(optimizers) if own == optimizer]
            own_cases = [cases[i] for i in numbers]
            models = [CostModel(case.model.tables, topology, case.model.workload) for case in own_cases]
            rects = [plan_rects(topology, case.plan.pairs(list(case.model.tables))) for case in own_cases]
            firsts = np.cumsum([0, *(len(case.model.tables) for case in own_cases)])
            parts = {
                spec.name: np.concatenate([getattr(one, spec.name) for one in rects]) for spec in fields(PlanRects)
            }
            parts["of"] = np.concatenate([one.of + first for one, first in zip(rects, firsts, strict=False)])
            whole = copy(models[0])
            whole.tables = _joined([one.tables for one in models])
            whole.row_shares = [shares for one in models for shares in one.row_shares]
            step_bytes = np.concatenate([one.lookups.step_bytes for one in models])
            at = np.concatenate([one.ranks + i * topology.world_size for i, one in enumerate(rects)])
            self.groups.append(_Group(np.array(numbers), whole, step_bytes, PlanRects(**parts), at))

    def phases(self, topology: Topology) -> Array:
        """``[P, C, W]`` milliseconds."""
        found = np.empty((len(PHASES), self.count, topology.world_size))
        for group in self.groups:
            found[:, group.cases] = group.phases(topology)
        return found

    def step_ms(self, topology: Topology) -> Array:
        """``[C]``."""
        return np.asarray(self.phases(topology).max(axis=-1).sum(axis=0))


def _joined(loads: Sequence[TableLoads]) -> TableLoads:
    names = [spec.name for spec in fields(TableLoads)]
    return TableLoads(**{name: np.concatenate([getattr(one, name) for one in loads]) for name in names})
