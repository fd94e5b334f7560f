"""Sharding without `DistributedModelParallel`: one collection, or every collection inside a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, agreed
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.sharders import CollectionSharder, ModuleSharder, default_sharders
from recshard_lab.sharding import (
    ParameterSharding,
    ParameterShardingGenerator,
    PlanError,
    ShardingPlan,
    apply_to_all,
    construct_module_sharding_plan,
)


def shard(
    module: nn.Module,
    plan: Mapping[str, ParameterSharding] | Mapping[str, ParameterShardingGenerator] | ParameterShardingGenerator,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    sharder: CollectionSharder | None = None,
) -> ShardedCollection:
    """Shards one embedding collection. Collective.

    Args:
        module: the collection, which is not changed.
        plan: table name -> sharding or generator (`row_wise()`), or one generator for every table.
        env: the ranks. Default: the default process group, or this process alone.
        device: device of the tables. Default: as in `CollectionSharder.shard`.
        sharder: the sharder. Default: that of this collection type.

    Raises:
        PlanError: an invalid plan.
        ValueError: no sharder supports the module.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, row_wise
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> shard(EmbeddingBagCollection([table]), row_wise()).shardings["t"].sharding_type
    'row_wise'
    """
    env = env if env is not None else ShardingEnv.default()

    def planned() -> tuple[CollectionSharder, Mapping[str, ParameterSharding]]:
        chosen = sharder or next((s for s in default_sharders() if type(module) is s.module_type), None)
        if chosen is None:
            kinds = ", ".join(s.module_type.__name__ for s in default_sharders())
            raise ValueError(
                f"no sharder supports {type(module).__name__}. Fix: pass sharder=, or a module of type {kinds}"
            )
        entries: Mapping[str, Any] = apply_to_all(module, plan) if callable(plan) else plan
        generators = {name: _always(entry) for name, entry in entries.items()}
        local = env.local_world_size
        return chosen, construct_module_sharding_plan(
            module, generators, chosen, local_size=local, world_size=env.world_size
        )

    chosen, params = agreed(env, planned)
    return chosen.shard(module, params, env, device)


def _always(entry: Any) -> ParameterShardingGenerator:
    """A generator that returns the sharding ``entry``, or ``entry`` itself if it is a generator."""
    if isinstance(entry, ParameterSharding):
        return lambda table, topology: entry.resolved(table, topology.world_size, topology.local_world_size)
    if not callable(entry):
        raise PlanError(
            f"a table's entry in the plan must be a ParameterSharding or a generator such as row_wise(), got {entry!r}"
        )
    return entry


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replaces every embedding collection inside a model with a sharded one. The dense part is not replicated.

    Args:
        module: the model, changed in place. For a bare collection, the sharded one is returned.
        env: the ranks. Default: the default process group, or this process alone.
        device: device of the model. Default: this rank's GPU with NCCL, otherwise the CPU.
        plan: the plan. Default: planned on rank 0.
        sharders: sharders of the collections.
        init_params: whether to initialize dense weights on ``meta``.

    Raises:
        PlanError: an invalid plan.
    """
    dmp = DistributedModelParallel(
        module, env, device, plan, sharders, init_data_parallel=False, init_parameters=init_params
    )
    return dmp.module
