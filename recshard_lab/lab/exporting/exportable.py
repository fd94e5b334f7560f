"""What there is to export of a thing, before anybody says as which kind of file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.compare.measure import Measured
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.report import Section
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import PlanError, ShardingPlan, Topology
from recshard_lab.sharding.plan.sharding_plan import Tables


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan with what is known of it: one of those that a page compares.

    Args:
        name: what a reader calls it: "Your plan".
        plan: None where there is none; `problem` says why.
        tables: their configs, or module path -> configs.
        topology: the ranks it is for.
        workload: the step.
        estimate: what it is predicted to cost.
        measured: what it was measured to cost, as `measure_plan` gives it.
        problem: why it does not fit, or why there is none.
        more: what else views of it are drawn from, by the names of their arguments: ``{"search": trace}``.
    """

    name: str
    plan: ShardingPlan | None
    tables: Tables
    topology: Topology
    workload: Workload
    estimate: Estimate | None = None
    measured: Any = None
    problem: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    @checks_arguments
    def of(
        cls,
        name: str,
        plan: ShardingPlan,
        tables: Tables | None = None,
        topology: Topology | None = None,
        workload: Workload | None = None,
        estimated: Estimate | None = None,
        measured: Measured | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> Candidate:
        """A plan; what is not said of it is what its planner knows, and it is predicted where nobody did.

        Raises:
            PlanError: no planner made it, and tables or topology are not given.
        """
        known = plan.planned
        if known is None and (tables is None or topology is None):
            lacking = ", ".join(
                f"{n}=..." for n, value in (("tables", tables), ("topology", topology)) if value is None
            )
            raise PlanError(
                f"no planner made this plan, so nobody knows what it is for. Fix: export(..., {lacking}); "
                f"as .json it needs neither"
            )
        if known is not None:
            tables = known.tables if tables is None else tables
            topology = topology or known.planner.topology
            workload = workload or known.planner.workload
        assert tables is not None
        assert topology is not None
        workload = workload or Workload()
        plan = plan.resolved(tables, topology.world_size, topology.local_world_size)
        if estimated is None:
            same = known is not None and topology == known.planner.topology and workload == known.planner.workload
            own = known.estimate(plan) if known is not None and same else None
            estimated = own or estimate(plan, tables, topology, workload)
        problem = "" if estimated.fits else "It does not fit: see Memory."
        return cls(name, plan, tables, topology, workload, estimated, measured, problem, more or {})

    @property
    def configs(self) -> list[BaseEmbeddingConfig]:
        """The tables, without their modules."""
        if isinstance(self.tables, Mapping):
            return [table for own in self.tables.values() for table in own]
        return list(self.tables)

    def script(self, model: str | None = None) -> str:
        """A script for torchrun that trains under the plan.

        Raises:
            PlanError: there is no plan, or a table that a script cannot say.
        """
        if self.plan is None:
            raise PlanError(f"{self.name}: there is no plan to run. {self.problem}")
        odd = next((table.name for table in self.configs if table.init_fn is not None), None)
        if odd is not None and model is None:  # a planner keeps no functions, so that its script would not tell
            raise PlanError(
                f"table {odd!r} has an init_fn, which a script cannot say. Fix: "
                f"model='package.module:factory', which makes it"
            )
        if self.plan.planned is not None:
            return self.plan.to_script(model)
        planner = EmbeddingShardingPlanner(self.topology, workload=self.workload)
        return self.plan.to_script(model, planner=planner, tables=self.tables)


@dataclass(frozen=True, eq=False)
class Exportable:
    """A page's contents, its pictures, and the plans that it is about.

    Args:
        title: of the page.
        sections: of the page, without the last ones that every page has (the Python, the files, the versions).
        subtitle: a sentence under the title.
        note: the page's last line: measured or predicted, on what.
        python: what makes the same, to be copied.
        pictures: heading -> views, one column each of the picture files.
        candidates: the plans.
        name: of the files, without suffix; made of the title where left out.
    """

    title: str
    sections: Sequence[Section]
    subtitle: str = ""
    note: str = ""
    python: str = ""
    pictures: Mapping[str, Sequence[View]] = field(default_factory=dict)
    candidates: Sequence[Candidate] = ()
    name: str = ""

    @property
    def stem(self) -> str:
        """A file's name for it.

        >>> Exportable("Placement: 3 tables, 2 ranks", []).stem
        'placement_3_tables_2_ranks'
        """
        return stem_of(self.name or self.title)

    @property
    def planned(self) -> list[Candidate]:
        """The candidates that have a plan."""
        return [each for each in self.candidates if each.plan is not None]

    @property
    def stems(self) -> dict[str, Candidate]:
        """File name without suffix -> the plan that it holds."""
        found = self.planned
        if len(found) == 1:
            return {"plan": found[0]}
        made: dict[str, Candidate] = {}
        for each in found:
            stem, count = stem_of(each.name), 1
            while stem in made:
                count += 1
                stem = f"{stem_of(each.name)}_{count}"
            made[stem] = each
        return made

    def candidate(self, name: str = "") -> Candidate:
        """The plan of a name, or the only one.

        Raises:
            ValueError: no plan, none of that name, or several and no name.
        """
        found = self.planned
        names = ", ".join(repr(each.name) for each in found)
        if not found:
            raise ValueError(f"{self.title}: there is no plan in it to write. Fix: .html, .svg or .png")
        if name:
            found = [each for each in found if each.name == name]
            if not found:
                raise ValueError(f"there is no plan {name!r} in it; there are: {names}")
        if len(found) > 1:
            raise ValueError(
                f"there are {len(found)} plans in it ({names}), and such a file holds one. Fix: "
                f"plan={found[0].name!r}, or a folder or .zip, which hold them all"
            )
        return found[0]


def stem_of(words: str) -> str:
    """Words as a file's name.

    >>> stem_of("Your plan (4 ranks)"), stem_of("…")
    ('your_plan_4_ranks', 'export')
    """
    return re.sub(r"[^a-z0-9]+", "_", words.lower().replace("'", "")).strip("_")[:60] or "export"
