"""Rows that have no slot in the fast tier. `base` is the interface of a store; each other file is one kind of store."""

from recshard_lab.embedding.dynamic.stores.base import RowFormat as RowFormat
from recshard_lab.embedding.dynamic.stores.base import Rows as Rows
from recshard_lab.embedding.dynamic.stores.base import RowStore as RowStore
from recshard_lab.embedding.dynamic.stores.base import StoreCounters as StoreCounters
from recshard_lab.embedding.dynamic.stores.host import HostStore as HostStore
