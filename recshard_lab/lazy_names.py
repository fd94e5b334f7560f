"""The names of a room, each imported when it is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lazy_loader

from .interrupts import uninterrupted

__all__ = ["attach_stub"]


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, for the names in the stub beside `file`.

    An interrupt of an import takes effect when the import has ended, so that the next use of the name works.
    """
    load, names, everything = lazy_loader.attach_stub(package, file)

    def load_whole(name: str) -> Any:
        with uninterrupted():
            return load(name)

    return load_whole, names, everything
