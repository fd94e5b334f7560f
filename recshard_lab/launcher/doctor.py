"""Checks of this machine for ``recshard doctor``. They change nothing. Each function returns one or more `Finding`.

``ok`` is True for a working part, False for a missing part that ranks or the lab need, and None for optional parts and
information. ``fix`` is the command or change to make. A check that raises is reported as a Finding with ok False.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from ..cores import free_memory, quota, usable_cores
from ..sockets import loopback_interface
from .engines import start_methods
from .engines.fork import warm
from .errors import LaunchError, RankError
from .session import launch

__all__ = ["Finding", "as_json", "as_table", "checkup", "inspect", "real_launch"]

PYTHONS = ((3, 11), (3, 12), (3, 13))  # on which the tests have run
TORCH_OF_FBGEMM = {"1.6": "2.11", "1.8": "2.13", "1.9": "2.14"}  # each release is built for one torch
FBGEMM_BUILDS = ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
IMPORT_S = 120.0
_TRY_FBGEMM = "import torch, fbgemm_gpu; torch.ops.fbgemm.asynchronous_complete_cumsum"


@dataclass(frozen=True)
class Finding:
    """One fact about this machine. fix: what to do about it, None when nothing need be done."""

    name: str
    value: str
    ok: bool | None = None
    fix: str | None = None


def inspect(checks: Sequence[Callable[[], list[Finding]]] | None = None) -> list[Finding]:
    """Every fact, in the order people read them. A check that raises is a Finding with ok False."""
    findings: list[Finding] = []
    for check in CHECKS if checks is None else checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(_broken(check.__name__.replace("_", " ").strip(), error))
    return findings


# -- the machine -----------------------------------------------------------------------------------


def system() -> list[Finding]:
    """The operating system and Python: how ranks start there, and whether the tests run on this Python."""
    here = f"Python {'.'.join(map(str, sys.version_info[:3]))} on {sys.platform}"
    methods = start_methods()
    if not methods:
        fix = "ranks do not start on Windows: run Python and Jupyter in WSL 2 (wsl --install)"
        return [Finding("system", here, False, fix)]
    if methods[0] == "spawn":
        here += "; ranks are spawned, which takes seconds (start_method='fork' takes 0.1 s)"
    if sys.version_info[:2] not in PYTHONS:
        return [Finding("system", here, None, "the tests do not run on it: use Python 3.11, 3.12 or 3.13")]
    return [Finding("system", here, True)]


def cores() -> list[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    value = f"{usable} of {there} usable" if usable != there else f"{usable} usable"
    share = quota()
    if share is not None and share < there:
        value += f" ({share:g} by this container's quota)"
    few = "ranks will take turns: results are exact, times include waiting" if usable < 2 else None
    return [Finding("cores", value, usable > 1 or None, few)]


def memory() -> list[Finding]:
    free, total = free_memory()
    value = f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free"
    if free < 2**29:
        return [Finding("memory", value, False, "4 idle ranks take about 0.3 GB: free some, or launch fewer")]
    return [Finding("memory", value, True)]


def shared_memory(folder: str = "/dev/shm") -> list[Finding]:
    if not os.path.isdir(folder):
        return [Finding("shared memory", f"no {folder}")]
    size = shutil.disk_usage(folder)
    value = f"{size.free / 1e9:.2f} of {size.total / 1e9:.2f} GB free in {folder}"
    if size.free >= 2**28:
        return [Finding("shared memory", value, True)]
    fix = "NCCL and worker processes of data loaders need it: docker run --shm-size=1g, or remount it larger"
    return [Finding("shared memory", value, None, fix)]


def open_files() -> list[Finding]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= 1024
    fix = None if many else "each rank takes 6 in the notebook's process: ulimit -n 4096"
    shown = [("unlimited" if limit == resource.RLIM_INFINITY else str(limit)) for limit in (soft, hard)]
    return [Finding("open files", f"{shown[0]} (at most {shown[1]})", many or (None if soft >= 128 else False), fix)]


def loopback() -> list[Finding]:
    """Whether a connection to 127.0.0.1 carries data: Gloo ranks need it."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2) as there,
            server.accept()[0] as here,
        ):
            here.sendall(b"x")
            there.settimeout(2)
            if there.recv(1) != b"x":
                raise OSError("what was sent did not arrive")
    except OSError as error:
        up = "sudo ifconfig lo0 up" if sys.platform == "darwin" else "ip link set lo up"
        return [Finding("loopback", f"127.0.0.1: {error}", False, f"ranks are connected by it: {up}")]
    return [Finding("loopback", f"127.0.0.1 answers ({loopback_interface()})", True)]


def unix_sockets() -> list[Finding]:
    """Whether a socket pair passes file descriptors: ranks receive their pipes this way."""
    if not start_methods():
        return []
    try:
        a, b = socket.socketpair()
        with a, b, open(os.devnull) as null:
            socket.send_fds(a, [b"x"], [null.fileno()])
            _, fds, _, _ = socket.recv_fds(b, 1, 1)
            for fd in fds:
                os.close(fd)
    except OSError as error:
        return [Finding("local sockets", str(error), False, "the sandbox must allow AF_UNIX socket pairs")]
    return [Finding("local sockets", "pass file descriptors", len(fds) == 1)]


