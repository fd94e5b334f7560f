"""Lists the options of every table: each allowed scheme and kernel, with even shards and their costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from recshard_lab.compat.distributed.shard_sizes import calculate_shard_sizes_and_offsets
from recshard_lab.compat.planner.base import Constraints, Enumerator, ShardEstimator
from recshard_lab.compat.planner.constants import BATCH_SIZE, POOLING_FACTOR
from recshard_lab.compat.planner.constraints import ParameterConstraints
from recshard_lab.compat.planner.estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from recshard_lab.compat.planner.options import PartitionByType, Shard, ShardingOption
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.compat.planner.utils import build_sharder_data_map, sharder_name
from recshard_lab.embedding import EmbeddingBagCollectionInterface
from recshard_lab.sharding import EmbeddingComputeKernel, ShardingType, scheme_names, sharder_of

_PARTITION_BY = {
    ShardingType.TABLE_WISE: PartitionByType.DEVICE,
    ShardingType.COLUMN_WISE: PartitionByType.DEVICE,
    ShardingType.TABLE_ROW_WISE: PartitionByType.HOST,
    ShardingType.TABLE_COLUMN_WISE: PartitionByType.HOST,
    ShardingType.ROW_WISE: PartitionByType.UNIFORM,
    ShardingType.DATA_PARALLEL: PartitionByType.UNIFORM,
    ShardingType.GRID_SHARD: PartitionByType.MULTI_HOST,
}
GUARDED_SHARDING_TYPES_FOR_FP_MODULES = {
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}
_KERNELS = [str(kernel) for kernel in EmbeddingComputeKernel if kernel != EmbeddingComputeKernel.DENSE]


def get_partition_by_type(sharding_type: str) -> str:
    """Where the shards of a scheme are placed, as value of `PartitionByType`.

    Raises:
        ValueError: an unknown scheme.

    >>> get_partition_by_type("table_row_wise")
    'host'
    """
    if sharding_type not in list(ShardingType):
        raise ValueError(f"sharding type {sharding_type!r} does not exist. Fix: use one of {', '.join(ShardingType)}")
    return _PARTITION_BY[ShardingType(sharding_type)].value


def default_sharding_types(module: nn.Module, compute_device: str) -> list[str]:
    """The schemes that TorchRec's sharder of a collection allows on a device, in its order."""
    names = ShardingType
    found = [names.DATA_PARALLEL, names.TABLE_WISE, names.COLUMN_WISE]
    if not isinstance(module, EmbeddingBagCollectionInterface):
        return [str(name) for name in (*found, names.ROW_WISE)]
    found.append(names.TABLE_COLUMN_WISE)
    on_gpus = (names.ROW_WISE, names.TABLE_ROW_WISE, names.GRID_SHARD) if compute_device != "cpu" else ()
    return [str(name) for name in (*found, *on_gpus)]


