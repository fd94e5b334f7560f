"""Answers about a plan: why a table is placed where it is, what differs from another plan, what a change would cost."""

from dataclasses import dataclass, field
from typing import Any

from recshard_lab.planner.answers.text import gigabytes, milliseconds, sharding_text
from recshard_lab.planner.model.estimate import Estimate
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.sharding.export.plan_table import ranks_text, shards_text
from recshard_lab.text_table import Printable, TextTable

LEAST_MS = 1e-6  # a smaller difference between two steps counts as none


@dataclass(frozen=True)
class PhaseShare:
    """One phase of a step on its slowest rank, and the share that one table causes.

    Attributes:
        phase: its name.
        rank: the slowest; all others wait for it. If the cost model has no waiting, the rank with the most work.
        ms: its time on that rank.
        table_ms: the part that grows with this table's ids and bytes. The rest is other tables' and fixed costs.
    """

    phase: str
    rank: int
    ms: float
    table_ms: float

    @property
    def share(self) -> float:
        """`table_ms` as a share of `ms`."""
        return self.table_ms / self.ms if self.ms > 0 else 0.0


@dataclass(frozen=True)
class Alternative:
    """Another way to place one table, with all other tables where they are.

    Attributes:
        sharding: the best placement found for this scheme and output path.
        step_ms: predicted step of the plan with it; more_ms: its difference from the plan's own step.
        memory_bytes: held by the fullest rank.
        fits: whether every rank has room.
        allowed: whether the planner's constraints allow it.
    """

    sharding: ParameterSharding
    step_ms: float
    more_ms: float
    memory_bytes: float
    fits: bool
    allowed: bool

    @property
    def text(self) -> str:
        """Scheme, ranks and output path in a few words."""
        return sharding_text(self.sharding)


@dataclass(frozen=True)
class Explained(Printable):
    """Why one table is placed where it is; `print` it.

    Attributes:
        table: its name.
        sharding: its placement.
        step_ms: predicted step of the plan.
        memory_bytes: held by the fullest rank.
        usable_bytes: of a rank, its capacity without the reserve.
        critical: the longest phase that a plan can change (all but "dense"), on its slowest rank.
        phases: all phases.
        alternatives: the best other placement of every scheme and output path: those that fit first, then by step.
        index_bytes: of the index of a dynamic table, on all its ranks together.
    """

    table: str
    sharding: ParameterSharding
    step_ms: float
    memory_bytes: float
    usable_bytes: float
    critical: PhaseShare
    phases: tuple[PhaseShare, ...]
    alternatives: tuple[Alternative, ...]
    index_bytes: float = 0.0

    @property
    def share(self) -> float:
        """The share of the step that this table causes on the slowest ranks of all phases."""
        return sum(phase.table_ms for phase in self.phases) / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def why(self) -> str:
        """The reason, in a sentence or two."""
        possible = [way for way in self.alternatives if way.fits and way.allowed]
        if possible:
            best, fastest = possible[0], "No allowed alternative is faster while the other tables stay."
            more = milliseconds(abs(best.more_ms))
            if best.more_ms < -LEAST_MS:
                reason = f"The search stopped near the best: {best.text} would be {more} shorter."
            elif best.more_ms > LEAST_MS:
                reason = f"{fastest} The next best, {best.text}, costs {more} more."
            else:
                reason = f"{fastest} {best.text} is as fast."
        elif any(way.allowed for way in self.alternatives):
            reason = "No allowed alternative fits."
        else:
            reason = "Its constraints allow no alternative."
        barred = [way for way in self.alternatives if way.more_ms < -LEAST_MS and not (way.fits and way.allowed)]
        if barred:
            best = min(barred, key=lambda way: way.more_ms)
            bar = "does not fit" if not best.fits else "is not allowed"
            reason += f" {best.text} would be {milliseconds(-best.more_ms)} shorter but {bar}."
        return reason

    def records(self) -> list[dict[str, Any]]:
        """The chosen placement and its alternatives, as dicts."""
        fits = self.memory_bytes <= self.usable_bytes
        chosen = Alternative(self.sharding, self.step_ms, 0.0, self.memory_bytes, fits, True)
        return [
            {
                "scheme": way.sharding.sharding_type,
                "ranks": ranks_text(way.sharding.ranks or []),
                "route": way.sharding.route,
                "shards": shards_text(way.sharding.shards),
                "step_ms": way.step_ms,
                "more_ms": way.more_ms,
                "memory_bytes": way.memory_bytes,
                "fits": way.fits,
                "allowed": way.allowed,
                "chosen": way is chosen,
            }
            for way in (chosen, *self.alternatives)
        ]

    def parts(self) -> list[str | TextTable]:
        at = self.critical
        phases = [(p.phase, str(p.rank), f"{p.ms:.3f}", f"{p.table_ms:.3f}", f"{p.share:.0%}") for p in self.phases]
        ways = []
        for way, line in zip(self.alternatives, self.records()[1:], strict=True):
            note = "does not fit" if not way.fits else "" if way.allowed else "not allowed"
            name = line["scheme"] if line["route"] == "direct" else f"{line['scheme']} by {line['route']}"
            more = f"{way.more_ms:+.3f}"
            ways.append((name, line["ranks"], more, gigabytes(way.memory_bytes), note, line["shards"]))
        return [
            f"{self.table}: {sharding_text(self.sharding)}. {self.why}",
            f"The step takes {milliseconds(self.step_ms)} (predicted). Its longest phase is {at.phase}, "
            f"{milliseconds(at.ms)} on rank {at.rank}. {self.table} causes {at.share:.0%} of that phase and "
            f"{self.share:.0%} of the step.",
            f"The fullest rank holds {gigabytes(self.memory_bytes)} of {gigabytes(self.usable_bytes)} usable.",
            *[f"The index of {self.table} takes {gigabytes(self.index_bytes)} on its ranks."] * (self.index_bytes > 0),
            TextTable(
                ("phase", "slowest rank", "ms", f"of {self.table}, ms", "share"),
                phases,
                caption="Phases of the step",
                widest=(20, 12, 12, 28, 5),
            ),
            TextTable(
                ("alternative", "ranks", "step, ms", "fullest rank", "", "shards"),
                ways,
                caption=f"Other placements of {self.table}, and how they change the step",
                widest=(34, 14, 10, 12, 12, 28),
            ),
        ]


