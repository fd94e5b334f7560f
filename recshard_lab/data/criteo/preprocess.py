"""Criteo's click logs from text to files that a loader maps into memory: in bounded memory, on all cores, resumable.

    day_0.gz  --parse-->  day_0_labels.npy, day_0_dense.npy, ids     --number-->  day_0_sparse.npy   (or day_0.parquet)
    day_1.gz  --parse-->  day_1_...                           |                   ^
                                                              +---count---> cat_0_ids.npy ... cat_25_ids.npy

Text is read once. Ids are read twice more, from a file of 104 bytes a sample that is removed in the end; hashed ids
need neither (`hash_size`). The files' names, shapes and dtypes are those of TorchRec's ``BinaryCriteoUtils``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from recshard_lab.arguments import checks_arguments
from recshard_lab.data.criteo import DEFAULT_CAT_NAMES
from recshard_lab.data.criteo.folder import MANIFEST, Column, Day, Manifest, check_sizes, only_user
from recshard_lab.data.criteo.work import FREQUENCY_THRESHOLD, OnProgress, Progress, Settings, Work

_BESIDES_TABLES = 600 << 20  # bytes: the interpreter, torch, compiled loops, chunks on their way
_LEAST_MEMORY_GB = 0.75
_MOST_INT32 = 2**31 - 1
Place = str | os.PathLike[str]


@checks_arguments
def preprocess_criteo(
    inputs: Sequence[Place],
    out: Place,
    *,
    threshold: int | None = None,
    hash_size: int = 0,
    max_ind_range: int = 0,
    format: str = "npy",
    skip_bad: bool = False,
    resume: bool = False,
    memory_gb: float = 2.0,
    threads: int = 2,
    on_progress: OnProgress | None = None,
) -> Manifest:
    """Turns Criteo's files (Kaggle's or the Terabyte's, plain or gzipped) into a folder for `CriteoClicks`.

    Dense features become ``log(1 + max(count, 0))``, as in the DLRM reference; missing counts and ids are 0, as
    TorchRec's scripts have them. Ids become contiguous numbers by TorchRec's rule: those that appear fewer than
    `threshold` times are 1, the others 2, 3, ... in the order of their first appearance; or they are hashed.

    Args:
        inputs: one file a day. Days are in the order of the numbers in names like ``day_3.gz``, else as given.
        out: the folder; made if it is not there, empty or begun by the same call.
        threshold: number of times that an id must appear to get a separate number. 1 numbers all ids.
        hash_size: ids are the logged number modulo this instead, and nothing is counted.
        max_ind_range: ids are taken modulo this before they are counted, as the DLRM reference's option of this name.
        format: "npy", or "parquet" (needs pyarrow).
        skip_bad: leave malformed lines out and count them, instead of refusing the first one.
        resume: go on with a folder that an earlier call began.
        memory_gb: memory that the process may take in all, in GB.
        threads: how many work side by side.
        on_progress: called with a `Progress` after each piece.

    Returns:
        The folder's manifest: rows, clicks and malformed lines of every day, `num_embeddings` of every category.

    Raises:
        ValueError: settings that cannot be; a malformed, truncated or corrupt file, by name and line; a folder that
            holds something else, or belongs to a run with other inputs or settings.
        FileNotFoundError: an input that is not there.
        OSError: a full disk; what was finished is kept for `resume`.
    """
    settings = _settings(threshold, hash_size, max_ind_range, format, skip_bad)
    if not _LEAST_MEMORY_GB <= memory_gb < 1 << 20 or not 1 <= threads <= 1024:
        raise ValueError(
            f"memory_gb must be at least {_LEAST_MEMORY_GB}, threads 1 to 1024, got {memory_gb}, {threads}"
        )
    _needs_numba()
    if format == "parquet":
        from recshard_lab.data.criteo.parquet import pyarrow_parquet

        pyarrow_parquet()
    days = _days([Path(path) for path in inputs])
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with only_user(folder), ThreadPoolExecutor(threads, thread_name_prefix="recshard-criteo") as pool:
        manifest = _begun(folder, settings, days, resume)
        tables = int(memory_gb * 1e9) - _BESIDES_TABLES
        _run(Work(folder, settings, pool, threads, tables, on_progress or _silent), manifest)
    return manifest


def _silent(progress: Progress) -> None:
    """Ignores progress."""


def _run(work: Work, manifest: Manifest) -> None:
    from recshard_lab.data.criteo.count_ids import count_days
    from recshard_lab.data.criteo.number_days import number_days
    from recshard_lab.data.criteo.parse_days import parse_days

    if manifest.complete:
        return
    parse_days(work, manifest)
    if work.settings.numbers_ids:
        count_days(work, manifest)
    else:
        manifest.columns = [Column(name, work.settings.hash_size) for name in DEFAULT_CAT_NAMES]
    number_days(work, manifest)
    manifest.columns.sort(key=lambda column: DEFAULT_CAT_NAMES.index(column.name))
    manifest.complete = True
    manifest.save(work.folder)
    _clear(work.folder, manifest)


def _settings(threshold: int | None, hash_size: int, max_ind_range: int, format: str, skip_bad: bool) -> Settings:
    if format not in ("npy", "parquet"):
        raise ValueError(f"format must be 'npy' or 'parquet', got {format!r}")
    for name, value, least in (
        ("threshold", FREQUENCY_THRESHOLD if threshold is None else threshold, 1),
        ("hash_size", hash_size, 0),
        ("max_ind_range", max_ind_range, 0),
    ):
        if not least <= value <= _MOST_INT32:
            raise ValueError(f"{name} must be from {least} to {_MOST_INT32:,}, got {value}")
    if hash_size and (threshold is not None or max_ind_range):
        raise ValueError("hash_size counts no ids: leave out threshold and max_ind_range, or hash_size")
    return Settings(FREQUENCY_THRESHOLD if threshold is None else threshold, hash_size, max_ind_range, format, skip_bad)


def _needs_numba() -> None:
    try:
        import numba  # noqa: F401
    except ImportError as error:
        raise ValueError(f"reading Criteo's text needs numba ({error}): pip install 'recshard-lab[data]'") from error


def _days(inputs: list[Path]) -> list[Day]:
    """One per file, in their order."""
    if not inputs:
        raise ValueError("inputs is empty. Fix: pass the files to read, one per day")
    if len({path.resolve() for path in inputs}) < len(inputs):
        raise ValueError(f"inputs names a file twice: {', '.join(map(str, inputs))}")
    for path in inputs:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist, or is not a file. Fix: pass Criteo's files")
    numbers = [re.fullmatch(r"day_(\d+)(\..*)?", path.name) for path in inputs]
    found = [int(match[1]) for match in numbers if match]
    numbered = len(set(found)) == len(inputs)
    named = sorted(zip(found, inputs, strict=True)) if numbered else list(enumerate(inputs))
    return [
        Day(f"day_{number}", str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
        for number, path in named
    ]


def _begun(folder: Path, settings: Settings, days: list[Day], resume: bool) -> Manifest:
    """The folder's manifest if it is of the same run, else a new one for an empty folder."""
    there = [path.name for path in folder.iterdir() if path.name not in ("lock", f"{MANIFEST}.part")]
    if MANIFEST not in there:
        if there:
            raise ValueError(
                f"{folder} holds other files ({', '.join(sorted(there)[:3])} ...). Fix: pass an empty folder"
            )
        manifest = Manifest(asdict(settings), days)
        manifest.save(folder)
        return manifest
    if not resume:
        raise ValueError(f"{folder} already holds a run. Fix: pass --resume, or another folder")
    manifest = Manifest.load(folder)
    if manifest.settings != asdict(settings):
        changed = [name for name, value in asdict(settings).items() if manifest.settings.get(name) != value]
        settings_then = ", ".join(f"{name} {manifest.settings.get(name)!r}" for name in changed)
        raise ValueError(f"{folder} was begun with {settings_then}. Fix: use the same, or another folder")
    known = [(day.name, day.source, day.source_bytes, day.source_mtime_ns) for day in manifest.days]
    if known != [(day.name, day.source, day.source_bytes, day.source_mtime_ns) for day in days]:
        raise ValueError(
            f"{folder} was begun with other input files, or they have changed since: "
            f"{', '.join(day.source for day in manifest.days)}"
        )
    check_sizes(folder, manifest.entries())
    _clear(folder, manifest)
    return manifest


def _clear(folder: Path, manifest: Manifest) -> None:
    """Removes the incomplete files of an interrupted run."""
    named = {entry.name for entry in manifest.entries()}
    for path in folder.iterdir():
        unfinished = path.suffix in (".part", ".blocks", ".numbers") or ".parts" in path.name
        ours = re.fullmatch(r"(day_\d+|cat_\d+)[_.].*", path.name)
        if ours and path.name not in named and (unfinished or path.suffix in (".npy", ".parquet")):
            path.unlink()
