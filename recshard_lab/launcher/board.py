"""Named values that a rank posts and the notebook can read at any time, also while a cell runs.

The rank pushes each value, so the notebook never has to ask a busy rank. Only the newest value of a name is kept::

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
    """Sets the rank of this process. Pass None in a process that a rank has forked: it posts nothing."""
    global _rank
    _rank = rank


def post(name: str, value: Any) -> None:
    """Posts a picklable value under a name and replaces the older one. Does nothing outside a launched rank.

    >>> post("progress", 1)
    """
    if _rank is not None:
        with _rank.shielded():
            _rank.channel.send(Message("post", 0, pickle.dumps((name, pickle.dumps(value)))))


def at_rest(name: str, value: Callable[[], Any] | None) -> None:
    """Posts the result of a function after every cell or call. Pass None to remove the function."""
    if value is None:
        _at_rest.pop(name, None)
    else:
        _at_rest[name] = value


def rest() -> None:
    """Posts the registered results. A function that fails is reported on stderr and removed."""
    for name, value in list(_at_rest.items()):
        try:
            post(name, value())
        except BaseException:  # SystemExit too: the rank must answer
            _at_rest.pop(name, None)
            traceback.print_exc()
