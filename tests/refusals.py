"""Tables of calls that must be refused."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def not_refused(
    cases: Mapping[str, tuple[Callable[[], Any], str]] | Iterable[tuple[Callable[[], Any], str]],
    error: type[Exception] = ValueError,
) -> list[str]:
    """Calls that are accepted, raise another error, or one without these words (a regular expression).

    >>> not_refused([(lambda: int("x"), "invalid literal"), (lambda: int("x"), "no number"), (lambda: int("1"), "")])
    ["1: ValueError: invalid literal for int() with base 10: 'x'", '2: nothing was raised']
    """
    found = []
    for name, (call, words) in cases.items() if isinstance(cases, Mapping) else enumerate(cases):
        try:
            call()
        except Exception as raised:
            if not isinstance(raised, error) or not re.search(words, str(raised)):
                found.append(f"{name}: {type(raised).__name__}: {raised}")
        else:
            found.append(f"{name}: nothing was raised")
    return found
