"""Ids and rows as bytes, and errors of stores that outlive the process."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

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


def ids_of(parts: Sequence[bytes]) -> Tensor:
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


def _package(package: str, name: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ImportError(f'tier {name!r} needs {package}. Fix: pip install "recshard-lab[tiers]"') from error


class OutsideStore(RowStore):
    """Rows that outlive the process: a record of fixed size for the 8 bytes of each id. They are never lost for lack of
    capacity.

    Attributes:
        place: where the rows of the shard are.
        place_name: its name in `state`.
    """

    place: str
    place_name: ClassVar[str]

    @abstractmethod
    def _read(self, keys: list[bytes]) -> list[bytes | None]:
        """The record of each key."""

    @abstractmethod
    def _write(self, items: list[tuple[bytes, bytes]]) -> int:
        """Stores records. Returns how many keys are new."""

    @abstractmethod
    def _scan(self, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
        """All keys and their records, up to ``size`` at a time."""

    @abstractmethod
    def _remove(self) -> None:
        """Removes the rows, and what tells other shards that this one is here."""

    def _get(self, ids: Tensor) -> tuple[Rows, Tensor]:
        values = self._read(id_bytes(ids))
        return self.format.unpacked(ids, records_of(values, self.format)), _present(values)

    def _contains(self, ids: Tensor) -> Tensor:
        return _present(self._read(id_bytes(ids)))

    def _put(self, rows: Rows) -> Stored:
        data, width = self.format.packed(rows).numpy().tobytes(), self.format.record_bytes
        records = (data[first : first + width] for first in range(0, len(data), width))
        return Stored(self._write(list(zip(id_bytes(rows.ids), records, strict=True))))

    def _batches(self, size: int) -> Iterator[Rows]:
        for items in self._scan(size):
            keys, values = zip(*items, strict=True)
            yield self.format.unpacked(ids_of(keys), records_of(values, self.format))

    def state(self) -> dict[str, Any]:
        """The place's name, after everything was written out. The rows are not in the state."""
        return {self.place_name: self.place, "counters": self.counters.as_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Checks that the state names this place, which then has the rows of now, not those of `state`'s time."""
        if state[self.place_name] != self.place:
            raise ValueError(
                f"the state's tier {self.name!r} is {state[self.place_name]}, and the table's is {self.place}. Fix: "
                f"build the table with the tier of the state"
            )
        self.counters = type(self.counters)(**state["counters"])

    def clear(self) -> None:
        """Removes everything."""
        self.counters.erasures += len(self)
        self._remove()
        self.close()


def _present(values: Sequence[bytes | None]) -> Tensor:
    return torch.tensor([value is not None for value in values]).bool()


# Rows on disk, in an LMDB database: id -> record of fixed size.
#
# Shape letters: M ids.


_FORMAT = b"format"  # its value names the format of all rows; ids have keys of 8 bytes
_FIRST_BYTES = 1 << 26  # size of the memory map at first; it doubles when it is full


class DiskStore(OutsideStore):
    """Rows in a folder, which are kept between runs.

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

    place_name = "path"

    def __init__(self, format: RowFormat, folder: str | Path, part: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.path = Path(folder, part)
        self.place = str(self.path)
        self._open: Any = None
        self._dropped: list[bytes] = []  # deleted with the next write, which saves a transaction
        _package("lmdb", self.name)

    def __getstate__(self) -> dict[str, Any]:
        self.close()
        return dict(self.__dict__)

    # ---- the store ----

    def __len__(self) -> int:
        """Rows in the store."""
        self._change()
        return int(self._database().stat()["entries"]) - 1

    def _read(self, keys: list[bytes]) -> list[bytes | None]:
        self._change()
        with self._database().begin() as transaction:
            return [transaction.get(key) for key in keys]

    def _write(self, items: list[tuple[bytes, bytes]]) -> int:
        return self._change(items)[1]

    def _delete(self, ids: Tensor) -> int:
        return self._change(gone=id_bytes(ids))[0]

    def _drop(self, ids: Tensor) -> int:
        self._dropped += id_bytes(ids)
        return len(ids)

    def _change(self, items: list[tuple[bytes, bytes]] | None = None, gone: Sequence[bytes] = ()) -> tuple[int, int]:
        """Deletes what was dropped, deletes other keys, then puts items. Returns how many rows went, and came."""
        if not (items or gone or self._dropped):
            return 0, 0
        lmdb, database = _package("lmdb", self.name), self._database()
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

    def _scan(self, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
        self._change()
        after = b""
        while True:
            items: list[tuple[bytes, bytes]] = []
            with self._database().begin() as transaction:
                cursor = transaction.cursor()
                if cursor.set_range(after):
                    known = (item for item in cursor.iternext() if item[0] != _FORMAT)
                    items = list(islice(known, size))
            if not items:
                return
            after = items[-1][0] + b"\0"
            yield items

    # ---- the file ----

    def state(self) -> dict[str, Any]:
        """As of `OutsideStore`."""
        self._change()
        self._database().sync(True)
        return super().state()

    def close(self) -> None:
        """Writes everything out and closes the file. The next call opens it again."""
        if self._open is not None:
            self._change()
            self._open.sync(True)
            self._open.close()
            self._open = None

    def _remove(self) -> None:
        self.close()
        shutil.rmtree(self.path)

    def _database(self) -> Any:
        """The open database."""
        if self._open is None:
            lmdb = _package("lmdb", self.name)
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


# Rows in a Redis server: one hash for each shard of a table, id -> record of fixed size.
#
# Shape letters: M ids.


_AT_ONCE = 4096  # ids of one command


class RedisStore(OutsideStore):
    """Rows in a Redis server, which keeps them as it is configured to.

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

    place_name = "key"

    def __init__(self, format: RowFormat, url: str, key: str, part: str, **options: Any) -> None:
        super().__init__(format, **options)
        self.url, self._shards, self._part, self.place = url, key, part, f"{key}/{part}"
        self._connected: Any = None
        _package("redis", self.name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None}

    # ---- the store ----

    def __len__(self) -> int:
        """Rows in the store."""
        return int(self._server().hlen(self.place))

    def _read(self, keys: list[bytes]) -> list[bytes | None]:
        parts = self._send(lambda pipeline, some: pipeline.hmget(self.place, some), keys)
        return [value for some in parts for value in some]

    def _write(self, items: list[tuple[bytes, bytes]]) -> int:
        fields = [part for item in items for part in item]
        return sum(self._send(lambda pipeline, some: pipeline.hset(self.place, items=some), fields, 2 * _AT_ONCE))

    def _delete(self, ids: Tensor) -> int:
        return sum(self._send(lambda pipeline, some: pipeline.hdel(self.place, *some), id_bytes(ids)))

    def _scan(self, size: int) -> Iterator[list[tuple[bytes, bytes]]]:
        seen: set[bytes] = set()  # a scan may return a field twice
        found = self._server().hscan_iter(self.place, count=_AT_ONCE)
        new = (item for item in found if not (item[0] in seen or seen.add(item[0])))  # type: ignore[func-returns-value]
        while items := list(islice(new, size)):
            yield items

    # ---- the server ----

    def close(self) -> None:
        """Closes the connection. The next call opens one again."""
        if self._connected is not None:
            self._connected.close()
            self._connected = None

    def _remove(self) -> None:
        server = self._server()
        server.delete(self.place, f"{self.place}/format")
        server.srem(self._shards, self._part)

    def _send(
        self, command: Callable[[Any, list[bytes]], object], arguments: list[bytes], at_once: int = _AT_ONCE
    ) -> list[Any]:
        """The results of a command for each part of the arguments."""
        if not arguments:
            return []
        pipeline = self._server().pipeline(transaction=False)
        for first in range(0, len(arguments), at_once):
            command(pipeline, arguments[first : first + at_once])
        return list(pipeline.execute())

    def _server(self) -> Any:
        """The connection, after its first check of the format."""
        if self._connected is None:
            redis = _package("redis", self.name)
            server = redis.Redis.from_url(self.url)
            try:
                shards = [shard.decode() for shard in server.smembers(self._shards)]
                check_parts(self.name, f"{self.url} {self._shards!r}", self._part, shards)
                server.sadd(self._shards, self._part)
                known = server.set(f"{self.place}/format", str(self.format), nx=True, get=True)
            except redis.exceptions.ConnectionError as error:
                raise ConnectionError(
                    f"tier {self.name!r} cannot reach the Redis server at {self.url}: {error} Fix: start it, or pass "
                    f"its url"
                ) from error
            if known is not None:
                check_format(self.name, f"hash {self.place!r}", known.decode(), self.format)
            self._connected = server
        return self._connected
