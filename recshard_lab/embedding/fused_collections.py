"""Unsharded collections on a lookup kernel: all tables in one lookup, the optimizer inside backward.

Shape letters: B batch, F features, each of one table, N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding.collections import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    check_pooling,
    common_dim,
)
from recshard_lab.embedding.configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    embedding_names_by_table,
)
from recshard_lab.embedding.fused_base import FusedCollection, check_location
from recshard_lab.embedding.inputs import check_weights, fit_features, to_most_bags, to_samples
from recshard_lab.embedding.optimizers import EmbOptimType
from recshard_lab.embedding.out_of_range import put_back
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


@EmbeddingBagCollectionInterface.register
@names_wrong_arguments
class FusedEmbeddingBagCollection(FusedCollection):
    """`EmbeddingBagCollection` whose backward steps the touched rows itself: no gradient, no ``optimizer.step()``.

    Outputs, keys and state dict are those of `EmbeddingBagCollection`. The parameters have ``requires_grad=False``, so
    that a torch optimizer of the rest of the model skips them.

    Args:
        tables: the tables.
        optimizer_type: ``torch.optim.SGD``, ``torch.optim.Adagrad``, `RowWiseAdagrad`, or an `EmbOptimType`.
        optimizer_kwargs: ``lr`` (or ``learning_rate``), ``eps``, ``weight_decay``.
        is_weighted: as of `EmbeddingBagCollection`; weights that require gradients get them.
        device: where tables and optimizer states are stored.
        location: fbgemm's ``EmbeddingLocation``: HOST on a CPU, DEVICE on a GPU. Default: that of the device.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.
        out_of_range: as of `EmbeddingBagCollection`.

    Raises:
        ValueError: an optimizer or argument without a fused equal, a backend that refuses, tables that do not fit
            together, or another location.

    >>> table = EmbeddingBagConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> fused = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.5}, backend="native")
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3]), lengths=torch.tensor([2]))
    >>> fused(batch).values().sum().backward()
    >>> fused.state_dict()["embedding_bags.movies.weight"][:, 0].tolist()
    [0.5, 1.0, 1.0, 0.5]
    """

    tables_name = "embedding_bags"
    pooled = True

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        location: Any = None,
        backend: str | None = None,
        out_of_range: str = "error",
    ) -> None:
        check_pooling(tables)
        check_location(location, device_named(device or "cpu"))
        super().__init__(tables, optimizer_type, optimizer_kwargs, is_weighted, device, backend, out_of_range)
        self._tables = list(tables)
        self._is_weighted = is_weighted
        self._keys = [name for names in embedding_names_by_table(tables) for name in names]
        self._means = [table.pooling is PoolingType.MEAN for table in tables for _ in table.feature_names]
        self._sums = not any(self._means)
        columns = [number for number, dim in enumerate(self._dims) for _ in range(dim)]
        self._columns = torch.tensor(columns, device=self.device)  # the feature of each
        self._fewest_rows = min(table.num_embeddings for table in tables)

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; backward through the result steps the tables.

        Args:
            features: has every feature of the tables; others are not read. A variable batch must have
                ``inverse_indices``, as for `EmbeddingBagCollection`.

        Returns:
            ``[B, sum of D]``.

        Raises:
            ValueError: a feature, the weights or inverse indices are missing, or an id is out of range.
        """
        whole = self._whole(features)
        if whole is not None:
            pooled = self._look_up(None, *whole)
            return KeyedTensor(self._keys, self._dims, pooled)
        fitted = fit_features(features, self._tables, self._policy)
        bags = [bag for _, bag, _ in fitted]
        weights = None
        if self._is_weighted:
            weights = torch.cat([check_weights(bag.weights_or_none(), self._features) for bag in bags])
        lengths = to_most_bags([bag.lengths() for bag in bags])
        ids = torch.cat([bag.values() for bag in bags])
        offsets = nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        pooled = self._look_up(weights, ids, offsets, [bag.values().shape[0] for bag in bags])
        pooled = self._mean(pooled, to_most_bags([bag.lengths() for bag, _, _ in fitted]))
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            parts = zip(self._features, pooled.split(self._dims, dim=1), strict=True)
            pooled = torch.cat([to_samples(part, features, feature) for feature, part in parts], dim=1)
        return KeyedTensor(self._keys, self._dims, pooled)

    def _whole(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, list[int]] | None:
        """Ids, offsets and ids of each feature of a batch that the kernel takes as it is, else None.

        Most batches are so: keys in the tables' order, sums of plain bags, all ids in the smallest table.
        """
        if self._is_weighted or not self._sums or torch.compiler.is_compiling():
            return None
        if features.keys() != self._features or features.variable_stride_per_key():
            return None
        ids = features.values()
        if features.inverse_indices_or_none() is not None or ids.dim() != 1 or ids.is_meta or ids.numel() == 0:
            return None
        if ids.dtype not in (torch.int32, torch.int64):
            return None
        offsets = features.offsets()
        starts = offsets[:: features.stride()]
        low, high, *edges = torch.cat([torch.stack(ids.aminmax()).to(offsets.dtype), starts]).tolist()  # one wait
        if low < 0 or high >= self._fewest_rows:
            return None
        return ids, offsets, [end - start for start, end in pairwise(edges)]

    def _mean(self, pooled: Tensor, lengths: list[Tensor]) -> Tensor:
        """Divides the columns of MEAN tables by the number of ids."""
        if self._sums:
            return pooled
        divisors = [
            length.clamp(min=1) if mean else torch.ones_like(length)
            for mean, length in zip(self._means, lengths, strict=True)
        ]
        return pooled / torch.stack(divisors, dim=1).index_select(1, self._columns)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted


