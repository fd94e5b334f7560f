"""How functions, arguments and results travel: dill, so that what a notebook defines goes along.

A function from the notebook's ``__main__`` takes with it the globals it names (`recurse`), and the source
lines that its traceback will want to show.
"""

from __future__ import annotations

import importlib
import io
import linecache
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dill

__all__ = ["decode", "encode", "encode_call", "remember_sources", "sources_of"]


class _ByName(dill.Pickler):
    """Sends modules as their names. dill would send the contents of those outside site-packages: ours, when
    installed in place, and the notebook's neighbours."""

    dispatch = dill.Pickler.dispatch.copy()

    def save_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "__main__":
            dill.Pickler.dispatch[types.ModuleType](self, module)
        else:
            self.save_reduce(importlib.import_module, (module.__name__,), obj=module)

    dispatch[types.ModuleType] = save_module


def encode(value: Any) -> bytes:
    """`value` by dill; what cannot be carried raises a TypeError or PicklingError naming it."""
    buffer = io.BytesIO()
    _ByName(buffer, recurse=True).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The inverse of `encode`. Only for bytes that came over our own channel."""
    return dill.loads(data)


def encode_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """A call, with the sources of the notebook's functions that it reaches."""
    return encode((encode((fn, tuple(args), dict(kwargs))), sources_of(fn)))


def sources_of(*items: Any) -> dict[str, str]:
    """Source text by file name for functions among `items` and those they name, where no file on disk has it."""
    found: dict[str, str] = {}
    waiting: list[Any] = list(items)
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type) and item.__module__ == "__main__":
            waiting += list(vars(item).values())
        code = getattr(item, "__code__", None)
        if not isinstance(item, types.FunctionType) or not isinstance(code, types.CodeType):
            continue
        if not os.path.exists(code.co_filename):
            text = "".join(linecache.getlines(code.co_filename))
            if text:
                found[code.co_filename] = text
                waiting += [item.__globals__[name] for name in code.co_names if name in item.__globals__]
    return found


def remember_sources(sources: Mapping[str, str]) -> None:
    """Lets tracebacks show lines of files that exist nowhere but in the notebook."""
    for filename, text in sources.items():
        linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
