"""What a planner's search looked at: whole plans in the order in which they were found, as step and memory.

Step and memory of every plan kept are the cost model's own, those that `estimate` gives for it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.search.options import Placement
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan
from recshard_lab.text_table import Printable, TextTable

STAGES = {
    "placed": "tables placed one after the other",
    "annealed": "after a sweep of annealing over all tables",
    "moved": "a few tables moved",
    "exchanged": "two tables exchanged",
    "rerouted": "all tables under another route",
    "proven": "the MILP's",
    "chosen": "the plan chosen",
    "single scheme": "every table under one scheme",
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A whole plan.

    Attributes:
        number: which of the plans looked at, from 0; -1 for those that were made for comparison.
        stage: how it came about, a key of `STAGES`.
        step_ms: predicted step.
        memory_bytes: that the fullest rank holds.
        fits: whether every rank has room, in both of its memories where it has two.
        placements: of every table, in the order of the planner's tables.
        elsewhere: of a plan under a single scheme, the number of tables that it cannot split, which use other schemes.
    """

    number: int
    stage: str
    step_ms: float
    memory_bytes: float
    fits: bool
    placements: tuple[Placement, ...] = field(repr=False)
    elsewhere: int = 0

    @property
    def schemes(self) -> dict[str, int]:
        """Scheme -> number of tables, in descending order."""
        return dict(Counter(placement.option.proposal.scheme for placement in self.placements).most_common())

    @property
    def text(self) -> str:
        """The schemes in a few words."""
        return ", ".join(f"{count} {scheme}" for scheme, count in self.schemes.items())


@dataclass(frozen=True, eq=False)
class SearchTrace(Printable):
    """The plans that a planner looked at, as ``plan.search`` of an ``EmbeddingShardingPlanner(keep_search=True)``.

    Whole plans are kept: those after each placement of all tables, each sweep of annealing, each move and each
    exchange. Ways to place one table that were scored and not taken are not among them.

    Attributes:
        candidates: in the order in which they were found; the chosen plan is one of them.
        chosen: None if no plan fits.
        single_schemes: scheme -> every table under it, placed as the planner places, for comparison; where that does
            not fit, as if there were room. The search need not have come by it.
        lower_bound: `ShardingPlan.bound_ms`. None if no plan fits.
        usable_bytes: of a rank, its capacity without the reserve.
        seen: how many plans were looked at.
        every: of those, each one of this many was kept, with all that were the best so far or that no other was better
            than in both step and memory.
        owners: module path and table name of each placement.
    """

    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    single_schemes: dict[str, Candidate]
    lower_bound: float | None
    usable_bytes: float
    seen: int
    every: int
    owners: tuple[tuple[str, str], ...] = field(repr=False)

    def plan(self, candidate: Candidate) -> ShardingPlan:
        """A candidate as a plan, to be estimated, drawn or run."""
        plan: dict[str, EmbeddingModuleShardingPlan] = {path: EmbeddingModuleShardingPlan() for path, _ in self.owners}
        for (path, name), placement in zip(self.owners, candidate.placements, strict=True):
            plan[path][name] = placement.sharding()
        return ShardingPlan(plan)

    def frontier(self) -> list[Candidate]:
        """The plans that fit and that no other that fits is as good as in step and memory; the fastest first."""
        fitting = [one for one in (*self.candidates, *self.single_schemes.values()) if one.fits]
        values = np.array([(one.step_ms, one.memory_bytes) for one in fitting]).reshape(-1, 2)
        return [fitting[at] for at in frontier_of(values)]

    def best_so_far(self) -> list[Candidate]:
        """The plans that fit and were faster than all before them."""
        found: list[Candidate] = []
        for one in self.candidates:
            if one.fits and (not found or one.step_ms < found[-1].step_ms):
                found.append(one)
        return found

    @property
    def thinned(self) -> str:
        """What of the search is here, in words."""
        if self.every == 1:
            return f"All {self.seen:,} plans looked at."
        return (
            f"{len(self.candidates):,} of {self.seen:,} plans looked at: one in {self.every:,}, all that were the best "
            f"so far, and the frontier."
        )

    def records(self) -> list[dict[str, Any]]:
        """One dict for each plan kept, in the order of the search, then the single schemes."""
        best, frontier = set(map(id, self.best_so_far())), set(map(id, self.frontier()))
        named = {id(one): scheme for scheme, one in self.single_schemes.items()}
        return [
            {
                "number": one.number,
                "stage": one.stage,
                "scheme": named.get(id(one), ""),
                "step_ms": one.step_ms,
                "memory_bytes": one.memory_bytes,
                "fits": one.fits,
                "best_so_far": id(one) in best,
                "frontier": id(one) in frontier,
                "chosen": one is self.chosen,
                "schemes": one.schemes,
            }
            for one in (*self.candidates, *self.single_schemes.values())
        ]

    def parts(self) -> list[str | TextTable]:
        fitting = sum(one.fits for one in self.candidates)
        found = f"{self.thinned} {fitting:,} of them fit the {gigabytes(self.usable_bytes)} usable per rank."
        chosen = [] if self.chosen is None else [f"Chosen: no. {self.chosen.number:,}, {self.chosen.step_ms:.3f} ms."]
        if chosen and self.lower_bound:
            chosen.append(f"No plan of the proposed shards is shorter than {self.lower_bound:.3f} ms.")
        best = [
            (f"no. {one.number:,}", one.stage, f"{one.step_ms:.3f}", gigabytes(one.memory_bytes), one.text)
            for one in self.best_so_far()
        ]
        alone = [
            (
                scheme,
                "" if one.fits else "does not fit",
                f"{one.step_ms:.3f}",
                gigabytes(one.memory_bytes),
                f"{one.elsewhere} tables under others" if one.elsewhere else "",
            )
            for scheme, one in self.single_schemes.items()
        ]
        heads = ("best so far", "found by", "ms", "fullest rank", "tables under")
        return [
            " ".join([found, *chosen]),
            TextTable(heads, best, widest=(14, 14, 12, 14, 46)),
            TextTable(("every table under", "", "ms", "fullest rank", ""), alone, widest=(20, 14, 12, 14, 30)),
        ]


def frontier_of(values: np.ndarray) -> list[int]:
    """Of ``[n, 2]`` values, of which less is better, those that no other is as good as in both; the least first.

    >>> frontier_of(np.array([[3.0, 1.0], [1.0, 5.0], [2.0, 5.0], [1.0, 5.0]]))
    [1, 0]
    """
    found: list[int] = []
    least = np.inf
    for at in np.lexsort((values[:, 1], values[:, 0])).tolist():
        if values[at, 1] < least:
            found.append(at)
            least = float(values[at, 1])
    return found
