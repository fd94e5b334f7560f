"""Exports dynamic tables for serving: from a collection, or from dumps, which any number of ranks may have written.

Shape letters: M ids of a table, K ids that a delta leaves as they are, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.dumps.collection import folders_of, refuse_other_tables
from recshard_lab.embedding.dynamic.dumps.files import DumpError, Entry, FileReader
from recshard_lab.embedding.dynamic.dumps.read import check_rows, positions
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.embedding.dynamic.vocabulary import (
    Exported,
    VocabularyEmbeddingBagCollection,
    VocabularyEmbeddingCollection,
    served_dtype,
)
from recshard_lab.embedding.kernels import TORCH_DTYPES

_Part = tuple[Tensor, int, Tensor]
"""Ids, their first column, and those columns of their rows."""


@checks_arguments
@torch.no_grad()
def export_static(
    collection: nn.Module, path: str | Path | Sequence[str | Path] | None = None
) -> VocabularyEmbeddingBagCollection | VocabularyEmbeddingCollection:
    """Copies dynamic tables into static ones with a vocabulary, which look up the same rows.

    Rows of all tiers are copied.

    A sharded collection is exported from a dump: write it on all ranks, then call this on one of them, or in another
    process that can read the folder. It is not collective.

    The result is in host memory and in evaluation mode. Absent ids look up what the dynamic collection returned for
    them in evaluation: zeros, or with ``absent="initial"`` initial rows, which are computed from the seed, the table's
    name and the id. 16-bit rows become FP32, which is exact.

    Args:
        collection: a `DynamicEmbeddingBagCollection` or `DynamicEmbeddingCollection`. With ``path``, a sharded one or a
            `VocabularyEmbeddingBagCollection` as well: it then only names the tables, with their features and seeds.
        path: the folder of a dump, or several in order: a full dump and its deltas. Other tables of the dump are not
            read. Default: the rows that the collection has now.

    Raises:
        DumpError: no dump, a damaged one, one without these tables, or a delta without the dump before it.
        ValueError: a sharded collection without ``path``, or a collection without dynamic tables.

    >>> from recshard_lab import DynamicEmbeddingBagCollection, KeyedJaggedTensor
    >>> users = DynamicEmbeddingConfig("user", 4, capacity=128)
    >>> dynamic = DynamicEmbeddingBagCollection([users], torch.optim.SGD, {"lr": 0.5})
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([10**15, -7]), lengths=torch.tensor([1, 1]))
    >>> dynamic(batch).values().sum().backward()
    >>> serving = export_static(dynamic)
    >>> serving.vocabulary("user").tolist()
    [-7, 1000000000000000]
    >>> bool((serving(batch).values() == dynamic.eval()(batch).values()).all())
    True
    """
    result = _empty_like(collection)
    if path is None:
        if not isinstance(collection, DynamicCollection):
            raise ValueError(
                f"{type(collection).__name__} does not have its rows in one process. Fix: write a dump on all ranks, "
                f"and pass its folder as path="
            )
        tables = {name: _of_table(table) for name, table in collection.tables().items()}
    else:
        tables = _of_dumps(result.configs(), path)
    result.fill(tables)
    return result


def _empty_like(collection: Any) -> Any:
    """A collection for serving with the tables and features of another one, and no ids."""
    if hasattr(collection, "embedding_bag_configs"):
        tables, more = collection.embedding_bag_configs(), {"is_weighted": collection.is_weighted()}
        kind: Any = VocabularyEmbeddingBagCollection
    elif hasattr(collection, "embedding_configs") and hasattr(collection, "need_indices"):
        tables, more = collection.embedding_configs(), {"need_indices": collection.need_indices()}
        kind = VocabularyEmbeddingCollection
    else:
        raise ValueError(
            f"{type(collection).__name__} is not a collection of dynamic tables. Fix: pass one collection of the model"
        )
    for table in tables:
        if not isinstance(table, DynamicEmbeddingConfig):
            raise ValueError(f"table {table.name!r} is not dynamic. Fix: pass a collection of DynamicEmbeddingConfig")
    return kind(tables, **more)


def _of_table(table: DynamicTable) -> Exported:
    """The rows of a table that is not sharded."""
    with table.lock:
        vocabulary = _ascending(rows.ids.cpu() for rows in table.export_batches())
        parts = ((rows.ids, 0, rows.weight) for rows in table.export_batches())
        return _filled(table.config, vocabulary, parts)


def _of_dumps(tables: Sequence[DynamicEmbeddingConfig], path: str | Path | Sequence[str | Path]) -> dict[str, Exported]:
    """The rows of tables after a dump and its deltas."""
    found: dict[str, Exported] = {}
    steps = dict.fromkeys([table.name for table in tables], 0)
    for folder, entries, _ in folders_of(path):
        refuse_other_tables(folder, entries, steps)
        for table in tables:
            name, entry = table.name, entries[table.name]
            dtype = TORCH_DTYPES[table.data_type]
            check_rows(folder, name, entry, table.embedding_dim, dtype, {}, steps[name])
            found[name] = _after(FileReader(folder, entry), table, found.get(name))
            steps[name] = entry["step"]
    if not found:
        raise DumpError("path=[] names no dump. Fix: pass the folder of a dump")
    return found


def _after(reader: FileReader, table: DynamicEmbeddingConfig, before: Exported | None) -> Exported:
    """A table after one more dump."""
    primary = [file for _, files in reader.pieces((0, 1)) for file in files]
    kept = _ascending(_ids(reader, primary, "kept_ids"))
    vocabulary = _ascending([kept, *_ids(reader, primary, "ids")])
    return _filled(table, vocabulary, chain(_left(reader, table.name, kept, before), _written(reader, table)))


def _ids(reader: FileReader, files: Iterable[Entry], key: str) -> Iterator[Tensor]:
    return (file.get_tensor(key) for file in reader.opened(files) if key in set(file.keys()))


def _left(reader: FileReader, name: str, kept: Tensor, before: Exported | None) -> Iterator[_Part]:
    """The rows ``[K, D]`` that a delta leaves as they were."""
    if not len(kept):
        return
    at, found = positions(kept[:0] if before is None else before.vocabulary, kept)
    if before is None or not bool(found.all()):
        raise DumpError(
            f"{reader.folder} leaves {len(kept) - len(at):,} rows of table {name!r} that no earlier dump has. "
            f"Fix: pass the full dump and every delta, in order"
        )
    yield kept, 0, before.weight[at]


def _written(reader: FileReader, table: DynamicEmbeddingConfig) -> Iterator[_Part]:
    """The rows that a dump has, a file at a time."""
    for columns, files in reader.pieces((0, table.embedding_dim)):
        for file in reader.opened(files):
            if "ids" in set(file.keys()):
                yield file.get_tensor("ids"), columns[0], file.get_tensor("weight")


def _ascending(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).unique()


def _filled(table: DynamicEmbeddingConfig, vocabulary: Tensor, parts: Iterable[_Part]) -> Exported:
    """A table whose rows come in parts."""
    weight = torch.zeros(len(vocabulary) + 1, table.embedding_dim, dtype=served_dtype(table))
    for ids, first, rows in parts:
        at = torch.searchsorted(vocabulary, ids.cpu())
        weight[at, first : first + rows.shape[1]] = rows.to("cpu", weight.dtype)
    return Exported(vocabulary, weight)
