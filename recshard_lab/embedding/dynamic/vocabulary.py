"""Static tables with a vocabulary of ids, for serving what dynamic tables have learned.

A table has M ids in order, ``[M]`` int64, and their rows. A binary search finds the row of an id. One more row of zeros
is looked up by all other ids. In tables with ``absent="initial"``, their initial rows are computed and added.

Shape letters: B batch, N ids of a feature, M ids of a vocabulary, D columns, A ids that are not in the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from recshard_lab.arguments import checks_arguments, device_named
from recshard_lab.embedding.collections import EmbeddingBagCollection, EmbeddingCollection
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.dynamic.collections import AnyId
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.embedding.dynamic.initial import initial_rows, stream_of
from recshard_lab.embedding.inputs import fit_features, to_samples
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recshard_lab.sparse.variable_batch import inverse_of


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


class VocabularyCollection(ABC, nn.Module):
    """The base of both collections.

    Attributes:
        collection: the plain collection, whose tables have ``M + 1`` rows.
        vocabularies: has a buffer ``[M]`` for each table.
        tables_name: the part of ``collection`` that has the tables.
    """

    collection: nn.Module
    tables_name: ClassVar[str]

    def __init__(self, tables: Sequence[DynamicEmbeddingConfig], device: torch.device | str | None) -> None:
        super().__init__()
        check_tables(tables)
        self._tables = list(tables)
        self._names = embedding_names_by_table(tables)
        self._policy = AnyId()
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

    def configs(self) -> list[DynamicEmbeddingConfig]:
        """The dynamic tables, in order."""
        return self._tables

    def _fields(self, table: DynamicEmbeddingConfig, names: list[str]) -> dict[str, Any]:
        """Arguments of the plain table, which reads the features under these names."""
        return {
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

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Changes the sizes of vocabularies and tables to those of the state dict first."""
        resized = False
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
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(*arguments)

    def _found(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[_Output]]:
        """The batch with row numbers in place of ids, one feature for each output."""
        fitted = fit_features(features, self._tables, self._policy)
        rows: list[Tensor] = []
        outputs: list[_Output] = []
        for table, names in self._outputs():
            for feature, name in zip(table.feature_names, names, strict=True):
                bags = fitted[len(outputs)][0]
                at, absent = _numbers(self.vocabulary(table.name), bags.values().long())
                rows.append(at)
                outputs.append(_Output(table, feature, name, bags, absent))
        order = [features.keys().index(output.feature) for output in outputs]
        given, inverse = features.permute(order), features.inverse_indices_or_none()
        names = [output.name for output in outputs]
        variable = given.variable_stride_per_key()
        return (
            KeyedJaggedTensor._unchecked(
                names,
                torch.cat(rows),
                given.weights_or_none(),
                given.lengths(),
                None,
                given.stride(),
                given.length_per_key(),
                given.stride_per_key_per_rank() if variable else None,
                None if inverse is None else torch.stack([inverse_of(inverse, each.feature) for each in outputs]),
                None if inverse is None else names,
            ),
            outputs,
        )

    def _outputs(self) -> list[tuple[DynamicEmbeddingConfig, list[str]]]:
        """The tables, each with the keys of its outputs."""
        return list(zip(self._tables, self._names, strict=True))


@checks_arguments
class VocabularyEmbeddingBagCollection(VocabularyCollection):
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

    tables_name = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self._is_weighted = is_weighted
        super().__init__(tables, device)

    def _plain(self, device: torch.device) -> nn.Module:
        configs = [
            EmbeddingBagConfig(**self._fields(table, names), pooling=table.pooling) for table, names in self._outputs()
        ]
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

    def embedding_bag_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The dynamic tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted


@checks_arguments
class VocabularyEmbeddingCollection(VocabularyCollection):
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

    tables_name = "embeddings"

    def __init__(
        self,
        tables: Sequence[DynamicEmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        self._need_indices = need_indices
        super().__init__(tables, device)

    def _plain(self, device: torch.device) -> nn.Module:
        return EmbeddingCollection(
            [EmbeddingConfig(**self._fields(table, names)) for table, names in self._outputs()], device
        )

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

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The dynamic tables, in order."""
        return self._tables

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices


def _numbers(vocabulary: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` the row of each id, M for absent ids, and ``[A]`` the positions of those."""
    at = torch.searchsorted(vocabulary, ids)
    known = at < len(vocabulary)
    known[known.clone()] = vocabulary[at[known]] == ids[known]
    return torch.where(known, at, len(vocabulary)), (~known).nonzero().squeeze(1)


def served_dtype(table: DynamicEmbeddingConfig) -> torch.dtype:
    """The number format of rows: a lookup widens a 16-bit table whole, so that rows are stored widened."""
    return torch.promote_types(TORCH_DTYPES[table.data_type], torch.float32)
