"""``%autoreload`` for ranks: edited modules are reloaded before a cell runs.

It is on if the notebook's ``%autoreload`` is on, or after a ``%%recshard`` cell with ``%autoreload 2``. IPython reloads
the modules on a rank; it also updates functions and classes that were imported by name.
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
_old_objects: dict[Any, Any] = {}  # on a rank: IPython's state between two reloads


class Autoreload:
    """The setting of this notebook."""

    def __init__(self) -> None:
        self.setting: bool | None = None  # of a cell of the ranks; None: as in the notebook

    def take_out(self, cell: str) -> str:
        """Applies the ``%autoreload`` lines of a cell and returns the cell without them; line numbers stay."""
        for line in _LINE.finditer(cell):
            if "load_ext" not in line[0]:
                self.setting = line["mode"] not in _OFF
        return _LINE.sub("", cell)

    def on(self, shell: Any) -> bool:
        """Whether modules are reloaded."""
        if self.setting is not None:
            return self.setting
        magics = shell.magics_manager.registry.get("AutoreloadMagics")
        return magics is not None and bool(magics._reloader.enabled and magics._reloader.check_all)

    def before(self, ranks: Ranks, chosen: Sequence[int]) -> None:
        """Reloads edited modules on the chosen ranks."""
        ranks.call(reload_changed, ranks=chosen)

    def after(self, ranks: Ranks, chosen: Sequence[int]) -> None:
        """Records on the ranks the modules that their cell imported."""
        ranks.call(note_loaded, ranks=chosen)


def _users_modules() -> list[tuple[Any, str, int]]:
    """(module, file, time of its last change) of modules that are neither built in nor installed."""
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
    """On a rank: records when the files of loaded modules were changed."""
    for _, file, changed in _users_modules():
        _loaded.setdefault(file, changed)


def reload_changed() -> None:
    """On a rank: reloads edited modules. A module that fails to load is reported and stays unchanged."""
    for module, file, changed in _users_modules():
        if _loaded.setdefault(file, changed) == changed:
            continue
        _loaded[file] = changed
        from IPython.extensions.autoreload import superreload

        try:
            superreload(module, old_objects=_old_objects)
        except Exception as error:
            print(f"autoreload of {module.__name__} failed: {type(error).__name__}: {error}", file=sys.stderr)
