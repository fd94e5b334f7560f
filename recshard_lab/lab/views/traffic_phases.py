"""What the labels of collectives mean to a reader: phases of a step's traffic, and the routes inside them.

A trace and an `Estimate` name the same things alike (``output_dist/rows/inside``), so that predicted and counted bytes
meet by name::

    label   input_dist/sizes   input_dist/ids   output_dist/rows[/route]   output_dist_backward/rows[/route]
    phase   sizes              ids              rows                       gradients

    label   row_norms    dense    replicas/weights   replicas/optimizer_state
    phase   row_norms    dense    sync               sync
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

PHASES: dict[str, str] = {
    "sizes": "sizes of messages",
    "ids": "ids to shards",
    "rows": "rows to samples",
    "gradients": "gradients to shards",
    "weight_gradients": "gradients of id weights",
    "row_norms": "row norms",
    "dense": "dense all-reduce",
    "sync": "2D sync",
    "other": "other",
}
"""Name of a phase -> what a reader sees."""

_OF_PREFIX = {
    "input_dist/sizes": "sizes",
    "input_dist/ids": "ids",
    "input_dist_backward/": "weight_gradients",
    "output_dist/": "rows",
    "output_dist_backward/": "gradients",
    "row_norms": "row_norms",
    "dense": "dense",
    "replicas/": "sync",
}
_ROUTES = {
    "": "direct",
    "reduce_scatter": "reduce_scatter",
    "inside": "two_hop inside",
    "across": "two_hop across",
}


@dataclass(frozen=True, eq=False)
class Part:
    """The traffic under one label.

    Args:
        phase: a name of `PHASES`.
        words: what a reader sees, with the route.
        predicted, counted: bytes ``[W, W]``; None if it is not predicted, or not counted.
    """

    phase: str
    words: str
    predicted: np.ndarray | None
    counted: np.ndarray | None


def phase_of(label: str) -> str:
    """The phase that a collective belongs to.

    >>> phase_of("output_dist/rows/across"), phase_of("pipeline/agree")
    ('rows', 'other')
    """
    return next((phase for prefix, phase in _OF_PREFIX.items() if label.startswith(prefix)), "other")


def words_of(label: str) -> str:
    """A label for a reader.

    >>> words_of("output_dist_backward/rows"), words_of("replicas/optimizer_state"), words_of("pipeline/agree")
    ('gradients to shards: direct', '2D sync: optimizer state', 'pipeline/agree')
    """
    phase = phase_of(label)
    if phase == "other":
        return label
    rest = label.split("/")[1:]
    if phase in ("rows", "gradients"):
        route = "/".join(rest[1:])
        return f"{PHASES[phase]}: {_ROUTES.get(route, route)}"
    return f"{PHASES[phase]}: {rest[-1].replace('_', ' ')}" if phase == "sync" and rest else PHASES[phase]


def parts_of(estimate: Any, measured: Any = None, phase: str | None = None) -> list[Part]:
    """The parts of a step's traffic, in its order, without those that are nothing on both sides.

    Args:
        estimate, measured: with a ``traffic_by_phase``; without it, no parts are returned.
        phase: only those of this phase.

    Raises:
        ValueError: unknown phase.
    """
    if phase is not None and phase not in PHASES:
        raise ValueError(f"no phase is named {phase!r}; there are: {', '.join(PHASES)}")
    predicted: Mapping[str, Any] = getattr(estimate, "traffic_by_phase", None) or {}
    counted: Mapping[str, Any] = getattr(measured, "traffic_by_phase", None) or {}
    order = list(PHASES)
    labels = sorted(dict.fromkeys([*predicted, *counted]), key=lambda label: order.index(phase_of(label)))
    found = []
    for label in labels:
        if phase is not None and phase_of(label) != phase:
            continue
        sides = [
            None if label not in side else _away(np.asarray(side[label], dtype=float)) for side in (predicted, counted)
        ]
        if any(side is not None and side.any() for side in sides):
            found.append(Part(phase_of(label), words_of(label), *sides))
    return found


def _away(sent: np.ndarray) -> np.ndarray:
    """Without what stays on its rank."""
    return sent - np.diag(np.diag(sent))
