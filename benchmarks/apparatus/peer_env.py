"""A throw-away virtual environment in which other launchers are installed, each at a pinned version."""

from __future__ import annotations

import shutil
import sys
import tempfile
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.apparatus.pip import pip_install

__all__ = ["PeerEnv", "PeersMissing"]

INSTALL_S = 900.0


class PeersMissing(RuntimeError):
    """Not even what every peer needs could be installed; the message carries pip's last line."""


class PeerEnv:
    """A context manager: torch, numpy and ipykernel as here, then each of `peers`; gone at its end.

    missing: peer -> why pip could not install it.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        self.peers = peers
        self.missing: dict[str, str] = {}
        self.folder = ""

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(Path(self.folder, "bin", "python"))

    def __enter__(self) -> PeerEnv:
        self.folder = tempfile.mkdtemp(prefix="recshard-peers-")
        try:
            venv.create(self.folder, with_pip=True, symlinks=True)
            if why := self._install(base_requirements()):
                raise PeersMissing(f"an environment for other launchers could not be made: {why}")
            for peer in self.peers:
                if why := self._install([peer, *base_requirements()]):  # no peer may bring another torch
                    self.missing[peer.split("==")[0]] = why
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes it from the disk."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _install(self, requirements: Sequence[str]) -> str:
        """Why pip failed, in a line; empty when it did not."""
        return pip_install(self.python, requirements, INSTALL_S, self.folder)


def base_requirements() -> list[str]:
    """What peers run on, pinned to the releases that are measured beside them; torch never unpinned.

    >>> [requirement.split("==")[0] for requirement in base_requirements()]
    ['torch', 'numpy', 'ipykernel']
    """
    releases = {name: metadata.version(name).split("+")[0] for name in ("torch", "numpy", "ipykernel")}
    return [f"{name}=={release}" for name, release in releases.items()]


def note(text: str) -> None:
    """Tells a person who waits; what a program reads goes to stdout."""
    print(text, file=sys.stderr, flush=True)
