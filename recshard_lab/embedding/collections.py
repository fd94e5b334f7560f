"""Unsharded embedding collections: the reference for every sharded and fused one.

Plain torch, one `nn.EmbeddingBag` a table, ordinary parameters and gradients.

Shape letters: B batch, N ids of a feature, E rows, D columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.fx import wrap
from torch.nn import functional

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.inputs import (
    Fitted,
    OutOfRange,
    as_batch,
    check_weights,
    fit_features,
    put_back,
    to_samples,
)
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

wrap("fit_features")  # one node in an fx graph


class EmbeddingBagCollectionInterface(ABC, nn.Module):
    """A KeyedJaggedTensor in, a KeyedTensor of pooled rows out: for annotations and `isinstance`, as in TorchRec.

    >>> table = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
    >>> isinstance(EmbeddingBagCollection([table]), EmbeddingBagCollectionInterface)
    True
    """

    @abstractmethod
    def forward(self, features: Any) -> Any:
        """Looks up one batch."""

    @abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""

    @abstractmethod
    def is_weighted(self) -> bool:
        """Whether batches carry weights."""


class EmbeddingCollectionInterface(ABC, nn.Module):
    """A KeyedJaggedTensor in, a JaggedTensor of rows per feature out."""

    @abstractmethod
    def forward(self, features: Any) -> Any:
        """Looks up one batch."""

    @abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""


class TableCollection(nn.Module):
    """The base of unsharded collections: their tables, the keys of their outputs and the out-of-range policy.

    Lookups are in the subclasses: plain ones in torch alone, others on kernels.

    Attributes:
        tables_name: the submodule that has one module for each table, in the names of a state dict.
        pooled: whether a lookup pools bags.
    """

    tables_name: ClassVar[str]
    pooled: ClassVar[bool]
    policy_type: ClassVar[type[OutOfRange]] = OutOfRange

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        out_of_range: str,
        *,
        is_weighted: bool = False,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        self._policy = self.policy_type(out_of_range)
        check_tables(tables)
        if self.pooled:
            check_pooling(tables)
        self._tables: list[Any] = list(tables)
        self._is_weighted, self._need_indices = bool(is_weighted), bool(need_indices)
        self._names = embedding_names_by_table(tables)
        self._keys = [name for names in self._names for name in names]
        self._feature_names = [feature for table in tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]

    def __prepare_scriptable__(self) -> None:
        raise ValueError(
            f"torch.jit.script does not compile {type(self).__name__}: torch 2.13 deprecates it, and a "
            f"KeyedJaggedTensor is no TorchScript class. Fix: call torch.export.export(module, (features,)) or "
            f"torch.compile(module)"
        )

    def out_of_range_count(self) -> int:
        """Out-of-range ids so far, under ``"clamp"`` and ``"ignore"``."""
        return self._policy.count()

    @property
    def out_of_range(self) -> str:
        """The out-of-range policy."""
        return self._policy.policy


@EmbeddingBagCollectionInterface.register
class PooledTables(TableCollection):
    """What pooling collections have in common."""

    tables_name, pooled = "embedding_bags", True

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted


@EmbeddingCollectionInterface.register
class SequenceTables(TableCollection):
    """What collections have in common that return a row per id."""

    tables_name, pooled = "embeddings", False

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self._tables

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Columns of the outputs, where all tables have the same.

        Raises:
            ValueError: tables of several widths.
        """
        dims = set(self._dims)
        if len(dims) > 1:
            raise ValueError(
                f"the tables have several embedding_dim, {sorted(dims)}. Fix: read each table's embedding_dim"
            )
        return dims.pop()

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the keys of its outputs."""
        return self._names


class PlainCollection(TableCollection):
    """Tables as ordinary parameters."""

    def reset_parameters(self) -> None:
        """Draws every table anew: ``init_fn`` if given, else uniform in ``[weight_init_min, weight_init_max]``."""
        for table in self._tables:
            reset_weight(self._weight(table), table)

    def _weight(self, table: BaseEmbeddingConfig) -> Tensor:
        return cast(Tensor, getattr(self, self.tables_name)[table.name].weight)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device


@names_wrong_arguments
class EmbeddingBagCollection(PlainCollection, PooledTables):
    """Tables with pooled bags: for each sample and feature the sum or mean of its ids' rows.

    Parameters are named ``embedding_bags.{table}.weight``, ``[E, D]``. A feature that several tables read has one
    output a table, keyed ``feature@table``.

    Args:
        tables: the tables; outputs come in their order, and in the order of each table's features.
        is_weighted: multiply each row by its id's weight first. SUM gives ``sum(w * row)``, MEAN
            ``sum(w * row) / number of ids``. When False, weights in a batch are not read.
        device: where the parameters live; ``"meta"`` allocates nothing.
        out_of_range: the policy for ids below 0 or beyond the table: ``"error"``, ``"clamp"`` to the nearest row, or
            ``"ignore"``: they add nothing and get no gradient, and a MEAN still divides by the bag's length.

    Raises:
        ValueError: tables that cannot be held together, or a number format that cannot be trained.

    >>> table = EmbeddingBagConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=2, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3, 1]), lengths=torch.tensor([2, 0, 1]))
    >>> EmbeddingBagCollection([table])(batch)["seen"].tolist()
    [[2.0, 2.0], [0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        out_of_range: str = "error",
    ) -> None:
        super().__init__(tables, out_of_range, is_weighted=is_weighted)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.pooling.value.lower(),
                include_last_offset=True,
                _weight=_new_weight(table, device),
            )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch.

        Args:
            features: has every feature of the tables; others are not read. May be a TensorDict of jagged nested
                tensors. A variable batch
                (``stride_per_key_per_rank``) must have ``inverse_indices``, by which each feature's pooled rows
                become the rows of the B samples.

        Returns:
            ``[B, sum of D]``, fp32 (fp64 if a table is).

        Raises:
            ValueError: a feature, the weights or inverse indices are missing, or an id is out of range.
        """
        features = as_batch(features, self._tables)
        bags = fit_features(features, self._tables, self._policy)
        pooled: list[Tensor] = []
        for table in self._tables:
            weight, mean = self._weight(table), table.pooling is PoolingType.MEAN
            for feature in table.feature_names:
                pooled.append(_pool(features, feature, bags[len(pooled)], weight, mean, self._is_weighted))
        return KeyedTensor(list(self._keys), list(self._dims), torch.cat(pooled, dim=1))


@names_wrong_arguments
class EmbeddingCollection(PlainCollection, SequenceTables):
    """Tables that return one row per id (sequence embeddings).

    Parameters are named ``embeddings.{table}.weight``, ``[E, D]``. A feature that several tables read has one
    output a table, keyed ``feature@table``.

    Args:
        tables: the tables.
        device: where the parameters live; ``"meta"`` allocates nothing.
        need_indices: put the batch's ids into the outputs' weights.
        use_gather_select, use_gather_select_per_sharding: accepted for compatibility with TorchRec, where they select
            a kernel. They have no effect.
        out_of_range: as of `EmbeddingBagCollection`; an ignored id is a row of zeros.

    Raises:
        ValueError: tables that cannot be held together, or a number format that cannot be trained.

    >>> table = EmbeddingConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=2, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3, 1]), lengths=torch.tensor([2, 0, 1]))
    >>> EmbeddingCollection([table])(batch)["seen"].values().shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: Mapping[str, bool] | None = None,
        *,
        out_of_range: str = "error",
    ) -> None:
        super().__init__(tables, out_of_range, need_indices=need_indices)
        self._gather_select = use_gather_select, use_gather_select_per_sharding
        self.embeddings = nn.ModuleDict()
        for table in tables:
            self.embeddings[table.name] = nn.Embedding(
                table.num_embeddings, table.embedding_dim, _weight=_new_weight(table, device)
            )
            reset_weight(self._weight(table), table)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch.

        Args:
            features: has every feature of the tables; others, weights and inverse indices are not read. May be a
                TensorDict of jagged nested tensors.

        Returns:
            For each output key ``[N, D]`` rows with the lengths of its feature: ``[B]``, or ``[B_f]`` in a
            variable batch.

        Raises:
            ValueError: a feature is missing, or an id is out of range.
        """
        features = as_batch(features, self._tables)
        bags = fit_features(features, self._tables, self._policy)
        outputs: dict[str, JaggedTensor] = {}
        for table, names in zip(self._tables, self._names, strict=True):
            weight = self._weight(table)
            for name in names:
                outputs[name] = _rows(bags[len(outputs)], weight, self._need_indices)
        return outputs

    def use_gather_select(self) -> bool:
        """The argument of this name."""
        return self._gather_select[0]

    def use_gather_select_per_sharding(self) -> Mapping[str, bool] | None:
        """The argument of this name."""
        return self._gather_select[1]


@wrap  # one node in an fx graph
def _pool(
    features: KeyedJaggedTensor, feature: str, fitted: Fitted, weight: Tensor, mean: bool, weighted: bool
) -> Tensor:
    """One feature's pooled rows ``[B, D]``, summed in fp32 or better."""
    given, bags, _ = fitted
    per_id = check_weights(bags.weights_or_none(), [feature]) if weighted else None
    wide = torch.promote_types(weight.dtype, torch.float32)
    pooled = functional.embedding_bag(
        bags.values().long(),
        weight.to(wide),
        functional.pad(bags.lengths().cumsum(0), (1, 0)),
        mode="sum",
        per_sample_weights=None if per_id is None else per_id.to(wide),
        include_last_offset=True,
    )
    if mean:
        pooled = pooled / given.lengths().clamp(min=1).unsqueeze(1)
    return to_samples(pooled, features, feature)


