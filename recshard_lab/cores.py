"""The machine: its name for tables, the cores and memory that this process may use, and the ranks that share it."""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path

__all__ = ["driver", "free_memory", "local_world_size", "machine", "quota", "usable_cores"]


def machine() -> str:
    """One line for the title of a table: system, usable cores, GPUs, versions of Python and torch.

    >>> f"{usable_cores()} cores" in machine()
    True
    """
    import torch

    gpus = f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{platform.system()} {platform.machine()}, {usable_cores()} cores{gpus}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def local_world_size(world_size: int) -> int:
    """Ranks per node: the launcher's ``LOCAL_WORLD_SIZE`` if it divides `world_size`, otherwise all ranks."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = int(value) if value.isdigit() else 0
    return local if local > 0 and world_size % local == 0 else world_size


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may run on, and no more than the quota of its containers, rounded up; at least 1.

    Args:
        root: where ``proc`` and ``sys`` are.

    >>> 1 <= usable_cores() <= os.cpu_count()
    True
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = quota(root)
    return allowed if share is None else max(1, min(allowed, math.ceil(share)))


@cache
def quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's control groups, in cores. None if no group has a quota.

    Reads both layouts (``cpu.max``; ``cpu.cfs_quota_us`` and ``cpu.cfs_period_us``), in the group of this process and
    in all groups that contain it (https://docs.kernel.org/admin-guide/cgroup-v2.html, CPU). Reads them once.
    """
    groups = root / "sys/fs/cgroup"
    shares = []
    for controllers, path in _memberships(root):
        places = [groups, groups / "unified"] if controllers == "" else [groups / controllers, groups / "cpu"]
        for mount in places:
            inner = mount / path.lstrip("/")
            for group in (inner, *inner.parents):
                if mount in (group, *group.parents):
                    shares.append(_share(group))
    return min((share for share in shares if share is not None), default=None)


def free_memory() -> tuple[int, int]:
    """Free and total bytes of the machine's memory, or of this container's if that is less.

    >>> free, total = free_memory()
    >>> 0 < free <= total
    True
    """
    import psutil

    there = psutil.virtual_memory()
    free, total = int(there.available), int(there.total)
    limit = _cgroup("memory.max")
    if limit.isdigit() and int(limit) < total:
        total = int(limit)
        files = re.search(r"^inactive_file (\d+)", _cgroup("memory.stat"), re.MULTILINE)
        free = min(free, total - int(_cgroup("memory.current") or 0) + int(files[1] if files else 0))
    return free, total


def _cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""


def _memberships(root: Path) -> list[tuple[str, str]]:
    """Controllers ("" for the unified layout) and path of the groups that may limit cores."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    fields = [line.split(":", 2) for line in lines]
    return [(names, path) for _, names, path in fields if names == "" or "cpu" in names.split(",")]


def _share(group: Path) -> float | None:
    """A group's own limit in cores."""
    try:
        told = (group / "cpu.max").read_text().split()
    except OSError:
        try:
            told = [(group / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        except OSError:
            return None
    try:
        allowed, period = map(float, told)
    except ValueError:  # "max"
        return None
    return allowed / period if allowed > 0 and period > 0 else None


def driver(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Version of the NVIDIA driver.

    >>> driver(Path("/nowhere"))
    'none'
    """
    if proc.is_file() and (found := re.search(r"\s(\d{3,}\.[\d.]+)\s", proc.read_text())):
        return found[1]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return done.stdout.split()[0] if done.stdout.split() else "none"
