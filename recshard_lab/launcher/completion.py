"""On a rank: the names that a word may become."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Mapping
from typing import Any

__all__ = ["completions"]

MOST = 500


def completions(word: str, namespace: Mapping[str, Any]) -> list[str]:
    """Names in `namespace`, built in, or attributes when the word has a dot, that begin with `word`.

    Private ones only when asked for by their underscore.

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
