"""Rows in a Redis server: one hash for each shard of a table, id -> record of fixed size.

Shape letters: M ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
