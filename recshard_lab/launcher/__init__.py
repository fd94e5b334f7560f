"""Ranks for a notebook: persistent processes, forked in milliseconds, that run any SPMD function or cell."""

from .errors import Failure as Failure
from .errors import LaunchError as LaunchError
from .errors import RankError as RankError
from .errors import RanksInterrupted as RanksInterrupted
from .forkserver import warm as warm
from .joining import Place as Place
from .joining import join as join
from .launching import current as current
from .launching import launch as launch
from .lines import LineMerger as LineMerger
from .lines import Printer as Printer
from .results import CellResult as CellResult
from .results import RankStatus as RankStatus
from .session import Ranks as Ranks

__all__ = [
    "CellResult",
    "Failure",
    "LaunchError",
    "LineMerger",
    "Place",
    "Printer",
    "RankError",
    "RankStatus",
    "Ranks",
    "RanksInterrupted",
    "current",
    "join",
    "launch",
    "warm",
]
