"""Unsharded embedding collections: the reference truth of every sharded and fused one.

Plain torch, one `nn.EmbeddingBag` a table, ordinary parameters and gradients.

Shape letters: B batch, N ids of a feature, E rows, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.inputs import check_ids, check_weights, feature_of, to_samples
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class EmbeddingBagCollection(nn.Module):
    """Tables whose bags are pooled: for each sample and feature the sum or mean of its ids' rows.

    Parameters are named ``embedding_bags.{table}.weight``, ``[E, D]``. A feature that several tables read has one
    output a table, keyed ``feature@table``.

    Args:
        tables: the tables; outputs come in their order, and in the order of each table's features.
        is_weighted: multiply each row by its id's weight first. SUM gives ``sum(w * row)``, MEAN
            ``sum(w * row) / number of ids``. When False, weights in a batch are not read.
        device: where the parameters live; ``"meta"`` allocates nothing.

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
    ) -> None:
        super().__init__()
        check_tables(tables)
        check_pooling(tables)
        self._tables = list(tables)
        self._is_weighted = is_weighted
        self._names = embedding_names_by_table(tables)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode=table.pooling.value.lower(),
                include_last_offset=True,
                _weight=empty_weight(table, device),
            )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch.

        Args:
            features: has every feature of the tables; others are not read. A variable batch
                (``stride_per_key_per_rank``) must have ``inverse_indices``, by which each feature's pooled rows
                become the rows of the B samples.

        Returns:
            ``[B, sum of D]``, fp32 (fp64 if a table is).

        Raises:
            ValueError: a feature, the weights or inverse indices are missing, or an id is no row of its table.
        """
        keys, pooled = [], []
        for table, names in zip(self._tables, self._names, strict=True):
            for feature, name in zip(table.feature_names, names, strict=True):
                keys.append(name)
                pooled.append(self._pool(table, feature, features))
        return KeyedTensor(keys, [part.shape[1] for part in pooled], torch.cat(pooled, dim=1))

    def _pool(self, table: EmbeddingBagConfig, feature: str, features: KeyedJaggedTensor) -> Tensor:
        bags = feature_of(features, feature, table)
        ids, lengths = bags.values(), bags.lengths()
        check_ids(ids, lengths, feature, table)
        weights = check_weights(bags.weights_or_none(), [feature]) if self._is_weighted else None
        weight = self._weight(table)
        wide = torch.promote_types(weight.dtype, torch.float32)
        pooled = functional.embedding_bag(
            ids.long(),
            weight.to(wide),
            functional.pad(lengths.cumsum(0), (1, 0)),
            mode="sum",
            per_sample_weights=None if weights is None else weights.to(wide),
            include_last_offset=True,
        )
        if table.pooling is PoolingType.MEAN:
            pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
        return to_samples(pooled, features, feature)

    def reset_parameters(self) -> None:
        """Draws every table anew: ``init_fn`` if given, else uniform in ``[weight_init_min, weight_init_max]``."""
        for table in self._tables:
            reset_weight(self._weight(table), table)

    def _weight(self, table: BaseEmbeddingConfig) -> Tensor:
        weight = self.embedding_bags[table.name].weight
        assert isinstance(weight, Tensor)
        return weight

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device


class EmbeddingCollection(nn.Module):
    """Tables whose ids each keep a row of their own (sequence embeddings).

    Parameters are named ``embeddings.{table}.weight``, ``[E, D]``. A feature that several tables read has one
    output a table, keyed ``feature@table``.

    Args:
        tables: the tables.
        device: where the parameters live; ``"meta"`` allocates nothing.
        need_indices: put the ids into the outputs' weights.

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
    ) -> None:
        super().__init__()
        check_tables(tables)
        self._tables = list(tables)
        self._need_indices = need_indices
        self._names = embedding_names_by_table(tables)
        self.embeddings = nn.ModuleDict()
        for table in tables:
            self.embeddings[table.name] = nn.Embedding(
                table.num_embeddings, table.embedding_dim, _weight=empty_weight(table, device)
            )
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch.

        Args:
            features: has every feature of the tables; others, weights and inverse indices are not read.

        Returns:
            For each output key ``[N, D]`` rows with the lengths of its feature: ``[B]``, or ``[B_f]`` in a
            variable batch.

        Raises:
            ValueError: a feature is missing, or an id is no row of its table.
        """
        outputs = {}
        for table, names in zip(self._tables, self._names, strict=True):
            weight = self._weight(table)
            for feature, name in zip(table.feature_names, names, strict=True):
                bags = feature_of(features, feature, table)
                ids, lengths = bags.values(), bags.lengths()
                check_ids(ids, lengths, feature, table)
                wide = torch.promote_types(weight.dtype, torch.float32)
                rows = functional.embedding(ids.long(), weight.to(wide))
                outputs[name] = JaggedTensor(rows, weights=ids if self._need_indices else None, lengths=lengths)
        return outputs

    def reset_parameters(self) -> None:
        """Draws every table anew: ``init_fn`` if given, else uniform in ``[weight_init_min, weight_init_max]``."""
        for table in self._tables:
            reset_weight(self._weight(table), table)

    def _weight(self, table: BaseEmbeddingConfig) -> Tensor:
        weight = self.embeddings[table.name].weight
        assert isinstance(weight, Tensor)
        return weight

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, in order."""
        return self._tables

    def embedding_dim(self) -> int:
        """Columns of the outputs, where all tables have the same.

        Raises:
            ValueError: tables of several widths.
        """
        dims = {table.embedding_dim for table in self._tables}
        if len(dims) > 1:
            raise ValueError(f"the tables have several embedding_dim, {sorted(dims)}: ask each table")
        return dims.pop()

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the keys of its outputs."""
        return self._names

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return next(self.parameters()).device


def check_pooling(tables: Sequence[EmbeddingBagConfig]) -> None:
    """Refuses tables that cannot be pooled.

    Raises:
        ValueError: a table that has no pooling.
    """
    for table in tables:
        pooling = getattr(table, "pooling", None)
        if pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(
                f"table {table.name!r} has pooling {pooling}: use PoolingType.SUM or MEAN, or put it into an "
                f"EmbeddingCollection, which does not pool"
            )


def empty_weight(table: BaseEmbeddingConfig, device: torch.device | str | None) -> Tensor:
    """``[E, D]``, not yet drawn.

    Raises:
        ValueError: a number format that cannot be trained.
    """
    if table.data_type not in TORCH_DTYPES:
        kinds = ", ".join(kind.value for kind in TORCH_DTYPES)
        raise ValueError(f"table {table.name!r} is {table.data_type.value}, which cannot be trained: use {kinds}")
    dtype = TORCH_DTYPES[table.data_type]
    return torch.empty(table.num_embeddings, table.embedding_dim, dtype=dtype, device=device)


@torch.no_grad()
def reset_weight(weight: Tensor, table: BaseEmbeddingConfig) -> None:
    """Draws one table's weights as its config says, in place. Nothing happens on ``meta``."""
    if weight.is_meta:
        return
    if table.init_fn is not None:
        table.init_fn(weight)
    else:
        weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())