@dataclass(frozen=True)
class TableChange:
    """One table in two plans.

    Attributes:
        table: its name, with its module's path if there are several modules.
        before, after: its placement; None in a plan that does not name it.
        changed: what differs, of "scheme", "ranks", "shards", "route", "kernel"; empty if nothing does.
        moved_bytes: weights and optimizer state that move from one rank to another, over all ranks.
        more_ms: difference of the first plan's step if only this table were placed as in the second. None if only one
            plan names the table, or if the plans have different numbers of ranks. These differences do not add up to
            the cost of all changes: tables share phases, and only the slowest rank counts.
    """

    table: str
    before: ParameterSharding | None
    after: ParameterSharding | None
    changed: tuple[str, ...]
    moved_bytes: int
    more_ms: float | None = None


@dataclass(frozen=True)
class PlanDiff(Printable):
    """What changes from one plan to another; `print` it.

    Attributes:
        tables: every table of either plan.
        before, after: predicted costs of the plans.
    """

    tables: tuple[TableChange, ...]
    before: Estimate = field(repr=False)
    after: Estimate = field(repr=False)

    @property
    def changed(self) -> tuple[TableChange, ...]:
        """The tables that differ."""
        return tuple(change for change in self.tables if change.changed)

    @property
    def moved_bytes(self) -> int:
        """Bytes that move from one rank to another, of all tables."""
        return sum(change.moved_bytes for change in self.tables)

    def records(self) -> list[dict[str, Any]]:
        """The tables that differ, as dicts."""
        return [
            {
                "table": change.table,
                "changed": ", ".join(change.changed),
                "before": "" if change.before is None else sharding_text(change.before),
                "after": "" if change.after is None else sharding_text(change.after),
                "moved_bytes": change.moved_bytes,
                "more_ms": change.more_ms,
            }
            for change in self.changed
        ]

    def parts(self) -> list[str | TextTable]:
        more = self.after.step_ms / self.before.step_ms - 1 if self.before.step_ms > 0 else 0.0
        full = "" if self.after.fits else " The second plan DOES NOT FIT."
        count = f"{len(self.changed)} of {len(self.tables)} tables change"
        lines = [
            (
                line["table"],
                gigabytes(line["moved_bytes"]),
                "" if line["more_ms"] is None else f"{line['more_ms']:+.3f}",
                line["before"] or "-",
                line["after"] or "-",
            )
            for line in self.records()
        ]
        return [
            f"{count}, {gigabytes(self.moved_bytes)} move between ranks." if self.changed else "No table changes.",
            f"Predicted step {milliseconds(self.before.step_ms)} -> {milliseconds(self.after.step_ms)} ({more:+.1%}); "
            f"the fullest rank holds {gigabytes(self.before.fullest_bytes)} -> {gigabytes(self.after.fullest_bytes)}."
            f"{full}",
            TextTable(
                ("table", "moves", "step, ms", "before", "after"),
                lines,
                caption="How each change alone changes the step (tables share phases, so these do not add up)",
                widest=(24, 10, 10, 30, 30),
            ),
        ]


