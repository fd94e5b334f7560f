"""What plotly figures have in common here: no template, no paper, an ink that both themes can read."""

from __future__ import annotations

from typing import Any

from recshard_lab.lab.draw.theme import HATCHES, LABEL_INK, MIDDLE_INK, Look

_AXIS = {
    "showgrid": False,
    "zeroline": False,
    "linecolor": MIDDLE_INK,
    "tickcolor": MIDDLE_INK,
    "ticks": "outside",
    "automargin": True,
}
GRID = {"gridcolor": "rgba(128,136,146,.25)"}


def figure(traces: list[Any], title: str, *, height: int = 380, **layout: Any) -> Any:
    """A figure of ``traces`` in the house's style; ``layout`` is merged over it."""
    import plotly.graph_objects as go

    base: dict[str, Any] = {
        "template": "none",
        "title": {
            "text": title,
            "font": {"size": 15},
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 0.97,
            "yanchor": "top",
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": MIDDLE_INK, "size": 12},
        "margin": {"l": 56, "r": 20, "t": 84, "b": 44},
        "legend": {"orientation": "h", "y": 1.01, "yanchor": "bottom", "x": 0},
        "showlegend": any(trace.name and trace.showlegend is not False for trace in traces),
        "hoverlabel": {"align": "left"},
        "height": height,
        "xaxis": _AXIS,
        "yaxis": {**_AXIS, "showgrid": True, **GRID},
    }
    for key, value in layout.items():
        old = base.get(key, _AXIS if key.startswith("xaxis") else None)
        base[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return go.Figure(data=traces, layout=base)


def up_to(most: float) -> dict[str, Any]:
    """The range of an axis that begins at 0 and on which a value fits.

    >>> up_to(100.0)
    {'range': [0.0, 104.0]}
    """
    return {"range": [0.0, 1.04 * most]} if most > 0 else {}


def blank(title: str, problem: str) -> Any:
    """A figure that only says why it is empty."""
    note = {"text": problem, "showarrow": False, "xref": "paper", "yref": "paper", "x": 0, "y": 0.5}
    return figure(
        [],
        title,
        height=140,
        annotations=[note],
        xaxis={"visible": False},
        yaxis={"visible": False},
    )


def marker(look: Look) -> dict[str, Any]:
    """A bar's fill, hatching and outline."""
    shape = HATCHES[look.hatch][0]
    pattern = {"shape": shape, "fgcolor": "rgba(20,24,29,.35)", "size": 7, "solidity": 0.15, "bgcolor": look.fill}
    made: dict[str, Any] = {"color": look.fill, "line": {"color": LABEL_INK, "width": 0.6}}
    return {**made, "pattern": pattern} if shape else made
