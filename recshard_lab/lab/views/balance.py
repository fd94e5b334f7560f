"""Balance: the slowest rank of each phase, what it costs, and how long each rank waits.

The first panel is the critical path: every phase takes as long as its slowest rank. Up to the mean is what it would
take if all ranks did the same; the rest is lost to imbalance. The panels below show each rank's time at work and
waiting, and its bytes against the mean. `phases` shows when ranks wait; this view shows what waiting costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.theme import (
    MISSING,
    PHASES,
    WARNING,
    Look,
    as_sentence,
    bytes_text,
    look_of,
    ms_text,
    number,
    with_notes,
)
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.phases import unshowable
from recshard_lab.lab.views.registry import register_view
from recshard_lab.lab.views.traffic_phases import words_of
from recshard_lab.text_table import TextTable

LOST = Look("lost to imbalance", "#ff9d8a", "cross")
MEAN = Look("mean rank", "#c9ced6", "plain")
WORK, WAIT = Look("at work", "#9cc4ee", "plain"), Look("waiting for the slowest", "#eceff3", "dots")
PREDICTED, COUNTED = Look("bytes, predicted", "#d3bdea", "dots"), Look("bytes, measured", "#f6bd83", "rising")
SIDES = {"held": "Bytes held", "sent": "Bytes sent", "received": "Bytes received"}
ROW, TALL, STRIP = 24.0, 110.0, 44.0
LABEL = 20  # letters of the longest label of a bar


@register_view("Balance", place=4)
def balance(estimate: Any, measured: Any = None, *, note: str = "", width: int = 860, extent: float = 0.0) -> View:
    """Work and waiting of every rank, and the critical path through the phases.

    Args:
        estimate: has ``phases`` (P names), ``ms`` ``[W, P]``, and, where they are known, ``waits``, ``overlap``,
            ``memory_categories``, ``memory_bytes`` ``[W, C]`` and ``traffic_bytes`` ``[W, W]``.
        measured: has ``step_ms_by_rank`` ``[W]``; where it was taken ``waited_ms``, label of an exchange -> ``[W]``;
            bytes as in the estimate. Drawn beside.
        note: a sentence under the picture.
        width: of the static picture, in pixels.
        extent: ms that fill the picture, where several are to one scale; 0 for its own step.

    >>> from types import SimpleNamespace
    >>> found = SimpleNamespace(phases=("lookup", "dense"), ms=[[3.0, 1.0], [1.0, 1.0]])
    >>> balance(found).summary.split(". ")[1]
    'Most is lost in lookup, where rank 0 is slowest: perfect balance would save 1 ms of it (33%).'
    """
    problem = unshowable(estimate, measured)
    if problem:
        return message_view("balance", "Balance", problem)
    names, ms = tuple(estimate.phases), np.asarray(estimate.ms, dtype=float)
    found = Balance.of(names, ms, bool(getattr(estimate, "waits", True)), _held_and_sent(estimate), measured)
    overlap = getattr(estimate, "overlap", None)
    title = f"Balance: {ms_text(found.saved)} of a step of {ms_text(found.step)} lost to imbalance"
    if overlap is not None:
        note = f"Without the pipeline ({overlap.pipeline}), which hides a part of both. {as_sentence(note)}".strip()
    summary = with_notes(found.summary(), [getattr(measured, "times_note", "")])

    if found.steps is not None and not found.waited:
        note = f"Measured: whole steps. Their waiting was not measured. {as_sentence(note)}".strip()
    if len(ms) > 1 and found.amounts:
        note = f"Dashed: the mean of all ranks. {as_sentence(note)}".strip()
    chart = spec.Chart(title, summary, tuple(_rows(found, extent, width)), note)
    return View.of_chart("balance", chart, _numbers(found), width, extent=found.tallest)


@dataclass(frozen=True, eq=False)
class Balance:
    """What the picture shows.

    Attributes:
        names, ms: P phases, ``[W, P]``.
        slowest: ``[P]`` the slowest rank of each phase; path: ``[P]`` its ms; mean: ``[P]`` of all ranks.
        waits: whether phases wait for their slowest rank; else the step is the busiest rank's own sum.
        amounts: "held", "sent", "received" -> bytes ``[W]``, predicted; counted: the same, measured.
        steps: ``[W]`` measured; None if nothing was measured.
        waited: name of an exchange -> ``[W]`` ms that each rank waited in it, measured.
    """

    names: tuple[str, ...]
    ms: np.ndarray
    slowest: np.ndarray
    path: np.ndarray
    mean: np.ndarray
    waits: bool
    amounts: dict[str, np.ndarray]
    counted: dict[str, np.ndarray] = field(default_factory=dict)
    steps: np.ndarray | None = None
    waited: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(
        cls, names: tuple[str, ...], ms: np.ndarray, waits: bool, amounts: dict[str, np.ndarray], measured: Any
    ) -> Balance:
        """From an estimate's numbers and what was measured."""
        slowest = ms.argmax(axis=0) if waits else np.full(len(names), int(ms.sum(axis=1).argmax()))
        path = ms[slowest, np.arange(len(names))]
        if measured is None:
            return cls(names, ms, slowest, path, ms.mean(axis=0), waits, amounts)
        took: Mapping[str, Any] = getattr(measured, "waited_ms", None) or {}
        waited = {words_of(label): np.asarray(values, dtype=float) for label, values in took.items()}
        waited = {name: values for name, values in waited.items() if np.isfinite(values).all()}
        counted = {name: values for name, values in _held_and_sent(measured).items() if len(values) == len(ms)}
        steps = np.asarray(measured.step_ms_by_rank, dtype=float)
        return cls(names, ms, slowest, path, ms.mean(axis=0), waits, amounts, counted, steps, waited)

    @property
    def step(self) -> float:
        """ms."""
        return float(self.path.sum())

    @property
    def longest(self) -> float:
        """ms of the longest phase, or of the longest waiting in an exchange."""
        return max(float(self.path.max()), *(float(values.max()) for values in self.waited.values()), 0.0)

    @property
    def tallest(self) -> float:
        """ms of the longest step, predicted or measured."""
        return float(np.nanmax([self.step, *(self.steps if self.steps is not None else ())]))

    @property
    def saved(self) -> float:
        """ms that a perfect balance would save."""
        return float((self.path - self.mean).sum())

    @property
    def waiting(self) -> np.ndarray:
        """``[W]`` ms of the step, predicted."""
        return np.maximum(0.0, self.step - self.ms.sum(axis=1))

    @property
    def measured_waiting(self) -> np.ndarray | None:
        """``[W]`` ms, measured in all exchanges; None where that was not taken."""
        return np.sum(list(self.waited.values()), axis=0) if self.waited else None

    def summary(self) -> str:
        """The slowest rank, and what it costs."""
        if len(self.ms) == 1:
            return "There is one rank, which waits for no other."
        if not self.saved > 1e-9 * max(self.step, 1e-9):
            return "All ranks do the same in every phase: no rank waits."
        share = 100 * float(self.waiting.mean()) / self.step
        lost = self.path - self.mean
        worst = int(lost.argmax())
        words = f"Ranks wait {number(share, 2)}% of the step. "
        if not self.waits:
            words += f"Rank {self.slowest[0]} is busiest, and under this cost model its sum is the step"
        else:
            label = look_of(self.names[worst], PHASES).label
            words += f"Most is lost in {label}, where rank {self.slowest[worst]} is slowest"
        saved = f"{ms_text(float(lost[worst]) if self.waits else self.saved)}"
        part = float(lost[worst]) / float(self.path[worst]) if self.waits else self.saved / self.step
        words += f": perfect balance would save {saved} of it ({number(100 * part, 2)}%)."
        real = self.measured_waiting
        if real is not None and self.steps is not None and np.isfinite(self.steps).all() and self.steps.max() > 0:
            words += f" Measured: ranks wait {number(100 * float((real / self.steps).mean()), 2)}% of the step."
        return words


