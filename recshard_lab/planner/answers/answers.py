"""What the planner answers: why a table lies where it does, what two plans differ in, what a wish would cost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from recshard_lab.planner.answers.shown import Shown
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.model.estimate import Estimate
from recshard_lab.sharding import ParameterSharding, ShardingPlan
from recshard_lab.sharding.export.text_table import ranks_text, shards_text

Tables: TypeAlias = list[tuple[Sequence[int], Sequence[Sequence[str]]]]
LONGEST_RANKS = 24  # of a list of ranks in a sentence; a longer one is counted
LEAST_MS = 1e-6  # steps that differ by less are as long as each other


@dataclass(frozen=True)
class PhaseShare:
    """One phase of a step on its slowest rank, and what a table causes of it.

    Attributes:
        phase: its name.
        rank: the slowest; every other waits for it. Under a cost model in which none waits, the busiest of all.
        ms: how long it takes there.
        table_ms: what grows with this table's ids and bytes there; the rest is other tables' and fixed costs.
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
    """Another way to place one table, all other tables where they are.

    Attributes:
        sharding: the best placement found of this scheme and route.
        step_ms: predicted step of the plan with it; more_ms: beyond the plan's own, negative where it is shorter.
        memory_bytes: that the fullest rank holds.
        fits: whether every rank has room.
        allowed: whether the planner might choose it under its constraints.
    """

    sharding: ParameterSharding
    step_ms: float
    more_ms: float
    memory_bytes: float
    fits: bool
    allowed: bool

    @property
    def text(self) -> str:
        """Scheme, ranks and route in a few words."""
        return sharding_text(self.sharding)


