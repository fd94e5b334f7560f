"""Facts that must be equal on all ranks, for `comm.refuse_differences`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recshard_lab.embedding import BaseEmbeddingConfig, OptimizerSpec
from recshard_lab.embedding.optimizers import spec_of_parameter
from recshard_lab.sharding import ParameterSharding, ShardingPlan

Facts = dict[str, Any]


def plan_facts(plan: ShardingPlan | None) -> Facts:
    """Every field of every table's sharding; one fact if the plan is None.

    >>> from recshard_lab import Shard
    >>> facts = plan_facts(ShardingPlan({"": {"t": ParameterSharding("custom", shards=[Shard(0, (0, 9), (0, 4))])}}))
    >>> facts["route of table 't' in module ''"]
    'direct'
    """
    if plan is None:
        return {"plan": None}
    return {
        f"{field} of table {table!r} in module {path!r}": value
        for path, shardings in plan.plan.items()
        for table, sharding in shardings.items()
        for field, value in _sharding_facts(sharding).items()
    }


def _sharding_facts(sharding: ParameterSharding) -> Facts:
    return {
        "sharding_type": sharding.sharding_type,
        "compute_kernel": sharding.compute_kernel,
        "route": sharding.route,
        "cache_params": sharding.cache_params,
        "shards": [(shard.rank, shard.rows, shard.cols, shard.tier) for shard in sharding.shards],
        "ranks": sharding.ranks,
    }


def table_facts(path: str, tables: Sequence[BaseEmbeddingConfig]) -> Facts:
    """The configuration of every table of a collection."""
    return {
        f"{field} of table {config.name!r} in module {path!r}": value
        for config in tables
        for field, value in vars(config).items()
    }


def weight_facts(path: str, weights: Mapping[str, nn.Parameter], default: OptimizerSpec | None) -> Facts:
    """Dtype, fused optimizer and ``requires_grad`` of every unsharded table.

    Args:
        path: path of the collection.
        weights: table name -> parameter.
        default: the sharder's optimizer, for tables without one.
    """
    facts: Facts = {}
    for name, weight in weights.items():
        table = f"table {name!r} in module {path!r}"
        facts[f"number format of {table}"] = str(weight.dtype)
        facts[f"optimizer of {table}"] = spec_of_parameter(weight) or default
        facts[f"requires_grad of {table}"] = weight.requires_grad
    return facts


def dense_facts(module: nn.Module, sharded: set[str]) -> Facts:
    """Shape, dtype and ``requires_grad`` of the replicated parameters and buffers.

    Args:
        module: the model.
        sharded: paths of the sharded collections.
    """

    def is_dense(name: str) -> bool:
        return not any(path == "" or name.startswith(f"{path}.") for path in sharded)

    parameters = {
        f"parameter {name!r}": (tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters()
        if is_dense(name)
    }
    buffers = {
        f"buffer {name!r}": (tuple(b.shape), str(b.dtype)) for name, b in module.named_buffers() if is_dense(name)
    }
    return parameters | buffers


def sharder_facts(sharder: Any) -> Facts:
    """The settings of a sharder."""
    name = type(sharder).__name__
    return {f"{field} of {name}": value for field, value in vars(sharder).items()}


# Refuses collections and parameters that a model has twice: sharding replaces one of them, and the other stays.


def refuse_second_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if the model has one of these modules under a second name.

    Args:
        model: has the modules.
        modules: path -> module that is to be replaced.
    """
    paths: dict[int, str] = {}
    for path, module in modules.items():
        paths.setdefault(id(module), path)
    for path, module in model.named_modules(remove_duplicate=False):
        first = paths.get(id(module), path)
        if first != path:
            raise ValueError(
                f"{type(module).__name__} {first!r} is also {path!r} in the model: sharding would replace it under one "
                f"name and leave its unsharded tables under the other. Fix: register it once, and pass its output to "
                f"the modules that use it"
            )


def refuse_second_owners(model: nn.Module, collections: Mapping[str, nn.Module]) -> None:
    """Raises ValueError if the model has a parameter or buffer of one of these collections under a second name.

    Args:
        model: has the collections.
        collections: path -> collection that is to be sharded.
    """
    tensors = {id(tensor) for own in collections.values() for tensor in (*own.parameters(), *own.buffers())}
    names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in tensors and names.setdefault(id(tensor), name) != name:
            raise ValueError(
                f"{names[id(tensor)]!r} and {name!r} are one tensor: sharding would split the table's and leave the "
                f"other as it is, so both would train apart. Fix: give them separate parameters, or do not shard the "
                f"collection"
            )
