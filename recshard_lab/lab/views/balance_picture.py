"""The static picture of the balance of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.lab.draw.rank_columns import MARGIN, Columns
from recshard_lab.lab.draw.svg import Svg, fit, text_width
from recshard_lab.lab.draw.theme import (
    LABEL_INK,
    MISSING,
    PHASES,
    WARNING,
    Look,
    bytes_text,
    look_of,
    ms_text,
    number,
    ticks,
)

if TYPE_CHECKING:
    from recshard_lab.lab.views.balance import Balance

LOST = Look("lost to imbalance", "#ff9d8a", "cross")
WORK, WAIT = Look("at work", "#9cc4ee", "plain"), Look("waiting for the slowest", "#eceff3", "dots")
PREDICTED, COUNTED = Look("predicted", "#9cc4ee", "plain"), Look("measured", "#f6bd83", "rising")
ROW, TALL, STRIP = 24.0, 110.0, 34.0
MOST = 32  # ranks whose bars are told apart
_EDGE = f'stroke="{LABEL_INK}" stroke-width=".5"'
SIDES = {"held": "bytes held", "sent": "bytes sent", "received": "bytes received"}


def draw_balance(found: Balance, title: str, summary: str, note: str, width: int, uid: str, extent: float = 0.0) -> Svg:
    """The picture; `extent`: ms that fill it, where several are to one scale."""
    svg = Svg(width, 0, title, summary, uid)
    y = svg.head(title, summary, MARGIN) + 18
    wide = width >= 700
    left, right = (170.0, 200.0) if wide else (148.0, 134.0)
    scale = (width - left - right - MARGIN) / (max(found.longest, extent) or 1.0)
    words = "Critical path, predicted" if found.waits else "The busiest rank, predicted"
    svg.text(MARGIN, y, words, bold=True)
    y += 8
    for phase, name in enumerate(found.names):
        if found.path[phase] > 0:
            _phase(svg, found, phase, name, (left, y), scale, width - right, wide)
            y += ROW
    if found.waited:
        y += 12
        svg.text(MARGIN, y + 4, fit(["Measured: waiting in exchanges for the rank that comes last", "Measured waiting"],
                                    width - 2 * MARGIN, 11), bold=True)  # fmt: skip
        y += 12
        for name, values in found.waited.items():
            _exchange(svg, name, values, (left, y), scale, width - right, wide)
            y += ROW
    y = _axis(svg, left, y + 2, scale, found)
    mean = Look("mean", "#c9ced6", "plain")
    looks = [(mean, "up to the mean rank, in its phase's colour"), (LOST, "lost: perfect balance would save it")]
    y = svg.legend(MARGIN, y + 8, looks, width - 2 * MARGIN) + 14
    y = _ranks(svg, found, y, width, extent)
    y = _bytes(svg, found, y, width)
    if note:
        for line in wrap(note, int((width - 2 * MARGIN) / 5.9)):
            svg.text(MARGIN, y + 10, line, soft=True)
            y += 16
    svg.height = y + 6
    return svg


def _phase(
    svg: Svg, found: Balance, phase: int, name: str, at: tuple[float, float], scale: float, right: float, wide: bool
) -> None:
    left, y = at
    look = look_of(name, PHASES)
    mean, most, rank = float(found.mean[phase]), float(found.path[phase]), int(found.slowest[phase])
    size = 11 if wide else 10
    svg.text(left - 8, y + 15, fit([look.label], left - MARGIN - 6, size), anchor="end", size=size)
    hover = f"{look.label}\nmean rank: {ms_text(mean)}\nslowest, rank {rank}: {ms_text(most)}"
    even = min(mean, most)
    svg.rect(left, y + 3, even * scale, ROW - 7, svg.fill(look), hover, _EDGE)
    lost = most - mean
    if lost * scale >= 0.05:
        svg.rect(
            left + even * scale, y + 3, lost * scale, ROW - 7, svg.fill(LOST), f"{hover}\nlost: {ms_text(lost)}", _EDGE
        )
    told = [f"rank {rank} is slowest, {ms_text(lost)} lost", f"rank {rank}: {ms_text(lost)} lost", f"rank {rank}"]
    if len(found.ms) == 1 or lost <= 1e-6 * most:
        told = [f"{ms_text(most)}, all alike" if len(found.ms) > 1 else ms_text(most)]
    svg.text(right + 8, y + 15, fit(told, svg.width - right - MARGIN, size), size=size)


def _exchange(
    svg: Svg, name: str, values: np.ndarray, at: tuple[float, float], scale: float, right: float, wide: bool
) -> None:
    """How long ranks waited in an exchange; the last to come did not."""
    left, y = at
    size = 11 if wide else 10
    last = int(values.argmin())
    svg.text(left - 8, y + 15, fit([name, name.split(":")[0]], left - MARGIN - 6, size), anchor="end", size=size)
    most = ms_text(values.max())
    hover = f"{name}\nrank {last} comes last\nranks wait {ms_text(values.mean())} on average, up to {most}"
    svg.rect(left, y + 3, values.max() * scale, ROW - 7, svg.fill(WAIT), hover, _EDGE)
    svg.line(left + values.mean() * scale, y + 1, left + values.mean() * scale, y + ROW - 2, 'stroke-width="2"')
    told = [f"rank {last} last, others wait {most}", f"rank {last} last, {most}", f"rank {last} last"]
    svg.text(right + 8, y + 15, fit(told, svg.width - right - MARGIN, size), size=size)


def _axis(svg: Svg, left: float, y: float, scale: float, found: Balance) -> float:
    longest = found.longest
    svg.line(left, y, left + longest * scale, y, 'stroke-opacity=".6"')
    marks = ticks(0.0, longest)
    every = 1 + int(len(marks) * 52 / max(1.0, longest * scale))
    for tick in marks[::every]:
        svg.line(left + tick * scale, y, left + tick * scale, y + 4, 'stroke-opacity=".6"')
        svg.text(left + tick * scale, y + 16, "0" if not tick else ms_text(tick), anchor="middle", size=10, soft=True)
    return y + 20


def _ranks(svg: Svg, found: Balance, y: float, width: float, extent: float) -> float:
    """Time at work and waiting, a column a rank; measured beside."""
    columns = Columns(len(found.ms), width)
    sides = [("predicted", found.step - found.waiting, found.waiting)]
    real = found.measured_waiting
    if found.steps is not None:
        wait = np.zeros(len(found.ms)) if real is None else np.minimum(real, found.steps)
        sides.append(("measured", found.steps - wait, wait))
    tallest = max(*(float(np.nanmax(work + wait, initial=0.0)) for _, work, wait in sides), extent) or 1.0
    words = "Every rank's step" + (", predicted | measured" if len(sides) > 1 else ", predicted")
    svg.text(MARGIN, y, words, bold=True)
    floor = y + 26 + TALL
    each = columns.each / len(sides) - (2 if len(sides) > 1 and columns.legible else 0)
    for place, (kind, work, wait) in enumerate(sides):
        told = "waiting was not measured" if real is None and kind == "measured" else ""
        scale = TALL / tallest
        lefts = [columns.left(rank) + place * columns.each / len(sides) for rank in range(len(work))]
        bars = _Bars(svg, lefts, each, floor, kind)
        bars.draw(WORK, np.zeros(len(work)), work * scale, [f"at work: {ms_text(v)}" for v in work.tolist()])
        bars.draw(WAIT, work * scale, wait * scale, [told or f"waiting: {ms_text(v)}" for v in wait.tolist()])
        for rank, (busy, idle) in enumerate(zip(work.tolist(), wait.tolist(), strict=True)):
            middle = lefts[rank] + each / 2
            if not np.isfinite(busy + idle):
                svg.text(middle, floor - 4, MISSING, anchor="middle", size=10)
            elif columns.legible and busy + idle > 0 and not told:
                share = f"{number(100 * busy / (busy + idle), 2)}%"
                words = fit([f"{share} at work", share], each + 6, 10)
                svg.text(middle, floor - (busy + idle) * scale - 5, words, anchor="middle", size=10)
    svg.line(MARGIN - 4, floor + 0.5, columns.right + 4, floor + 0.5, 'stroke-opacity=".6"')
    columns.label_ranks(svg, floor + 15, bold=int(found.ms.sum(axis=1).argmax()))
    y = floor + 24 + (14 if columns.each < 44 else 0)
    entries = [(WORK, WORK.label), (WAIT, WAIT.label)]
    y = svg.legend(MARGIN, y, entries, width - 2 * MARGIN)
    if real is None and found.steps is not None:
        svg.text(MARGIN, y + 8, "Measured: whole steps; how much of them was waiting was not taken.", soft=True)
        y += 16
    return y + 12


@dataclass(frozen=True)
class _Bars:
    """Bars of all ranks on one floor; beyond `MOST` of them one shape, without tooltips."""

    svg: Svg
    lefts: list[float]
    each: float
    floor: float
    kind: str

    def draw(self, look: Look, lower: np.ndarray, high: np.ndarray, told: list[str]) -> None:
        """Bars ``[W]`` pixels high that stand so high above the floor."""
        ok = np.flatnonzero(np.isfinite(lower + high) & (high >= 0.05)).tolist()
        if len(self.lefts) > MOST:
            shapes = [
                f"M{self.lefts[at]:.1f} {self.floor - lower[at]:.1f}v{-high[at]:.1f}h{self.each:.1f}v{high[at]:.1f}z"
                for at in ok
            ]
            if shapes:
                self.svg.path("".join(shapes), f'fill="{self.svg.fill(look)}"', f"{look.label}, {self.kind}")
            return
        for at in ok:
            y = self.floor - lower[at] - high[at]
            hover = f"rank {at}, {self.kind}\n{told[at]}"
            self.svg.rect(self.lefts[at], y, self.each, high[at], self.svg.fill(look), hover, _EDGE)


def _bytes(svg: Svg, found: Balance, y: float, width: float) -> float:
    """Each rank's bytes against the mean: the dashed line."""
    columns = Columns(len(found.ms), width)
    names = [name for name in SIDES if name in found.amounts]
    if not names or len(found.ms) == 1:
        return y - 8
    two = any(name in found.counted for name in names)
    for name in names:
        values, real = found.amounts[name], found.counted.get(name)
        sides = [(PREDICTED, values), *([(COUNTED, real)] if real is not None else [])]
        top = max(float(side.max()) for _, side in sides)
        mean, rank = float(values.mean()), int(values.argmax())
        most = f"{bytes_text(values[rank])}, {number(values[rank] / mean)} times the mean"
        words = f"{SIDES[name].capitalize()}: rank {rank} has most, {most}"
        if real is not None and real.mean() > 0:
            words += f"; measured {number(real.max() / real.mean())} times, rank {int(real.argmax())}"
        svg.text(MARGIN, y + 4, fit([words, words.split(";")[0]], width - 2 * MARGIN, 10.6))
        floor = y + 12 + STRIP
        for place, (look, side) in enumerate(sides):
            each = columns.each / len(sides)
            bars = _Bars(svg, [columns.left(at) + place * each for at in range(len(side))], each, floor, look.label)
            told = [f"{SIDES[name]}: {bytes_text(value)}" for value in side.tolist()]
            bars.draw(look, np.zeros(len(side)), side / top * STRIP, told)
        level = floor - mean / top * STRIP
        svg.line(MARGIN - 4, level, columns.right + 4, level, f'stroke-dasharray="5 3" style="stroke:{WARNING}"')
        svg.line(MARGIN - 4, floor + 0.5, columns.right + 4, floor + 0.5, 'stroke-opacity=".4"')
        y = floor + 20
    svg.line(MARGIN, y, MARGIN + 18, y, f'stroke-dasharray="5 3" style="stroke:{WARNING}"')
    svg.text(MARGIN + 24, y + 4, "mean of all ranks")
    if two:
        x = MARGIN + 24 + text_width("mean of all ranks", 11) + 18
        svg.legend(x, y - 6, [(PREDICTED, PREDICTED.label), (COUNTED, COUNTED.label)], width - x)
    return y + 14
