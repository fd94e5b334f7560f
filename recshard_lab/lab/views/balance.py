"""Balance: which rank holds up each phase, what that costs, and which ranks wait for whom.

Above, the critical path: every phase takes as long as its slowest rank; up to the mean is what it would take if all
ranks did the same, the rest is lost to imbalance. Below, every rank's time at work and waiting, and its bytes against
the mean. `phases` shows when ranks wait; this shows what it costs and who is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recshard_lab.lab.draw.plots import GRID, figure, marker, up_to
from recshard_lab.lab.draw.svg import Svg
from recshard_lab.lab.draw.theme import PHASES, as_sentence, bytes_text, look_of, ms_text, number, with_notes
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.balance_picture import LOST, WAIT, WORK, draw_balance
from recshard_lab.lab.views.phases import unshowable
from recshard_lab.lab.views.registry import register_view
from recshard_lab.lab.views.traffic_phases import words_of
from recshard_lab.text_table import TextTable


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

    def draw(uid: str) -> Svg:
        return draw_balance(found, title, summary, note, width, uid, extent)

    def plot() -> Any:
        return _plot(found, title, extent)

    return View("balance", title, summary, _numbers(found), draw, plot, extent=found.tallest)


@dataclass(frozen=True, eq=False)
class Balance:
    """What the picture shows.

    Attributes:
        names, ms: P phases, ``[W, P]``.
        slowest: ``[P]`` the rank that holds up each phase; path: ``[P]`` what it takes; mean: ``[P]`` of all ranks.
        waits: whether phases wait for their slowest rank; else the step is the busiest rank's own sum.
        amounts: "held", "sent", "received" -> bytes ``[W]``, predicted; counted: the same, measured.
        steps: ``[W]`` measured; None where nothing was.
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
        """Who holds up what, and what it costs."""
        if len(self.ms) == 1:
            return "One rank waits for nobody."
        if not self.saved > 1e-9 * max(self.step, 1e-9):
            return "All ranks do the same in every phase: nobody waits."
        share = 100 * float(self.waiting.mean()) / self.step
        lost = self.path - self.mean
        worst = int(lost.argmax())
        words = f"Ranks wait {number(share, 2)}% of the step. "
        if not self.waits:
            words += f"Rank {self.slowest[0]} is busiest, and under this cost model its own sum is the step"
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


def _plot(found: Balance, title: str, extent: float) -> Any:
    import plotly.graph_objects as go

    labels = [look_of(name, PHASES).label for name in found.names]
    lost = found.path - found.mean
    ranks = [f"rank {rank}" for rank in found.slowest]
    traces: list[Any] = []
    for name, values, look, hover in (
        ("mean rank", np.minimum(found.mean, found.path), WORK, "mean"),
        ("lost to imbalance", np.maximum(lost, 0.0), LOST, "lost to imbalance, slowest: %{customdata}"),
    ):
        template = f"%{{y}}<br>{hover}: %{{x:.4g}} ms<extra></extra>"
        traces.append(
            go.Bar(
                name=name,
                orientation="h",
                y=labels,
                x=[float(v) for v in values],
                customdata=ranks,
                marker=marker(look),
                hovertemplate=template,
            )
        )
    sides: list[tuple[str, Sequence[Any], Sequence[Any]]] = [
        ("predicted", found.step - found.waiting, found.waiting)  # type: ignore[list-item]
    ]
    real = found.measured_waiting
    if real is not None and found.steps is not None:
        sides.append(("measured", np.maximum(0.0, found.steps - real), real))  # type: ignore[arg-type]
    each = list(range(len(found.ms)))
    for place, (kind, work, wait) in enumerate(sides):
        for look, values, base in ((WORK, work, None), (WAIT, wait, [float(v) for v in work])):
            traces.append(
                go.Bar(
                    name=look.label,
                    legendgroup=look.label,
                    showlegend=place == 0,
                    x=each,
                    y=[float(v) for v in values],
                    base=base,
                    offsetgroup=place,
                    xaxis="x2",
                    yaxis="y2",
                    marker=marker(look),
                    hovertemplate=f"rank %{{x}}, {kind}<br>{look.label}: %{{y:.4g}} ms<extra></extra>",
                )
            )
    return figure(
        traces,
        title,
        barmode="stack" if len(sides) == 1 else "group",
        height=520,
        xaxis={**up_to(extent or found.longest), "title": {"text": "ms"}, "showgrid": True, **GRID, "anchor": "y"},
        yaxis={"autorange": "reversed", "showgrid": False, "domain": [0.56, 1]},
        xaxis2={"title": {"text": "rank"}, "anchor": "y2"},
        yaxis2={
            **up_to(max(found.tallest, extent)),
            "title": {"text": "ms"},
            **GRID,
            "domain": [0, 0.38],
            "anchor": "x2",
        },
    )
