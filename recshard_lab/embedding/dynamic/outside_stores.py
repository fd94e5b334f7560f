"""Ids and rows as bytes, and errors of stores that outlive the process."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recshard_lab.embedding.dynamic.stores.base import RowFormat, Rows, RowStore, Stored


def id_bytes(ids: Tensor) -> list[bytes]:
    """The 8 bytes of each id, highest first.

    >>> id_bytes(torch.tensor([258]))
    [b'\\x00\\x00\\x00\\x00\\x00\\x00\\x01\\x02']
    """
    data = ids.numpy().astype(">i8").tobytes()
    return [data[at : at + 8] for at in range(0, len(data), 8)]


def ids_of(parts: list[bytes]) -> Tensor:
    """``[M]`` int64 of what `id_bytes` returned."""
    return torch.from_numpy(np.frombuffer(b"".join(parts), ">i8").astype(np.int64))


def records_of(values: Sequence[bytes | None], format: RowFormat) -> Tensor:
    """``[M, record bytes]`` uint8 of the values of M ids. Zeros for None."""
    nothing = bytes(format.record_bytes)
    data = bytearray().join(nothing if value is None else value for value in values)
    return torch.from_numpy(np.frombuffer(data, np.uint8)).view(len(values), format.record_bytes)


def check_format(name: str, place: str, known: str, format: RowFormat) -> None:
    """Raises ValueError if a place has rows of another format."""
    if known != str(format):
        raise ValueError(
            f"tier {name!r}: {place} has rows of {known}, and the table has {format}. Fix: pass another path or url, "
            f"or use the optimizer and number format of those rows"
        )


def check_parts(name: str, place: str, part: str, others: Iterable[str]) -> None:
    """Raises ValueError if a place has rows of another sharding, which this shard would not find.

    Args:
        name: of the tier.
        place: of the table's shards.
        part: this shard, as `part_name` returned it.
        others: shards that are there.

    >>> check_parts("disk", "/rows", part_name((0, 4), (0, 8)), [part_name((4, 8), (0, 8))])
    """
    own = _edges(part)
    for other in others:
        (first, end), (left, right) = _edges(other)
        both = max(first, own[0][0]) < min(end, own[0][1]) and max(left, own[1][0]) < min(right, own[1][1])
        if other != part and both:
            raise ValueError(
                f"tier {name!r}: {place} has rows of {other!r}, which the shard {part!r} would not find. Fix: use "
                f"the sharding of those rows, or pass another path or url"
            )


def part_name(partitions: tuple[int, int], columns: tuple[int, int]) -> str:
    """The name of a shard: its first partition and the one after its last, and the same of its columns."""
    return f"partitions-{partitions[0]}-{partitions[1]}_columns-{columns[0]}-{columns[1]}"


def _edges(part: str) -> list[tuple[int, int]]:
    return [(int(first), int(end)) for _, first, end in (axis.split("-") for axis in part.split("_"))]


def check_place(name: str, stored: str, own: str) -> None:
    """Raises ValueError if a state names another place than this tier's."""
    if stored != own:
        raise ValueError(
            f"the state's tier {name!r} is {stored}, and the table's is {own}. Fix: build the table with the tier of "
            f"the state"
        )


# Rows on disk, in an LMDB database: id -> record of fixed size.
#
# Shape letters: M ids.


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


# Rows in a Redis server: one hash for each shard of a table, id -> record of fixed size.
#
# Shape letters: M ids.


_AT_ONCE = 4096  # ids of one command