@wrap
def _rows(fitted: Fitted, weight: Tensor, need_indices: bool) -> JaggedTensor:
    """One feature's rows ``[N, D]``, in fp32 or better."""
    given, bags, kept = fitted
    wide = torch.promote_types(weight.dtype, torch.float32)
    rows = put_back(functional.embedding(bags.values().long(), weight.to(wide)), kept, given.values().shape[0])
    return JaggedTensor._unchecked(rows, given.values() if need_indices else None, given.lengths())


def check_pooling(tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Checks that tables can be pooled.

    Raises:
        ValueError: a table without pooling.
    """
    for table in tables:
        pooling = getattr(table, "pooling", None)
        if pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(
                f"table {table.name!r} has pooling {pooling}. Fix: use PoolingType.SUM or MEAN, or an "
                f"EmbeddingCollection, which does not pool"
            )


def trained_dtype(table: BaseEmbeddingConfig) -> torch.dtype:
    """torch's number format of a static table that is trained.

    Raises:
        ValueError: a number format that cannot be trained, or a dynamic table.
    """
    if table.dynamic:
        raise ValueError(
            f"table {table.name!r} is dynamic, and this collection has static tables. Fix: use "
            f"DynamicEmbeddingBagCollection or DynamicEmbeddingCollection"
        )
    if table.data_type not in TORCH_DTYPES:
        kinds = ", ".join(kind.value for kind in TORCH_DTYPES)
        raise ValueError(f"table {table.name!r} is {table.data_type.value}, which cannot be trained. Fix: use {kinds}")
    return TORCH_DTYPES[table.data_type]


def _new_weight(table: BaseEmbeddingConfig, device: torch.device | str | None) -> Tensor:
    """``[E, D]`` before its draw. It uses random numbers only if the table is `drawn_twice`."""
    size, dtype = (table.num_embeddings, table.embedding_dim), trained_dtype(table)
    weight = torch.empty(size, dtype=dtype, device=device_named(device))
    return weight.normal_() if table.drawn_twice else weight


@torch.no_grad()
def reset_weight(weight: Tensor, table: BaseEmbeddingConfig) -> None:
    """Draws one table's weights by its config, in place. Does nothing on ``meta``."""
    if weight.is_meta:
        return
    if table.init_fn is not None:
        try:
            table.init_fn(weight)
        except (TypeError, RuntimeError) as error:
            shape = list(weight.shape)
            raise ValueError(f"table {table.name!r}: init_fn(weight) failed on a weight {shape}: {error}") from error
    else:
        weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())
