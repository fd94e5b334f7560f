"""``%autoreload`` for ranks: modules that were edited on disk are loaded again before a cell runs there.

On where the notebook's own ``%autoreload`` is, or a cell of the ranks says ``%autoreload 2``. The work on a rank is
IPython's, which also brings functions and classes that were imported by name up to date.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

from recshard_lab.launcher import Ranks

__all__ = ["Autoreload"]

_LINE = re.compile(r"^%(?:load_ext\s+autoreload|autoreload(?:\s+(?P<mode>\w+))?)[ \t]*$", re.M)
_OFF = ("0", "off")
_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

_loaded: dict[str, int] = {}  # on a rank: file -> its time of change when it was loaded
_old_objects: dict[Any, Any] = {}  # on a rank: what IPython remembers from one reload to the next


class Autoreload:
    """What was asked for in this notebook."""

    def __init__(self) -> None:
        self.asked: bool | None = None  # by a cell of the ranks; None: as the notebook does itself

    def take_out(self, cell: str) -> str:
        """The cell without its ``%autoreload`` lines, which are obeyed; other lines keep their numbers."""
        for line in _LINE.finditer(cell):
            if "load_ext" not in line[0]:
                self.asked = line["mode"] not in _OFF
        return _LINE.sub("", cell)

    def on(self, shell: Any) -> bool:
        """Whether modules are to be loaded again."""
        if self.asked is not None:
            return self.asked
        magics = shell.magics_manager.registry.get("AutoreloadMagics")
        return magics is not None and bool(magics._reloader.enabled and magics._reloader.check_all)

    def before(self, ranks: Ranks, chosen: Sequence[int]) -> None:
        """Brings the chosen ranks up to date."""
        ranks.call(reload_changed, ranks=chosen)

    def after(self, ranks: Ranks, chosen: Sequence[int]) -> None:
        """Has the ranks remember what their cell imported."""
        ranks.call(note_loaded, ranks=chosen)


def _users_modules() -> list[tuple[Any, str, int]]:
    """(module, file, time of its last change) for what is neither Python's nor installed."""
    found = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and not file.startswith(_INSTALLED):
            try:
                found.append((module, file, os.stat(file).st_mtime_ns))
            except OSError:
                continue  # in a zip, or deleted
    return found


def note_loaded() -> None:
    """On a rank: remembers the state in which modules were loaded."""
    for _, file, changed in _users_modules():
        _loaded.setdefault(file, changed)


def reload_changed() -> None:
    """On a rank: loads again what has changed; a module that cannot be loaded is told of and stays as it was."""
    for module, file, changed in _users_modules():
        if _loaded.setdefault(file, changed) == changed:
            continue
        _loaded[file] = changed
        from IPython.extensions.autoreload import superreload

        try:
            superreload(module, old_objects=_old_objects)
        except Exception as error:
            print(f"autoreload of {module.__name__} failed: {type(error).__name__}: {error}", file=sys.stderr)
