"""After a fork of this process the child holds none of the parent's ranks: their descriptors are closed there.

A rank ends when the last copy of the notebook's end of its channel is closed. A copy in a forked child would keep ranks
alive that nobody can use. ``subprocess`` and ``multiprocessing`` with ``spawn`` close them by themselves.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["forget_in_forks"]


class Holder(Protocol):
    """What holds something of the parent. `forget` runs in the child: it may close, not send or wait."""

    def forget(self) -> None: ...


_holders: WeakSet[Holder] = WeakSet()


def forget_in_forks(holder: Holder) -> None:
    """Has ``holder.forget()`` called in every process that is forked from this one while `holder` exists."""
    _holders.add(holder)


def _in_child() -> None:
    for holder in list(_holders):
        holder.forget()
    _holders.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
