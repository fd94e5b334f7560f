"""Builds ``binder/`` as repo2docker does, without a container: what it would run, in its order, in a fresh environment.

repo2docker itself (the installed release) reads the files and says which buildpack it takes and what it would run. What
differs from the real thing, because there is neither Docker nor conda here:

- its base environment comes from pip: Python of the version that runtime.txt asks for, and of its lock file those
  packages that its own list names, in the very versions of the lock;
- a folder stands for the container, in which HOME and the checkout are one, as there; the user may be root;
- where download.pytorch.org cannot be reached, torch comes from wherever pip of this machine finds ``torch==...+cpu``
  (``PIP_FIND_LINKS``, pip.conf): the version asked for is the same, plain CUDA builds do not answer to it.

``python -m tests.binder.building FOLDER`` builds in FOLDER.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.binder.watching import Watch

ROOT = Path(__file__).parents[2]
KEPT = ("LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")  # of our variables; pip's and proxies' too


@dataclass(frozen=True)
class Plan:
    """What repo2docker makes of a checkout."""

    buildpack: str
    python: str
    base: list[str]  # name==version
    early_files: list[str]  # all of the checkout that is there before the rest
    early: list[str]  # shell, with only those files
    late: list[str]  # shell, with the checkout
    post_build: list[str]  # files, made executable and run
    start: str  # in front of the server's command; ${REPO_DIR} in it


def plan(checkout: Path) -> Plan:
    """Asks repo2docker's buildpacks, in its order, as it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its own, of a logger's old name
        from repo2docker.app import Repo2Docker
        from repo2docker.buildpacks import conda

    with chdir(checkout):
        app = Repo2Docker()
        packs = (make(app.base_image) for make in app.buildpacks)
        pack = next(pack for pack in packs if pack.detect())
        pack.platform = "linux/amd64"
        python = pack.python_version
        return Plan(
            buildpack=type(pack).__name__,
            python=python,
            base=_base_packages(Path(conda.__file__).parent, python),
            early_files=list(pack.get_preassemble_script_files()),
            early=[script for _, script in pack.get_preassemble_scripts()],
            late=[script for _, script in pack.get_assemble_scripts()],
            post_build=list(pack.get_post_build_scripts()),
            start=pack.get_start_script() or "",
        )


def _base_packages(folder: Path, python: str) -> list[str]:
    """What its list for this Python names, in the versions of its lock file."""
    named = re.findall(r"^- ([\w-]+)", (folder / f"environment.py-{python}.yml").read_text(), re.MULTILINE)
    lock = (folder / f"environment.py-{python}-linux-64.lock").read_text()
    versions = dict(re.findall(r"/([\w.-]+)-([^-/]+)-[^-/]+\.(?:conda|tar\.bz2)", lock))
    wanted = [name for name in (*named, "ipykernel", "ipython") if name in versions]
    pips = [(name.removesuffix("-singleuser"), versions[name]) for name in wanted if name not in ("python", "nodejs")]
    return [f"{name}=={version}" for name, version in pips]


@dataclass(frozen=True)
class Container:
    """A folder that stands for one."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def prefix(self) -> Path:
        return self.folder / "env"

    def variables(self) -> dict[str, str]:
        """Those of the image, and what this machine needs to reach a package index."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT or name.startswith("PIP_")}
        kept |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
        kept.setdefault("PIP_RETRIES", "1")
        path = f"{self.home}/.local/bin:{self.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        names = ("HOME", "REPO_DIR", "NB_PYTHON_PREFIX", "KERNEL_PYTHON_PREFIX")
        places = (self.home, self.home, self.prefix, self.prefix)
        return {**kept, "PATH": path, "NB_USER": "jovyan", **dict(zip(names, map(str, places), strict=True))}

    def shell(self, script: str) -> str:
        """Runs it to its end; what it said."""
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.home, env=self.variables(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{script.strip()}\nended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def copy(self, names: list[str]) -> None:
        for name in names:
            target = self.home / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)


def build(folder: Path) -> dict[str, Any]:
    """Builds in ``folder``; the seconds and the peak of memory of every step, which it also keeps there."""
    wanted, container = plan(ROOT), Container(folder)
    python = _interpreter(wanted.python)
    container.home.mkdir(parents=True)
    steps: dict[str, dict[str, float]] = {}

    def step(name: str, script: str) -> None:
        begun = time.perf_counter()
        with Watch(os.getpid()) as watch:
            container.shell(script)
        steps[name] = {"seconds": time.perf_counter() - begun, "peak_bytes": watch.peak}

    step("base", f'{python} -m venv "{container.prefix}" && pip install -q --no-cache-dir {" ".join(wanted.base)}')
    container.copy(wanted.early_files)
    for script in wanted.early:
        step(script, script)
    container.copy(_files())
    for script in wanted.late:
        step(script, script)
    for file in wanted.post_build:
        step(file, f"chmod +x {file} && ./{file}")
    steps["all"] = {"disk_bytes": float(container.shell(f'du -sb "{container.prefix}"').split()[0])}
    (folder / "build.json").write_text(json.dumps(steps, indent=1))
    return steps


def _files() -> list[str]:
    """The checkout as it would be cloned, changes not yet committed included."""
    told = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [name for name in dict.fromkeys(told.stdout.split("\0")) if name and (ROOT / name).is_file()]


def _interpreter(version: str) -> str:
    if "{}.{}".format(*sys.version_info) == version:
        return str(Path(getattr(sys, "_base_executable", sys.executable)))
    found = shutil.which(f"python{version}")
    if found is None:
        raise RuntimeError(f"binder/runtime.txt asks for Python {version}: there is no python{version} here")
    return found


if __name__ == "__main__":
    for name, figures in build(Path(sys.argv[1])).items():
        print(name, {key: round(value, 1) for key, value in figures.items()})
