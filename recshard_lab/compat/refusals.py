"""Arguments of TorchRec that this library has by name, and refuses by value."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Refusal:
    """The values of one argument that have no effect here.

    Args:
        why: the reason why other values are refused.
        fix: what to do instead.
        accepted: values that have no effect.
        same_as: name of another argument, whose value is accepted too.
    """

    why: str
    fix: str
    accepted: tuple[Any, ...] = (None, False)
    same_as: str = ""


def refused(refusals: Mapping[str, Refusal], values: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first refused argument, and a sentence with the value, the reason and the fix; None if there is none.

    Args:
        refusals: of a class or function.
        values: argument -> value. Arguments that it lacks count as accepted.

    >>> refused({"ssd": Refusal("tables are in memory", "omit it")}, {"ssd": 3})
    ('ssd', 'ssd=3 is not supported: tables are in memory. Fix: omit it')
    """
    for name, refusal in refusals.items():
        value = values.get(name)
        if name in values and value not in refusal.accepted and value != values.get(refusal.same_as, value is None):
            return name, f"{name}={value!r:.60} is not supported: {refusal.why}. Fix: {refusal.fix}"
    return None


def refuses(error: type[Exception] = ValueError, /, **refusals: Refusal) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function raise `error` for refused values of its arguments.

    >>> @refuses(ssd=Refusal("tables are in memory", "omit it"))
    ... def place(rows, ssd=None):
    ...     return rows
    >>> place(3)
    3
    >>> place(3, 4)
    Traceback (most recent call last):
    ...
    ValueError: ssd=4 is not supported: tables are in memory. Fix: omit it
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        names = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if (found := refused(refusals, {**dict(zip(names, args, strict=False)), **kwargs})) is not None:
                raise error(found[1])
            return function(*args, **kwargs)

        checked.refused_values = refusals  # type: ignore[attr-defined]
        return checked

    return decorate


def refused_values(called: Any) -> Mapping[str, Refusal]:
    """Argument -> refusal, of a class or function.

    >>> from recshard_lab.compat.modules.utils import construct_jagged_tensors
    >>> list(refused_values(construct_jagged_tensors))
    ['seq_vbe_ctx']
    """
    found: Mapping[str, Refusal] = getattr(called, "refused_values", {})
    return found or getattr(getattr(called, "__init__", None), "refused_values", {})
