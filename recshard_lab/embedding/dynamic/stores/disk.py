"""Rows on disk, in an LMDB database: id -> record of fixed size.

Shape letters: M ids.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows, RowStore, Stored
from recshard_lab.embedding.dynamic.stores.records import (
    check_format,
    check_parts,
    check_place,
    id_bytes,
    ids_of,
    records_of,
)

_FORMAT = b"format"  # its value names the format of all rows; ids have keys of 8 bytes
_FIRST_BYTES = 1 << 26  # size of the memory map at first; it doubles when it is full


class DiskStore(RowStore):
    """Rows in a folder, which are kept between runs. They are never lost for lack of capacity.

    Writes are atomic: a process that ends in mid-call leaves all of its rows or none. They reach the disk when the
    operating system writes them out, and at `state` and `close`. A row that moves to the fast tier is deleted with the
    next write. One process at a time may use a folder.

    Args:
        format: of all rows.
        folder: of the shards of the table.
        part: the shard, see `part_name`: the folder of its rows, created with the first call.
        options: the other arguments of `RowStore`.

    Raises:
        ImportError: lmdb is not installed.
        ValueError: at the first call: the folder has rows of another format or sharding, or this process has opened it.
    """

    def __init__(self, format: RowFormat, folder: str | Path, part: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.path = Path(folder, part)
        self._open: Any = None
        self._dropped: list[bytes] = []  # deleted with the next write, which saves a transaction
        _lmdb(self.name)

    def __getstate__(self) -> dict[str, Any]:
        self.close()
        return dict(self.__dict__)

    # ---- the store ----

    def __len__(self) -> int:
        """Rows in the store."""
        self._write([])
        return int(self._database().stat()["entries"]) - 1

    def _get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        self._write([])
        with self._database().begin(buffers=True) as transaction:
            values = [transaction.get(key) for key in id_bytes(ids)]
            records = records_of(values, self.format)
        return self.format.unpacked(ids, records), torch.tensor([value is not None for value in values]).bool()

    def _contains(self, ids: Tensor) -> Tensor:
        self._write([])
        with self._database().begin(buffers=True) as transaction:
            return torch.tensor([transaction.get(key) is not None for key in id_bytes(ids)]).bool()

    def _put(self, rows: Rows) -> Stored:
        items = list(zip(id_bytes(rows.ids), self.format.packed(rows).numpy(), strict=True))
        return Stored(self._write(items)[1])

    def _delete(self, ids: Tensor) -> int:
        return self._write([], id_bytes(ids))[0]

    def _drop(self, ids: Tensor) -> int:
        self._dropped += id_bytes(ids)
        return len(ids)

    def _write(self, items: Sequence[tuple[bytes, Any]], gone: Sequence[bytes] = ()) -> tuple[int, int]:
        """Deletes what was dropped, deletes other keys, then puts items. Returns how many rows went, and came."""
        if not (items or gone or self._dropped):
            return 0, 0
        lmdb, database = _lmdb(self.name), self._database()
        while True:
            try:
                with database.begin(write=True) as transaction:
                    for key in self._dropped:
                        transaction.delete(key)
                    removed = sum(transaction.delete(key) for key in gone)
                    before = transaction.stat()["entries"]
                    if items:
                        transaction.cursor().putmulti(items)
                    added = int(transaction.stat()["entries"] - before)
                self._dropped = []
                return removed, added
            except lmdb.MapFullError:
                database.set_mapsize(2 * database.info()["map_size"])

    def _batches(self, size: int) -> Iterator[Rows]:
        self._write([])
        after = b""
        while True:
            keys: list[bytes] = []
            values: list[bytes] = []
            with self._database().begin() as transaction:
                cursor = transaction.cursor()
                more = cursor.set_range(after)
                while more and len(keys) < size:
                    key, value = cursor.item()
                    if key != _FORMAT:
                        keys.append(key)
                        values.append(value)
                    after = key + b"\0"
                    more = cursor.next()
            if not keys:
                return
            yield self.format.unpacked(ids_of(keys), records_of(values, self.format))

    # ---- the file ----

    def state(self) -> dict[str, Any]:
        """The folder's name, after everything was written out. The rows are not in the state."""
        self._write([])
        self._database().sync(True)
        return {"path": str(self.path), "counters": self.counters.as_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Checks that the state names this folder, which then has the rows of now, not those of `state`'s time."""
        check_place(self.name, state["path"], str(self.path))
        self.counters = type(self.counters)(**state["counters"])

    def close(self) -> None:
        """Writes everything out and closes the file. The next call opens it again."""
        if self._open is not None:
            self._write([])
            self._open.sync(True)
            self._open.close()
            self._open = None

    def clear(self) -> None:
        """Removes the folder."""
        self.counters.erasures += len(self)
        self.close()
        shutil.rmtree(self.path)

    def _database(self) -> Any:
        """The open database."""
        if self._open is None:
            lmdb = _lmdb(self.name)
            folder = self.path.parent
            shards = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
            check_parts(self.name, str(folder), self.path.name, shards)
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                opened = lmdb.open(str(self.path), map_size=_FIRST_BYTES, sync=False, metasync=False)
            except lmdb.Error as error:
                raise ValueError(
                    f"tier {self.name!r} cannot open {self.path}: {error} Fix: pass another path"
                ) from error
            with opened.begin(write=True) as transaction:
                known = transaction.get(_FORMAT, b"").decode()
                if not known:
                    transaction.put(_FORMAT, str(self.format).encode())
            try:
                check_format(self.name, str(self.path), known or str(self.format), self.format)
            except ValueError:
                opened.close()
                raise
            self._open = opened
        return self._open


def _lmdb(name: str) -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise ImportError(f'tier {name!r} needs lmdb. Fix: pip install "recshard-lab[tiers]"') from error
    return lmdb
