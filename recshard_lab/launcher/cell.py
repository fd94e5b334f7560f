"""A cell on a rank: run it as a notebook would, keep its lines for tracebacks, and describe what came out."""

from __future__ import annotations

import ast
import base64
import io
import re
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .payload import remember_sources

__all__ = ["NOTHING", "bundle", "describe", "redirect_display", "run_source"]

_LOST_PEER = re.compile(r"closed by peer|[Cc]onnection (closed|reset|refused)|Broken pipe|Socket closed|abort", re.S)

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


def bundle(value: Any) -> dict[str, Any]:
    """MIME type -> content for `value`, as a notebook shows it; a repr that raises is left out."""
    found: dict[str, Any] = {}
    method = _method(value, "_repr_mimebundle_")
    if method is not None:
        got = _quietly(method)
        found.update((got[0] if isinstance(got, tuple) else got) or {})
    for mime, name in _RICH.items():
        method = _method(value, name)
        if mime not in found and method is not None:
            content = _quietly(method)
            if content is not None:
                found[mime] = content[0] if isinstance(content, tuple) else content
    if not found and type(value).__module__ == "matplotlib.figure":
        found["image/png"] = _quietly(lambda: _png(value))
    for mime, content in found.items():
        if isinstance(content, bytes):
            found[mime] = base64.b64encode(content).decode("ascii")
    if "text/plain" not in found:
        text = _quietly(lambda: repr(value))
        found["text/plain"] = f"<{type(value).__name__}: its repr raised>" if text is None else text
    return found


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", bbox_inches="tight")
    return file.getvalue()


def _method(value: Any, name: str) -> Any | None:
    return None if isinstance(value, type) else getattr(value, name, None)


def _quietly(function: Any) -> Any | None:
    try:
        return function()
    except Exception:
        return None


def failure_text(error: BaseException, ours: tuple[str, ...]) -> str:
    """The traceback as Python prints it, without frames in files whose path starts with one of `ours`."""
    described = traceback.TracebackException.from_exception(error)
    part: traceback.TracebackException | None = described
    while part is not None:
        users = [frame for frame in part.stack if not frame.filename.startswith(ours)]
        part.stack = traceback.StackSummary.from_list(users)
        part = part.__cause__ or part.__context__
    return "".join(described.format())


def describe(error: BaseException, ours: tuple[str, ...]) -> dict[str, str]:
    """What the kernel needs to know of an exception, in plain text: its class may exist only here."""
    kind = "raised"
    if isinstance(error, KeyboardInterrupt):
        kind = "interrupted"
    elif isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        kind = "freed"
    return {
        "kind": kind,
        "name": type(error).__name__,
        "message": str(error),
        "traceback": failure_text(error, ours),
    }


def redirect_display(display: Callable[..., None]) -> None:
    """``IPython.display.display``, which matplotlib's inline backend calls too, shows in the notebook."""
    with suppress(ImportError):
        import IPython.core.display_functions
        import IPython.display

        IPython.core.display_functions.display = IPython.display.display = display
