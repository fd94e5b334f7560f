"""Overflow: memory that each rank needs against what it may use, the first rank that does not fit, and the fix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import MEMORY, WARNING, bytes_text, counted, look_of, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.phases import drawn_ranks
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner import Estimate, Workload
from recshard_lab.planner import estimate as estimated
from recshard_lab.sharding import EmbeddingModuleShardingPlan, PlanError, ShardingPlan, Topology, scheme_named
from recshard_lab.text_table import TextTable

MOST_TABLES = 4
WIDE = 640  # pixels from which each rank's bytes are written beside its bar
LONGEST = bytes_text(888.8e6)  # no number of bytes takes more room
MOST_WORK = 40_000  # tables x ranks up to which changes of the plan are tried


@dataclass(frozen=True)
class Fix:
    """One change after which every rank fits.

    Attributes:
        words: the change.
        fullest: bytes of the fullest rank after it.
        step_ms: of the estimate after it; NaN where the plan stays.
        rounds: whether the change rounds the weights.
    """

    words: str
    fullest: float
    step_ms: float = float("nan")
    rounds: bool = False

    def __str__(self) -> str:
        after = f"; the fullest rank then needs {bytes_text(self.fullest)}"
        return f"{self.words}{after if np.isfinite(self.step_ms) else ''}"


@register_view("Overflow", place=22)
def overflow(
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
    *,
    estimate: Estimate | None = None,
    note: str = "",
    width: int = 860,
    extent: float = 0.0,
) -> View:
    """Bytes that each rank needs against its usable memory; names the first rank that does not fit, and one fix.

    A fix is tried before it is named: the plan with this one change is estimated again.

    Args:
        plan, tables, topology, workload: what needs the memory.
        estimate: of the plan, if it was computed already: has ``memory_bytes`` ``[W, C]``, ``capacity_bytes`` and
            ``usable_bytes`` ``[W]``.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes that fill the picture, where several are to one scale; 0 for its own fullest rank.
    """
    title = "Overflow: which rank does not fit"
    found = estimated(plan, tables, topology, workload) if estimate is None else estimate
    held, usable = found.held_bytes, found.usable_bytes
    if not held.size:
        return message_view("overflow", title, "The estimate has no rank.")
    if not (np.isfinite(held).all() and np.isfinite(usable).all()):
        return message_view("overflow", title, "The estimate has bytes that are not finite.")
    over = np.flatnonzero(held > usable)
    shares = held / np.maximum(usable, 1)
    first = int(over[0] if len(over) else np.argmax(shares))
    if len(over):
        missing = held[first] - usable[first]
        summary = f"Rank {first} is the first that does not fit: it needs {bytes_text(held[first])}, "
        summary += f"{bytes_text(usable[first])} are usable, {bytes_text(missing)} are missing."
        if len(over) > 1:
            summary += f" {counted(len(over) - 1, 'more rank')} {'does' if len(over) == 2 else 'do'} not fit."
        fix = smallest_fix(found, plan, tables, topology, workload)
        summary += f" Fix: {fix}."
    else:
        summary = f"Every rank fits. Rank {first} is the fullest: {bytes_text(held[first])} of "
        summary += f"{bytes_text(usable[first])} usable."
    numbers = TextTable(
        ("rank", "needs", "usable", "missing", "fits"),
        [
            [
                str(rank),
                bytes_text(held[rank]),
                bytes_text(usable[rank]),
                bytes_text(max(0.0, held[rank] - usable[rank])),
                "no" if rank in over else "yes",
            ]
            for rank in range(len(held))
        ],
    )
    rows = drawn_ranks(shares, first)
    fewer = f"Not drawn: {counted(len(held) - len(rows), 'rank')}, less full than these"
    notes = [fewer if len(rows) < len(held) else "", note.removesuffix(".")]
    chart = spec.Chart(
        title, summary, ((_panel(found, rows, width, extent),),), with_notes("", notes), warn=len(over) > 0
    )
    return View.of_chart("overflow", chart, numbers, width, extent=float(max(*held[rows], *usable[rows])))


def smallest_fix(
    found: Estimate,
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
) -> Fix:
    """The change of one table after which every rank fits and the step is the shortest; else more memory.

    A change that rounds weights (FP16) is named only if no other change is enough.
    """
    if len(tables) * topology.world_size > MOST_WORK:
        return _more_memory(found)
    tried: list[Fix] = []
    for words, changed_plan, changed_tables in _changes(found, plan, list(tables), topology):
        try:
            after = estimated(changed_plan, changed_tables, topology, workload)
        except PlanError:  # the scheme does not suit the table
            continue
        if (after.held_bytes <= after.usable_bytes).all():
            rounds = changed_tables != list(tables)
            tried.append(Fix(words, float(after.held_bytes.max()), after.step_ms, rounds))
    return min(tried, key=lambda fix: (fix.rounds, fix.step_ms)) if tried else _more_memory(found)


def _more_memory(found: Estimate) -> Fix:
    needed = found.held_bytes
    capacity = float((needed / np.maximum(found.usable_bytes, 1) * found.capacity_bytes).max())
    return Fix(f"ranks with {bytes_text(capacity)} of memory each", float(needed.max()))


def _changes(
    found: Estimate, plan: ShardingPlan, tables: list[BaseEmbeddingConfig], topology: Topology
) -> Iterator[tuple[str, ShardingPlan, list[BaseEmbeddingConfig]]]:
    """One-table changes: another rank, another scheme, half the bytes. Of the largest tables on the first full rank."""
    room = found.usable_bytes - found.held_bytes
    rank, emptiest = int(np.flatnonzero(room < 0)[0]), int(np.argmax(room))
    placed = plan.resolved(tables, topology.world_size, topology.local_world_size).tables()
    here = {
        table.name: sum(s.num_rows * s.num_cols for s in placed[table.name].shards if s.rank == rank)
        for table in tables
        if table.name in placed
    }
    largest = sorted((table for table in tables if here.get(table.name)), key=lambda table: -here[table.name])
    for table in largest[:MOST_TABLES]:
        scheme = placed[table.name].sharding_type
        if scheme == "table_wise" and emptiest != rank:
            moved = scheme_named("table_wise").default(table, topology, [emptiest])
            yield f"table {table.name!r} on rank {emptiest}", _with(plan, table.name, moved), tables
        for other in ("row_wise", "column_wise"):
            if other != scheme:
                made = scheme_named(other).default(table, topology, None)
                yield f"table {table.name!r} {other} instead of {scheme}", _with(plan, table.name, made), tables
        if table.data_type is DataType.FP32:
            halved = [replace(one, data_type=DataType.FP16) if one is table else one for one in tables]
            yield f"table {table.name!r} with data_type=DataType.FP16", plan, halved


def _with(plan: ShardingPlan, name: str, sharding: Any) -> ShardingPlan:
    """The plan with another sharding of one table."""
    return ShardingPlan(
        {
            path: EmbeddingModuleShardingPlan({**own, **({name: sharding} if name in own else {})})
            for path, own in plan.plan.items()
        }
    )


def _panel(estimate: Estimate, rows: list[int], width: int, extent: float) -> spec.Panel:
    """A bar for each of these ranks: its memory by category, what is usable, and what is missing."""
    needed, usable = estimate.held_bytes, estimate.usable_bytes
    marks: list[spec.Mark] = []
    ends = estimate.memory_bytes.cumsum(axis=1)
    for i, category in enumerate(estimate.memory_categories):
        look = look_of(category, MEMORY)
        parts = [
            (at, ends[rank, i] - size, ends[rank, i], f"rank {rank}\n{look.label}: {bytes_text(size)}", "")
            for at, rank in enumerate(rows)
            if (size := float(estimate.memory_bytes[rank, i])) > 0
        ]
        marks += spec.bars(look.label, look, parts, width=0.62, across=True)
    told: list[tuple[float, str]] = []
    for at, rank in enumerate(rows):
        need, room = float(needed[rank]), float(usable[rank])
        words = f"{bytes_text(need)} of {bytes_text(room)}"
        missing = f"{bytes_text(need - room)} missing" if need > room else ""
        if missing:
            outline = (room, need, need, room, room), (at - 0.36, at - 0.36, at + 0.36, at + 0.36, at - 0.36)
            hover = (f"rank {rank}\n{words}, {missing}",) * 5
            marks.append(spec.Lines("missing", *outline, colour=WARNING, dash="5 3", width=2.5, hover=hover))
        full = ", ".join(filter(None, [words, missing]))
        told.append((max(need, room), full if width >= WIDE else missing))
    limits = [(usable[rank], at, f"rank {rank}\n{bytes_text(usable[rank])} usable", "") for at, rank in enumerate(rows)]
    marks += spec.points("usable memory", limits, symbol="line-ns", size=10.0)
    longest = f"{LONGEST} of {LONGEST}, {LONGEST} missing" if width >= WIDE else f"{LONGEST} missing"
    held = [(extent, longest)] if extent else told
    high = spec.room_for(held, width - 110, 10.5, inside=False)
    marks += [spec.Text(end + 0.012 * high, at, words, "start") for at, (end, words) in enumerate(told) if words]
    axis = spec.Axis("linear", 0.0, high * 1.02, "", "bytes")
    names = [f"{'✗' if needed[rank] > usable[rank] else '✓'} rank {rank}" for rank in rows]
    return spec.Panel(axis, spec.categories(names), tuple(marks), height=30.0 * len(rows))