@dataclass(frozen=True)
class WhyNot(Printable):
    """What a change of constraints would cost; `print` it.

    Attributes:
        requested: table -> the requested constraint in words.
        plan: the shorter of two plans: the planner's under these constraints, and this plan with only these tables
            moved. None if neither fits.
        refusal: the error if no plan exists.
        before, after: predicted costs without and with the change.
        diff: the changes from the one plan to the other.
    """

    requested: dict[str, str]
    plan: ShardingPlan | None = field(repr=False)
    refusal: str | None
    before: Estimate = field(repr=False)
    after: Estimate | None = field(repr=False)
    diff: PlanDiff | None = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether a plan exists."""
        return self.plan is not None

    @property
    def more_ms(self) -> float | None:
        """Difference of the steps, negative if the requested plan is shorter; None if no plan exists."""
        return None if self.after is None else self.after.step_ms - self.before.step_ms

    def records(self) -> list[dict[str, Any]]:
        """The two plans as dicts. Only the present plan if no plan meets the constraints."""
        found = []
        for name, costs in (("now", self.before), ("as requested", self.after)):
            if costs is not None:
                changeable = (entry for entry in slowest_ranks(costs) if entry[0] != "dense")
                phase, rank, ms = max(changeable, key=lambda entry: entry[2])
                found.append(
                    {
                        "plan": name,
                        "step_ms": costs.step_ms,
                        "memory_bytes": costs.fullest_bytes,
                        "usable_bytes": float(costs.usable_bytes.max()),
                        "critical_phase": phase,
                        "critical_rank": rank,
                        "critical_ms": ms,
                    }
                )
        return found

    def parts(self) -> list[str | TextTable]:
        names = ", ".join(f"{table} {words}" for table, words in self.requested.items())
        lines = [
            (
                line["plan"],
                milliseconds(line["step_ms"]),
                f"{gigabytes(line['memory_bytes'])} of {gigabytes(line['usable_bytes'])}",
                f"{line['critical_phase']} on rank {line['critical_rank']}, {milliseconds(line['critical_ms'])}",
            )
            for line in self.records()
        ]
        costs = TextTable(("plan", "step", "fullest rank", "longest phase"), lines, widest=(13, 14, 24, 40))
        if self.diff is None or self.more_ms is None:
            return [f"No plan has {names}: {self.refusal}", costs]
        sentences, changes = self.diff.parts()[:-1], self.diff.parts()[-1]
        if not self.diff.changed:
            return [f"The plan already has {names}.", costs]
        more = milliseconds(abs(self.more_ms))
        verdict = f"{more} longer" if self.more_ms > 0 else f"{more} shorter. The search stopped before this plan"
        verdict = "as long as now" if abs(self.more_ms) <= LEAST_MS else verdict
        return [f"With {names} the predicted step is {verdict}.", *sentences, costs, changes]


def slowest_ranks(costs: Estimate) -> list[tuple[str, int, float]]:
    """Each phase, its slowest rank (if ranks do not wait for each other, the one with the most work), its ms there."""
    ranks = costs.ms.argmax(axis=0).tolist() if costs.waits else [costs.critical_rank] * len(costs.phases)
    return [
        (phase, rank, float(costs.ms[rank, p])) for p, (phase, rank) in enumerate(zip(costs.phases, ranks, strict=True))
    ]
