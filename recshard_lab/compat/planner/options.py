"""One way to shard one table: TorchRec's `ShardingOption` and `Shard`, and how tables are partitioned."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from recshard_lab.compat.planner.costs import Perf, Storage
from recshard_lab.embedding import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface


class PartitionByType(Enum):
    """Where a partitioner places an option's shards.

    DEVICE: each on any rank. HOST: on the ranks of one node. UNIFORM: one on each rank. MULTI_HOST: on the ranks of
    several nodes.
    """

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


@dataclass
class Shard:
    """One shard of an option.

    Args:
        size, offset: rows and columns.
        storage, perf: its costs, from an estimator.
        rank: where it is placed, from a partitioner.

    >>> Shard([10, 4], [0, 0], rank=1).rank
    1
    """

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))

    def __str__(self) -> str:
        size, offset = tuple(self.size), tuple(self.offset)
        return f"Shard size: {size}, offset: {offset}, storage: {self.storage}, perf: {self.perf}, rank: {self.rank}"


class ShardingOption:
    """One way to shard one table. An enumerator makes several for each table; a plan has one of them.

    Args:
        name: of the table.
        tensor: its weights, usually on device meta.
        module: path and module that hold it.
        input_lengths: mean ids per bag, one per feature.
        batch_size: samples per rank.
        sharding_type, compute_kernel: names.
        partition_by: value of `PartitionByType`.
        shards: its shards.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode, output_dtype, key_value_params: from the
            table's constraints.
        dependency: name of another table that must be placed with this one.
        is_pooled: whether bags are pooled. Default: from the module.
        feature_names: of the table.
        num_poolings: bags per sample, one per feature.
    """

    def __init__(
        self,
        name: str,
        tensor: torch.Tensor,
        module: tuple[str, nn.Module],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: Any = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: Any = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: Any = None,
        key_value_params: Any = None,
        num_poolings: list[float] | None = None,
    ) -> None:
        self.name, self.tensor, self.module = name, tensor, module
        self.input_lengths, self.batch_size, self.num_poolings = input_lengths, batch_size, num_poolings
        self.sharding_type, self.partition_by, self.compute_kernel = sharding_type, partition_by, compute_kernel
        self.shards, self.cache_params, self.enforce_hbm = shards, cache_params, enforce_hbm
        self.stochastic_rounding, self.bounds_check_mode = stochastic_rounding, bounds_check_mode
        self.dependency, self.feature_names = dependency, feature_names
        self.output_dtype, self.key_value_params = output_dtype, key_value_params
        self._is_pooled = is_pooled

    @property
    def fqn(self) -> str:
        """Path of the table: its module's path and its name."""
        return f"{self.path}.{self.name}"

    @property
    def path(self) -> str:
        """Path of the module."""
        return self.module[0]

    @property
    def cache_load_factor(self) -> float | None:
        """Cached share of the rows; None without `cache_params`."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Number of features."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """The sum over shards, in bytes."""
        return reduce(add, (shard.storage or Storage(0, 0) for shard in self.shards), Storage(0, 0))

    @property
    def total_perf(self) -> float:
        """The sum over shards, in ms."""
        return sum((shard.perf.total for shard in self.shards if shard.perf is not None), 0.0)

    @property
    def is_pooled(self) -> bool:
        """Whether bags are pooled."""
        if self._is_pooled is None:
            self._is_pooled = self.module_pooled(self.module[1], self.name)
        return self._is_pooled

    @staticmethod
    def module_pooled(module: nn.Module, sharding_option_name: str) -> bool:
        """Whether the module that holds a table pools its bags.

        Args:
            module: an embedding collection, or a module around it.
            sharding_option_name: name of the table.
        """
        parts = [module, *(part for _, part in module.named_children())]
        for part in parts:
            if isinstance(part, EmbeddingCollectionInterface):
                return False
            if isinstance(part, EmbeddingBagCollectionInterface):
                return True
        return not any(name == sharding_option_name for name, _ in module.named_children())

    @property
    def module_type_key(self) -> str:
        """Name of the module's class, the key of a sharder."""
        kind = type(self.module[1])
        return f"{kind.__module__}.{kind.__name__}"

    @property
    def has_feature_processor(self) -> bool:
        """Whether the module applies feature processors to its input."""
        return hasattr(self.module[1], "_feature_processors") or "FeatureProcessed" in type(self.module[1]).__name__

    def get_shards_assignment(self) -> list[int | None]:
        """The rank of each shard."""
        return [shard.rank for shard in self.shards]

    def storage_hash(self) -> int:
        """A hash of table, scheme, kernel and columns of a shard. It is equal in every process."""
        columns = min(shard.size[1] for shard in self.shards) if self.shards else 0
        key = (self.fqn, self.sharding_type, self.compute_kernel, columns)
        return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")

    def __hash__(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards), str(self.cache_params)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ShardingOption) and hash(self) == hash(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        """A copy with its own shards and cache parameters. Tensor and module are shared."""
        made = copy(self)
        made.shards, made.cache_params = deepcopy(self.shards, memo), deepcopy(self.cache_params, memo)
        return made

    def __str__(self) -> str:
        lines = [
            f"name: {self.name}",
            f"sharding type: {self.sharding_type}",
            f"compute kernel: {self.compute_kernel}",
            f"num shards: {self.num_shards}",
            *(f"\t{shard}" for shard in self.shards),
        ]
        return "\n".join(lines)


def reset_shard_rank(proposal: Sequence[ShardingOption]) -> None:
    """Removes the ranks of all shards of a proposal."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None
