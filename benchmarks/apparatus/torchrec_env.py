"""A throw-away virtual environment in which TorchRec stands beside the torch and fbgemm that are installed here.

TorchRec asks pip for the CUDA build of fbgemm, which cannot be imported without CUDA and would overwrite the CPU one:
it is installed without its dependencies, and what it needs in pure Python is named here.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

from benchmarks.apparatus.peer_env import PeersMissing
from benchmarks.apparatus.pip import pip_install

__all__ = ["TORCHREC", "TorchRecEnv"]

TORCHREC = "torchrec==1.8.0"
STANDS_ON = {"torch": "2.13.0", "fbgemm_gpu-cpu": "1.8.0"}
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
)
INSTALL_S = 600.0


class TorchRecEnv:
    """A context manager; gone at its end. This interpreter's packages are seen from inside, none is changed.

    Where ``RECSHARD_PEERS`` names an interpreter that has TorchRec, that one is used and left as it is.

    Raises:
        PeersMissing: torch or fbgemm here is not the release that TorchRec was built for, or pip failed.
    """

    def __init__(self) -> None:
        self.folder = ""

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        if given := os.environ.get("RECSHARD_PEERS"):
            return given
        return str(Path(self.folder, "bin", "python"))

    def __enter__(self) -> TorchRecEnv:
        if os.environ.get("RECSHARD_PEERS"):
            return self
        for package, release in STANDS_ON.items():
            there = _release(package)
            if there != release:
                raise PeersMissing(
                    f"{TORCHREC} runs beside {package}=={release}, here is {there or 'none'}: "
                    f"pip install 'recshard-lab[cpu]' into an environment of its own and run the benchmark there"
                )
        self.folder = tempfile.mkdtemp(prefix="recshard-torchrec-")
        try:
            venv.create(self.folder, with_pip=True, symlinks=True)
            (site,) = Path(self.folder, "lib").glob("python*/site-packages")
            here = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
            (site / "beside.pth").write_text("\n".join(here) + "\n")
            if why := pip_install(self.python, ["--no-deps", TORCHREC, *NEEDS], INSTALL_S, self.folder):
                raise PeersMissing(f"{TORCHREC} could not be installed: {why}")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes it from the disk."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _release(package: str) -> str:
    try:
        return metadata.version(package).split("+")[0]
    except metadata.PackageNotFoundError:
        return ""
