"""Whether a widget's ranks still run, and which variables are lost when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recshard_lab.launcher.errors import named

LOOK_S = 0.5  # seconds between two looks of a widget at its ranks


@dataclass(frozen=True)
class BoundRanks:
    """A session and its processes at one time.

    Args:
        ranks: the launched session.
        pids: process ids by rank.
    """

    ranks: Any
    pids: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Any) -> BoundRanks:
        """The ranks that run now."""
        return cls(ranks, tuple(ranks.pids))

    @property
    def ended(self) -> str:
        """How these ranks ended, as a clause; empty while they run."""
        pids = tuple(self.ranks.pids)
        if not pids:
            return "The ranks were stopped"
        if pids != self.pids:
            return "The ranks were restarted"
        return "" if self.ranks.usable else "A rank ended"

    def gone(self, variable: str) -> str:
        """Why a variable on these ranks is gone and what to do, in one line; empty while they run."""
        if not (ended := self.ended):
            return ""
        fix = {"The ranks were stopped": "Launch ranks and run", "A rank ended": "Restart the ranks and run"}
        return f"{ended}: '{variable}' is gone. {fix.get(ended, 'Run')} its cell again."


def lost_text(variables: Sequence[str]) -> str:
    """The lost variables, as a sentence after another one; empty without variables.

    >>> lost_text(["model", "tables"])
    ' Their variables are gone: model, tables. Run the cells that made them.'
    """
    return f" Their variables are gone: {named(variables)}. Run the cells that made them." if variables else ""
