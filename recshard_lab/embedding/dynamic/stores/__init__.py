"""Rows that have no slot in the fast tier. `base` is the interface of a store; each other file is one kind of store."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.outside_stores import DiskStore as DiskStore
from recshard_lab.embedding.dynamic.outside_stores import RedisStore as RedisStore
from recshard_lab.embedding.dynamic.outside_stores import part_name
from recshard_lab.embedding.dynamic.stores.base import RowFormat as RowFormat
from recshard_lab.embedding.dynamic.stores.base import Rows as Rows
from recshard_lab.embedding.dynamic.stores.base import RowStore as RowStore
from recshard_lab.embedding.dynamic.stores.base import StoreCounters as StoreCounters
from recshard_lab.embedding.dynamic.stores.base import TierError as TierError
from recshard_lab.embedding.dynamic.stores.chain import Chain as Chain
from recshard_lab.embedding.dynamic.stores.host import HostStore as HostStore


def open_stores(
    config: DynamicEmbeddingConfig,
    format: RowFormat,
    partitions: int,
    shard: tuple[int, int],
    columns: tuple[int, int],
) -> list[RowStore]:
    """The stores of ``config.tiers`` for one shard of the table.

    Args:
        config: the table.
        format: of the rows.
        partitions: of the table.
        shard: the first of them that is here, and the one after the last.
        columns: the same of the table's columns.
    """
    part = part_name(shard, columns)
    stores: list[RowStore] = []
    for tier in config.tiers:
        options: Any = {"name": tier.name, "mode": tier.mode, "cost": tier.cost}
        if tier.kind == "host":
            assert tier.capacity is not None
            stores.append(HostStore(format, int(tier.capacity), partitions=partitions, shard=shard, **options))
        elif tier.kind == "disk":
            folder = Path(str(tier.path), quote(config.name, safe=""))
            stores.append(DiskStore(format, folder, part, **options))
        else:
            stores.append(RedisStore(format, str(tier.url), f"recshard-lab/{config.name}", part, **options))
    return stores
