"""Dumps of the tables of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from recshard_lab.complete_folders import MANIFEST, Staging, described
from recshard_lab.embedding.dynamic.dumps.files import (
    DUMP,
    Dumped,
    DumpError,
    Entry,
    FileWriter,
    Restored,
    joined,
    safetensors_torch,
    steps_of,
)
from recshard_lab.embedding.dynamic.dumps.read import check_dynamic, read_dynamic
from recshard_lab.embedding.dynamic.dumps.write import write_dynamic
from recshard_lab.embedding.dynamic.table import DynamicTable

Since = int | str | Path | None
Paths = str | Path | Iterable[str | Path]


def dump_tables(
    tables: Mapping[str, DynamicTable], pending: Mapping[str, int], path: str | Path, since: Since
) -> Dumped:
    """Writes tables to a folder.

    Args:
        tables: name -> table.
        pending: name -> the first step whose backward is to come, if there is any.
        path, since: as of `DynamicCollection.dump`.
    """
    safetensors_torch()
    steps = steps_of(since)
    staging = Staging(DUMP, Path(path))
    try:
        writer = FileWriter(staging.path, 0)
        entries = {
            name: write_dynamic(writer, table, first_step(steps, name), pending.get(name))
            for name, table in tables.items()
        }
        staging.commit(described(writer.paths), tables=joined([entries]))
    except BaseException:
        staging.discard()
        raise
    return Dumped.of(Path(path), DUMP.manifest_of(DUMP.readable(path)))


def load_tables(tables: Mapping[str, DynamicTable], paths: Paths, optimizer_state: bool) -> Restored:
    """Fills tables from folders, see `DynamicCollection.load`."""
    result = Restored({}, {})
    for folder, entries, _ in folders_of(paths):
        refuse_other_tables(folder, entries, tables)
        for name, table in tables.items():
            check_dynamic(folder, name, entries[name], table, optimizer_state)
        counts = {name: read_dynamic(folder, entries[name], table, optimizer_state) for name, table in tables.items()}
        rows, lost = ({name: pair[part] for name, pair in counts.items()} for part in range(2))
        result = result.then(Restored(rows, lost))
    return result


def folders_of(
    paths: Paths, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[Path, dict[str, Entry], dict[str, Any]]]:
    """The folder, the tables and the manifest of each dump. Compares its files with their checksums first."""
    for path in [paths] if isinstance(paths, str | Path) else paths:
        folder = DUMP.readable(path)
        manifest = DUMP.manifest_of(folder)
        DUMP.check_files(folder, manifest["files"], rank, world_size)
        yield folder, _checked_entries(folder, manifest), manifest


def _checked_entries(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Entry]:
    """The tables of a manifest, which name only files of the folder."""
    entries = dict(manifest["tables"])
    for entry in entries.values():
        for file in [file for piece in entry["pieces"] for file in piece["files"]] + entry["counts"]:
            if file["file"] not in manifest["files"]:
                raise DumpError(f"{folder / MANIFEST} names {file['file']!r}, which is not a file of the dump")
    return entries


def refuse_other_tables(folder: Path, entries: Mapping[str, Entry], tables: Iterable[str]) -> None:
    """Raises DumpError if a dump lacks a table."""
    missing = [name for name in tables if name not in entries]
    if missing:
        raise DumpError(
            f"{folder} has the tables {sorted(entries)}, and no {missing[0]!r}. Fix: load it into a model with its "
            f"tables"
        )


def first_step(steps: Mapping[str, Entry] | int | None, table: str) -> Any:
    """Of which step on a table's rows are written."""
    if not isinstance(steps, Mapping):
        return steps
    if table not in steps:
        raise DumpError(f"the dump of since= has no table {table!r}. Fix: omit since, which dumps everything")
    return steps[table]
