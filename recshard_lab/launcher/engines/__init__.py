"""Where ranks come from. The launcher knows a rank by three file descriptors and a `RankProcess`, and asks no more.

| engine | a rank is | from request to first all_reduce, n=4 |
|---|---|---|
| ``fork`` | a fork of a process that has imported torch already (`zygote`) | 0.1 s |
| ``spawn`` | a clean interpreter, through ``multiprocess`` | seconds: every rank imports torch |
| ``ray`` | a process beside a Ray actor, on any machine of a Ray cluster | seconds: actors, then the same |

A new engine is one file here and a line in `engine_for`.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

from .engine import Ending as Ending
from .engine import Engine as Engine
from .engine import OnExit as OnExit
from .engine import RankProcess as RankProcess

if TYPE_CHECKING:
    from ..shape import Shape

__all__ = ["ENGINES", "Ending", "Engine", "OnExit", "RankProcess", "default_start_method", "engine_for"]

ENGINES = ("fork", "spawn", "ray")


def default_start_method() -> str:
    """``fork`` where processes can fork, ``spawn`` elsewhere."""
    return "fork" if hasattr(os, "fork") else "spawn"


def engine_for(shape: Shape) -> Engine:
    """An engine ready to start the ranks of `shape`; raises LaunchError where it cannot."""
    if shape.engine == "fork":
        from .fork import ForkEngine, why_not_fork

        why = why_not_fork()
        if not why:
            return ForkEngine(shape)
        warnings.warn(
            f"ranks cannot be forked: {why}. They start as clean interpreters, which takes seconds. "
            "Fix: pass start_method='spawn', which does the same without this warning.",
            RuntimeWarning,
            stacklevel=6,
        )
        shape = replace(shape, engine="spawn")
    if shape.engine == "spawn":
        from .spawn import SpawnEngine

        return SpawnEngine(shape)
    from .ray_cluster import RayEngine

    return RayEngine(shape)
