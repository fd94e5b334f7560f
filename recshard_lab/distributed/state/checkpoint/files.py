"""A checkpoint is a folder that is either complete or absent.

::

    run/                    the checkpoint
    .run.saving-1f2e/       a running save: writes `manifest.json` last, then is renamed to `run`
    .run.previous/          the previous checkpoint during the exchange; read if `run` is missing

All files are on disk (fsync) before the rename. If a process is killed, ``run`` or ``.run.previous`` is complete, and
the next save removes the other folders. The manifest lists every file with its size and SHA-256.

Several processes may save to one path. Each writes to a private folder and locks it (``flock``) until it ends, so no
other save removes it. Renames are serialized by a lock on the parent folder; the last save to finish stays.
"""

import errno
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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
FORMAT = "recshard_lab checkpoint"
VERSION = 1
_CHUNK = 2**22
_LOCK_S = 60.0  # more than renaming two folders and removing a third takes


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, of another format version, or of another model."""


class CheckpointSaveError(CheckpointError, OSError):
    """A checkpoint that could not be written, for example to a full disk. The previous one is complete."""


class Staging:
    """A private folder beside ``folder`` for one save. Removes the folders of killed saves.

    Args:
        folder: folder of the checkpoint.

    Raises:
        CheckpointError: ``folder`` exists and is not a checkpoint.

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
                    f"{folder} exists, is not a checkpoint and is not replaced. Fix: choose another path"
                )
            for staging in folder.parent.glob(f".{folder.name}.saving-*"):
                _remove_if_dead(staging)
            self.path = folder.parent / f".{folder.name}.saving-{uuid.uuid4().hex[:8]}"
            self.path.mkdir()
            self._handle: int | None = os.open(self.path, os.O_RDONLY)
            _lock(self._handle)

    def commit(self, files: Mapping[str, Any]) -> None:
        """Writes the manifest and replaces the old folder with the new one."""
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
    """Removes the folder of a save unless its process is alive or the file system has no locks."""
    try:
        handle = os.open(staging, os.O_RDONLY)
    except OSError:  # its process just renamed or removed it
        return
    try:
        if _lock(handle):
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether this process has the lock now. Also False if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevents other processes of this library from renaming checkpoints in the same parent folder.

    Raises:
        CheckpointError: another process holds the lock for 60 s, or the system is Windows.
    """
    if fcntl is None:
        raise CheckpointError(
            f"{folder} could not be saved: Windows cannot lock folders. "
            "Fix: run in WSL 2, or torch.save(model.state_dict(), path)"
        )
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
    """File name -> size and checksum."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def readable(path: str | Path) -> Path:
    """The folder to load: ``path``, or its predecessor if a save was killed between the two renames.

    Raises:
        CheckpointError: neither exists.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    previous = _previous(folder)
    if not folder.exists() and previous.is_dir():
        return previous
    raise CheckpointError(f"no checkpoint at {folder}. Fix: pass a folder that save_checkpoint wrote")


def manifest_of(folder: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and checksum at the time of saving.

    Raises:
        CheckpointError: no manifest, a damaged one, or another format version.
    """
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text = outer["manifest"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")
        manifest = json.loads(text)
        kind, version, files = manifest["format"], manifest["version"], dict(manifest["files"])
        entries = [(type(name), type(entry["bytes"]), type(entry["sha256"])) for name, entry in files.items()]
        if set(entries) - {(str, int, str)}:
            raise CheckpointError(f"{path} is damaged: a file has no size or checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {MANIFEST} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged or not a manifest of a checkpoint: {error}") from None
    if kind != FORMAT:
        raise CheckpointError(f"{path} has the format {kind!r:.80}, expected {FORMAT!r}")
    if version != VERSION or isinstance(version, bool):
        raise CheckpointError(
            f"{path} has format version {version!r:.40}, but this recshard_lab reads version {VERSION}. Fix: update "
            f"recshard_lab, or save the checkpoint again with this version"
        )
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is outside the folder")
    if ".metadata" not in files:
        raise CheckpointError(f"{path} does not list .metadata: the checkpoint is incomplete")
    return files


def check_files(folder: Path, files: Mapping[str, Mapping[str, Any]], rank: int, world_size: int) -> None:
    """Compares the sizes of all files, and the checksums of every ``world_size``-th file, with the manifest.

    Raises:
        CheckpointError: a file that is missing, truncated, too long or damaged, by name.
    """
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: the checkpoint is incomplete")
        size = path.stat().st_size
        if size != expected["bytes"]:
            problem = "truncated" if size < expected["bytes"] else "too long"
            raise CheckpointError(f"{path} is {problem}: {size:,} bytes, {expected['bytes']:,} were saved")
    for name in sorted(files)[rank::world_size]:
        if _sha256(folder / name) != files[name]["sha256"]:
            raise CheckpointError(f"{folder / name} is damaged: its checksum differs from the manifest")


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
