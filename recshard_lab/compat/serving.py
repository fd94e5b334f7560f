"""A meta-path finder that answers ``import torchrec`` and its submodules with this library's classes.

Each served module is an empty package (``__path__ = []``) whose names are loaded at their first use. For a missing name
of a package, Python calls the finder again, which raises an error with the nearest name.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import abc, import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from recshard_lab.compat.not_served import explain
from recshard_lab.compat.served import served_modules, target_of

ROOT = "torchrec"


class Finder:
    """In ``sys.meta_path`` while TorchRec's names are served."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a served module; None for other modules.

        Raises:
            ImportError: a module or name of TorchRec that is not served, with the nearest name here.
        """
        if fullname != ROOT and not fullname.startswith(f"{ROOT}."):
            return None
        if fullname not in served_modules():
            raise ImportError(explain(fullname))
        return ModuleSpec(fullname, Loader(), origin="recshard_lab.compat.torchrec", is_package=True)


class Loader(abc.Loader):
    """Creates a module whose names come from `served`."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ServedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Executes nothing: names are loaded at their first use."""


class ServedModule(ModuleType):
    """A module with TorchRec's name and this library's classes."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"{name}, served by recshard_lab: see recshard_lab.compat.torchrec.")
        self.__all__ = sorted(served_modules()[name])

    def __getattr__(self, name: str) -> Any:
        path = f"{self.__name__}.{name}"
        target = target_of(self.__name__, name)
        if target is None:
            if path in served_modules():
                return import_module(path)
            if name.startswith("__"):
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            raise AttributeError(explain(path))
        room, _, own = target.partition(":")
        value = getattr(import_module(room), own)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        # The import of a submodule sets it as an attribute here. A function of the same name stays in its place.
        if not (isinstance(value, ServedModule) and target_of(self.__name__, name)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _on_arrival, (self.__name__,)

    def __dir__(self) -> list[str]:
        children = {m.rpartition(".")[2] for m in served_modules() if m.rpartition(".")[0] == self.__name__}
        return sorted({*super().__dir__(), *self.__all__, *children})


def _on_arrival(name: str) -> ModuleType:
    """Loads the module in another process, for a pickled function that uses it."""
    if finder_in_place() is None and ROOT not in sys.modules:
        sys.meta_path.insert(0, Finder())
    return import_module(name)


def finder_in_place() -> Finder | None:
    """The installed finder, if there is one."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Finder)), None)
