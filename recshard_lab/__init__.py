"""Learn, explore and decide embedding sharding.

``__init__.pyi`` lists the public names: those typed most, and the rooms, which have the others. Each is imported on
first use. ``import recshard_lab`` imports no tensor library, and a rank never loads a widget.

>>> import recshard_lab as rs
>>> "KeyedJaggedTensor" in dir(rs), "sharding" in dir(rs)
(True, True)
"""

import os as _os
import re as _re
from functools import lru_cache as _lru_cache
from pathlib import Path as _Path
from sys import modules as _modules
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import lazy_loader as _lazy_loader

if _TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.2.0"

if "RECSHARD_TORCHREC" in _os.environ:  # the process that started this one serves TorchRec's names
    from recshard_lab.compat.torchrec import install_as_parent as _install_as_parent

    _install_as_parent()

_load, _, _lazy = _lazy_loader.attach_stub(__name__, __file__)
__all__ = sorted([*_lazy, "__version__", "load_ipython_extension", "unload_ipython_extension"])


def __getattr__(name: str) -> _Any:
    if name in _lazy:
        from recshard_lab.interrupts import uninterrupted

        with uninterrupted():
            return _load(name)
    if name.startswith("_"):
        return _load(name)
    rooms = _names_of_rooms()
    room = min((room for room in rooms if name in rooms[room]), key=lambda room: len(rooms[room]), default=None)
    fix = f"Fix: use rs.{room}.{name}" if room else "Fix: dir(recshard_lab) lists its names"
    raise AttributeError(f"{__name__} has no {name!r}. {fix}", name=name, obj=_modules[__name__])


@_lru_cache(maxsize=1)
def _names_of_rooms() -> dict[str, set[str]]:
    """Room -> its public names, read from its text: no room is imported."""
    files = {room: list(_Path(__file__).parent.glob(f"{room}/__init__.py*")) for room in _lazy}
    found = _re.compile(r"^from \S+ import \w+ as (\w+)$", _re.MULTILINE).findall
    return {room: {name for file in own for name in found(file.read_text())} for room, own in files.items() if own}


def __dir__() -> list[str]:
    return list(__all__)


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """``%load_ext recshard_lab``: registers the magics and starts warming the ranks' forkserver."""
    from recshard_lab.interrupts import uninterrupted

    with uninterrupted():
        from recshard_lab.lab.magics import load

        load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """``%unload_ext recshard_lab``: stops the ranks and takes the magics away."""
    from recshard_lab.lab.magics import unload

    unload(shell)
