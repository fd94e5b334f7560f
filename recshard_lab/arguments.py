"""Errors that name a wrong argument, for public calls whose inside would trip over it."""

import collections.abc as abc
import functools
import inspect
import numbers
import reprlib
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_TRIPPED = (TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, AssertionError)


def names_wrong_arguments(call: _F) -> _F:
    """Decorator of a function or class: if it trips over an argument that is not what its annotation says, ValueError.

    Nothing is looked at until something is raised, so that right calls cost nothing and whatever works in place of the
    type that is named goes on working. Errors that no argument explains stay as they are.

    >>> @names_wrong_arguments
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half("seven")
    Traceback (most recent call last):
    ...
    ValueError: half: number must be float, got 'seven' (a str)
    """
    if isinstance(call, type):
        made: Any = call
        made.__init__ = _guarded(made.__init__, call.__name__)
        return call
    return _guarded(call, call.__name__)  # type: ignore[return-value]


def checks_arguments(call: _F) -> _F:
    """The same, looking before the call: for what keeps its arguments and would trip over them only later.

    A default fits always.

    >>> @checks_arguments
    ... def keep(rows: list[int] | None = None) -> None: ...
    >>> keep(["a"])
    Traceback (most recent call last):
    ...
    ValueError: keep: rows must be list[int] | None, got ['a'] (a list)
    """
    if isinstance(call, type):
        made: Any = call
        made.__init__ = _checked(made.__init__, call.__name__)
        return call
    return _checked(call, call.__name__)  # type: ignore[return-value]


def device_named(device: Any) -> Any:
    """``torch.device(device)``, None for None.

    >>> device_named("x")
    Traceback (most recent call last):
    ...
    ValueError: device must be a torch.device or a name such as 'cpu' or 'cuda:0', got 'x' (a str)
    """
    import torch

    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        wanted = "a torch.device or a name such as 'cpu' or 'cuda:0'"
        raise ValueError(f"device must be {wanted}, got {_shown(device)}") from error


def _checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        wrong = _wrong(function, args, kwargs)
        if wrong is not None:
            raise ValueError(f"{name}: {wrong}")
        return function(*args, **kwargs)

    return checked


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError:
            raise
        except _TRIPPED as error:
            wrong = _wrong(function, args, kwargs)
            if wrong is None:
                raise
            raise ValueError(f"{name}: {wrong}") from error

    return guarded


def _wrong(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The first argument that is not what its annotation says, as a sentence."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
        hints = typing.get_type_hints(function)
    except (TypeError, NameError):  # arguments that are not there: Python's own words are clear
        return None
    for name, value in bound.arguments.items():
        if value is signature.parameters[name].default:
            continue
        if name in hints and not _fits(value, hints[name]):
            return f"{name} must be {_spelled(hints[name])}, got {_shown(value)}"
    return None


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any or isinstance(hint, typing.TypeVar):
        return True
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is typing.Literal:
        return value in parts
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, numbers.Real) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if origin is None:
        return not isinstance(hint, type) or getattr(hint, "_is_protocol", False) or isinstance(value, hint)
    if origin is abc.Callable:
        return callable(value)
    if not isinstance(origin, type):
        return True
    if origin is type:
        return isinstance(value, type)
    if not isinstance(value, origin) or (isinstance(value, (str, bytes)) and origin is not str):
        return False
    return _parts_fit(value, origin, parts, _fits)


def _parts_fit(value: Any, origin: type, parts: tuple[Any, ...], fits: Callable[[Any, Any], bool]) -> bool:
    # `fits` is handed in: functions that call each other by name cannot be carried to ranks by value
    if not parts:
        return True
    if issubclass(origin, abc.Mapping):
        return all(fits(key, parts[0]) and fits(own, parts[1]) for key, own in value.items())
    if origin is tuple and parts[-1] is not Ellipsis:
        return len(value) == len(parts) and all(map(fits, value, parts))
    if isinstance(value, (abc.Sequence, abc.Set)):
        return all(fits(own, parts[0]) for own in value)
    return True


def _spelled(hint: Any) -> str:
    if hint is type(None):
        return "None"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def shown(value: Any, most: int = 60) -> str:
    """A value for a message: `repr`, cut, in little time whatever the value is.

    >>> shown([0] * 10**6), shown(10**5000)
    ('[0, 0, 0, 0, 0, 0, ...]', 'a whole number of about 5,001 digits')
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # a repr that fails, too
        text = f"an object of type {type(value).__name__}"
    return text if len(text) <= most else text[: most - 3] + "..."


class _Short(reprlib.Repr):
    """Few entries of few levels."""

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()
        return repr(x) if bits <= 128 else f"a whole number of about {int(bits * 0.30103) + 1:,} digits"


_SHORT = _Short()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 120, 120


def _shown(value: Any) -> str:
    return f"{shown(value)} (a {type(value).__name__})"
