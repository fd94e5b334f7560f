"""Temporary virtual environments in which other libraries are installed, each at a pinned version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Self

__all__ = ["Environment", "PeerEnv", "PeersMissing", "TorchRecEnv", "with_checkout"]

TORCHREC = "torchrec==1.8.0"
BUILT_FOR = {"torch": "2.13.0", "fbgemm_gpu-cpu": "1.8.0"}
NEEDS = (
    "tensordict==0.15.3",
    "pyvers==0.2.3",
    "orjson",
    "importlib-metadata",
    "zipp",
    "cloudpickle",
    "pyre-extensions==0.0.32",
    "typing-inspect==0.9.0",
    "mypy-extensions",
    "tqdm",
    "iopath==0.1.10",
    "portalocker",
    "torchmetrics==1.0.3",
    "lightning-utilities",
)


class PeersMissing(RuntimeError):
    """An environment could not be made; the message carries pip's last line."""


class Environment:
    """A context manager: creates a virtual environment and deletes it at the end."""

    def __init__(self) -> None:
        self.folder = ""

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(Path(self.folder, "bin", "python"))

    def __enter__(self) -> Self:
        self.folder = tempfile.mkdtemp(prefix="recshard-peers-")
        try:
            venv.create(self.folder, with_pip=True, symlinks=True)
            self.fill()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def fill(self) -> None:
        """Installs what the environment is for."""

    def install(self, arguments: Sequence[str], timeout_s: float = 900.0) -> str:
        """Installs requirements with pip. Returns why it failed, in one line; empty if it did not."""
        command = [self.python, "-m", "pip", "install", "--quiet", "--no-cache-dir", *arguments]
        env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": self.folder}
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=env)
        except subprocess.TimeoutExpired:
            return f"pip did not finish in {timeout_s:g} s"
        if done.returncode == 0:
            return ""
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        return errors[-1].strip() if errors else f"pip ended with code {done.returncode}"


class PeerEnv(Environment):
    """torch, numpy and ipykernel in the versions that are installed here, then each of ``peers``.

    Attributes:
        missing: peer -> why pip could not install it.
    """

    def __init__(self, peers: Sequence[str]) -> None:
        super().__init__()
        self.peers = peers
        self.missing: dict[str, str] = {}

    def fill(self) -> None:
        """Installs the base, then each peer.

        Raises:
            PeersMissing: pip could not install the base.
        """
        if why := self.install(base_requirements()):
            raise PeersMissing(f"the environment for other launchers could not be made: {why}")
        for peer in self.peers:
            if why := self.install([peer, *base_requirements()]):  # no peer may replace torch
                self.missing[peer.split("==")[0]] = why


class TorchRecEnv(Environment):
    """TorchRec, beside the torch and fbgemm that are installed here; their packages are visible inside.

    TorchRec requires the CUDA build of fbgemm, which cannot be imported without CUDA and overwrites the CPU build.
    Therefore pip installs it without its dependencies. `NEEDS` lists those in pure Python.

    If ``RECSHARD_PEERS`` names an interpreter that has TorchRec, that interpreter is used and left as it is.

    Raises:
        PeersMissing: torch or fbgemm is not the release that TorchRec was built for, or pip failed.
    """

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return os.environ.get("RECSHARD_PEERS") or super().python

    def __enter__(self) -> Self:
        if os.environ.get("RECSHARD_PEERS"):
            return self
        for package, release in BUILT_FOR.items():
            found = _release(package)
            if found != release:
                raise PeersMissing(
                    f"{TORCHREC} needs {package}=={release}, found {found or 'none'}. "
                    f"Fix: run pip install 'recshard-lab[cpu]' in a separate environment, and the benchmark there."
                )
        return super().__enter__()

    def fill(self) -> None:
        """Makes the packages of this interpreter visible, and installs TorchRec."""
        (site,) = Path(self.folder, "lib").glob("python*/site-packages")
        here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (site / "beside.pth").write_text("\n".join(here) + "\n")
        if why := self.install(["--no-deps", TORCHREC, *NEEDS]):
            raise PeersMissing(f"{TORCHREC} could not be installed: {why}")


def with_checkout() -> dict[str, str]:
    """This process's environment variables, under which another interpreter imports from this checkout."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}


def base_requirements() -> list[str]:
    """What every peer needs, pinned to the releases that are installed here.

    >>> [requirement.split("==")[0] for requirement in base_requirements()]
    ['torch', 'numpy', 'ipykernel']
    """
    return [f"{name}=={_release(name)}" for name in ("torch", "numpy", "ipykernel")]


def _release(package: str) -> str:
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return ""
