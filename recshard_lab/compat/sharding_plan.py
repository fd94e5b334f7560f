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


class _Generator:
    """A generator, with what its factory was called with.

    Args:
        generator: the generator.
        requests: its factory's arguments.
    """

    def __init__(self, generator: ParameterShardingGenerator, requests: Mapping[str, Any]) -> None:
        self.generator = generator
        self.has_kernel = requests.get("compute_kernel") is not None
        devices = requests.get("device_types") or [requests.get("device")]
        self.devices = {str(device) for device in devices if device is not None}

    def __call__(self, *args: Any) -> ParameterSharding:
        return self.generator(*args)


def _with_requests(factory: Callable[..., ParameterShardingGenerator]) -> Callable[..., Any]:
    @wraps(factory)
    def generator(*args: Any, **kwargs: Any) -> Any:
        return _Generator(factory(*args, **kwargs), signature(factory).bind(*args, **kwargs).arguments)

    return generator


column_wise = _with_requests(sharding.column_wise)
data_parallel = _with_requests(sharding.data_parallel)
grid_shard = _with_requests(sharding.grid_shard)
row_wise = _with_requests(sharding.row_wise)
table_row_wise = _with_requests(sharding.table_row_wise)
table_wise = _with_requests(sharding.table_wise)


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
        spec = plan[name].sharding_spec
        found = {str(shard.placement.device().type) for shard in spec.shards} if spec is not None else set()
        other: set[str] = getattr(generator, "devices", set()) - found
        if found and other:
            raise sharding.PlanError(
                f"table {name!r} is requested on {min(other)!r}, and the plan is for {min(found)!r}: all shards are on "
                f"one device type. Fix: pass device_type={min(other)!r}, or omit the device of the table"
            )
        if (
            isinstance(generator, _Generator)
            and not generator.has_kernel
            and (plan[name].replicated or not _steps_in_backward(module, name))
        ):
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
