"""Memory: one stack of bytes by category for each rank, against its capacity.

Up to three stacks stand side by side for each rank:

    predicted  what the planner computes for the plan
    counted    the sizes of the tables and buffers that the ranks allocated
    measured   the peak in one step: the CUDA allocator's figure, on CPU all tensors that live

If a plan stores rows in host memory, a second picture below shows it with its own capacity. Ranks on CPU share the
host's memory. The reserve is a band between usable bytes and capacity: a plan fits if its stack ends below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.rank_columns import nodes_of
from recshard_lab.lab.draw.svg import fit, text_width
from recshard_lab.lab.draw.theme import MEMORY, WARNING, as_sentence, bytes_text, bytes_unit, look_of, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.memory_tiers import Stacks, Tier, host_memory, own_memory, problem_of, words_on_sharing
from recshard_lab.lab.views.registry import register_view
from recshard_lab.planner.answers.text import ranks_word
from recshard_lab.text_table import TextTable

TALLEST = 210.0
FAR = 2.5  # a capacity beyond this many times the largest stack is written instead of drawn


@register_view("Memory", place=2)
def memory(
    estimate: Any,
    measured: Any = None,
    *,
    topology: Any = None,
    note: str = "",
    width: int = 860,
    extent: float = 0.0,
) -> View:
    """Bytes per rank and category against the capacity, in the ranks' own memory and in the host's.

    Args:
        estimate: has ``memory_categories`` (C names), ``memory_bytes`` ``[W, C]``, ``capacity_bytes`` and
            ``usable_bytes`` ``[W]``; where the plan keeps rows in the host's memory also ``host_bytes`` and
            ``host_weight_bytes`` ``[W]``, and ``host_room_bytes``.
        measured: what ranks reported, ranks in the same order: ``memory_categories``, ``memory_bytes`` ``[W, C]`` and
            ``host_memory_bytes`` ``[W, 2]`` for the stack "counted"; ``in_use``, one `RankMemory` per rank, for the
            stack "measured". Both ``host_memory_bytes`` and ``in_use`` may be missing.
        topology: for the names of the memories, and for the ranks of each node.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: bytes of the stack that fills the picture, where several are to one scale; 0 for its own tallest.
    """
    tiers = [own_memory(estimate, measured, topology)]
    if tiers[0].stacks["predicted"][1].size == 0:
        return message_view("memory", "Memory", "The estimate has no ranks or no bytes.")
    host = host_memory(estimate, measured)
    tiers += [host] if host is not None else []
    for tier in tiers:
        if problem := problem_of(tier):
            return message_view("memory", "Memory", problem)
    title = f"Memory per rank, {' | '.join(tiers[0].stacks)}"
    summary = _summary(tiers)
    notes = [words for words in (words_on_sharing(topology), note) if words]
    nodes = nodes_of(len(tiers[0].capacity), getattr(topology, "local_world_size", None))

    most = max(float(values.sum(axis=1).max()) for _, values in tiers[0].stacks.values())
    rows = tuple((_panel(tier, nodes, extent if tier is tiers[0] else 0.0, width),) for tier in tiers)
    chart = spec.Chart(title, summary, rows, " ".join(notes), warn=summary.startswith("Does not fit"))
    return View.of_chart("memory", chart, _numbers(tiers), width, extent=most)


def _summary(tiers: list[Tier]) -> str:
    """Fits or not, and by how much on the rank where it is tightest."""
    told = [_told(tier, f" in {tier.name}" if len(tiers) > 1 else "") for tier in tiers]
    return " ".join(sorted(told, key=lambda words: not words.startswith("Does not fit")))


def _told(tier: Tier, where: str) -> str:
    used, capacity, usable = tier.stacks["predicted"][1].sum(axis=1), tier.capacity, tier.usable
    over = np.flatnonzero(used > usable)
    tight = int(np.argmax(used - usable)) if len(over) else int(np.argmax(used / np.maximum(usable, 1)))
    reserve = capacity[tight] - usable[tight]
    limit = f"{bytes_text(usable[tight])} usable"
    if reserve > 0:
        limit = f"{limit} of {bytes_text(capacity[tight])} ({number(100 * reserve / capacity[tight], 2)}% reserve)"
    if len(over):
        others = f"; {ranks_word(over.tolist())} need more than they have" if len(over) > 1 else ""
        return f"Does not fit: rank {tight} needs {bytes_text(used[tight])}{where}, it has {limit}{others}."
    return f"Fits: the fullest rank{where}, rank {tight}, uses {bytes_text(used[tight])} of {limit}."


def _panel(tier: Tier, nodes: list[tuple[int, int, str]], extent: float, width: int) -> spec.Panel:
    """The stacks of one memory, side by side for each rank, and its limits.

    Args:
        extent: bytes that fill the plot, where several charts are to one scale; 0 for the largest stack.
    """
    ranks, sides = len(tier.capacity), len(tier.stacks)
    each = 0.86 / sides
    marks: list[spec.Mark] = []
    most = max(extent, *(float(values.sum(axis=1).max()) for _, values in tier.stacks.values())) or 1.0
    near = 0 < float(tier.capacity.min()) <= FAR * most
    tallest = max(most, min(float(tier.capacity.max()), FAR * most) if near else 0.0)
    wide = (width - 100) / ranks * each
    for place, (kind, (names, values)) in enumerate(tier.stacks.items()):
        at = np.arange(ranks) + (place - (sides - 1) / 2) * each
        lower = np.zeros(ranks)
        for i, name in enumerate(names):
            marks += _bars(name, kind, at, lower, lower + values[:, i], each * 0.92, wide)
            lower = lower + values[:, i]
        marks += _totals(lower, at, each, wide, tallest)
    marks += _limits(tier, near)
    marks += [spec.Span(first, end - 1, name) for first, end, name in nodes]
    title = tier.name[:1].upper() + tier.name[1:]
    if not near and tier.capacity.min() > 0:
        far = (
            f"capacity {bytes_text(tier.capacity.min())}, {number(float(tier.capacity.min()) / most, 2)} times the axis"
        )
        title = f"{title}: {far}" if title else as_sentence(far)
    if sides > 1:
        title = f"{title or 'Each rank'}; from left to right: {', '.join(tier.stacks)}"
    axis = spec.linear([tallest], "", "bytes", pad=0.12)
    height = TALLEST if not tier.is_host else 0.6 * TALLEST
    return spec.Panel(spec.categories(map(str, range(ranks)), "rank"), axis, tuple(marks), title, height)


def _bars(
    name: str, kind: str, at: np.ndarray, lower: np.ndarray, upper: np.ndarray, each: float, wide: float
) -> list[spec.Mark]:
    """One category of one kind of stack."""
    look = look_of(name, MEMORY)

    def label(size: float) -> str:
        words = fit([f"{look.label}, {bytes_text(size)}", bytes_text(size)], wide - 4, 11)
        return "" if words.endswith("…") else words

    rows = [
        (at[rank], lower[rank], upper[rank], f"rank {rank}, {kind}\n{look.label}: {bytes_text(size)}", label(size))
        for rank, size in enumerate((upper - lower).tolist())
        if size > 0
    ]
    return spec.bars(look.label, look, rows, width=each)


def _totals(total: np.ndarray, at: np.ndarray, each: float, wide: float, tallest: float) -> list[spec.Mark]:
    """The bytes of each stack above it, where there is room."""
    told = [(bytes_text(value), bytes_text(value).replace(" ", ""), _short(value)) for value in total]
    words = [next((w for w in some if text_width(w, 10) <= wide + 6), "") for some in told]
    return [
        spec.Text(float(x), float(y + 0.025 * tallest), w)
        for x, y, w in zip(at, total, words, strict=True)
        if w and y > 0
    ]


def _limits(tier: Tier, near: bool) -> list[spec.Mark]:
    """The usable bytes as a dashed line, the reserve as a band above it; of each rank if they differ."""
    if not near:
        return []
    capacity, usable = tier.capacity, tier.usable
    same = len(set(capacity.tolist())) == 1 and len(set(usable.tolist())) == 1
    spans = [(None, 0)] if same else [((rank - 0.5, rank + 0.5), rank) for rank in range(len(capacity))]
    marks: list[spec.Mark] = []
    for x, rank in spans:
        if usable[rank] < capacity[rank]:
            marks.append(spec.Band("reserve", x, (float(usable[rank]), float(capacity[rank]))))
    if same:
        words = f"{bytes_text(usable[0])} usable of {bytes_text(capacity[0])}"
        return [*marks, spec.Rule(y=float(usable[0]), words=words, colour=WARNING)]
    edges = np.repeat(np.arange(len(capacity)), 2) + np.tile([-0.5, 0.5], len(capacity))
    levels = tuple(np.repeat(usable, 2).tolist())
    return [*marks, spec.Lines("usable", tuple(edges.tolist()), levels, WARNING, "6 3", width=1.6)]


def _short(value: float) -> str:
    """Bytes where there is little room: ``9.5G``."""
    size, unit = bytes_unit(value)
    return f"{number(value / size, 2)}{unit[0]}"


def _used(tiers: Sequence[Stacks]) -> list[str]:
    found: dict[str, None] = {}
    for names, values in (stack for stacks in tiers for stack in stacks.values()):
        found.update(dict.fromkeys(name for i, name in enumerate(names) if values[:, i].any()))
    return [name for name in MEMORY if name in found] + [name for name in found if name not in MEMORY]


def _numbers(tiers: list[Tier]) -> TextTable:
    used = _used([tier.stacks for tier in tiers])
    named = len(tiers) > 1
    rows = []
    for tier in tiers:
        for rank in range(len(tier.usable)):
            for kind, (names, values) in tier.stacks.items():
                at = {name: values[rank, i] for i, name in enumerate(names)}
                cells = [bytes_text(at[name]) if name in at else "" for name in used]
                cells += [bytes_text(values[rank].sum()), bytes_text(tier.usable[rank])]
                rows.append([*([tier.name] if named else []), str(rank), kind, *cells])
    heads = ("rank", "", *(look_of(name, MEMORY).label for name in used), "total", "usable")
    return TextTable(("memory", *heads) if named else heads, rows)
