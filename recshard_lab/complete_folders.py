"""Folders that are either complete or absent: checkpoints and dumps.

::

    run/                    the folder
    .run.saving-1f2e/       a running save: writes `manifest.json` last, then is renamed to `run`
    .run.previous/          the previous folder during the exchange; read if `run` is missing

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
_CHUNK = 2**22
_LOCK_S = 60.0  # more than renaming two folders and removing a third takes


@dataclass(frozen=True)
class FolderFormat:
    """What a folder contains.

    Attributes:
        noun: what it is called in errors.
        name, version: as in its manifest.
        error: what is raised for a folder that is missing, incomplete or damaged.
        fix: what to pass instead of a missing folder.
        index: a file that every complete folder has; None if they share none.
    """

    noun: str
    name: str
    version: int
    error: type[ValueError]
    fix: str
    index: str | None = None

    def readable(self, path: str | Path) -> Path:
        """The folder to load: ``path``, or its predecessor if a save was killed between the two renames.

        Raises:
            error: neither exists.
        """
        folder = Path(path)
        if folder.is_dir():
            return folder
        previous = _previous(folder)
        if not folder.exists() and previous.is_dir():
            return previous
        raise self.error(f"no {self.noun} at {folder}. Fix: {self.fix}")

    def manifest_of(self, folder: Path) -> dict[str, Any]:
        """The manifest: ``files`` maps file name -> size and checksum at the time of saving.

        Raises:
            error: no manifest, a damaged one, or another format version.
        """
        path = folder / MANIFEST
        try:
            outer = json.loads(path.read_text(encoding="utf-8"))
            text = outer["manifest"]
            if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
                raise self.error(f"{path} is damaged: its checksum does not match")
            manifest = json.loads(text)
            kind, version, files = manifest["format"], manifest["version"], dict(manifest["files"])
            entries = [(type(name), type(entry["bytes"]), type(entry["sha256"])) for name, entry in files.items()]
            if set(entries) - {(str, int, str)}:
                raise self.error(f"{path} is damaged: a file has no size or checksum")
        except FileNotFoundError:
            raise self.error(f"{folder} is not a complete {self.noun}: {MANIFEST} is missing") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, self.error):
                raise
            raise self.error(f"{path} is damaged or not a manifest of a {self.noun}: {error}") from None
        if kind != self.name:
            raise self.error(f"{path} has the format {kind!r:.80}, expected {self.name!r}")
        if version != self.version or isinstance(version, bool):
            raise self.error(
                f"{path} has format version {version!r:.40}, but this recshard_lab reads version {self.version}. Fix: "
                f"update recshard_lab, or save the {self.noun} again with this version"
            )
        for name in files:
            if Path(name).name != name:
                raise self.error(f"{path} names {name!r}, which is outside the folder")
        if self.index is not None and self.index not in files:
            raise self.error(f"{path} does not list {self.index}: the {self.noun} is incomplete")
        return {**manifest, "files": files}

    def check_files(self, folder: Path, files: Mapping[str, Mapping[str, Any]], rank: int, world_size: int) -> None:
        """Compares the sizes of all files, and the checksums of every ``world_size``-th file, with the manifest.

        Raises:
            error: a file that is missing, truncated, too long or damaged, by name.
        """
        for name, expected in files.items():
            path = folder / name
            if not path.is_file():
                raise self.error(f"{path} is missing: the {self.noun} is incomplete")
            size = path.stat().st_size
            if size != expected["bytes"]:
                problem = "truncated" if size < expected["bytes"] else "too long"
                raise self.error(f"{path} is {problem}: {size:,} bytes, {expected['bytes']:,} were saved")
        for name in sorted(files)[rank::world_size]:
            if _sha256(folder / name) != files[name]["sha256"]:
                raise self.error(f"{folder / name} is damaged: its checksum differs from the manifest")


class Staging:
    """A private folder beside ``folder`` for one save. Removes the folders of killed saves.

    As a context, it discards what was not committed, and an error of the disk names the folder.

    Args:
        format: of the folder.
        folder: the folder.

    Raises:
        ValueError: ``folder`` exists and is not of this format, as the error of the format.

    Attributes:
        path: the private folder.
    """

    def __init__(self, format: FolderFormat, folder: Path) -> None:
        self.format, self.folder = format, folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(format, folder):
            previous = _previous(folder)
            if not folder.exists() and previous.exists():
                os.rename(previous, folder)
            if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
                raise format.error(
                    f"{folder} exists, is not a {format.noun} and is not replaced. Fix: choose another path"
                )
            for staging in folder.parent.glob(f".{folder.name}.saving-*"):
                _remove_if_dead(staging)
            self.path = folder.parent / f".{folder.name}.saving-{uuid.uuid4().hex[:8]}"
            self.path.mkdir()
            self._handle: int | None = os.open(self.path, os.O_RDONLY)
            _lock(self._handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.discard()
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:  # of a write
            why = f"{self.folder} could not be saved: {os.strerror(error.errno)}. Fix: free disk space"
            raise OSError(error.errno, why) from error

    def commit(self, files: Mapping[str, Any], **content: Any) -> None:
        """Writes the manifest, with ``content`` beside the files, and replaces the old folder with the new one."""
        kind = {"format": self.format.name, "version": self.format.version}
        body = json.dumps({**kind, "files": dict(sorted(files.items())), **content}, indent=1)
        text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
        with (self.path / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self.path)
        folder = self.folder
        with locked(self.format, folder):
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
def locked(format: FolderFormat, folder: Path) -> Iterator[None]:
    """Prevents other processes of this library from renaming folders in the same parent folder.

    Raises:
        ValueError: another process holds the lock for 60 s, or the system is Windows, as the error of the format.
    """
    if fcntl is None:
        raise format.error(
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
                raise format.error(
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
