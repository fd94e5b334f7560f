"""A rank's board: values put up by name, which the kernel sees at any time, also while a cell runs.

The kernel asks nothing of a busy rank: what is put up travels by itself, and the newest value of a name stays::

    on a rank        post("progress", 17)          at_rest("progress", lambda: state())     after every cell
    in the kernel    ranks.posted("progress")      -> [17, 17, 16, None]
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .channel import Message

if TYPE_CHECKING:
    from .rank import Rank

__all__ = ["at_rest", "post"]

_rank: Rank | None = None  # in this process
_at_rest: dict[str, Callable[[], Any]] = {}


def hold(rank: Rank | None) -> None:
    """Makes this process that rank; None: a process that a rank has forked, which posts nothing."""
    global _rank
    _rank = rank


def post(name: str, value: Any) -> None:
    """Puts a picklable value up under a name, in place of an older one; does nothing where no kernel looks.

    >>> post("progress", 1)
    """
    if _rank is not None:
        with _rank.shielded():
            _rank.channel.send(Message("post", 0, pickle.dumps((name, pickle.dumps(value)))))


def at_rest(name: str, value: Callable[[], Any] | None) -> None:
    """Has the result of a function put up whenever a piece of work has ended; None takes it off again."""
    if value is None:
        _at_rest.pop(name, None)
    else:
        _at_rest[name] = value


def rest() -> None:
    """Posts after each piece of work. A function that fails is reported on stderr and removed."""
    for name, value in list(_at_rest.items()):
        try:
            post(name, value())
        except BaseException:  # SystemExit too: the rank must answer
            _at_rest.pop(name, None)
            traceback.print_exc()
