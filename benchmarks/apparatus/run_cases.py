"""Cases one after the other, each put to live ranks of this library and, when asked, of TorchRec."""

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
    """Live ranks by side, "ours" and perhaps "theirs"; a context manager.

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
        """Starts a side, in the place of one that failed."""
        if name in self:
            self[name].close()
        self[name] = self._stack.enter_context(Side(name, self.pythons[name], self.ranks, self.local_ranks))


def run_cases(
    wanted: Sequence[StepCase], one: Callable[[StepCase, Sides], Figure], *, with_torchrec: bool
) -> list[Figure]:
    """A figure a case.

    Args:
        wanted: the cases; those next to each other that need the same ranks are put to the same processes.
        one: makes a case's figure from the live sides; it may start a side anew that failed.
        with_torchrec: whether there is a side "theirs", in an environment thrown away.

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
    """`run_cases` with interpreters that are given."""
    for (ranks, local), group in groupby(wanted, lambda case: (case.ranks, case.local_ranks)):
        with Sides(pythons, ranks, local) as sides:
            for case in group:
                note(f"{case.name} ...")
                yield one(case, sides)
