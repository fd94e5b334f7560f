"""A checkpoint is a folder that is either whole or not there.

::

    run/                    what is loaded
    .run.saving-1f2e/       being written: `manifest.json` last, then renamed to `run`
    .run.previous/          the one before, while the two change places; read if `run` is missing

Everything is on disk (fsync) before the rename. A process killed at any moment leaves ``run`` or ``.run.previous``
whole; the next save removes the rest. The manifest lists every file with its size and SHA-256.

Several processes may save to one path. Each writes to its own folder, and holds a lock on that folder (``flock``) as
long as it lives, so that no other save removes it. They rename one at a time, under a lock on the parent folder: the
last save to finish stays.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "recshard_lab checkpoint"
VERSION = 1
_CHUNK = 2**22
_LOCK_S = 60.0  # renaming two folders and removing a third takes less


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or another model's."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint that could not be written: the disk is full, for example. The one before is whole."""


class Staging:
    """A private folder beside ``folder`` for one save. Leftovers of saves that were killed are removed.

    Args:
        folder: where the checkpoint is to be.

    Raises:
        CheckpointError: ``folder`` holds something else than a checkpoint.

    Attributes:
        path: the private folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            previous = _previous(folder)
            if not folder.exists() and previous.exists():
                os.rename(previous, folder)
            if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
                raise CheckpointError(
                    f"{folder} is there and is no checkpoint: it will not be replaced. Fix: choose another path"
                )
            for left in folder.parent.glob(f".{folder.name}.saving-*"):
                _remove_if_dead(left)
            self.path = folder.parent / f".{folder.name}.saving-{uuid.uuid4().hex[:8]}"
            self.path.mkdir()
            self._handle: int | None = os.open(self.path, os.O_RDONLY)
            _lock(self._handle)

    def commit(self, files: Mapping[str, Any]) -> None:
        """Writes the manifest and puts the finished folder in the place of the old one."""
        body = json.dumps({"format": FORMAT, "version": VERSION, "files": dict(sorted(files.items()))}, indent=1)
        text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
        with (self.path / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.path)
        folder = self.folder
        with _locked(folder):
            previous = _previous(folder)
            if folder.exists():
                shutil.rmtree(previous, ignore_errors=True)
                os.rename(folder, previous)
            os.rename(self.path, folder)
            _sync_folder(folder.parent)
            shutil.rmtree(previous, ignore_errors=True)
        self._close()

    def discard(self) -> None:
        """Removes an unfinished save; does nothing after `commit`."""
        if self._handle is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)


def _remove_if_dead(staging: Path) -> None:
    """Removes the folder of a save unless its process is alive, or the file system cannot tell."""
    try:
        handle = os.open(staging, os.O_RDONLY)
    except OSError:  # its process has just renamed or removed it
        return
    try:
        if _lock(handle):
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether this process has the lock now. False, too, where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other process of this library changes what checkpoints in the same parent folder are called.

    Raises:
        CheckpointError: another process holds the lock for a minute.
    """
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks
            if time.monotonic() > end:
                raise CheckpointError(
                    f"{folder} could not be saved: another process holds the lock on {folder.parent} for "
                    f"{_LOCK_S:.0f} s. Fix: end that process, or choose a path in another folder"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(handle)


def described(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name -> its size and checksum."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def readable(path: str | Path) -> Path:
    """The folder to load: ``path``, or its predecessor where a save was killed between the two renames.

    Raises:
        CheckpointError: neither is there.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    previous = _previous(folder)
    if not folder.exists() and previous.is_dir():
        return previous
    raise CheckpointError(f"there is no checkpoint at {folder}")


def manifest_of(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and checksum, as saved.

    Raises:
        CheckpointError: no manifest, a damaged one, or one of another version.
    """
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text = outer["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not fit")
        found = json.loads(text)
        kind, version, files = found["format"], found["version"], dict(found["files"])
        entries = [(type(name), type(entry["bytes"]), type(entry["sha256"])) for name, entry in files.items()]
        if set(entries) - {(str, int, str)}:
            raise CheckpointError(f"{path} is damaged: a file has no size or checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no whole checkpoint: {MANIFEST} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged or no manifest of a checkpoint: {error}") from None
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(f"{path} is of {kind!r} version {version!r}, expected {FORMAT!r} version {VERSION}")
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is no file of its own folder")
    if ".metadata" not in files:
        raise CheckpointError(f"{path} does not list .metadata: the checkpoint is not whole")
    return files


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]], rank: int, world_size: int) -> None:
    """Reads every ``world_size``-th file and compares it with the manifest; sizes of all are compared first.

    Raises:
        CheckpointError: a file that is missing, too short or too long, or damaged, by name.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is not whole")
        size = path.stat().st_size
        if size != expected["bytes"]:
            what = "truncated" if size < expected["bytes"] else "too long"
            raise CheckpointError(f"{path} is {what}: {size:,} bytes, {expected['bytes']:,} were saved")
    for name in sorted(files)[rank::world_size]:
        if _sha256(folder / name) != files[name]["sha256"]:
            raise CheckpointError(f"{folder / name} is damaged: its checksum is not the one that was saved")


def _previous(folder: Path) -> Path:
    return folder.parent / f".{folder.name}.previous"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