def _held_and_sent(source: Any) -> dict[str, np.ndarray]:
    """Bytes of every rank, those that are numbers: held, sent, received."""
    found: dict[str, np.ndarray] = {}
    held = getattr(source, "memory_bytes", None)
    if held is not None:
        found["held"] = np.asarray(held, dtype=float).sum(axis=1)
    sent = getattr(source, "traffic_bytes", None)
    if sent is not None:
        away = np.array(sent, dtype=float)
        np.fill_diagonal(away, 0.0)
        found["sent"], found["received"] = away.sum(axis=1), away.sum(axis=0)
    return {name: values for name, values in found.items() if np.isfinite(values).all() and values.any()}


def _numbers(found: Balance) -> TextTable:
    rows: list[list[str]] = []

    def line(what: str, rank: int, values: np.ndarray, text: Any, lost: str = "") -> None:
        rows.append([what, f"rank {rank}", text(values[rank]), text(values.mean()), text(values.min()), lost])

    for phase, name in enumerate(found.names):
        lost = ms_text(float(found.path[phase] - found.mean[phase]))
        line(look_of(name, PHASES).label, int(found.slowest[phase]), found.ms[:, phase], ms_text, lost)
    rows.append(["step", "", ms_text(found.step), ms_text(found.step - found.saved), "", ms_text(found.saved)])
    line("waiting", int(found.waiting.argmax()), found.waiting, ms_text)
    for name, values in found.amounts.items():
        line(f"bytes {name}", int(values.argmax()), values, bytes_text)
    if found.steps is not None and np.isfinite(found.steps).all():
        line("measured step", int(found.steps.argmax()), found.steps, ms_text)
    for name, values in found.waited.items():
        line(f"measured waiting: {name}", int(values.argmax()), values, ms_text)
    for name, values in found.counted.items():
        line(f"measured bytes {name}", int(values.argmax()), values, bytes_text)
    return TextTable(("", "most on", "most", "mean", "least", "lost to imbalance"), rows)


