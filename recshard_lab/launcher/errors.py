"""Errors of ranks. Each message names the rank and a fix."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

__all__ = ["Failure", "LaunchError", "RankError", "RanksInterrupted", "named", "ranks_text", "resources_needed"]

NAMED = 20  # variables that a message names


class LaunchError(RuntimeError):
    """Ranks cannot be started, or cannot be used any more. The message ends with a fix."""


@contextmanager
def resources_needed(call: str) -> Iterator[None]:
    """Turns "too many open files" and "no space left" into a LaunchError that names the limit or the folder."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise LaunchError(f"{call} failed: {descriptors_text()}") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise LaunchError(
                f"{call} failed: {error.strerror} in {error.filename or tempfile.gettempdir()}. {SPACE}"
            ) from error
        raise


SPACE = "Fix: free space there, or set TMPDIR to another folder and restart the kernel."


def descriptors_text() -> str:
    """The limit on open descriptors of this process, and the fix if it is reached."""
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"the process uses all {limit} file descriptors that it may open. "
        f"Fix: run `ulimit -n {max(4096, 4 * limit)}` before you start Jupyter."
    )


@dataclass(frozen=True)
class Failure:
    """How one rank failed in one cell or call.

    kind: ``raised`` (an exception), ``interrupted`` (stopped from the notebook), ``freed`` (it waited in a
    collective for a rank that failed, and the launcher ended the wait), ``died`` (the process ended).
    """

    rank: int
    kind: Literal["raised", "interrupted", "freed", "died"]
    name: str  # the exception's class, or the signal's name, or "exit"
    message: str  # the exception's text, or what ended the process
    traceback: str = ""  # the remote traceback; for a rank that died, the last lines it printed

    @property
    def headline(self) -> str:
        """One line: ``ValueError: boom``, ``killed by SIGKILL``."""
        if self.kind == "died":
            return self.message
        return f"{self.name}: {self.message}" if self.message else self.name


_VERB = {"died": "", "raised": "raised ", "interrupted": "stopped by ", "freed": "lost the other ranks: "}


def ranks_text(ranks: Sequence[int], world_size: int | None = None) -> str:
    """A set of ranks as text.

    >>> ranks_text([2]), ranks_text([0, 1, 2, 5]), ranks_text([0, 1], world_size=2)
    ('rank 2', 'ranks 0-2, 5', 'all 2 ranks')
    """
    if world_size is not None and len(ranks) == world_size > 1:
        return f"all {world_size} ranks"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"


def named(names: Sequence[str]) -> str:
    """Names of variables as text: at most the first 20, then the number of the others.

    >>> named(["model", "tables"])
    'model, tables'
    """
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


class RankError(RuntimeError):
    """A cell or call failed on one or more ranks.

    failures: every rank's failure, those that caused the error first. ranks: the ranks that caused it.
    note: the state afterwards (groups rebuilt, restart needed).
    """

    def __init__(self, failures: Sequence[Failure], world_size: int, note: str = "") -> None:
        order = {"died": 0, "raised": 1, "interrupted": 2, "freed": 3}
        self.failures = tuple(sorted(failures, key=lambda failure: (order[failure.kind], failure.rank)))
        self.world_size = world_size
        self.note = note
        worst = self.failures[0].kind
        causes = [failure for failure in self.failures if failure.kind == worst]
        self.causes = causes
        self.ranks = tuple(failure.rank for failure in causes)
        super().__init__(self._text())

    def __reduce__(self) -> tuple[type[RankError], tuple[tuple[Failure, ...], int, str]]:
        return RankError, (self.failures, self.world_size, self.note)

    @property
    def rank(self) -> int:
        """The first rank that caused the error."""
        return self.ranks[0]

    def blocks(self) -> list[tuple[str, str]]:
        """``(which ranks, traceback)``, ranks with the same traceback together."""
        groups: dict[str, list[Failure]] = {}
        for failure in self.causes:
            groups.setdefault(failure.traceback or failure.headline, []).append(failure)
        return [
            (ranks_text([failure.rank for failure in group], self.world_size), text.rstrip())
            for text, group in groups.items()
        ]

    def headline(self) -> str:
        """One line per set of ranks with the same error, then the state of the others."""
        groups: dict[str, list[int]] = {}
        for failure in self.causes:
            groups.setdefault(_VERB[failure.kind] + failure.headline, []).append(failure.rank)
        if self.causes[0].kind == "died":
            groups = {what.replace("was ", "were ", 1) if len(who) > 1 else what: who for what, who in groups.items()}
        lines = [f"{ranks_text(ranks, self.world_size)} {what}" for what, ranks in groups.items()]
        freed = [failure.rank for failure in self.failures if failure.kind == "freed" and failure not in self.causes]
        if freed:
            were = "was" if len(freed) == 1 else "were"
            lines.append(f"{ranks_text(freed)} {were} waiting in a collective and {were} freed")
        stopped = [f.rank for f in self.failures if f.kind == "interrupted" and f not in self.causes]
        if stopped:
            lines.append(f"{ranks_text(stopped)} {'was' if len(stopped) == 1 else 'were'} interrupted")
        return "; ".join(lines)

    def _text(self) -> str:
        parts = [self.headline()]
        parts += [f"--- {who} ---\n{text}" for who, text in self.blocks()]
        if self.note:
            parts.append(self.note)
        return "\n".join(parts)


class RanksInterrupted(KeyboardInterrupt):
    """The user stopped a cell. note: which variables were kept and which were lost."""

    def __init__(self, failures: Sequence[Failure], world_size: int, note: str = "") -> None:
        self.failures, self.world_size, self.note = tuple(failures), world_size, note
        super().__init__(self._text())

    def _text(self) -> str:
        parts = []
        if self.failures:
            parts.append(f"stopped on {ranks_text([f.rank for f in self.failures], self.world_size)}")
        blocks: dict[str, list[int]] = {}
        for failure in self.failures:
            blocks.setdefault(failure.traceback.rstrip(), []).append(failure.rank)
        parts += [f"--- {ranks_text(ranks, self.world_size)} ---\n{text}" for text, ranks in blocks.items() if text]
        return "\n".join([*parts, self.note] if self.note else parts)
