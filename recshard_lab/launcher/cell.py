"""Runs a cell on a rank as a notebook would: keeps its source for tracebacks and describes its result."""

from __future__ import annotations

import ast
import base64
import builtins
import difflib
import io
import keyword
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from .errors import named
from .payload import remember_sources

__all__ = ["NOTHING", "bundle", "completions", "describe", "evaluate", "no_keyboard", "redirect_display", "run_source"]

_LOST_PEER = re.compile(r"closed by peer|[Cc]onnection (closed|reset|refused)|Broken pipe|Socket closed|abort", re.S)

EXPRESSION = "<string>"  # what tracebacks call it
NOTHING = object()  # the cell ends in no expression

_RICH = {
    "text/html": "_repr_html_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
    "image/svg+xml": "_repr_svg_",
    "image/png": "_repr_png_",
    "image/jpeg": "_repr_jpeg_",
    "application/json": "_repr_json_",
}


def run_source(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Runs `source` in `namespace`; its last expression's value, or NOTHING (also after a closing ``;``)."""
    remember_sources({filename: source})
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or source.rstrip().endswith(";"):
        exec(compile(tree, filename, "exec"), namespace)
        return NOTHING
    tree.body.pop()
    exec(compile(tree, filename, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), filename, "eval"), namespace)
    return NOTHING if value is None else value


def evaluate(expression: str, namespace: dict[str, Any], variables: Sequence[str]) -> Any:
    """The value of an expression in `namespace`.

    Args:
        variables: the names that cells have made, which the error lists.

    Raises:
        NameError: `expression` uses a name that the rank does not have. The message ends with a fix.

    >>> evaluate("modle", {"model": 1}, ["model"])
    Traceback (most recent call last):
    NameError: no variable 'modle' on this rank, which has model. Fix: use 'model'
    """
    try:
        return eval(compile(expression, EXPRESSION, "eval"), namespace)
    except NameError as error:
        missing = error.name
        *_, last = traceback.walk_tb(error.__traceback__)
        if missing is None or missing in namespace or last[0].f_code.co_filename != EXPRESSION:
            raise
        near = difflib.get_close_matches(missing, variables, 1)
        fix = f"use {near[0]!r}" if near else f"run a cell on the ranks that defines {missing!r}"
        raise NameError(
            f"no variable {missing!r} on this rank, which has {named(variables) or 'none'}. Fix: {fix}", name=missing
        ) from None


def bundle(value: Any) -> dict[str, Any]:
    """MIME type -> content for `value`, as a notebook shows it: text, or plain JSON values.

    A representation that raises, or that returns anything else, is left out; if none is left, ``text/plain`` names
    what failed. Nothing in the result has a class that exists only on this rank.

    >>> bundle(7)
    {'text/plain': '7'}
    """
    found: dict[str, Any] = {}
    failed: list[str] = []
    for mime, name in (("", "_repr_mimebundle_"), *_RICH.items()):
        if mime not in found:
            try:
                content = _represent(value, name)
                if content is not None:
                    found.update(_contents(content) if not mime else {mime: _content(mime, content)})
            except Exception as error:
                failed.append(f"{name}: {_headline(error)}")
    if not found and type(value).__module__ == "matplotlib.figure":
        try:
            found["image/png"] = _content("image/png", _png(value))
        except Exception as error:
            failed.append(f"savefig: {_headline(error)}")
    if "text/plain" not in found:
        notes = [] if found else failed
        try:
            text = str.__str__(repr(value))
        except Exception as error:
            text = f"<{_name(type(value))} object>"
            notes = [*notes, f"__repr__: {_headline(error)}"]
        found["text/plain"] = "\n".join([text, *(f"({_name(type(value))}.{note})" for note in notes)])
    return found


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _represent(value: Any, name: str) -> Any | None:
    """The result of the method with that name. None if it is missing, or if the object has every attribute (a mock)."""
    if isinstance(value, type) or getattr(value, "_ipython_canary_method_should_not_exist_", None) is not None:
        return None
    method = getattr(value, name, None)
    return None if method is None else method()


def _contents(data: Any) -> dict[str, Any]:
    """The MIME bundle in what ``_repr_mimebundle_`` returned: a dict, or a pair of a dict and its metadata."""
    if isinstance(data, tuple) and len(data) == 2:
        data = data[0]
    if not isinstance(data, dict):
        raise TypeError(f"expected a dict, got {_name(type(data))}")
    plain = {_plain(mime): content for mime, content in dict.items(data) if content is not None}
    return {mime: _content(mime, content) for mime, content in plain.items()}


