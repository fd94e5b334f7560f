"""TorchRec's plan functions where their defaults differ from this library's.

TorchRec's ``construct_module_sharding_plan`` chooses the kernel "fused" for a table with an optimizer in backward, and
"dense" for every other table: its gradient is then in ``.grad``, and an ordinary optimizer steps it. This library's
function always chooses "fused". A kernel that a generator names is kept in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from typing import Any

from recshard_lab import sharding
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ParameterSharding, ParameterShardingGenerator

_WRAPPERS = ("_embedding_module", "_embedding_bag_collection")  # attributes with the collection inside


class _DefaultKernel:
    """A generator for which no kernel was requested."""

    def __init__(self, generator: ParameterShardingGenerator) -> None:
        self.generator = generator

    def __call__(self, *args: Any) -> ParameterSharding:
        return self.generator(*args)


def _without_default_kernel(factory: Callable[..., ParameterShardingGenerator]) -> Callable[..., Any]:
    @wraps(factory)
    def generator(*args: Any, **kwargs: Any) -> Any:
        made = factory(*args, **kwargs)
        requested = signature(factory).bind(*args, **kwargs).arguments.get("compute_kernel")
        return made if requested is not None else _DefaultKernel(made)

    return generator


column_wise = _without_default_kernel(sharding.column_wise)
data_parallel = _without_default_kernel(sharding.data_parallel)
grid_shard = _without_default_kernel(sharding.grid_shard)
row_wise = _without_default_kernel(sharding.row_wise)
table_row_wise = _without_default_kernel(sharding.table_row_wise)
table_wise = _without_default_kernel(sharding.table_wise)


def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, Any],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one collection, with TorchRec's default kernels.

    Args:
        module, per_param_sharding, sharder, local_size, world_size, device_type: as of
            `recshard_lab.sharding.construct_module_sharding_plan`.

    Raises:
        PlanError: as of that function.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, "t", feature_names=["f"])])
    >>> construct_module_sharding_plan(tables, {"t": row_wise()}, world_size=2)["t"].compute_kernel
    'dense'
    """
    plan = sharding.construct_module_sharding_plan(
        module, per_param_sharding, sharder, local_size, world_size, device_type
    )
    for name, generator in per_param_sharding.items():
        if isinstance(generator, _DefaultKernel) and (plan[name].replicated or not _steps_in_backward(module, name)):
            plan[name] = plan[name].with_kernel("dense")
    return plan


def _steps_in_backward(module: Any, table: str) -> bool:
    """Whether the weight of a table has an optimizer in backward."""
    from recshard_lab.embedding import FusedCollection

    for attribute in _WRAPPERS:
        module = getattr(module, attribute, module)
    if isinstance(module, FusedCollection):
        return True
    tables = getattr(module, "embedding_bags", None) or getattr(module, "embeddings", {})
    return table in tables and hasattr(tables[table].weight, "_in_backward_optimizers")
