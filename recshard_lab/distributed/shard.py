"""Sharding without the wrapper: one collection by a plan written for it, or every collection inside a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, agreed
from recshard_lab.distributed.model_parallel import DistributedModelParallel
from recshard_lab.distributed.sharded_collections import ShardedCollection
from recshard_lab.distributed.sharders import CollectionSharder, default_sharders
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
    """The sharded twin of one embedding collection. All ranks must call it.

    Args:
        module: the collection; it stays as it is.
        plan: table name -> its sharding or a generator of one (`row_wise()`), or one generator for every table.
        env: the ranks; the default process group, or this process alone, when left out.
        device: where the tables live; as of `CollectionSharder.shard` when left out.
        sharder: how; the default one of this kind of collection when left out.

    Raises:
        PlanError: a plan that cannot be.
        ValueError: a module that no sharder is for.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, row_wise
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> shard(EmbeddingBagCollection([table]), row_wise()).shardings["t"].sharding_type
    'row_wise'
    """
    env = env if env is not None else ShardingEnv.default()

    def planned() -> tuple[CollectionSharder, Mapping[str, ParameterSharding]]:
        found = sharder or next((s for s in default_sharders() if type(module) is s.module_type), None)
        if found is None:
            kinds = ", ".join(s.module_type.__name__ for s in default_sharders())
            raise ValueError(
                f"no sharder is for {type(module).__name__}: it is none of {kinds}. Fix: pass sharder=, or one of these"
            )
        entries: Mapping[str, Any] = apply_to_all(module, plan) if callable(plan) else plan
        generators = {name: _always(entry) for name, entry in entries.items()}
        local = env.local_world_size
        return found, construct_module_sharding_plan(
            module, generators, found, local_size=local, world_size=env.world_size
        )

    found, params = agreed(env, planned)
    return found.shard(module, params, env, device)


def _always(entry: Any) -> ParameterShardingGenerator:
    """A generator that gives a sharding that is there already."""
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
    sharders: Sequence[CollectionSharder] | None = None,
    init_params: bool = False,
) -> nn.Module:
    """Replaces every embedding collection inside a model by its sharded twin; the dense rest is not replicated.

    Args:
        module: the model, changed in place; a collection by itself has its twin returned.
        env: the ranks; the default process group, or this process alone, when left out.
        device: where the model lives; this rank's GPU with NCCL, the CPU otherwise.
        plan: planned on rank 0 when left out.
        sharders: which collections, and how.
        init_params: draw dense weights on ``meta``.

    Raises:
        PlanError: a plan that cannot be.
    """
    made = DistributedModelParallel(
        module, env, device, plan, sharders, init_data_parallel=False, init_parameters=init_params
    )
    return made.module