def _content(mime: str, content: Any) -> Any:
    """One representation: JSON types may hold JSON values, others are text (bytes as base64)."""
    if isinstance(content, tuple) and len(content) == 2:  # with metadata
        content = content[0]
    if isinstance(content, bytes | bytearray):
        return base64.b64encode(content).decode("ascii")
    if not mime.endswith("json") and not isinstance(content, str):
        raise TypeError(f"expected str or bytes, got {_name(type(content))}")
    return _plain(content)


def _plain(value: Any) -> Any:
    """JSON values with the built-in types alone: the classes of subclasses may exist only on this rank."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__pos__(value)
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in tuple(value)]
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in dict.keys(value)):
            raise TypeError("expected str as the keys of JSON values")
        return {str.__str__(key): _plain(item) for key, item in dict.items(value)}
    raise TypeError(f"expected text or JSON values, got {_name(type(value))}")


def _name(kind: type) -> str:
    return str.__str__(type.__dict__["__name__"].__get__(kind))


def _headline(error: BaseException) -> str:
    message = _message(error)
    return f"{_name(type(error))}: {message}" if message else _name(type(error))


def _message(error: BaseException) -> str:
    try:
        return str.__str__(str(error))
    except BaseException as again:
        if isinstance(again, KeyboardInterrupt):
            raise
        return f"<its __str__ raised {_name(type(again))}>"


def failure_text(error: BaseException, ours: tuple[str, ...]) -> str:
    """The traceback as Python prints it, without frames in files whose path starts with one of `ours`."""
    try:
        described = traceback.TracebackException.from_exception(error)
        part: traceback.TracebackException | None = described
        while part is not None:
            users = [frame for frame in part.stack if not frame.filename.startswith(ours)]
            part.stack = traceback.StackSummary.from_list(users)
            part = part.__cause__ or part.__context__
        return "".join(described.format())
    except Exception as again:  # parts of a traceback are the user's code: names, sources, notes
        return f"{_headline(error)}\n(its traceback cannot be formatted: {_headline(again)})\n"


def describe(error: BaseException, ours: tuple[str, ...]) -> dict[str, str]:
    """The exception as plain text. Its class, and the classes of its parts, may exist only on this rank."""
    message = _message(error)
    kind = "raised"
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    elif isinstance(error, RuntimeError) and _LOST_PEER.search(message):
        kind = "freed"
    return {"kind": kind, "name": _name(type(error)), "message": message, "traceback": failure_text(error, ours)}


def no_keyboard(prompt: object = "") -> NoReturn:
    """Replaces ``input`` on ranks."""
    raise EOFError("ranks have no keyboard. Fix: ask in a notebook cell, then %recshard_push the answer")


def redirect_display(display: Callable[..., None]) -> None:
    """``IPython.display.display``, which matplotlib's inline backend calls too, shows in the notebook."""
    with suppress(ImportError):
        import IPython.core.display_functions
        import IPython.display

        IPython.core.display_functions.display = IPython.display.display = display


MOST = 500


def completions(word: str, namespace: Mapping[str, Any]) -> list[str]:
    """Names that begin with `word`: from `namespace` and builtins, or attributes if the word contains a dot.

    Private names are included only if the word begins with an underscore.

    >>> completions("wei", {"weight": 1, "weights": 2, "bias": 3})
    ['weight', 'weights']
    >>> completions("z.re", {"z": 1j})
    ['z.real']
    """
    holder, dot, start = word.rpartition(".")
    if not dot:
        names = [*namespace, *dir(builtins), *keyword.kwlist]
    else:
        first, *rest = holder.split(".")
        try:
            value = namespace[first] if first in namespace else getattr(builtins, first)
            for attribute in rest:
                value = getattr(value, attribute)
            names = [*dir(value)]
        except Exception:  # the user's own properties may raise anything
            return []
    texts = [str.__str__(name) for name in names if isinstance(name, str)]  # globals() and dir() may hold anything
    fitting = {name for name in texts if name.startswith(start) and (start.startswith("_") or not name.startswith("_"))}
    return [holder + dot + name for name in sorted(fitting)[:MOST]]
