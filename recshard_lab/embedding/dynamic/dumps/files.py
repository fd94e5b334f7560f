"""What the folder of a dump contains: safetensors files of rows, and a manifest in JSON.

::

    00000-000000.safetensors    rank 0's first rows of a table: ids [M], weight [M, d], states.momentum1 [M], ...
    manifest.json               per table its steps, size and settings, and for each range of columns its files

A folder is complete or absent (`recshard_lab.complete_folders`). Every rank writes its own files. Files of a table
whose ids are hashed name the 64ths of the hash that they have, so that a rank opens only files with ids of its shards.

Shape letters: M rows of a file, K ids, d columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from recshard_lab.complete_folders import FolderFormat
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.index_rounds import partitions_of
from recshard_lab.embedding.dynamic.sizes import MOST_PARTITIONS

FILE_BYTES = 64 * 2**20


class DumpError(ValueError):
    """A dump that is missing, incomplete, or does not fit the tables."""


DUMP = FolderFormat(
    noun="dump", name="recshard_lab dump", version=1, error=DumpError, fix="pass a folder that dump() wrote"
)
Entry: TypeAlias = dict[str, Any]
"""A table in the manifest."""


@dataclass(frozen=True)
class Dumped:
    """The result of a dump.

    Attributes:
        path: the folder.
        rows: table -> rows written, over all ranks.
        present: table -> rows of the table, over all ranks. A full dump of a dynamic table writes all.
        steps: table -> its step at the dump.
        bytes: of all files.
    """

    path: Path
    rows: dict[str, int]
    present: dict[str, int]
    steps: dict[str, int]
    bytes: int

    @classmethod
    def of(cls, path: Path, manifest: Mapping[str, Any]) -> Dumped:
        """What a manifest says."""
        rows, present, steps = {}, {}, {}
        for name, entry in manifest["tables"].items():
            first = [piece for piece in entry["pieces"] if piece["columns"][0] == 0]
            files = [file for piece in first for file in piece["files"]]
            rows[name] = sum(file["rows"] for file in files)
            present[name] = rows[name] + sum(file["kept"] for file in files)
            steps[name] = entry["step"]
        return cls(path, rows, present, steps, sum(file["bytes"] for file in manifest["files"].values()))


@dataclass(frozen=True)
class Restored:
    """The result of a load.

    Attributes:
        rows: table -> rows of this rank that were read from files.
        lost: table -> rows of this rank that found no place, those with the lowest scores. `DynamicTable.on_evict` is
            passed them, and they count as evictions.
    """

    rows: dict[str, int]
    lost: dict[str, int]

    def then(self, later: Restored) -> Restored:
        """Both loads, one after the other."""
        return Restored(_added(self.rows, later.rows), _added(self.lost, later.lost))


def _added(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in dict.fromkeys([*one, *other])}


class FileWriter:
    """Writes the files of one rank.

    Args:
        folder: an existing folder.
        rank: its number.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank, self.paths = folder, rank, list[Path]()

    def write(self, tensors: Mapping[str, Tensor]) -> str:
        """Writes a file to the disk (fsync). Returns its name."""
        name = f"{self.rank:05}-{len(self.paths):06}.safetensors"
        path = self.folder / name
        safetensors_torch().save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, str(path))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.paths.append(path)
        return name

    def index_file(self, tensors: Mapping[str, Tensor], *, hashed: bool = True) -> Entry:
        """Writes ``ids [M]`` or ``kept_ids [K]`` with what belongs to them. Returns the file's entry."""
        ids = tensors["ids"] if "ids" in tensors else tensors["kept_ids"]
        span = [0, MOST_PARTITIONS]
        if hashed and len(ids):
            parts = partitions_of(ids, MOST_PARTITIONS)
            span = [int(parts.min()), int(parts.max()) + 1]
        rows, kept = (len(tensors[key]) if key in tensors else 0 for key in ("ids", "kept_ids"))
        return {"file": self.write(tensors), "rows": rows, "kept": kept, "hash": span}


class FileReader:
    """Reads the files of a table.

    Args:
        folder: the dump.
        entry: the table in its manifest.
    """

    def __init__(self, folder: Path, entry: Entry) -> None:
        self.folder, self.entry = folder, entry

    def pieces(self, columns: tuple[int, int]) -> Iterator[tuple[tuple[int, int], list[Entry]]]:
        """Columns and files of every piece that has some of these columns."""
        for piece in self.entry["pieces"]:
            first, end = piece["columns"]
            if first < columns[1] and columns[0] < end:
                yield (first, end), piece["files"]

    def opened(self, files: Iterable[Entry], span: tuple[int, int] | None = None) -> Iterator[Any]:
        """Every file that may have ids in these 64ths of the hash, as safetensors opens it."""
        for file in files:
            low, high = file["hash"]
            if span is None or (low < span[1] and span[0] < high):
                try:
                    with safetensors_torch().safe_open(str(self.folder / file["file"]), framework="pt") as opened:
                        yield opened
                except OSError as error:
                    raise DumpError(f"{self.folder / file['file']} could not be read: {error}") from error


def settings_of(config: DynamicEmbeddingConfig) -> dict[str, Any]:
    """What the rows of a dynamic table depend on, beside its name and what a dump has of each row.

    ``weight_init`` are the ends of the initial values. None stands for the default, which follows ``max_capacity``.

    >>> settings_of(DynamicEmbeddingConfig("user", 4, capacity=128, seed=3))
    {'seed': 3, 'weight_init': None, 'absent': 'initial', 'evict': 'lru'}
    """
    default = config.weight_init_min is None and config.weight_init_max is None
    return {
        "seed": config.seed,
        "weight_init": None if default else list(config.init_range),
        "absent": config.absent,
        "evict": "a function of ids" if callable(config.evict) else config.evict,
    }


def steps_of(since: int | str | Path | None) -> Mapping[str, Entry] | int | None:
    """The first step whose rows a dump has: of each table, as the manifest of an earlier dump says, or of all."""
    if since is None or (isinstance(since, int) and not isinstance(since, bool)):
        return since
    if not isinstance(since, str | Path):
        raise ValueError(f"since={since!r} is not supported. Fix: pass the path of an earlier dump, or a step")
    folder = DUMP.readable(since)
    return {name: entry["next"] for name, entry in DUMP.manifest_of(folder)["tables"].items()}


def joined(by_rank: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """The tables of a manifest, from what each rank has written."""
    tables: dict[str, Entry] = {}
    for entries in by_rank:
        for name, entry in entries.items():
            if name not in tables:
                tables[name] = {**entry, "pieces": [*entry["pieces"]], "counts": [*entry["counts"]]}
                continue
            other = tables[name]
            other["step"] = max(other["step"], entry["step"])
            other["pieces"] += entry["pieces"]
            other["counts"] += entry["counts"]
            other["next"] = {key: min(step, other["next"][key]) for key, step in entry["next"].items()}
    return tables


def safetensors_torch() -> Any:
    """The module that reads and writes files.

    Raises:
        ValueError: the package is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise ValueError(
            'dumps need the package safetensors, which is not installed. Fix: pip install "recshard-lab[safetensors]"'
        ) from None
    return safetensors.torch


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")
