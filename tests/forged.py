"""Saved folders that an attacker changed, checksums included."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recshard_lab.complete_folders import MANIFEST, Staging, described


def forged(folder: Path, target: Path, files: dict[str, bytes], format: Any) -> Path:
    """Copies a folder of a format, with these files replaced. Its manifest has their checksums. Returns the target."""
    with Staging(format, target) as staging:
        for path in folder.iterdir():
            if path.name != MANIFEST:
                (staging.path / path.name).write_bytes(files.get(path.name, path.read_bytes()))
        staging.commit(described(staging.path.iterdir()))
    return target


def resign(folder: Path, changed: Callable[[Any], dict[str, Any]]) -> None:
    """Changes fields of a folder's manifest, and its checksum."""
    manifest = json.loads(json.loads((folder / MANIFEST).read_text())["manifest"])
    text = json.dumps(manifest | changed(manifest))
    signed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}
    (folder / MANIFEST).write_text(json.dumps(signed))


class Payload:
    """Unpickling it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def malice(folder: Path) -> Payload:
    """Unpickling it makes a folder."""
    return Payload(os.mkdir, str(folder))