def folders() -> list[Finding]:
    """Where downloads are kept and where ranks meet."""
    import pooch

    return [
        _writable("cache", Path(pooch.os_cache("recshard_lab")), "XDG_CACHE_HOME"),
        _writable("temporary files", Path(tempfile.gettempdir()), "TMPDIR"),
    ]


# -- torch and fbgemm ------------------------------------------------------------------------------


def torch_and_backends() -> list[Finding]:
    try:
        import torch
        from torch import distributed
    except Exception as error:  # a broken wheel raises OSError, or worse
        return [_broken("torch", error, 'pip install -e ".[cpu]", or pip install torch==2.13.0')]
    found = [_at_least("torch", str(torch.__version__))]
    if not distributed.is_available():
        return [*found, Finding("Gloo", "torch is built without torch.distributed", False, "pip install torch==2.13.0")]
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if gpus:
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus)
        found.append(Finding("GPUs", f"{len(gpus)}: {names}", True))
    elif _nvidia_driver():
        built = torch.version.cuda
        why = f"the driver does not work with CUDA {built}" if built else "this torch is a CPU build"
        fix = "update the driver" if built else 'a CUDA build of torch: pip install "recshard-lab[cuda]"'
        found.append(Finding("GPUs", f"NVIDIA driver found, but {why}", None, fix))
    else:
        found.append(Finding("GPUs", "none; ranks use CPU cores"))
    gloo, nccl = distributed.is_gloo_available(), distributed.is_nccl_available()
    found.append(
        Finding("Gloo", "available" if gloo else "missing", gloo, None if gloo else "pip install torch==2.13.0")
    )
    if nccl:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        found.append(Finding("NCCL", f"{version}{'' if gpus else ' (no GPU to use it)'}", True if gpus else None))
    else:
        needed = 'GPUs talk over it: pip install "recshard-lab[cuda]"' if gpus else None
        found.append(Finding("NCCL", "not in this torch", False if gpus else None, needed))
    return found


def fbgemm() -> list[Finding]:
    """Which build, for which torch, and whether it imports: tried in another process, since it may crash."""
    builds = {name: version for name in FBGEMM_BUILDS if (version := version_of(name))}
    torch_version = version_of("torch") or "none"
    if not builds:
        return [Finding("fbgemm", "not installed; kernels of plain torch are used", None, _fbgemm_fix(torch_version))]
    shown = " and ".join(f"{name} {version}" for name, version in builds.items())
    if len(builds) > 1:
        fix = f"two builds overwrite each other: pip uninstall -y {' '.join(builds)}; {_fbgemm_fix(torch_version)}"
        return [Finding("fbgemm", shown, False, fix)]
    ((name, version),) = builds.items()
    wants = TORCH_OF_FBGEMM.get(_release(version))
    failed = _import_error()
    if wants and _release(torch_version) != wants:
        tells = f"{shown} is built for torch {wants}, here is {torch_version}" + (f": {failed}" if failed else "")
        return [Finding("fbgemm", tells, False, _fbgemm_fix(torch_version, name))]
    if failed:
        return [Finding("fbgemm", f"{shown} cannot be imported: {failed}", False, _fbgemm_fix(torch_version, name))]
    matches = f"built for torch {wants}" if wants else f"imports with torch {torch_version}"
    return [Finding("fbgemm", f"{shown}, {matches}", True)]


def _fbgemm_fix(torch_version: str, installed: str = "") -> str:
    """What to install so that fbgemm and torch match; an installed build must go first."""
    build = "fbgemm-gpu" if "+cu" in torch_version or _nvidia_driver() else "fbgemm-gpu-cpu"
    version = next((f for f, t in TORCH_OF_FBGEMM.items() if t == _release(torch_version)), None)
    wanted = f"{build}=={version}.0" if version else f"torch==2.13.0 {build}==1.8.0"
    first = f"pip uninstall -y {installed}; " if installed else ""
    return f"{first}pip install {wanted}"


