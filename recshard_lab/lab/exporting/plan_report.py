"""Pages about plans: one with its reasons, or several side by side, with the figures of the prediction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab import views
from recshard_lab.lab.compare.plan_comparison import PlanComparison
from recshard_lab.lab.compare.question import Answer, Question
from recshard_lab.lab.draw.theme import SCHEMES, bytes_text, counted, look_of, ms_text, number, with_notes
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.assumptions import assumptions
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.report import Folded, Part, Picture, Section
from recshard_lab.planner.answers.text import sharding_text
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan
from recshard_lab.text_table import TextTable

MOST_EXPLAINED = 40
MOST_DIFFERENCES, MOST_OPEN = 60, 12  # tables listed; beyond, behind a click
COLUMN_WIDTH = 500  # pixels of a picture, where those of several plans are side by side


def plan_page(found: Candidate, preset: str = "", python: str = "") -> Exportable:
    """One plan: its pictures, the reasons for each table, and the figures of the prediction.

    Args:
        found: the plan; the plan of a planner is explained, table by table.
        preset: name of the topology's preset, for its sources, or the file of a device profile.
    """
    if found.plan is None:
        problem = Section("No plan", [found.problem])
        return Exportable(found.name, [problem], python=python, candidates=[found])
    pictures = _views(found)
    sections = [Section("Problem", [found.problem])] if found.problem else []
    sections += [Section(views.view_label(view.name), [view]) for view in pictures]
    sections += [*_explained(found.plan), assumptions(found.topology, found.workload, preset)]
    where = f" of {Path(preset).name}" if preset else f" on {found.topology.compute_device}"
    tables, ranks = counted(len(found.configs), "table"), counted(found.topology.world_size, "rank")
    return Exportable(
        f"A plan for {tables} on {ranks}",
        sections,
        subtitle=f"{_step_words(found)}{where}; {found.workload.batch_size:,} samples a rank, "
        f"{found.workload.optimizer}.",
        note=_note([found]),
        python=python,
        pictures={found.name: pictures},
        candidates=[found],
    )


def comparison_page(
    candidates: Sequence[Candidate],
    title: str = "",
    *,
    more: Sequence[Section] = (),
    preset: str = "",
    python: str = "",
    name: str = "",
) -> Exportable:
    """Several plans side by side: their figures, the tables that differ, and each picture of every plan.

    Args:
        candidates: at least one.
        title: of the page.
        more: further sections, after the figures.

    Raises:
        ValueError: no candidate, or two of one name.
    """
    names = [each.name for each in candidates]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"a comparison needs plans of different names, got {', '.join(names) or 'none'}")
    found = _side_by_side(candidates)
    first: list[Part] = [_figures(found)]
    first += [f"{each.name}: {each.problem}" for each in candidates if each.problem]
    offered = _offered(candidates)
    drawn = {view: found.views(view, COLUMN_WIDTH) for view in offered}
    sections = [
        Section("Side by side", first),
        *more,
        *_differences(candidates),
        *(
            Section(views.view_label(view), [Picture(each, plan) for plan, each in drawn[view].items()])
            for view in offered
        ),
        *_assumed(candidates, preset),
    ]
    return Exportable(
        title or f"{counted(len(names), 'plan')} for {counted(len(candidates[0].configs), 'table')}",
        sections,
        subtitle=f"Predicted steps: {', '.join(f'{each.name} {_step(each)}' for each in candidates)}.",
        note=_note(candidates),
        python=python,
        pictures={each.name: [drawn[view][each.name] for view in offered] for each in candidates},
        candidates=candidates,
        name=name,
    )


def _views(found: Candidate) -> list[View]:
    """Every registered view of it."""
    assert found.plan is not None
    plan, tables = flat_plan(found.plan, found.tables)
    known: dict[str, Any] = {"plan": plan, "tables": tables, "topology": found.topology, **found.more}
    known |= {"estimate": found.estimate} if found.estimate is not None else {}
    known |= {"measured": found.measured} if found.measured is not None else {}
    return [views.draw(name, **known) for name in views.views_of(*known)]


def _offered(candidates: Sequence[Candidate]) -> list[str]:
    """The views of all of them."""
    known = {"plan", "tables", "topology"} | ({"estimate"} if any(each.estimate for each in candidates) else set())
    return views.views_of(*known) if any(each.plan is not None for each in candidates) else []


def _side_by_side(candidates: Sequence[Candidate]) -> PlanComparison:
    """The same plans as a result of `compare_plans`."""
    flat = {each.name: None if each.plan is None else flat_plan(each.plan, each.tables)[0] for each in candidates}
    answers = {
        each.name: Answer(
            Question({}, each.topology.world_size, each.workload.batch_size, each.topology.memory_cap_bytes),
            each.topology,
            each.workload,
            flat[each.name],
            each.estimate,
            each.problem,
        )
        for each in candidates
    }
    tables = next((flat_plan(each.plan, each.tables)[1] for each in candidates if each.plan is not None), [])
    measured = {each.name: each.measured for each in candidates if each.measured is not None}
    return PlanComparison(tables, answers, measured)


def _figures(found: PlanComparison) -> TextTable:
    """The figures of each plan, one column per plan, and the number of tables per scheme."""
    numbers = found.numbers
    counts = [
        Counter(s.sharding_type for s in a.plan.tables().values()) if a.plan else {} for a in found.answers.values()
    ]
    schemes = [", ".join(f"{n} {look_of(scheme, SCHEMES).label}" for scheme, n in each.items()) for each in counts]
    caps = [bytes_text(a.topology.memory_cap_bytes) for a in found.answers.values()]
    rows = [*numbers.rows, ["Memory of a rank", *caps], ["Schemes", *schemes]]
    return TextTable(numbers.heads, rows, wraps=True)


def _differences(candidates: Sequence[Candidate]) -> list[Section]:
    """Tables whose scheme or ranks differ between the plans."""
    planned = [each for each in candidates if each.plan is not None]
    if len(planned) < 2:
        return []
    shardings = [
        {name: sharding_text(sharding) for name, sharding in flat_plan(each.plan, each.tables)[0].tables().items()}
        for each in planned
        if each.plan is not None
    ]
    names = list(dict.fromkeys(name for own in shardings for name in own))
    differing = [name for name in names if len({own.get(name) for own in shardings}) > 1]
    if not differing:
        return [Section("What differs", ["Every table has the same placement in all plans."])]
    words = f"{len(differing):,} of {counted(len(names), 'table')} differ between the plans"
    if len(differing) > MOST_DIFFERENCES:
        words += f"; the first {MOST_DIFFERENCES} are listed"
    rows = [[name, *(own.get(name, "") for own in shardings)] for name in differing[:MOST_DIFFERENCES]]
    table = TextTable(("table", *(each.name for each in planned)), rows, wraps=True)
    parts: list[Part] = [f"{words}.", table] if len(rows) <= MOST_OPEN else [Folded(words, table)]
    return [Section("What differs", parts)]


def _assumed(candidates: Sequence[Candidate], preset: str) -> list[Section]:
    """The figures of the predictions, once if they are the same for all plans."""
    kinds: list[tuple[Candidate, list[str]]] = []
    for each in candidates:
        alike = next(
            (
                names
                for known, names in kinds
                if known.topology == each.topology and repr(known.workload) == repr(each.workload)
            ),
            None,
        )
        if alike is None:
            kinds.append((each, [each.name]))
        else:
            alike.append(each.name)
    made = [(assumptions(each.topology, each.workload, preset), names) for each, names in kinds]
    if len(made) == 1:
        return [made[0][0]]
    return [Section(f"{section.heading}: {', '.join(names)}", section.parts) for section, names in made]


def _explained(plan: ShardingPlan) -> list[Section]:
    """The reasons for each table, most expensive first."""
    if plan.planned is None:
        return []
    named = plan.planned.named(plan)
    largest = sorted(named, key=lambda name: -named[name][0].weight_bytes)[:MOST_EXPLAINED]
    found = sorted((plan.explain(name) for name in largest), key=lambda each: -each.share)
    parts: list[Part] = [
        Folded(f"{each.table}: {sharding_text(each.sharding)}, causes {each.share:.0%} of the step", each, each.share)
        for each in found
    ]
    which = f"the {len(found)} largest of {len(named):,} tables" if len(found) < len(named) else "every table"
    words = (
        f"For {which}, most expensive first: its share of each phase, and the cost of every other scheme and output "
        f"path with all other tables unchanged."
    )
    return [Section("Reasons for each table", [words, *parts])]


def flat_plan(
    plan: ShardingPlan, tables: Sequence[BaseEmbeddingConfig] | Mapping[str, Sequence[BaseEmbeddingConfig]]
) -> tuple[ShardingPlan, list[BaseEmbeddingConfig]]:
    """Plan and tables without modules, for views. Tables of equal name get the paths of their modules."""
    if not isinstance(tables, Mapping):
        return plan, list(tables)
    names = [table.name for own in tables.values() for table in own]
    shardings, configs = {}, []
    for path, own in tables.items():
        for table in own:
            name = table.name if names.count(table.name) == 1 else f"{path}.{table.name}"
            shardings[name] = plan.plan[path][table.name]
            configs.append(replace(table, name=name))
    return ShardingPlan({"": EmbeddingModuleShardingPlan(shardings)}), configs


def _step(found: Candidate) -> str:
    return "none" if found.estimate is None else ms_text(found.estimate.step_ms)


def _step_words(found: Candidate) -> str:
    if found.estimate is None:
        return "No plan"
    words = f"Predicted step {number(found.estimate.step_ms, 4)} ms"
    if found.measured is not None:
        words += f", measured {ms_text(getattr(found.measured, 'step_ms', float('nan')))}"
    return words


def _note(candidates: Sequence[Candidate]) -> str:
    measured = [each.name for each in candidates if each.measured is not None]
    if not measured:
        return "Predicted, not measured."
    words = f"Measured on this machine: {', '.join(measured)}. Everything else is predicted."
    return with_notes(words, (getattr(each.measured, "times_note", "") for each in candidates))
