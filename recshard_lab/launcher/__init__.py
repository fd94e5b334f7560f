"""Launches ranks from a notebook: persistent processes that run SPMD functions and cells."""

from .engines.fork import warm as warm
from .errors import Failure as Failure
from .errors import LaunchError as LaunchError
from .errors import RankError as RankError
from .errors import RanksInterrupted as RanksInterrupted
from .joining import Place as Place
from .joining import join as join
from .lines import LineMerger as LineMerger
from .lines import Printer as Printer
from .session import CellResult as CellResult
from .session import Ranks as Ranks
from .session import RankStatus as RankStatus
from .session import current as current
from .session import launch as launch
from .session import start as start
from .shape import Shape as Shape

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
