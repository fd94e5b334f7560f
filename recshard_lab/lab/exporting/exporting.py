"""One call that writes anything the lab shows as a file: a page, a picture, a plan, a script, or all of them.

::

    export(thing, "x.html")   one page that opens offline: pictures, numbers, the Python, every assumption
    export(thing, "x.svg")    the pictures; x.png the same in pixels
    export(thing, "x.json")   the plan, for ShardingPlan.from_json
    export(thing, "x.py")     a script for torchrun that trains under the plan; x.sh runs it too
    export(thing, "x.zip")    all of them; a path without suffix is a folder of them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.lab.draw.view import View
from recshard_lab.lab.exporting.exportable import Candidate, Exportable
from recshard_lab.lab.exporting.kinds import KINDS, Options, everything, kind_of, page_of
from recshard_lab.lab.exporting.page import check_plotly
from recshard_lab.lab.exporting.plan_report import comparison_page, plan_page
from recshard_lab.lab.exporting.report import Section
from recshard_lab.planner import Sweep
from recshard_lab.sharding import ShardingPlan


@checks_arguments
def export(
    thing: Any,
    path: str | Path,
    *,
    plan: str = "",
    plotly: str = "embed",
    theme: str = "light",
    scale: float = 2.0,
    model: str | None = None,
    title: str = "",
    python: str = "",
    **known: Any,
) -> Path:
    """Writes a view, a comparison, a plan or a widget as the file that its name asks for.

    Args:
        thing: a view; a list of views, or heading -> view or views; a plan, or name -> plan; a sweep; what
            ``recshard demo`` found; a widget of the lab.
        path: ``.html``, ``.svg``, ``.png``, ``.json`` (a plan), ``.py`` or ``.sh`` (a script for torchrun),
            ``.zip``; no suffix is a folder. A file that is there is written over.
        plan: the name of the plan that goes into a file that holds one, where the thing has several.
        plotly: of a page: "embed" (opens offline, 2 MB), "cdn" (loaded from the network, as the page says), "none".
        theme: of a PNG, "light" or "dark".
        scale: of a PNG, its pixels for one of the picture's.
        model: of a script, the factory of the model that was planned for, as ``package.module:factory``.
        title, python: of a page: its heading, and the Python that makes the thing.
        known: of plans that no planner made: ``tables``, ``topology``, ``workload``, ``measured``.

    Returns:
        The path written.

    Raises:
        ValueError: a thing or a kind of file that is not known, a thing that such a file cannot hold, a page of more
            than 3 MB; all say what can be done.
        OSError: the file cannot be written.

    >>> from tempfile import mkdtemp
    >>> from recshard_lab.lab import views
    >>> export(views.curves({"loss": [0.7, 0.6]}), mkdtemp() + "/loss.svg").name
    'loss.svg'
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "json" and isinstance(thing, ShardingPlan):  # which says everything itself
        _check_folder(path)
        path.write_text(f"{thing.to_json(indent=2)}\n", encoding="utf-8")
        return path
    found = exportable(thing, **known)
    found = replace(found, title=title or found.title, python=python or found.python)
    options = Options(plan, check_plotly(plotly), theme, scale, model)
    _check_folder(path)
    if kind == "folder":
        path.mkdir(exist_ok=True)
        for name, data in everything(found, options).items():
            (path / name).write_bytes(data)
    else:
        path.write_bytes(KINDS[kind].write(found, options))
    return path


def exportable(thing: Any, **known: Any) -> Exportable:
    """What there is to export of a thing, see `export`.

    Raises:
        ValueError: nothing that could be exported.
    """
    if isinstance(thing, Exportable):
        return thing
    own = getattr(thing, "exportable", None)
    if callable(own):
        return own(**known)
    if isinstance(thing, View):
        thing = {thing.title: [thing]}
    if isinstance(thing, ShardingPlan):
        return plan_page(Candidate.of("plan", thing, **_known(known)))
    if isinstance(thing, Candidate):
        return plan_page(thing)
    if isinstance(thing, Sweep):
        from recshard_lab.lab.exporting.sweep_report import sweep_page

        if list(known) != ["workload"]:
            raise ValueError("a sweep's page says what step it was made for. Fix: export(..., workload=...)")
        return sweep_page(thing, known["workload"])
    if isinstance(thing, Mapping) and thing and all(isinstance(each, ShardingPlan) for each in thing.values()):
        return comparison_page([Candidate.of(str(name), each, **_known(known)) for name, each in thing.items()])
    if isinstance(thing, Mapping):
        parts = {str(name): [each] if isinstance(each, View) else each for name, each in thing.items()}
    elif isinstance(thing, Sequence) and thing and all(isinstance(each, View) for each in thing):
        parts = {}
        for each in thing:
            parts.setdefault(each.title, []).append(each)
    elif isinstance(thing, Sequence) and thing and all(isinstance(each, Candidate) for each in thing):
        return comparison_page(thing)
    else:
        parts = {}
    good = all(isinstance(own, Sequence) and own and all(isinstance(v, View) for v in own) for own in parts.values())
    if not parts or not good:
        raise ValueError(
            f"export takes a view, a list or dictionary of views, a ShardingPlan or a dictionary of them, a sweep or a "
            f"widget of the lab, got {_short(thing)}"
        )
    return Exportable(
        " and ".join(parts) if len(parts) < 3 else f"{len(parts)} pictures",
        [Section(heading, own) for heading, own in parts.items()],
        pictures=parts
        if len(parts) > 1 and isinstance(thing, Mapping)
        else {"": [v for o in parts.values() for v in o]},
    )


def write_page(path: str | Path, found: Exportable, plotly: str = "embed") -> Path:
    """Writes `page_of` to a path of any suffix."""
    path = Path(path)
    path.write_text(page_of(found, check_plotly(plotly)), encoding="utf-8")
    return path


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {str(path.parent)!r} to write {path.name} into. Fix: make it")


def _known(known: Mapping[str, Any]) -> dict[str, Any]:
    """What may be said of plans.

    Raises:
        ValueError: something else.
    """
    allowed = ("tables", "topology", "workload", "estimate", "measured")
    for name in known:
        if name not in allowed:
            raise ValueError(f"export does not know {name!r} of a plan; it takes: {', '.join(allowed)}")
    given = dict(known)
    return given if "estimate" not in given else {**given, "estimated": given.pop("estimate")}


def _short(thing: Any) -> str:
    words = repr(thing)
    return f"{words[:80]} (a {type(thing).__name__})"
