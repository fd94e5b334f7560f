"""Options to plans and back, and the checks of finished plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from recshard_lab.compat.planner.cache import CacheParams
from recshard_lab.compat.planner.constraints import ParameterConstraints, refuse_unsupported
from recshard_lab.compat.planner.costs import PlannerError, PlannerErrorType
from recshard_lab.compat.planner.enumerators import get_partition_by_type
from recshard_lab.compat.planner.options import PartitionByType, Shard, ShardingOption
from recshard_lab.compat.planner.topology import Topology
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    find_collections,
)
from recshard_lab.sharding import Shard as OurShard

_CACHED = str(EmbeddingComputeKernel.FUSED_UVM_CACHING)


def to_sharding_plan(sharding_options: list[ShardingOption], topology: Topology) -> ShardingPlan:
    """The plan of options with ranks.

    Args:
        sharding_options: one per table. topology: gives the devices of the placements.

    Raises:
        PlannerError: a shard without a rank, or an option that no plan can store.
    """
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in sharding_options:
        refuse_unsupported(option.name, option)
        ranks = [shard.rank for shard in option.shards if shard.rank is not None]
        if len(ranks) < option.num_shards:
            raise PlannerError(
                f"table {option.name!r} has a shard without a rank. Fix: partitioner.partition(options, topology)",
                PlannerErrorType.INVALID_RANK_ASSIGNMENT,
            )
        cache = option.cache_params if option.compute_kernel == _CACHED else None
        placed: list[OurShard] = []
        if option.sharding_type != ShardingType.DATA_PARALLEL:
            for shard in option.shards:
                (rows, cols), (top, left) = shard.size, shard.offset
                if rows and cols and shard.rank is not None:
                    placed.append(OurShard(shard.rank, (top, top + rows), (left, left + cols)))
        sharding = ParameterSharding(option.sharding_type, option.compute_kernel, ranks, None, cache, shards=placed)
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = sharding.on_devices(
            topology.compute_device, topology.local_world_size
        )
    return ShardingPlan(plan)


def options_of_plan(
    plan: ShardingPlan, module: nn.Module, sharders: Sequence[Any], batch_size: int, constraints: Mapping[str, Any]
) -> list[ShardingOption]:
    """The options of a finished plan, without costs."""
    found = {path: one for one in find_collections(module, sharders) for path in one.paths}
    made = []
    for path, tables in plan.plan.items():
        part = found[path].module
        weights = found[path].sharder.shardable_parameters(part)
        for name, sharding in tables.items():
            limit = constraints.get(name) or ParameterConstraints()
            scheme = str(sharding.sharding_type)
            known = scheme in list(ShardingType)
            shards = [Shard([s.num_rows, s.num_cols], [s.rows[0], s.cols[0]], rank=s.rank) for s in sharding.shards]
            made.append(
                ShardingOption(
                    name,
                    weights[name],
                    (path, part),
                    list(limit.pooling_factors or [1.0]),
                    batch_size,
                    scheme,
                    get_partition_by_type(scheme) if known else PartitionByType.DEVICE.value,
                    str(sharding.compute_kernel),
                    shards,
                    cache_params=None
                    if sharding.cache_params is None
                    else CacheParams(sharding.cache_params.algorithm, sharding.cache_params.load_factor),
                )
            )
    return made


def extract_plan(
    search_space: list[ShardingOption], loaded_sharding_options: dict[int, ShardingOption]
) -> list[ShardingOption]:
    """Copies of the options of a search space that a loaded plan has, with its shards.

    Args:
        search_space: of an enumerator. loaded_sharding_options: ``storage_hash`` -> option with ranks.

    Raises:
        PlannerError: of type PLAN_LOADING_FAILED, if two options of the space have one hash, or the loaded plan has an
            option that the space lacks.
    """
    found: dict[int, ShardingOption] = {}
    for option in search_space:
        key = option.storage_hash()
        if key not in loaded_sharding_options:
            continue
        if key in found:
            raise PlannerError(
                f"table {option.name!r} has two options with hash {key}. Fix: plan without plan_loader",
                PlannerErrorType.PLAN_LOADING_FAILED,
            )
        made = deepcopy(option)
        made.shards = deepcopy(loaded_sharding_options[key].shards)
        found[key] = made
    missing = [option.name for key, option in loaded_sharding_options.items() if key not in found]
    if missing:
        raise PlannerError(
            f"the loaded plan has options of table {missing[0]!r} that the enumerator does not list. Fix: plan again, "
            f"without plan_loader",
            PlannerErrorType.PLAN_LOADING_FAILED,
        )
    return list(found.values())


def validate_rank_assignment(sharding_plan: ShardingPlan, topology: Topology) -> None:
    """Checks that every shard is on a rank of the topology.

    Raises:
        PlannerError: of type INVALID_RANK_ASSIGNMENT.
    """
    for path, tables in sharding_plan.plan.items():
        for name, sharding in tables.items():
            if sharding.sharding_type == ShardingType.DATA_PARALLEL:
                continue
            if not sharding.shards:
                raise PlannerError(
                    f"table {name!r} of module {path!r} has no shards. Fix: plan.resolved(tables, world_size)",
                    PlannerErrorType.INVALID_RANK_ASSIGNMENT,
                )
            for shard in sharding.shards:
                if not 0 <= shard.rank < topology.world_size:
                    raise PlannerError(
                        f"table {name!r} of module {path!r} has a shard on rank {shard.rank} of {topology.world_size}. "
                        f"Fix: place it on a rank from 0 to {topology.world_size - 1}",
                        PlannerErrorType.INVALID_RANK_ASSIGNMENT,
                    )


def validate_compute_kernels(best_plan: list[ShardingOption]) -> None:
    """Checks that every option has a kernel that can run it.

    Raises:
        PlannerError: of type INVALID_COMPUTE_KERNEL.
    """
    known = [str(kernel) for kernel in EmbeddingComputeKernel]
    for option in best_plan:
        if option.compute_kernel not in known:
            raise PlannerError(
                f"table {option.name!r} has kernel {option.compute_kernel!r}. Fix: use one of {', '.join(known)}",
                PlannerErrorType.INVALID_COMPUTE_KERNEL,
            )


def validate_modules_inclusion_in_sharding_plan(
    sharding_plan: ShardingPlan,
    module: nn.Module,
    sharders: list[Any],
    constraints: dict[str, Any] | None = None,
    device_group: str | None = None,
) -> None:
    """Checks that the plan has every module that a sharder takes.

    Args:
        sharding_plan: the plan. module: the model. sharders: modules without parameters to shard are left out.
        constraints, device_group: only modules with a table whose constraint names `device_group`. Default: all.

    Raises:
        PlannerError: of type MISSING_MODULE_IN_PLAN.
    """
    missing = []
    for one in find_collections(module, sharders):
        tables = list(one.sharder.shardable_parameters(one.module))
        if device_group is not None:
            limits = [(constraints or {}).get(name) for name in tables]
            tables = [
                n
                for n, limit in zip(tables, limits, strict=True)
                if getattr(limit, "device_group", None) == device_group
            ]
        if tables and one.path not in sharding_plan.plan:
            missing.append(one.path)
    if missing:
        raise PlannerError(
            f"the plan lacks module {missing[0]!r}, which a sharder takes. Fix: add it, or leave its sharder out",
            PlannerErrorType.MISSING_MODULE_IN_PLAN,
        )