def _rows(found: Balance, extent: float, width: int) -> list[tuple[spec.Panel, ...]]:
    """The critical path, waiting in exchanges, every rank's step, every rank's bytes."""
    longest = max(found.longest, extent) or 1.0
    high = spec.room_for([(longest, " " * LABEL)], 0.7 * width, inside=False)
    ms = spec.Axis("linear", 0.0, high, "", "ms")
    rows: list[tuple[spec.Panel, ...]] = [(_path(found, ms),)]
    rows += [(_exchanges(found, ms),)] if found.waited else []
    ranks = spec.categories([str(rank) for rank in range(len(found.ms))], "rank")
    rows.append((_ranks(found, ranks, extent, width),))
    if len(found.ms) > 1:
        rows += [(_bytes(found, name, ranks),) for name in SIDES if name in found.amounts]
    return rows


def _path(found: Balance, ms: spec.Axis) -> spec.Panel:
    """Each phase up to its mean rank, and what its slowest rank adds."""
    labels: list[str] = []
    even, lost = [], []
    for phase, name in enumerate(found.names):
        whole, rank = float(found.path[phase]), int(found.slowest[phase])
        if not whole > 0:
            continue
        label, place = look_of(name, PHASES).label, len(labels)
        mean = float(min(found.mean[phase], whole))
        words = f"{label}\nmean rank: {ms_text(float(found.mean[phase]))}\nslowest, rank {rank}: {ms_text(whole)}"
        labels.append(label)
        if whole - mean > 1e-6 * whole:
            even.append((place, 0.0, mean, words, ""))
            time = ms_text(whole - mean)
            lost.append((place, mean, whole, f"{words}\nlost: {time}", f"rank {rank}: {time} lost"))
        else:
            even.append((place, 0.0, mean, words, ms_text(whole) + ", all alike" * (len(found.ms) > 1)))
    marks = spec.bars(MEAN.label, MEAN, even, label="end", across=True)
    marks += spec.bars(LOST.label, LOST, lost, label="end", across=True)
    title = "Critical path, predicted: the slowest rank of each phase" if found.waits else "The busiest rank, predicted"
    return spec.Panel(ms, spec.categories(labels), tuple(marks), title, ROW * max(1, len(labels)))


def _exchanges(found: Balance, ms: spec.Axis) -> spec.Panel:
    """The longest waiting in each exchange for the rank that came last."""
    bars, means = [], []
    for place, (name, values) in enumerate(found.waited.items()):
        rank, mean, most = int(values.argmin()), float(values.mean()), float(values.max())
        words = f"{name}\nrank {rank} comes last\nmean waiting of all ranks: {ms_text(mean)}, longest: {ms_text(most)}"
        bars.append((place, 0.0, most, words, f"rank {rank} last, {ms_text(most)}"))
        means.append((mean, place, words, ""))
    marks = spec.bars(WAIT.label, WAIT, bars, label="end", across=True)
    marks += spec.points("mean waiting of all ranks", means, symbol="line-ns", size=8.0)
    title = "Measured: longest waiting in each exchange"
    return spec.Panel(ms, spec.categories(found.waited), tuple(marks), title, ROW * len(bars))


