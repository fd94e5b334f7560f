"""What this machine has for a lab, found without changing anything; a fact a function, each a `Finding` or a few.

``ok`` is True for what is there, False for what ranks or the lab cannot do without, None for what is only
told or would be nice; ``fix`` is what to type. A check that itself fails becomes a Finding that says so.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from ..cores import quota, usable_cores

__all__ = ["Finding", "inspect"]

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
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))} on {sys.platform}"
    if not hasattr(os, "fork"):
        return [Finding("system", python, False, "ranks are forked: use Linux or macOS; on Windows, WSL 2")]
    return [Finding("system", python, True)]


def cores() -> list[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    value = f"{usable} of {there} usable" if usable != there else f"{usable} usable"
    share = quota()
    if share is not None and share < there:
        value += f" ({share:g} by this container's quota)"
    few = "ranks will take turns: results are exact, times include waiting" if usable < 2 else None
    return [Finding("cores", value, usable > 1 or None, few)]


def memory() -> list[Finding]:
    import psutil

    there = psutil.virtual_memory()
    free, total = int(there.available), int(there.total)
    limit = _cgroup("memory.max")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        cache = re.search(r"^inactive_file (\d+)", _cgroup("memory.stat"), re.MULTILINE)
        free = min(free, total - int(_cgroup("memory.current") or 0) + int(cache[1] if cache else 0))
    value = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    if free < 2**29:
        return [Finding("memory", value, False, "4 idle ranks take about 0.3 GB: free some, or launch fewer")]
    return [Finding("memory", value, True)]


def shared_memory(folder: str = "/dev/shm") -> list[Finding]:
    if not os.path.isdir(folder):
        return [Finding("shared memory", f"no {folder}")]
    size = shutil.disk_usage(folder)
    value = f"{size.free / 2**30:.2f} of {size.total / 2**30:.2f} GiB free in {folder}"
    if size.free >= 2**28:
        return [Finding("shared memory", value, True)]
    fix = "NCCL and worker processes of data loaders need it: docker run --shm-size=1g, or remount it larger"
    return [Finding("shared memory", value, None, fix)]


def open_files() -> list[Finding]:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= 1024
    fix = None if many else "each rank takes 6 in the notebook's process: ulimit -n 4096"
    shown = [("unlimited" if limit == resource.RLIM_INFINITY else str(limit)) for limit in (soft, hard)]
    return [Finding("open files", f"{shown[0]} (at most {shown[1]})", many or (None if soft >= 128 else False), fix)]


def loopback() -> list[Finding]:
    """A connection to oneself over 127.0.0.1, over which Gloo ranks talk."""
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
        return [Finding("loopback", f"127.0.0.1: {error}", False, "ranks talk over it: ip link set lo up")]
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return [Finding("loopback", f"127.0.0.1 answers{f' ({name})' if name else ''}", True)]


def unix_sockets() -> list[Finding]:
    """A socket pair that passes file descriptors, which is how ranks get their pipes."""
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
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus)
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
    """Whether a button's callback runs while a cell does, which subshells of the kernel make possible."""
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
    """Compared with what this package's own metadata asks for."""
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
    """Tried with a real file, in the folder or the nearest one above it that exists."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    fix = f"make {there} writable, or set {variable} to a folder that is"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = f"make room on its disk, or set {variable} to a folder on another"
        return Finding(name, f"{folder}: {error.strerror}", False, fix)
    return Finding(name, f"{folder}, {shutil.disk_usage(there).free / 2**30:.0f} GiB free", True)


def _nvidia_driver() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def _broken(name: str, error: BaseException, fix: str | None = None) -> Finding:
    lines = str(error).strip().splitlines()
    return Finding(name, f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300], False, fix)
