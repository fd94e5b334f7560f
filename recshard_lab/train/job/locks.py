"""Locks of the paths that a run writes: a second run that would write to one of them is refused.

A lock is an OS lock (``flock``) on a file beside the path, such as ``run/.checkpoint.lock`` for ``run/checkpoint``.
Rank 0 holds it from before the checkpoint is read until the run is closed, and then removes the file. The system
releases the lock when the process ends, also after ``kill -9``.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path


def lock_paths(paths: Mapping[str, str]) -> ExitStack:
    """Locks paths until the result is closed. Warns where the file system or the folder takes no lock.

    Args:
        paths: field of the config -> path that the run writes. URLs and devices are not locked.

    Raises:
        ValueError: another run holds a lock. Names the field, the path, and the process and host of that run.
    """
    with ExitStack() as held:
        for path, field in {Path(path).resolve(): field for field, path in paths.items() if "://" not in path}.items():
            if path.exists() and not (path.is_file() or path.is_dir()):
                continue
            file = path.with_name(f".{path.name}.lock")
            try:
                held.callback(_release, file, _acquired(file))
            except _Held as holder:
                raise ValueError(
                    f"{field} {path} is in use: {holder} writes to it. Fix: wait until that run ends, or choose "
                    f"another {field}"
                ) from None
            except OSError as error:
                warnings.warn(
                    f"{field} {path} could not be locked ({error}). Two runs that write to it at once are not refused",
                    stacklevel=2,
                )
        return held.pop_all()


class _Held(Exception):
    """Another run has the lock; `str` is its process."""


def _acquired(file: Path) -> int:
    """The handle of a lock file that this process has locked.

    Raises:
        _Held: another run has locked it.
        OSError: the file cannot be created, or the system or its file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        raise OSError("Windows has no flock") from None
    file.parent.mkdir(parents=True, exist_ok=True)
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, handle):
                with suppress(OSError):  # the disk is full: the lock has no words
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
            os.close(handle)  # another run removed the file after it was opened here
        except (BlockingIOError, PermissionError):
            holder = os.pread(handle, 300, 0).decode(errors="replace")
            os.close(handle)
            raise _Held(holder or "another process") from None
        except OSError:
            os.close(handle)
            raise


def _is_at(file: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False


def _release(file: Path, handle: int) -> None:
    with suppress(OSError):  # the folder was removed
        file.unlink()
    os.close(handle)
