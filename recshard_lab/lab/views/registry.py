"""Which views there are. A view that fails shows why instead of ending the cell it is shown in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recshard_lab.lab.draw.svg import Svg
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.sharding import ShardingPlan

ViewFunction = Callable[..., View]


@dataclass(frozen=True)
class _Entry:
    label: str
    function: ViewFunction
    place: int
    required: frozenset[str]
    accepted: frozenset[str]


_VIEWS: dict[str, _Entry] = {}


def register_view(label: str, *, place: int = 100) -> Callable[[ViewFunction], ViewFunction]:
    """Makes a function a view under its own name.

    The registered function answers an exception of the drawing with a message view; wrong arguments still raise. An
    argument `estimate` may also be a plan that a planner made.

    Args:
        label: what a reader sees on a button or a heading.
        place: views are offered in this order.

    Raises:
        ValueError: another view has this name.

    >>> @register_view("Number of ranks")
    ... def number_of_ranks(topology):
    ...     return message_view("number_of_ranks", "Ranks", f"{topology} ranks")
    >>> number_of_ranks(4).summary, unregister_view("number_of_ranks")
    ('4 ranks', None)
    """

    def register(function: ViewFunction) -> ViewFunction:
        name = function.__name__
        if name in _VIEWS:
            raise ValueError(f"a view named {name!r} exists already: unregister_view({name!r}) first")
        signature = inspect.signature(function)

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> View:
            bound = signature.bind(*args, **kwargs)
            try:
                if isinstance(bound.arguments.get("estimate"), ShardingPlan):
                    bound.arguments["estimate"] = bound.arguments["estimate"].estimate
                return _guarded(function(*bound.args, **bound.kwargs), label)
            except Exception as error:
                return message_view(name, label, reason(error))

        required = {
            p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
        }
        _VIEWS[name] = _Entry(label, guarded, place, frozenset(required), frozenset(signature.parameters))
        return guarded

    return register


def unregister_view(name: str) -> None:
    """Takes a view away again.

    Raises:
        ValueError: no such view.
    """
    _entry(name)
    del _VIEWS[name]


def view_names() -> list[str]:
    """The registered views, in the order in which they are offered."""
    return sorted(_VIEWS, key=lambda name: _VIEWS[name].place)


def view_named(name: str) -> ViewFunction:
    """A registered view's function.

    Raises:
        ValueError: no such view; the message lists those that exist.
    """
    return _entry(name).function


def view_label(name: str) -> str:
    """What a reader sees on its button."""
    return _entry(name).label


def views_of(*known: str) -> list[str]:
    """The views that can be drawn from these arguments.

    >>> views_of("losses")
    ['curves']
    """
    return [name for name in view_names() if _VIEWS[name].required <= set(known)]


def draw(name: str, /, **known: Any) -> View:
    """Draws a view from whatever is known, handing it the arguments that it asks for."""
    entry = _entry(name)
    return entry.function(**{key: value for key, value in known.items() if key in entry.accepted})


def draw_alike(name: str, /, known: Sequence[Mapping[str, Any]]) -> list[View]:
    """Draws one view several times to one scale, so that pictures side by side can be compared.

    Args:
        name: of the view.
        known: for each picture what is known, as for `draw`.
    """
    made = [draw(name, **each) for each in known]
    extent = max((view.extent for view in made), default=0.0)
    if "extent" not in _entry(name).accepted or not extent > 0:
        return made
    pairs = zip(made, known, strict=True)
    return [view if view.problem else draw(name, **{**each, "extent": extent}) for view, each in pairs]


def reason(error: Exception) -> str:
    """An exception as a reader should meet it: its message, with the type where that adds something."""
    words = str(error).strip()
    if not words:
        return type(error).__name__
    return words if isinstance(error, ValueError) else f"{type(error).__name__}: {words}"


def _entry(name: str) -> _Entry:
    if name not in _VIEWS:
        raise ValueError(f"no view is named {name!r}; there are: {', '.join(_VIEWS)}")
    return _VIEWS[name]


def _guarded(view: View, label: str) -> View:
    """The same view, whose drawing (which happens later) degrades too."""

    def failed(error: Exception) -> View:
        return message_view(view.name, label, reason(error))

    def safe_draw(uid: str) -> Svg:
        try:
            return view.draw(uid)
        except Exception as error:
            return failed(error).draw(uid)

    def safe_plot() -> Any:
        try:
            return view.plot()
        except Exception as error:
            return failed(error).plot()

    return replace(view, draw=safe_draw, plot=safe_plot)
