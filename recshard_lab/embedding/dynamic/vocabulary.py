"""Static tables with a vocabulary of ids, for serving what dynamic tables have learned.

A table has M ids in order, ``[M]`` int64, and their rows. A binary search finds the row of an id. One more row of zeros
is looked up by all other ids. In tables with ``absent="initial"``, their initial rows are computed and added.

Shape letters: B batch, N ids of a feature, M ids of a vocabulary, D columns, A ids that are not in the vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments, device_named
from recshard_lab.embedding.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    PooledTables,
    SequenceTables,
    TableCollection,
)
from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recshard_lab.embedding.dynamic.admission import initial_rows, stream_of
from recshard_lab.embedding.dynamic.collections import AnyId, DynamicCollection
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.row_files import (
    DumpError,
    Entry,
    FileReader,
    check_rows,
    folders_of,
    positions,
    refuse_other_tables,
)
from recshard_lab.embedding.dynamic.table import DynamicTable
from recshard_lab.embedding.inputs import fit_features, to_samples
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recshard_lab.sparse.keyed_jagged_tensor import inverse_of


class Exported(NamedTuple):
    """A table for serving.

    Attributes:
        vocabulary: ``[M]`` int64, ascending.
        weight: ``[M + 1, D]`` the rows of the vocabulary, then a row of zeros. FP64 or FP32.
    """

    vocabulary: Tensor
    weight: Tensor


class _Output(NamedTuple):
    """One feature of one table. ``bags`` has the ids of the batch, ``absent [A]`` the positions of absent ones."""

    table: DynamicEmbeddingConfig
    feature: str
    name: str
    bags: JaggedTensor
    absent: Tensor

    def has_initial_rows(self) -> bool:
        """Whether there is something to add. A compiled program adds nothing where A is 0."""
        return self.table.absent == "initial" and (torch.compiler.is_compiling() or len(self.absent) > 0)

    def initial(self) -> Tensor:
        """``[A, D]`` the initial rows of absent ids, in FP32 or FP64, rounded to the number format of the table."""
        config = self.table
        ids = self.bags.values()[self.absent].long()
        stream = stream_of(config.seed, config.name)
        rows = initial_rows(ids, stream, (0, config.embedding_dim), config.init_range)
        return rows.to(TORCH_DTYPES[config.data_type]).to(served_dtype(config))


class VocabularyCollection(TableCollection):
    """The base of both collections.

    Attributes:
        collection: the plain collection, whose tables have ``M + 1`` rows.
        vocabularies: has a buffer ``[M]`` for each table.
    """

    collection: nn.Module
    policy_type = AnyId

    def __init__(
        self, tables: Sequence[DynamicEmbeddingConfig], device: torch.device | str | None, **options: bool
    ) -> None:
        super().__init__(tables, "error", **options)
        self.vocabularies = nn.Module()
        for table in tables:
            none = torch.empty(0, dtype=torch.int64, device=device_named(device))
            self.vocabularies.register_buffer(table.name, none)
        self._make_collection(self.vocabulary(tables[0].name).device)

    @abstractmethod
    def _plain(self, device: torch.device) -> nn.Module:
        """The collection that looks rows up: M + 1 rows a table."""

    def _make_collection(self, device: torch.device) -> None:
        """New rows of zeros."""
        self.collection = self._plain(device).requires_grad_(False)
        self.eval()

    def fill(self, tables: Mapping[str, Exported]) -> None:
        """Takes the vocabulary and the weight of every table, without copying."""
        for name, table in tables.items():
            self.vocabularies.register_buffer(name, table.vocabulary)
        self._make_collection(torch.device("meta"))
        for name, table in tables.items():
            own = self.collection.get_submodule(f"{self.tables_name}.{name}")
            own.weight = nn.Parameter(table.weight, requires_grad=False)

    def _fields(self) -> Iterator[dict[str, Any]]:
        """Arguments of each plain table, which reads the features under the names of its outputs."""
        for table, names in zip(self._tables, self._names, strict=True):
            yield {
                "num_embeddings": len(self.vocabulary(table.name)) + 1,
                "embedding_dim": table.embedding_dim,
                "name": table.name,
                "data_type": DataType.FP64 if served_dtype(table) is torch.float64 else DataType.FP32,
                "feature_names": names,
                "init_fn": nn.init.zeros_,
            }

    def vocabulary(self, name: str) -> Tensor:
        """``[M]`` int64: the ids of a table, ascending.

        Raises:
            ValueError: the collection has no table of this name.
        """
        if name not in [table.name for table in self._tables]:
            known = ", ".join(repr(table.name) for table in self._tables)
            raise ValueError(f"table {name!r} does not exist. Fix: use one of {known}")
        return self.vocabularies.get_buffer(name)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Changes the sizes of vocabularies and tables to those of the state dict first."""
        resized, error_msgs = False, arguments[-1]
        for table in self._tables:
            ids, own = state_dict.get(f"{prefix}vocabularies.{table.name}"), self.vocabulary(table.name)
            if ids is None:
                continue
            if ids.dtype is not torch.int64 or ids.dim() != 1 or not bool((ids[1:] > ids[:-1]).all()):
                error_msgs.append(f"vocabulary of table {table.name!r} is not int64 [M] in ascending order")
            elif len(ids) != len(own):
                self.vocabularies.register_buffer(table.name, own.new_empty(len(ids)))
                resized = True
        if resized:
            self._make_collection(self.vocabulary(self._tables[0].name).device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _found(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[_Output]]:
        """The batch with row numbers in place of ids, one feature for each output."""
        fitted = fit_features(features, self._tables, self._policy)
        rows: list[Tensor] = []
        outputs: list[_Output] = []
        by_feature = [(table, feature) for table in self._tables for feature in table.feature_names]
        for (table, feature), name, (bags, *_) in zip(by_feature, self._keys, fitted, strict=True):
            at, absent = _numbers(self.vocabulary(table.name), bags.values().long())
            rows.append(at)
            outputs.append(_Output(table, feature, name, bags, absent))
        numbered = features.permute([features.keys().index(output.feature) for output in outputs])
        numbered._keys, numbered._values = self._keys, torch.cat(rows)  # of the new batch
        inverse = features.inverse_indices_or_none()
        if inverse is not None:
            numbered._inverse = torch.stack([inverse_of(inverse, output.feature) for output in outputs])
            numbered._inverse_keys = self._keys
        return numbered, outputs


@checks_arguments
class VocabularyEmbeddingBagCollection(VocabularyCollection, PooledTables):
    """Static tables that return what a `DynamicEmbeddingBagCollection` returned in evaluation. They cannot be trained.

    `export_static` fills them. The state dict has for each table ``vocabularies.{table}`` ``[M]`` int64, the ids in
    ascending order, and ``collection.embedding_bags.{table}.weight`` ``[M + 1, D]``, their rows and a row of zeros for
    absent ids. ``load_state_dict`` changes M to that of the state dict. `quantize_embeddings` makes the rows smaller.

    Args:
        tables: the dynamic tables. A new collection has no ids.
        is_weighted: as of `EmbeddingBagCollection`.
        device: where vocabularies and rows are stored.

    Raises:
        ValueError: as of `EmbeddingBagCollection`.

    >>> users = DynamicEmbeddingConfig("user", 4, capacity=128, absent="zero")
    >>> serving = VocabularyEmbeddingBagCollection([users])
    >>> weight = torch.tensor([[1.0, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0]])
    >>> state = {"vocabularies.user": torch.tensor([-7, 10**15]), "collection.embedding_bags.user.weight": weight}
    >>> serving.load_state_dict(state)
    <All keys matched successfully>
    >>> batch = KeyedJaggedTensor(["user"], torch.tensor([10**15, -7, 5]), lengths=torch.tensor([2, 1]))
    >>> serving(batch)["user"].tolist()
    [[3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]
    """

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, device, is_weighted=is_weighted)

    def _plain(self, device: torch.device) -> nn.Module:
        pairs = zip(self._tables, self._fields(), strict=True)
        configs = [EmbeddingBagConfig(**fields, pooling=table.pooling) for table, fields in pairs]
        return EmbeddingBagCollection(configs, self._is_weighted, device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; arguments, errors and result ``[B, sum of D]`` as of `EmbeddingBagCollection`.

        Ids may have any value.
        """
        rows, outputs = self._found(features)
        pooled = self.collection(rows)
        values, first = pooled.values(), 0
        for output in outputs:
            end = first + output.table.embedding_dim
            if output.has_initial_rows():
                values[:, first:end] += to_samples(self._initial(output), features, output.feature)
            first = end
        return KeyedTensor(pooled.keys(), pooled.length_per_key(), values)

    def _initial(self, output: _Output) -> Tensor:
        """What absent ids add to the pooled rows of a feature's bags ``[B_f, D]``."""
        rows, lengths = output.initial(), output.bags.lengths()
        if self._is_weighted:
            rows = rows * output.bags.weights()[output.absent, None].to(rows.dtype)
        count = lengths.shape[0]  # a symbol while a program is traced, which len() is not
        bags = torch.repeat_interleave(torch.arange(count, device=rows.device), lengths)[output.absent]
        added = rows.new_zeros(count, rows.shape[1]).index_add_(0, bags, rows)
        return added / lengths.clamp(min=1)[:, None] if output.table.pooling is PoolingType.MEAN else added


@checks_arguments
class VocabularyEmbeddingCollection(VocabularyCollection, SequenceTables):
    """`VocabularyEmbeddingBagCollection` for rows that are not pooled, as of `DynamicEmbeddingCollection`.

    The state dict has ``vocabularies.{table}`` ``[M]`` and ``collection.embeddings.{table}.weight`` ``[M + 1, D]``.

    Args:
        tables: the dynamic tables. Their ``pooling`` is not read. A new collection has no ids.
        device: where vocabularies and rows are stored.
        need_indices: put the batch's ids into the outputs' weights.

    Raises:
        ValueError: as of `EmbeddingCollection`.

    >>> serving = VocabularyEmbeddingCollection([DynamicEmbeddingConfig("user", 2, capacity=128, absent="zero")])
    >>> serving(KeyedJaggedTensor(["user"], torch.tensor([5]), lengths=torch.tensor([1])))["user"].values().tolist()
    [[0.0, 0.0]]
    """

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        super().__init__(tables, device, need_indices=need_indices)

    def _plain(self, device: torch.device) -> nn.Module:
        return EmbeddingCollection([EmbeddingConfig(**fields) for fields in self._fields()], device)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch; arguments, errors and result, ``[N, D]`` a feature, as of `EmbeddingCollection`.

        Ids may have any value.
        """
        numbers, outputs = self._found(features)
        found = self.collection(numbers)
        results = {}
        for output in outputs:
            rows = found[output.name].values()
            if output.has_initial_rows():
                rows[output.absent] = output.initial().to(rows.dtype)
            ids = output.bags.values() if self._need_indices else None
            results[output.name] = JaggedTensor._unchecked(rows, ids, output.bags.lengths())
        return results


def _numbers(vocabulary: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` the row of each id, M for absent ids, and ``[A]`` the positions of those."""
    at = torch.searchsorted(vocabulary, ids)
    known = at < len(vocabulary)
    known[known.clone()] = vocabulary[at[known]] == ids[known]
    return torch.where(known, at, len(vocabulary)), (~known).nonzero().squeeze(1)


def served_dtype(table: DynamicEmbeddingConfig) -> torch.dtype:
    """The number format of rows: a lookup widens a 16-bit table whole, so that rows are stored widened."""
    return torch.promote_types(TORCH_DTYPES[table.data_type], torch.float32)


# Exports dynamic tables for serving: from a collection, or from dumps, which any number of ranks may have written.
#
# Shape letters: M ids of a table, K ids that a delta leaves as they are, D columns.


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
        tables = _of_dumps(result._tables, path)
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
    for folder, entries in folders_of(path):
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
    rows = reader.rows((0, table.embedding_dim))  # a file at a time
    written = ((ids, columns[0], file.get_tensor("weight")) for columns, file, ids in rows)
    return _filled(table, vocabulary, chain(_left(reader, table.name, kept, before), written))


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


def _ascending(parts: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts]).unique()


def _filled(table: DynamicEmbeddingConfig, vocabulary: Tensor, parts: Iterable[_Part]) -> Exported:
    """A table whose rows come in parts."""
    weight = torch.zeros(len(vocabulary) + 1, table.embedding_dim, dtype=served_dtype(table))
    for ids, first, rows in parts:
        at = torch.searchsorted(vocabulary, ids.cpu())
        weight[at, first : first + rows.shape[1]] = rows.to("cpu", weight.dtype)
    return Exported(vocabulary, weight)