class RedisStore(RowStore):
    """Rows in a Redis server, which keeps them as it is configured to. They are never lost for lack of capacity.

    Configure the server with ``maxmemory-policy noeviction``, its default. A call sends one command for each 4,096 ids,
    and all of them in one message.

    Args:
        format: of all rows.
        url: of the server.
        key: of the shards of the table. A set of this key has their names.
        part: the shard, see `part_name`. ``key/part`` is the hash of its rows, and ``key/part/format`` their format.
        options: the other arguments of `RowStore`.

    Raises:
        ImportError: redis is not installed.
        ConnectionError: at the first call: the server cannot be reached.
        ValueError: at the first call: the hash has rows of another format or sharding.
    """

    def __init__(self, format: RowFormat, url: str, key: str, part: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.url, self._shards, self._part, self.key = url, key, part, f"{key}/{part}"
        self._connected: Any = None
        _redis(self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}

    # ---- the store ----

    def __len__(self) -> int:
        """Rows in the store."""
        return int(self._server().hlen(self.key))

    def _get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        values = [value for some in self._send("hmget", id_bytes(ids)) for value in some]
        rows = self.format.unpacked(ids, records_of(values, self.format))
        return rows, torch.tensor([value is not None for value in values]).bool()

    def _put(self, rows: Rows) -> Stored:
        data, width = self.format.packed(rows).numpy().tobytes(), self.format.record_bytes
        items: list[bytes] = []
        for number, field in enumerate(id_bytes(rows.ids)):
            items += (field, data[number * width : (number + 1) * width])
        return Stored(sum(self._send("hset", items, 2 * _AT_ONCE, items=True)))

    def _delete(self, ids: Tensor) -> int:
        return sum(self._send("hdel", id_bytes(ids)))

    def _batches(self, size: int) -> Iterator[Rows]:
        seen: set[bytes] = set()  # a scan may return a field twice
        fields, values = [], []
        for field, value in self._server().hscan_iter(self.key, count=_AT_ONCE):
            if field not in seen:
                seen.add(field)
                fields.append(field)
                values.append(value)
            if len(fields) == size:
                yield self._rows(fields, values)
                fields, values = [], []
        if fields:
            yield self._rows(fields, values)

    def _rows(self, fields: list[bytes], values: list[bytes]) -> Rows:
        return self.format.unpacked(ids_of(fields), records_of(values, self.format))

    # ---- the server ----

    def state(self) -> dict[str, Any]:
        """The hash's name. The rows are not in the state."""
        return {"key": self.key, "counters": self.counters.as_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Checks that the state names this hash, which then has the rows of now, not those of `state`'s time."""
        check_place(self.name, state["key"], self.key)
        self.counters = type(self.counters)(**state["counters"])

    def close(self) -> None:
        """Closes the connection. The next call opens one again."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def clear(self) -> None:
        """Removes the hash, its format and its name among the shards."""
        self.counters.erasures += len(self)
        server = self._server()
        server.delete(self.key, f"{self.key}/format")
        server.srem(self._shards, self._part)
        self.close()

    def _send(self, command: str, arguments: list[bytes], at_once: int = _AT_ONCE, **options: Any) -> list[Any]:
        """The results of a command for each part of the arguments."""
        if not arguments:
            return []
        pipeline = self._server().pipeline(transaction=False)
        for first in range(0, len(arguments), at_once):
            some = arguments[first : first + at_once]
            if options:
                getattr(pipeline, command)(self.key, items=some)
            else:
                getattr(pipeline, command)(self.key, *([some] if command == "hmget" else some))
        return list(pipeline.execute())

    def _server(self) -> Any:
        """The connection, after its first check of the format."""
        if self._connected is None:
            redis = _redis(self.name)
            server = redis.Redis.from_url(self.url)
            try:
                shards = [shard.decode() for shard in server.smembers(self._shards)]
                check_parts(self.name, f"{self.url} {self._shards!r}", self._part, shards)
                server.sadd(self._shards, self._part)
                known = server.set(f"{self.key}/format", str(self.format), nx=True, get=True)
            except redis.exceptions.ConnectionError as error:
                raise ConnectionError(
                    f"tier {self.name!r} cannot reach the Redis server at {self.url}: {error} Fix: start it, or pass "
                    f"its url"
                ) from error
            if known is not None:
                check_format(self.name, f"hash {self.key!r}", known.decode(), self.format)
            self._connected = server
        return self._connected


def _redis(name: str) -> Any:
    try:
        import redis
    except ImportError as error:
        raise ImportError(f'tier {name!r} needs redis. Fix: pip install "recshard-lab[tiers]"') from error
    return redis
