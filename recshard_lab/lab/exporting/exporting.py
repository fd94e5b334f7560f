"""`export` writes anything that the lab shows to a file: a page, a picture, a plan, a script, or all of them.

::

    export(thing, "x.html")   one page that works offline: pictures, numbers, the Python, every assumption
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
from recshard_lab.lab.exporting.kinds import KINDS, Options, everything, kind_of
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
    """Writes a view, a comparison, a plan or a widget to a file. Its suffix chooses the kind.

    Args:
        thing: a view; a list of views, or heading -> view or views; a plan, or name -> plan; a sweep; the result of
            ``recshard demo``; a widget of the lab.
        path: ``.html``, ``.svg``, ``.png``, ``.json`` (a plan), ``.py`` or ``.sh`` (a script for torchrun),
            ``.zip``; no suffix is a folder. Existing files are overwritten.
        plan: name of one of several plans, for a file that holds one plan.
        plotly: of a page: "embed" (works offline, 2 MB), "cdn" (loaded from the network), "none".
        theme: of a PNG, "light" or "dark".
        scale: of a PNG, its pixels per pixel of the picture.
        model: of a script, the factory of the planned model, as ``package.module:factory``.
        title, python: of a page: its heading, and the Python that makes the thing.
        known: for plans that no planner made: ``tables``, ``topology``, ``workload``, ``measured``.

    Returns:
        The path written.

    Raises:
        ValueError: an unknown type of thing or kind of file, a kind that cannot hold the thing, or a page of more than
            3 MB. The message contains a fix.
        OSError: the file cannot be written.

    >>> from tempfile import mkdtemp
    >>> from recshard_lab.lab import views
    >>> export(views.curves({"loss": [0.7, 0.6]}), mkdtemp() + "/loss.svg").name
    'loss.svg'
    """
    path = Path(path)
    kind = kind_of(path)
    if kind == "json" and isinstance(thing, ShardingPlan):
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
    """The contents of an export, see `export`.

    Raises:
        ValueError: a type that cannot be exported.
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
            raise ValueError("the page of a sweep needs the step that it simulates. Fix: export(..., workload=...)")
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


def _check_folder(path: Path) -> None:
    if not path.parent.is_dir():
        raise ValueError(f"{path.name} cannot be written: the folder {str(path.parent)!r} does not exist. Fix: make it")


def _known(known: Mapping[str, Any]) -> dict[str, Any]:
    """Checked arguments of `Candidate.of`.

    Raises:
        ValueError: an unknown name.
    """
    allowed = ("tables", "topology", "workload", "estimate", "measured")
    for name in known:
        if name not in allowed:
            raise ValueError(f"export has no argument {name!r} for plans; arguments: {', '.join(allowed)}")
    return {"estimated" if name == "estimate" else name: value for name, value in known.items()}


def _short(thing: Any) -> str:
    words = repr(thing)
    return f"{words[:80]} (a {type(thing).__name__})"
