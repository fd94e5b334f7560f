"""A checkpoint is a folder that is either whole or not there.

::

    run/                    what is loaded
    .run.saving-1f2e/       being written: `manifest.json` last, then renamed to `run`
    .run.previous/          the one before, while the two change places; read if `run` is missing

Everything is on disk (fsync) before the rename. A process killed at any moment leaves ``run`` or ``.run.previous``
whole; the next save clears the rest away. The manifest lists every file with its size and SHA-256.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "recshard_lab checkpoint"
VERSION = 1
_CHUNK = 2**22


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or another model's."""


def staging_of(folder: Path) -> Path:
    """A new folder beside ``folder``; leftovers of saves that were killed are removed.

    Raises:
        CheckpointError: something is in the way that is no checkpoint.
    """
    previous = _previous(folder)
    if not folder.exists() and previous.exists():
        os.rename(previous, folder)
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there and is no checkpoint: it will not be replaced, choose another path")
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in folder.parent.glob(f".{folder.name}.saving-*"):
        shutil.rmtree(left, ignore_errors=True)
    made = folder.parent / f".{folder.name}.saving-{uuid.uuid4().hex[:8]}"
    made.mkdir()
    return made


def described(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """File name -> its size and checksum."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}


def commit(staging: Path, folder: Path, files: Mapping[str, Any]) -> None:
    """Writes the manifest and puts the finished folder in the place of the old one."""
    body = json.dumps({"format": FORMAT, "version": VERSION, "files": dict(sorted(files.items()))}, indent=1)
    text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body})
    with (staging / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(staging)
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(folder, previous)
    os.rename(staging, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


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
        kind, version, files = found["format"], found["version"], found["files"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no whole checkpoint: {MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is damaged or no manifest of a checkpoint: {error}") from None
    if kind != FORMAT or version != VERSION:
        raise CheckpointError(f"{path} is of {kind!r} version {version!r}, expected {FORMAT!r} version {VERSION}")
    for name in files:
        if Path(name).name != name:
            raise CheckpointError(f"{path} names {name!r}, which is no file of its own folder")
    return dict(files)


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


def discard(staging: Path) -> None:
    """Removes an unfinished save."""
    shutil.rmtree(staging, ignore_errors=True)


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
