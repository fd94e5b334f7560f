"""Guesses and exercises in a notebook: `guess` before a number is shown, `check` after an exercise.

Both print text and return None, so that a cell shows nothing else. Neither raises for a wrong answer.

>>> from recshard_lab import lab
>>> lab.check(3.1, 2.56, hint="Did you count bytes?", unit="GB")
You gave 3.1 GB, expected 2.56 GB. Did you count bytes?
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from numbers import Real
from typing import Any

WITHIN = 0.20  # a guess counts in the score if it is this close
CLOSE = 0.02  # an answer is correct if it is this close
_TIGHT_UNITS = ("%", "x")  # written without a space

_score: dict[tuple[str, int], bool] = {}  # place of a guess -> within 20%; one process is one notebook


def guess(mine: Any, truth: Any, unit: str = "") -> None:
    """Prints your guess beside the true value, and how many guesses of this notebook were within 20%.

    The score belongs to the kernel: each call in a notebook counts once, with its last guess. A guess of None is not
    counted. Text counts if it is equal to the truth.

    Args:
        mine: a number or text; None if you have not guessed yet.
        truth: the true value.
        unit: printed after both.

    >>> from recshard_lab import lab
    >>> lab.guess(None, 29, "ids")
    No guess yet. It is 29 ids.
    >>> lab.guess(24, 29, "ids")  # doctest: +ELLIPSIS
    You guessed 24 ids. It is 29 ids: 17% off. Score in this notebook: ... within 20%.
    """
    told = f"It is {_text(truth, unit)}"
    if mine is None:
        print(f"No guess yet. {told}.")
        return
    off, near = _distance(_plain(mine), _plain(truth))
    _score[_place()] = near
    score = f"Score in this notebook: {sum(_score.values())} of {len(_score)} within {WITHIN:.0%}."
    print(f"You guessed {_text(mine, unit)}. {told}: {off}. {score}")


def check(
    mine: Any, truth: Any | Callable[[Any], bool | str], hint: str = "", unit: str = "", solution: str = ""
) -> None:
    """Prints whether an answer is correct; if it is None, one solution.

    Numbers are equal within 2%. Lists, tuples, dicts, arrays and tensors are compared by element, whole numbers in
    them exactly.

    Args:
        mine: the answer; None if there is none yet.
        truth: the expected value, or a function of the answer. The function returns True if the answer is correct,
            and else False or the reason as text. If it raises, the answer is wrong and the error is printed.
        hint: printed after a wrong answer.
        unit: printed after numbers.
        solution: one solution, printed if there is no answer; by default, `truth` if it is a value.

    Raises:
        TypeError: the function returned something else than a bool or text.

    >>> from recshard_lab import lab
    >>> lab.check(None, 2.56, unit="GB", solution="40e6 * 128 * 4 / 8 bytes")
    Not answered yet. One solution: 40e6 * 128 * 4 / 8 bytes
    >>> lab.check(2.5601, 2.56, unit="GB")
    Correct.
    >>> lab.check([3, 1], lambda shards: sum(shards) == 5 or f"They add up to {sum(shards)}, not 5.")
    Not correct. They add up to 4, not 5.
    """
    if mine is None:
        shown = solution or ("" if callable(truth) else _text(truth, unit))
        print("Not answered yet." + (f" One solution: {shown}" if shown else f" {hint}".rstrip()))
        return
    if callable(truth):
        reason = _reason(mine, truth)
    else:
        same = _equal(_plain(mine), _plain(truth))
        reason = "" if same else f"You gave {_text(mine, unit)}, expected {_text(truth, unit)}."
    print(f"{reason} {hint}".rstrip() if reason else "Correct.")


def _reason(mine: Any, truth: Callable[[Any], bool | str]) -> str:
    """Why the function rejects the answer; empty if it accepts it."""
    try:
        found = _plain(truth(mine))
    except Exception as error:
        return f"Not correct. Your answer raised {type(error).__name__}: {error}"
    if not isinstance(found, bool | str):
        raise TypeError(
            f"the function for lab.check returned {found!r}: it must return True, False or a text. "
            f"Fix: end it with a comparison, such as `mine == 3`"
        )
    if isinstance(found, str):
        return f"Not correct. {found}"
    return "" if found else "Not correct."


def _distance(mine: Any, truth: Any) -> tuple[str, bool]:
    """How far a guess is off, in words, and whether it counts."""
    if _is_number(truth) and not _is_number(mine):
        return "your guess is not a number", False
    if not _is_number(truth):
        same = _equal(mine, truth)
        return ("right" if same else "not the same"), same
    off = abs(mine - truth)
    if truth == 0 or not math.isfinite(off):
        return ("right" if mine == truth else f"{_text(off)} off"), bool(mine == truth)
    near = off <= WITHIN * abs(truth) * (1 + 1e-9)
    ratio = mine / truth
    for times, side in ((ratio, "high"), (1 / ratio if ratio > 0 else 0.0, "low")):
        if times >= 3:
            return f"{times:,.{int(times < 10)}f} times too {side}", near
    return f"{off / abs(truth):.0%} off", near


def _equal(mine: Any, truth: Any, inside: bool = False) -> bool:
    if _is_number(mine) and _is_number(truth):
        if inside and isinstance(mine, int) and isinstance(truth, int):
            return mine == truth
        return math.isclose(mine, truth, rel_tol=0, abs_tol=CLOSE * abs(truth))
    if isinstance(truth, dict) and isinstance(mine, dict):
        return mine.keys() == truth.keys() and all(_equal(_plain(mine[k]), _plain(truth[k]), True) for k in truth)
    if isinstance(truth, list | tuple) and isinstance(mine, list | tuple):
        pairs = zip(mine, truth, strict=False)
        return len(mine) == len(truth) and all(_equal(_plain(one), _plain(other), True) for one, other in pairs)
    return type(mine) is type(truth) and bool(mine == truth)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Arrays and tensors as numbers or lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _text(value: Any, unit: str = "") -> str:
    """A value with its unit.

    >>> _text(40_000_000, "rows"), _text(2.5600001, "GB"), _text(46, "%"), _text([1, 2], "ids")
    ('40,000,000 rows', '2.56 GB', '46%', '[1, 2]')
    """
    value = _plain(value)
    if not _is_number(value):
        return str(value)
    large = isinstance(value, int) or (math.isfinite(value) and abs(value) >= 1000)
    number = f"{value:,.0f}" if large else f"{float(value):.4g}"
    return f"{number}{unit}" if not unit or unit in _TIGHT_UNITS else f"{number} {unit}"


def _place() -> tuple[str, int]:
    """Where the caller of `guess` is: its notebook cell, if the front end names it, or its file; and its line."""
    frame = sys._getframe(2)
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    parent = shell.get_parent() if hasattr(shell, "get_parent") else {}
    cell = (parent.get("metadata") or {}).get("cellId")
    return cell or frame.f_code.co_filename, frame.f_lineno