class EmbeddingEnumerator(Enumerator):
    """Lists the options of every table.

    A sharder's ``sharding_types`` and ``compute_kernels`` restrict them if you override these methods. Otherwise the
    schemes are those of TorchRec's sharders. A scheme that a table's constraint names is listed on every device.

    Args:
        topology: the devices. batch_size: samples per rank. constraints: table name -> constraints.
        estimator: sets costs. Default: `EmbeddingPerfEstimator` and `EmbeddingStorageEstimator`.
        use_exact_enumerate_order: whether tables come in the module's order. Default: the last module first.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from recshard_lab.distributed import EmbeddingBagCollectionSharder
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])
    >>> listed = EmbeddingEnumerator(Topology(2, "cpu"), 64)
    >>> options = listed.enumerate(EmbeddingBagCollection([table]), [EmbeddingBagCollectionSharder()])
    >>> [(option.sharding_type, option.compute_kernel, option.num_shards) for option in options][:2]
    [('data_parallel', 'dense', 2), ('table_wise', 'fused', 1)]
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        self._topology, self._batch_size, self._constraints = topology, batch_size, constraints
        self._exact_order = bool(use_exact_enumerate_order)
        if not estimator:
            estimator = [
                EmbeddingPerfEstimator(topology=topology, constraints=constraints),
                EmbeddingStorageEstimator(topology=topology, constraints=constraints),
            ]
        self._estimators = estimator if isinstance(estimator, list) else [estimator]
        self.sharder_map: dict[str, Any] = {}
        self.last_stored_search_space: list[ShardingOption] | None = None

    def enumerate(self, module: nn.Module, sharders: list[Any]) -> list[ShardingOption]:
        """The options of every table of the modules that a sharder takes, with costs.

        Raises:
            RuntimeError: no scheme and kernel is left for a table.
        """
        self.sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        found = [
            option
            for path, part, sharder in self._sharded(module, sharders)
            for name, tensor in sharder.shardable_parameters(part).items()
            for option in self._options(path, part, sharder, name, tensor)
        ]
        self.populate_estimates(found)
        self.last_stored_search_space = list(found)
        return found

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Sets costs of options by the estimators."""
        data = build_sharder_data_map(self.sharder_map)
        for estimator in self._estimators:
            estimator.estimate(sharding_options, data)

    def _sharded(self, module: nn.Module, sharders: list[Any]) -> Iterator[tuple[str, nn.Module, Any]]:
        """Modules that a sharder takes; parts of them are not visited."""
        waiting: list[tuple[str, nn.Module]] = [("", module)]
        while waiting:
            path, part = waiting.pop(0 if self._exact_order else -1)
            sharder = sharder_of(part, sharders)
            if sharder is not None:
                self.sharder_map[sharder_name(type(part))] = sharder
                yield path, part, sharder
                continue
            children = [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]
            waiting = children + waiting if self._exact_order else waiting + children

    def _options(
        self, path: str, module: nn.Module, sharder: Any, name: str, tensor: torch.Tensor
    ) -> list[ShardingOption]:
        limit = (self._constraints or {}).get(name) or ParameterConstraints()
        made = []
        for scheme in self._schemes(module, sharder, limit):
            for kernel in self._kernels(sharder, scheme, limit):
                shards = [
                    Shard(size, offset)
                    for size, offset in even_shards(
                        scheme,
                        tensor,
                        self._topology.world_size,
                        self._topology.local_world_size,
                        limit.min_partition,
                    )
                ]
                made.append(
                    ShardingOption(
                        name,
                        tensor,
                        (path, module),
                        list(limit.pooling_factors or [POOLING_FACTOR]),
                        self._batch_size,
                        scheme,
                        get_partition_by_type(scheme),
                        kernel,
                        shards,
                        cache_params=limit.cache_params,
                        enforce_hbm=getattr(limit, "enforce_hbm", None),
                        stochastic_rounding=getattr(limit, "stochastic_rounding", None),
                        bounds_check_mode=getattr(limit, "bounds_check_mode", None),
                        feature_names=getattr(limit, "feature_names", None),
                        output_dtype=getattr(limit, "output_dtype", None),
                        key_value_params=getattr(limit, "key_value_params", None),
                    )
                )
        if not made:
            raise RuntimeError(
                f"table {name!r} has no scheme and kernel left on {self._topology.compute_device!r}: its constraint "
                f"has sharding_types={limit.sharding_types} and compute_kernels={limit.compute_kernels}, and "
                f"{type(sharder).__name__} allows others. Fix: relax the constraint"
            )
        return made

    def _schemes(self, module: nn.Module, sharder: Any, limit: ParameterConstraints) -> list[str]:
        device, named = self._topology.compute_device, limit.sharding_types
        allowed = [str(name) for name in sharder.sharding_types(device)]
        if set(allowed) >= set(scheme_names()):  # the sharder does not restrict
            if named:
                return [str(name) for name in named if name in list(ShardingType)]
            allowed = default_sharding_types(module, device)
        if named:
            return [name for name in allowed if name in named]
        return [name for name in allowed if name in list(ShardingType) and name != ShardingType.GRID_SHARD]

    def _kernels(self, sharder: Any, scheme: str, limit: ParameterConstraints) -> list[str]:
        device = self._topology.compute_device
        allowed = [str(name) for name in sharder.compute_kernels(scheme, device)]
        if set(allowed) >= {*_KERNELS, str(EmbeddingComputeKernel.DENSE)}:  # the sharder does not restrict
            if scheme == ShardingType.DATA_PARALLEL:
                allowed = [str(EmbeddingComputeKernel.DENSE)]
            else:
                allowed = _KERNELS if device == "cuda" else [str(EmbeddingComputeKernel.FUSED)]
        kernels = [name for name in allowed if limit.compute_kernels is None or name in limit.compute_kernels]
        if getattr(limit, "enforce_hbm", None) and len(kernels) > 1:
            kernels = [name for name in kernels if name != EmbeddingComputeKernel.FUSED_UVM]
        return kernels


def even_shards(
    sharding_type: str,
    tensor: torch.Tensor,
    world_size: int,
    local_world_size: int,
    min_partition: int | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Sizes and offsets of a scheme's shards.

    Columns are split into shards of `min_partition` (128) if it divides them. Rows are split evenly, rounded up, over
    all ranks or over those of a node; ranks without rows get empty shards.
    """
    shards = calculate_shard_sizes_and_offsets(tensor, world_size, local_world_size, sharding_type, min_partition)
    return [(list(size), list(offset)) for size, offset in zip(*shards, strict=True)]
