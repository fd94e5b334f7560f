"""Runs cases one after the other on live ranks of this library and, on request, of TorchRec."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby

from benchmarks import Figure, note
from benchmarks.apparatus.environments import TorchRecEnv
from benchmarks.apparatus.sides import Side
from benchmarks.apparatus.step_case import StepCase

__all__ = ["Sides", "put_to_sides", "run_cases"]


class Sides(dict[str, Side]):
    """A context manager: live ranks by side, "ours" and optionally "theirs".

    Args:
        pythons: side -> its interpreter.
        ranks, local_ranks: in all, and of one virtual node.
    """

    def __init__(self, pythons: dict[str, str], ranks: int, local_ranks: int) -> None:
        super().__init__()
        self.pythons, self.ranks, self.local_ranks = pythons, ranks, local_ranks
        self._stack = ExitStack()

    def __enter__(self) -> Sides:
        try:
            for name in self.pythons:
                self.start(name)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str) -> None:
        """Starts a side, and ends the one it replaces."""
        if name in self:
            self[name].close()
        self[name] = self._stack.enter_context(Side(name, self.pythons[name], self.ranks, self.local_ranks))


def run_cases(
    wanted: Sequence[StepCase], one: Callable[[StepCase, Sides], Figure], *, with_torchrec: bool
) -> list[Figure]:
    """The figure of each case.

    Args:
        wanted: the cases. Neighbours that need the same ranks share processes.
        one: makes a case's figure from the live sides. It may restart a side that failed.
        with_torchrec: adds the side "theirs", in a temporary environment.

    Raises:
        PeersMissing: TorchRec cannot be installed beside the torch that is here.
    """
    if not with_torchrec:
        return list(put_to_sides(wanted, one, {"ours": sys.executable}))
    note("creating a temporary environment for TorchRec, which takes about a minute ...")
    with TorchRecEnv() as theirs:
        return list(put_to_sides(wanted, one, {"ours": sys.executable, "theirs": theirs.python}))


def put_to_sides(
    wanted: Sequence[StepCase], one: Callable[[StepCase, Sides], Figure], pythons: dict[str, str]
) -> Iterator[Figure]:
    """`run_cases` with these interpreters."""
    for (ranks, local), group in groupby(wanted, lambda case: (case.ranks, case.local_ranks)):
        with Sides(pythons, ranks, local) as sides:
            for case in group:
                note(f"{case.name} ...")
                yield one(case, sides)
