"""Where ranks come from. The launcher uses three file descriptors and a `RankProcess` for each rank.

| engine | a rank is | from request to first all_reduce, n=4 |
|---|---|---|
| ``fork`` | a fork of a process that has imported torch already (`forkserver`) | 0.1 s |
| ``spawn`` | a clean interpreter, through ``multiprocess`` | seconds: every rank imports torch |
| ``ray`` | a process beside a Ray actor, on any machine of a Ray cluster | seconds: actors, then the same |

Linux forks by default. macOS spawns: Apple's frameworks start threads that a fork does not copy. Windows has no engine.
A new engine is one file here and a line in `engine_for`.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from .engine import Ending as Ending
from .engine import Engine as Engine
from .engine import OnExit as OnExit
from .engine import RankProcess as RankProcess

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["ENGINES", "Ending", "Engine", "OnExit", "RankProcess", "engine_for", "start_methods"]

ENGINES = ("fork", "spawn", "ray")


def start_methods() -> tuple[str, ...]:
    """How this system can start ranks, the default first. Empty on Windows.

    >>> set(start_methods()) <= set(ENGINES)
    True
    """
    if sys.platform == "win32":
        return ()
    if not hasattr(os, "fork"):
        return ("spawn",)
    return ("spawn", "fork") if sys.platform == "darwin" else ("fork", "spawn")


def engine_for(shape: Shape) -> Engine:
    """Returns an engine that is ready to start the ranks of `shape`. Raises LaunchError if it cannot."""
    if shape.engine == "fork":
        from .fork import ForkEngine, why_not_fork

        why = why_not_fork()
        if not why:
            return ForkEngine(shape)
        warnings.warn(
            f"ranks cannot be forked: {why}. They start as clean interpreters, which takes seconds. "
            "Fix: pass start_method='spawn' to do this without a warning.",
            RuntimeWarning,
            stacklevel=6,
        )
        shape = replace(shape, engine="spawn")
    if shape.engine == "spawn":
        from .spawn import SpawnEngine

        return SpawnEngine(shape)
    from .ray_cluster import RayEngine

    return RayEngine(shape)