@EmbeddingCollectionInterface.register
@names_wrong_arguments
class FusedEmbeddingCollection(FusedCollection):
    """`EmbeddingCollection` whose backward steps the touched rows itself: no gradient, no ``optimizer.step()``.

    Outputs, keys and state dict are those of `EmbeddingCollection`; parameters as of `FusedEmbeddingBagCollection`.

    Args:
        tables: the tables.
        optimizer_type: as of `FusedEmbeddingBagCollection`.
        optimizer_kwargs: its arguments.
        device: where tables and optimizer states are stored.
        need_indices: put the batch's ids into the outputs' weights.
        location: as of `FusedEmbeddingBagCollection`.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.
        out_of_range: as of `EmbeddingCollection`.

    Raises:
        ValueError: an optimizer or argument without a fused equal, a backend that refuses, tables that do not fit
            together, or another location.

    >>> table = EmbeddingConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> fused = FusedEmbeddingCollection([table], torch.optim.SGD, {"lr": 0.25}, backend="native")
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3, 3]), lengths=torch.tensor([1, 2]))
    >>> fused(batch)["seen"].values().sum().backward()
    >>> fused.state_dict()["embeddings.movies.weight"][:, 0].tolist()
    [0.75, 1.0, 1.0, 0.5]
    """

    tables_name = "embeddings"
    pooled = False

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: Any = None,
        backend: str | None = None,
        out_of_range: str = "error",
    ) -> None:
        check_location(location, device_named(device or "cpu"))
        super().__init__(tables, optimizer_type, optimizer_kwargs, False, device, backend, out_of_range)
        self._tables = list(tables)
        self._need_indices = need_indices
        self._names = embedding_names_by_table(tables)

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch; backward through the results steps the tables.

        Args:
            features: has every feature of the tables; others, weights and inverse indices are not read.

        Returns:
            For each output key ``[N, D]`` rows with the lengths of its feature: ``[B]``, or ``[B_f]`` in a
            variable batch.

        Raises:
            ValueError: a feature is missing, or an id is out of range.
        """
        fitted = fit_features(features, self._tables, self._policy)
        ids = torch.cat([bag.values() for _, bag, _ in fitted])
        counts = [bag.values().shape[0] for _, bag, _ in fitted]
        offsets = torch.tensor([0, *accumulate(counts)]).to(ids.device, non_blocking=True)
        flat = self._look_up(None, ids, offsets, counts)
        parts = flat.split([count * dim for count, dim in zip(counts, self._dims, strict=True)])
        names = [name for names in self._names for name in names]
        outputs = {}
        for name, part, dim, (bag, _, kept) in zip(names, parts, self._dims, fitted, strict=True):
            rows = put_back(part.view(-1, dim), kept, bag.values().shape[0])
            outputs[name] = JaggedTensor._unchecked(rows, bag.values() if self._need_indices else None, bag.lengths())
        return outputs

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
        return common_dim(self._tables)

    def embedding_names_by_table(self) -> list[list[str]]:
        """For each table the keys of its outputs."""
        return self._names