@dataclass(frozen=True)
class Explained(Shown):
    """Why one table lies where it does; `print` it.

    Attributes:
        table: its name.
        sharding: where it lies.
        step_ms: predicted step of the plan.
        memory_bytes: that the fullest rank holds.
        usable_bytes: of a rank, its capacity without the reserve.
        critical: the longest phase that a plan can change ("dense" it cannot), on its slowest rank.
        phases: all phases.
        alternatives: the best other placement of every scheme and route, the cheapest first, those that fit before
            those that do not.
    """

    table: str
    sharding: ParameterSharding
    step_ms: float
    memory_bytes: float
    usable_bytes: float
    critical: PhaseShare
    phases: tuple[PhaseShare, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def share(self) -> float:
        """Of the step, what this table causes on the slowest ranks of all phases."""
        return sum(phase.table_ms for phase in self.phases) / self.step_ms if self.step_ms > 0 else 0.0

    @property
    def why(self) -> str:
        """The reason in a sentence."""
        open_ = [way for way in self.alternatives if way.fits and way.allowed]
        if open_ and open_[0].more_ms < -LEAST_MS:
            reason = (
                f"found by a search that stops near the best: {open_[0].text} would be {_ms(-open_[0].more_ms)} shorter"
            )
        elif open_:
            cost = f"costs {_ms(open_[0].more_ms)} more" if open_[0].more_ms > LEAST_MS else "is as fast"
            reason = (
                "no other way that is allowed is faster while the other tables stay where they are; the next best, "
            )
            reason += f"{open_[0].text}, {cost}"
        elif any(way.allowed for way in self.alternatives):
            reason = "every other way that is allowed does not fit"
        else:
            reason = "its constraints allow nothing else"
        barred = [way for way in self.alternatives if way.more_ms < -LEAST_MS and not (way.fits and way.allowed)]
        if barred:
            best = min(barred, key=lambda way: way.more_ms)
            bar = "does not fit" if not best.fits else "is not allowed"
            reason += f"; {best.text} would be {_ms(-best.more_ms)} shorter but {bar}"
        return reason

    def records(self) -> list[dict[str, Any]]:
        """The chosen way and its alternatives, one dict each."""
        chosen = Alternative(
            self.sharding, self.step_ms, 0.0, self.memory_bytes, self.memory_bytes <= self.usable_bytes, True
        )
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

    def _sentences(self) -> list[str]:
        at = self.critical
        return [
            f"{self.table}: {sharding_text(self.sharding)}. {self.why[0].upper()}{self.why[1:]}.",
            f"Predicted step {_ms(self.step_ms)}; critical: {at.phase} on rank {at.rank}, {_ms(at.ms)}, of which "
            f"{self.table} causes {at.share:.0%}; of the whole step {self.share:.0%}.",
            f"The fullest rank holds {gigabytes(self.memory_bytes)} of {gigabytes(self.usable_bytes)} usable.",
        ]

    def _tables(self) -> Tables:
        phases = [("phase", "slowest rank", "ms", f"{self.table} ms", "share")]
        phases += [(p.phase, str(p.rank), f"{p.ms:.3f}", f"{p.table_ms:.3f}", f"{p.share:.0%}") for p in self.phases]
        ways = [("instead", "ranks", "more ms", "fullest rank", "", "shards")]
        for way, line in zip(self.alternatives, self.records()[1:], strict=True):
            note = "does not fit" if not way.fits else "" if way.allowed else "not allowed"
            name = line["scheme"] if line["route"] == "direct" else f"{line['scheme']} by {line['route']}"
            more = f"{way.more_ms:+.3f}"
            ways.append((name, line["ranks"], more, gigabytes(way.memory_bytes), note, line["shards"]))
        return [((20, 12, 12, 28, 5), phases), ((34, 14, 10, 12, 12, 28), ways)]


@dataclass(frozen=True)
class TableChange:
    """What two plans say of one table.

    Attributes:
        table: its name, with its module's path where there are several modules.
        before, after: where it lies; None in the plan that does not name it.
        changed: of "scheme", "ranks", "shards", "route", "kernel" those that differ; empty where nothing does.
        moved_bytes: weights and optimizer state that go from one rank to another, over all ranks.
        more_ms: how much longer the first plan's step would be with this table alone where the second has it, negative
            where shorter; None where that cannot be said: only one plan names it, or they are for other ranks. Tables
            share phases, of which the slowest rank counts, so these do not add up to what all changes cost together.
    """

    table: str
    before: ParameterSharding | None
    after: ParameterSharding | None
    changed: tuple[str, ...]
    moved_bytes: int
    more_ms: float | None = None


@dataclass(frozen=True)
class PlanDiff(Shown):
    """What changes from one plan to another; `print` it.

    Attributes:
        tables: every table of either plan.
        before, after: what the plans are predicted to cost.
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
        """Bytes from one rank to another, of all tables."""
        return sum(change.moved_bytes for change in self.tables)

    def records(self) -> list[dict[str, Any]]:
        """The tables that differ, one dict each."""
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

    def _sentences(self) -> list[str]:
        if not self.changed:
            return [f"No table changes. {costs_text(self.before, self.after)}"]
        return [
            f"{len(self.changed)} of {len(self.tables)} tables change, {gigabytes(self.moved_bytes)} move between "
            f"ranks. {costs_text(self.before, self.after)}"
        ]

    def _tables(self) -> Tables:
        lines = [("table", "moves", "alone, ms", "before", "after")]
        for line in self.records():
            more = "" if line["more_ms"] is None else f"{line['more_ms']:+.3f}"
            where = (line["before"] or "-", line["after"] or "-")
            lines.append((line["table"], gigabytes(line["moved_bytes"]), more, *where))
        return [((24, 10, 10, 30, 30), lines)]


@dataclass(frozen=True)
class WhyNot(Shown):
    """What a wish would cost; `print` it.

    Attributes:
        wishes: table -> what was asked for, in words.
        plan: the shorter of the plan that the planner makes with them and this plan with no other table moved; None
            where neither fits.
        refusal: why there is none.
        before: what the plan without them is predicted to cost; after: with them.
        diff: from the one plan to the other.
    """

    wishes: dict[str, str]
    plan: ShardingPlan | None = field(repr=False)
    refusal: str | None
    before: Estimate = field(repr=False)
    after: Estimate | None = field(repr=False)
    diff: PlanDiff | None = field(repr=False)

    @property
    def fits(self) -> bool:
        """Whether there is such a plan."""
        return self.plan is not None

    @property
    def more_ms(self) -> float | None:
        """How much longer the step is, negative where it is shorter; None where there is no such plan."""
        return None if self.after is None else self.after.step_ms - self.before.step_ms

    def records(self) -> list[dict[str, Any]]:
        """The two plans, one dict each, or the one there is."""
        found = []
        for name, each in (("now", self.before), ("with the wish", self.after)):
            if each is not None:
                phase, rank, ms = critical_of(each)
                found.append(
                    {
                        "plan": name,
                        "step_ms": each.step_ms,
                        "memory_bytes": each.fullest_bytes,
                        "usable_bytes": float(each.usable_bytes.max()),
                        "critical_phase": phase,
                        "critical_rank": rank,
                        "critical_ms": ms,
                    }
                )
        return found

    def _sentences(self) -> list[str]:
        asked = ", ".join(f"{table} {wish}" for table, wish in self.wishes.items())
        if self.after is None or self.diff is None:
            return [f"With {asked} there is no plan: {self.refusal}"]
        more = self.after.step_ms - self.before.step_ms
        if not self.diff.changed:
            return [f"The plan is as asked: {asked}."]
        verdict = (
            "is as long" if abs(more) <= LEAST_MS else f"is {_ms(abs(more))} {'longer' if more > 0 else 'shorter'}"
        )
        if more < -LEAST_MS:
            verdict += " (the search for this plan stopped short of that)"
        return [f"With {asked} the predicted step {verdict}.", *self.diff._sentences()]

    def _tables(self) -> Tables:
        lines = [("plan", "step", "fullest rank", "critical phase")]
        for line in self.records():
            held = f"{gigabytes(line['memory_bytes'])} of {gigabytes(line['usable_bytes'])}"
            slow = f"{line['critical_phase']} on rank {line['critical_rank']}, {_ms(line['critical_ms'])}"
            lines.append((line["plan"], _ms(line["step_ms"]), held, slow))
        return [((13, 14, 24, 40), lines), *(self.diff._tables() if self.diff is not None else [])]


def critical_of(found: Estimate) -> tuple[str, int, float]:
    """The longest phase that a plan can change, its slowest rank, and its ms there."""
    busiest = found.critical_rank
    most = found.ms.max(axis=0) if found.waits else found.ms[busiest]
    at = max((i for i, phase in enumerate(found.phases) if phase != "dense"), key=lambda i: most[i])
    return found.phases[at], int(found.ms[:, at].argmax()) if found.waits else busiest, float(most[at])


def costs_text(before: Estimate, after: Estimate) -> str:
    """Step and memory of two plans in a sentence."""
    more = after.step_ms / before.step_ms - 1 if before.step_ms > 0 else 0.0
    late = "" if after.fits else ", which DOES NOT FIT"
    return (
        f"Predicted step {_ms(before.step_ms)} -> {_ms(after.step_ms)} ({more:+.1%}); the fullest rank holds "
        f"{gigabytes(before.fullest_bytes)} -> {gigabytes(after.fullest_bytes)}{late}."
    )


def sharding_text(sharding: ParameterSharding) -> str:
    """Scheme, ranks, and the route where it is not the direct one.

    >>> sharding_text(ParameterSharding("row_wise", ranks=[0, 1], route="two_hop"))
    'row_wise on ranks 0-1 by two_hop'
    """
    ranks = set(sharding.ranks or [])
    where = f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(sorted(ranks))}"
    if len(where) > LONGEST_RANKS:
        where = f"{len(ranks)} ranks"
    where = "all ranks" if sharding.replicated else where
    return f"{sharding.sharding_type} on {where}{'' if sharding.route == 'direct' else f' by {sharding.route}'}"


def _ms(ms: float) -> str:
    """Milliseconds that stay readable when they are small."""
    return f"{ms:.2f} ms" if ms >= 1 else f"{ms:.3g} ms"
