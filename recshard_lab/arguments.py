"""Errors that name an argument of the wrong type, and its fix."""

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
    """Decorator of a function or class. Turns its errors into a ValueError if an argument has the wrong type.

    Arguments are compared with their annotations only after an error, so correct calls cost nothing, and values that
    behave like the annotated type work. Other errors do not change.

    >>> @names_wrong_arguments
    ... def half(number: float) -> float:
    ...     return number / 2
    >>> half("seven")
    Traceback (most recent call last):
    ...
    ValueError: half: number must be float, got 'seven' (a str). Fix: pass number=<float>
    """
    if isinstance(call, type):
        made: Any = call
        made.__init__ = _guarded(made.__init__, call.__name__)
        return call
    return _guarded(call, call.__name__)  # type: ignore[return-value]


def checks_arguments(call: _F) -> _F:
    """Like `names_wrong_arguments`, but compares before the call: for code that uses its arguments later.

    Default values are always accepted.

    >>> @checks_arguments
    ... def keep(rows: list[int] | None = None) -> None: ...
    >>> keep(["a"])
    Traceback (most recent call last):
    ...
    ValueError: keep: rows must be list[int] | None, got ['a'] (a list). Fix: pass rows=<list[int] | None>
    >>> @checks_arguments
    ... def draw(theme: typing.Literal["light", "dark"]) -> None: ...
    >>> draw("blue")
    Traceback (most recent call last):
        ...
    ValueError: draw: theme must be 'light' or 'dark', got 'blue' (a str). Fix: pass theme='light' or theme='dark'
    """
    if isinstance(call, type):
        made: Any = call
        made.__init__ = _checked(made.__init__, call.__name__)
        return call
    return _checked(call, call.__name__)  # type: ignore[return-value]


MPS = "MPS (Apple's GPU) is not supported: torch.distributed has no backend for its tensors"


def device_named(device: Any, name: str = "device") -> Any:
    """``torch.device(device)``, None for None. MPS is refused by name.

    >>> device_named("x")
    Traceback (most recent call last):
    ...
    ValueError: device must be a torch.device or a name such as 'cuda:0', got 'x' (a str). Fix: pass device='cpu'
    """
    import torch

    try:
        named = None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        wanted = "a torch.device or a name such as 'cuda:0'"
        raise ValueError(f"{name} must be {wanted}, got {_shown(device)}. Fix: pass {name}='cpu'") from error
    if named is not None and named.type == "mps":
        raise ValueError(f"{name}={str(device)!r}: {MPS}. Fix: pass {name}='cpu'")
    return named


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
    """The first argument of a wrong type, as an error with its fix."""
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*args, **kwargs)
        hints = typing.get_type_hints(function)
    except (TypeError, NameError):  # missing or unknown arguments: Python's own error is clear
        return None
    for name, value in bound.arguments.items():
        if value is signature.parameters[name].default:
            continue
        if name in hints and not _fits(value, hints[name]):
            kind = _spelled(hints[name])
            choices = (True, False) if hints[name] is bool else typing.get_args(hints[name])
            one_of = hints[name] is bool or typing.get_origin(hints[name]) is typing.Literal
            fix = " or ".join(f"{name}={choice!r}" for choice in choices) if one_of else f"{name}=<{kind}>"
            return f"{name} must be {kind}, got {_shown(value)}. Fix: pass {fix}"
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
    # `fits` is an argument: ranks receive functions by value, which excludes functions that call each other by name
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
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def shown(value: Any, most: int = 60) -> str:
    """A value for an error: its `repr`, at most ``most`` characters, in bounded time.

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