def _import_error() -> str:
    """How importing fbgemm in a fresh interpreter fails, in a line; empty when it works."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_FBGEMM], capture_output=True, text=True, check=False, timeout=IMPORT_S
        )
    except subprocess.TimeoutExpired:
        return f"no end after {IMPORT_S:g} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:300] if lines else f"the interpreter ended with code {done.returncode}"


# -- JupyterLab and its parts ----------------------------------------------------------------------


def lab_packages() -> list[Finding]:
    return [_package(name) for name in ("jupyterlab", "ipywidgets", "anywidget", "plotly", "ipykernel")]


def busy_widgets() -> list[Finding]:
    """Whether callbacks of widgets run while a cell runs, which needs subshells of the kernel."""
    version = version_of("ipykernel")
    if version is None:
        return []
    if _numbers(version) >= (7, 0, 1):
        ours = " (from ipykernel 7.4 on, the widgets of recshard_lab)" if _numbers(version) >= (7, 4) else ""
        return [Finding("widgets in a busy cell", f"answer while a cell runs{ours}", True)]
    fix = "move controls between cells; for answers while a cell runs: pip install 'ipykernel>=7.0.1'"
    return [Finding("widgets in a busy cell", f"wait for the cell to end (ipykernel {version})", None, fix)]


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    system,
    cores,
    memory,
    shared_memory,
    open_files,
    loopback,
    unix_sockets,
    folders,
    torch_and_backends,
    fbgemm,
    lab_packages,
    busy_widgets,
)


# -- small things ----------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """The installed version, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Finding:
    version = version_of(name)
    if version is None:
        return Finding(name, "not installed", False, f"pip install {name}")
    return _at_least(name, version)


def _at_least(name: str, version: str) -> Finding:
    """Compares the version with the requirement in this package's metadata."""
    try:
        asked = metadata.requires("recshard-lab") or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        asked = []
    least = next((m[1] for line in asked if (m := re.fullmatch(rf"{name}>=([\d.]+)", line.split(";")[0].strip()))), "0")
    if _numbers(version) >= _numbers(least):
        return Finding(name, version, True)
    return Finding(name, f"{version}, needs {least}", False, f"pip install '{name}>={least}'")


def _numbers(version: str) -> tuple[int, ...]:
    """``7.0.1rc1+cpu`` as (7, 0, 1)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _release(version: str) -> str:
    return ".".join(map(str, _numbers(version)[:2]))


def _writable(name: str, folder: Path, variable: str) -> Finding:
    """Writes a temporary file in the folder, or in the nearest existing parent."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    fix = f"make {there} writable, or set {variable} to a folder that is"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"make room on its disk, or set {variable} to a folder on another"
        return Finding(name, f"{folder}: {error.strerror}", False, fix)
    home = Path.home()
    shown = Path("~", folder.relative_to(home)) if folder.is_relative_to(home) else folder
    return Finding(name, f"{shown}, {shutil.disk_usage(there).free / 1e9:.0f} GB free", True)


def _nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def _broken(name: str, error: BaseException, fix: str | None = None) -> Finding:
    lines = str(error).strip().splitlines()
    return Finding(name, f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300], False, fix)


RANKS = 2
MARK = {True: "[green]✓[/]", False: "[bold red]✗[/]", None: "[dim]-[/]"}


def checkup() -> list[Finding]:
    """The findings of `inspect`, then a launch of two ranks over Gloo, and over NCCL with two GPUs or more."""
    import torch

    warm()  # torch is imported for the ranks meanwhile
    found = inspect()
    if not start_methods():
        return found
    found.append(real_launch("gloo"))
    if torch.cuda.device_count() >= RANKS:
        found.append(real_launch("nccl"))
    return found


def real_launch(backend: str) -> Finding:
    """Starts two ranks, runs an all_reduce of rank + 1, stops them, and times each part."""
    name = f"{RANKS} ranks over {backend}"
    begun = time.perf_counter()
    try:
        with launch(RANKS, backend=backend) as ranks:
            ready_s = time.perf_counter() - begun
            sums, seconds = zip(*ranks.run(_all_reduce, "cuda" if backend == "nccl" else "cpu"), strict=True)
    except (LaunchError, RankError, OSError) as error:
        headline = error.headline() if isinstance(error, RankError) else str(error)
        return Finding(name, f"{type(error).__name__}: {headline}", False, "see the findings above marked with a cross")
    if set(sums) != {3.0}:
        return Finding(name, f"all_reduce returned {sums}, not 3.0 on both", False, "torch's build is broken")
    return Finding(name, f"started in {ready_s:.2f} s, all_reduce {1e3 * max(seconds):.2f} ms", True)


def _all_reduce(device: str) -> tuple[float, float]:
    import torch
    from torch import distributed

    for _ in range(2):  # the second is past the set-up of connections
        ours = torch.full((1,), distributed.get_rank() + 1.0, device=device)
        begun = time.perf_counter()
        distributed.all_reduce(ours)
        result = ours.item()
    return result, time.perf_counter() - begun


def as_table(findings: Sequence[Finding]) -> Table:
    """One row per finding, with its fix below."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(width=1)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        fix = f"\n[yellow]→ {escape(finding.fix)}[/]" if finding.fix else ""
        table.add_row(MARK[finding.ok], escape(finding.name), escape(finding.value) + fix)
    return table


def as_json(findings: Sequence[Finding]) -> str:
    """One object: whether nothing needed is broken, and every finding.

    >>> as_json([Finding("cores", "2 usable", True)])
    '{"ok": true, "findings": [{"name": "cores", "value": "2 usable", "ok": true, "fix": null}]}'
    """
    ok = all(finding.ok is not False for finding in findings)
    return json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]})
