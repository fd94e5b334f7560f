"""The planner's search: every plan that it looked at, as step time and memory, and when it came by it.

Left, each plan by what the fullest rank holds and how long its step is; those over the memory's cap are crosses beyond
the cap's line. Right, the same steps by the number of plans looked at before, with the best so far as a staircase that
ends at the plan chosen. No plan that fits lies below the dashed bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.svg import Svg
from recshard_lab.lab.draw.theme import WARNING, bytes_text, ms_text, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.lab.views.search_picture import CHOSEN, FRONTIER, PLAIN, Seen, draw_search, scheme_label
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.planner.search.trace import Candidate, SearchTrace

MOST_LINES = 60  # of the numbers


@register_view("Planner's search", place=10)
def planner_search(search: SearchTrace | None, *, note: str = "", width: int = 860) -> View:
    """Every plan that a planner looked at: step time, memory of the fullest rank, and when it came by it.

    Args:
        search: ``plan.search`` of a plan by an ``EmbeddingShardingPlanner(keep_search=True)``.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    >>> from recshard_lab.embedding.configs import EmbeddingBagConfig
    >>> from recshard_lab.planner import EmbeddingShardingPlanner
    >>> from recshard_lab.sharding import Topology
    >>> tables = [EmbeddingBagConfig(1000, 16, name, feature_names=[name]) for name in ("movies", "users")]
    >>> planner = EmbeddingShardingPlanner(Topology(2), keep_search=True)
    >>> plan = planner.plan_tables(tables)
    >>> planner_search(plan.search).problem
    ''
    """
    if search is None:
        words = "There is no search to show: the plan was given, or EmbeddingShardingPlanner had no keep_search=True."
        return message_view("planner_search", "Planner's search", words)
    seen = Seen.of(search)
    if not seen.drawn and not seen.alone:
        words = "The planner looked at no plan."
        if search.candidates:
            words = f"None of {len(search.candidates):,} plans has a step and a memory that are numbers."
        return message_view("planner_search", "Planner's search", words)
    title = f"Planner's search: {search.seen:,} plan{'s' * (search.seen != 1)} looked at"
    title += f", {ms_text(search.chosen.step_ms)} chosen" if search.chosen is not None else ", none fits"
    summary = _summary(search, seen)

    def draw(uid: str) -> Svg:
        return draw_search(seen, title, summary, note, width, uid)

    return View("planner_search", title, summary, _numbers(seen), draw, lambda: _plot(seen, title))


def _summary(search: SearchTrace, seen: Seen) -> str:
    """How near the best, what was left out, and what one scheme alone would give."""
    words = []
    chosen, bound = search.chosen, search.lower_bound
    if chosen is not None and bound is not None and bound > 0 and np.isfinite([bound, chosen.step_ms]).all():
        far = max(0.0, chosen.step_ms / bound - 1)
        near = f"at most {number(100 * far, 2)}% longer than the best there is"
        words.append(f"The chosen plan is {near if far > 5e-5 else 'the best there is'}.")
        faster = [one for one in seen.drawn if one.fits and one.step_ms < 0.9999 * chosen.step_ms]
        if faster:
            best = min(faster, key=lambda one: one.step_ms)
            less = number(100 * (1 - best.step_ms / chosen.step_ms), 2)
            words.append(f"It is not the shortest here: no. {best.number:,} is {less}% shorter.")
    over = sum(not one.fits for one in seen.drawn)
    if search.every > 1:
        words.append(f"Drawn: {search.thinned}")
    if not search.candidates:
        words.append(f"The search found no plan that fits: each rank has {bytes_text(seen.capacity)} usable.")
    elif over:
        words.append(f"{over:,} {'plans do' if over > 1 else 'plan does'} not fit.")
    fitting = {scheme: one for scheme, one in seen.alone.items() if one.fits and not one.elsewhere}
    if fitting and chosen is not None:
        scheme = min(fitting, key=lambda name: fitting[name].step_ms)
        more = 100 * (fitting[scheme].step_ms / chosen.step_ms - 1) if chosen.step_ms > 0 else 0.0
        verdict = "no shorter" if abs(more) < 0.01 else f"{number(abs(more), 2)}% {'longer' if more > 0 else 'shorter'}"
        words.append(f"All tables under {scheme_label(scheme)}: {verdict}.")
    if seen.left_out:
        words.append(f"{seen.left_out:,} plans have no number and are not drawn.")
    return " ".join(words)


def _numbers(seen: Seen) -> TextTable:
    """The bound, the cap, the plans that have a name, and the best so far."""
    best, frontier = set(map(id, seen.best)), set(map(id, seen.frontier))
    rows: list[list[str]] = []
    if seen.bound is not None:
        rows.append(["lower bound", "", "", ms_text(seen.bound), "", "", ""])
    rows.append(["usable per rank", "", "", "", bytes_text(seen.capacity), "", ""])

    def line(name: str, one: Candidate) -> list[str]:
        marks = [word for word, among in (("best so far", best), ("frontier", frontier)) if id(one) in among]
        number_ = f"{one.number:,}" if one.number >= 0 else ""
        held = bytes_text(one.memory_bytes) + ("" if one.fits else ", does not fit")
        return [name, number_, one.stage, ms_text(one.step_ms), held, ", ".join(marks), one.text]

    if seen.chosen is not None:
        rows.append(line("chosen", seen.chosen))
    rows += [line(f"all {scheme_label(scheme)}", one) for scheme, one in seen.alone.items()]
    others = [one for one in seen.drawn if id(one) in best | frontier and one is not seen.chosen]
    left = len(others) - (MOST_LINES - len(rows))
    rows += [line("", one) for one in others[: MOST_LINES - len(rows)]]
    if left > 0:
        rows.append([f"and {left:,} more", "", "", "", "", "", "records() has all"])
    return TextTable(("plan", "no.", "found by", "step", "fullest rank", "", "tables under"), rows)


def _plot(seen: Seen, title: str) -> Any:
    import plotly.graph_objects as go

    def hovers(some: list[Candidate], name: str = "") -> list[str]:
        return [seen.hover(one, name).replace("\n", "<br>") for one in some]

    def points(name: str, some: list[Candidate], symbol: str, colour: str, size: int, **more: Any) -> list[Any]:
        shared: dict[str, Any] = {
            "mode": "markers",
            "text": hovers(some),
            "hovertemplate": "%{text}<extra></extra>",
            "legendgroup": name,
        }
        shared["marker"] = {"symbol": symbol, "color": colour, "size": size, "line": {"width": 1.4, "color": colour}}
        y = [one.step_ms for one in some]
        left = go.Scatter(name=name, x=[one.memory_bytes for one in some], y=y, **{**shared, **more})
        right = go.Scatter(name=name, x=[one.number for one in some], y=y, showlegend=False, xaxis="x2", **shared)
        return [left, right] if some and some[0].number >= 0 else [left]

    fitting, over = [one for one in seen.drawn if one.fits], [one for one in seen.drawn if not one.fits]
    traces: list[Any] = []
    for some, name, symbol, colour in ((fitting, "fits", "circle-open", PLAIN), (over, "over the cap", "x", WARNING)):
        traces += points(name, some, symbol, colour, 7) if some else []
    line = seen.frontier
    if line:
        traces.append(
            go.Scatter(
                name="Pareto frontier",
                x=[one.memory_bytes for one in line],
                y=[one.step_ms for one in line],
                mode="lines+markers",
                line={"color": FRONTIER, "dash": "dash", "shape": "vh"},
                marker={"symbol": "diamond", "size": 10, "color": FRONTIER},
                text=hovers(line),
                hovertemplate="%{text}<extra></extra>",
            )
        )
    if seen.best:
        stairs = seen.stairs()
        traces.append(
            go.Scatter(
                name="best so far",
                x=[at for at, _ in stairs],
                y=[ms for _, ms in stairs],
                mode="lines",
                line={"color": CHOSEN, "shape": "hv", "width": 2},
                xaxis="x2",
                hovertemplate="best of %{x} plans: %{y:.4g} ms<extra></extra>",
            )
        )
    for scheme, one in seen.alone.items():
        label = scheme_label(scheme)
        more = {"mode": "markers+text", "textposition": "top center", "text": [label], "cliponaxis": False}
        more |= {"hovertext": hovers([one], f"all {label}"), "hovertemplate": "%{hovertext}<extra></extra>"}
        symbol = "square-open" if one.fits else "square-x-open"
        traces += points(label, [one], symbol, "#7a828c", 11, **more, showlegend=False)
    if seen.chosen is not None:
        traces += points("chosen", [seen.chosen], "star", CHOSEN, 16)
    lines: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    if seen.bound is not None:
        lines.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": seen.bound, "y1": seen.bound})
        words = f"lower bound {ms_text(seen.bound)}"
        notes.append({"text": words, "xref": "paper", "x": 0, "xanchor": "left", "y": seen.bound, "yanchor": "top"})
    if seen.cap_near:
        lines.append({"type": "line", "x0": seen.capacity, "x1": seen.capacity, "yref": "paper", "y0": 0, "y1": 1})
        words = f"{bytes_text(seen.capacity)} usable"
        notes.append(
            {"text": words, "x": seen.capacity, "xanchor": "left", "yref": "paper", "y": 1, "yanchor": "bottom"}
        )
    return figure(
        traces,
        title,
        height=460,
        shapes=[{**one, "line": {"color": WARNING if "yref" in one else "#7a828c", "dash": "dash"}} for one in lines],
        annotations=[{**one, "showarrow": False} for one in notes],
        xaxis={
            "title": {"text": "fullest rank"},
            "domain": [0, 0.68],
            "tickformat": ".3~s",
            "ticksuffix": "B",
        },
        xaxis2={"title": {"text": "plans looked at"}, "domain": [0.74, 1], "anchor": "y"},
        yaxis={"title": {"text": "ms a step"}},
    )