def _ranks(found: Balance, ranks: spec.Axis, extent: float, width: int) -> spec.Panel:
    """Time at work and waiting of each rank; measured beside."""
    sides = [("predicted", found.step - found.waiting, found.waiting)]
    real = found.measured_waiting
    if found.steps is not None:
        wait = np.zeros(len(found.ms)) if real is None else np.minimum(real, found.steps)
        sides.append(("measured", found.steps - wait, wait))
    tallest = max(*(float(np.nanmax(work + wait, initial=0.0)) for _, work, wait in sides), extent) or 1.0
    each, marks = 0.86 / len(sides), list[spec.Mark]()
    for place, (kind, work, wait) in enumerate(sides):
        good = np.flatnonzero(np.isfinite(work + wait))
        at = np.arange(len(work)) + (place - (len(sides) - 1) / 2) * each
        is_known = real is not None or kind == "predicted"
        for look, lower, upper in ((WORK, np.zeros(len(work)), work), (WAIT, work, work + wait)):
            words = "waiting" if look is WAIT else "at work" if is_known else "step, waiting was not measured"
            rows = [
                (
                    at[rank],
                    lower[rank],
                    upper[rank],
                    f"rank {rank}, {kind}\n{words}: {ms_text(upper[rank] - lower[rank])}",
                    "",
                )
                for rank in good.tolist()
                if upper[rank] > lower[rank]
            ]
            marks += spec.bars(look.label, look, rows, width=each * 0.92)
        wide = (width - 80) / len(work) * each
        for rank in range(len(work)):
            if rank not in good:
                marks.append(spec.Text(float(at[rank]), 0.03 * tallest, MISSING))
            elif is_known and wide >= 28 and work[rank] + wait[rank] > 0:
                share = f"{number(100 * work[rank] / (work[rank] + wait[rank]), 2)}%"
                words = f"{share} at work" if wide >= 74 else share
                marks.append(spec.Text(float(at[rank]), float(work[rank] + wait[rank] + 0.05 * tallest), words))
    title = "Every rank's step, predicted" + (" (left) and measured" if len(sides) > 1 else "")
    busiest = int(found.ms.sum(axis=1).argmax())
    names = [f"▸ {name}" if rank == busiest else name for rank, name in enumerate(ranks.categories)]
    axis = spec.linear([tallest], "", "ms", pad=0.16)
    return spec.Panel(spec.categories(names, ranks.label), axis, tuple(marks), title, TALL)


def _bytes(found: Balance, name: str, ranks: spec.Axis) -> spec.Panel:
    """Each rank's bytes, predicted and measured, and the mean."""
    values, real = found.amounts[name], found.counted.get(name)
    mean, rank = float(values.mean()), int(values.argmax())
    title = (
        f"{SIDES[name]}: rank {rank} has most, {bytes_text(values[rank])}, {number(values[rank] / mean)} times the mean"
    )
    if real is not None and real.mean() > 0:
        title += f"; measured {number(real.max() / real.mean())} times, rank {int(real.argmax())}"
    sides = [(PREDICTED, values), *([(COUNTED, real)] if real is not None else [])]
    each, marks = 0.86 / len(sides), list[spec.Mark]()
    for place, (look, side) in enumerate(sides):
        at = np.arange(len(side)) + (place - (len(sides) - 1) / 2) * each
        rows = [
            (at[i], 0.0, value, f"rank {i}, {look.label}\n{SIDES[name]}: {bytes_text(value)}", "")
            for i, value in enumerate(side.tolist())
        ]
        marks += spec.bars(look.label, look, rows, width=each * 0.92)
    marks.append(spec.Rule(y=mean, colour=WARNING, dash="5 3"))
    axis = spec.linear([max(float(side.max()) for _, side in sides)], "", "bytes", pad=0.1)
    return spec.Panel(ranks, axis, tuple(marks), title, STRIP)
