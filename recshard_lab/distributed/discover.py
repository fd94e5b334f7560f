"""Facts that must be equal on all ranks, for `comm.refuse_differences`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from recshard_lab.embedding.optimizers import spec_of_parameter
from recshard_lab.sharding import Found, ShardingPlan

Facts = dict[str, Any]


def plan_facts(plan: ShardingPlan | None) -> Facts:
    """Every field of every table's sharding; one fact if the plan is None.

    >>> from recshard_lab import ParameterSharding, Shard
    >>> facts = plan_facts(ShardingPlan({"": {"t": ParameterSharding("custom", shards=[Shard(0, (0, 9), (0, 4))])}}))
    >>> facts["route of table 't' in module ''"]
    'direct'
    """
    if plan is None:
        return {"plan": None}
    facts: Facts = {}
    for path, shardings in plan.plan.items():
        for table, sharding in shardings.items():
            fields = {field: getattr(sharding, field) for field in _FIELDS}
            fields["shards"] = [(shard.rank, shard.rows, shard.cols, shard.tier) for shard in sharding.shards]
            facts |= {f"{field} of table {table!r} in module {path!r}": value for field, value in fields.items()}
    return facts


_FIELDS = ("sharding_type", "compute_kernel", "route", "cache_params", "shards", "ranks")


def module_facts(one: Found) -> Facts:
    """Type and tables of a module to shard; dtype, fused optimizer and ``requires_grad`` of each of its weights."""
    place, default = f"module {one.path!r}", getattr(one.sharder, "spec", None)
    facts: Facts = {f"type of {place}": type(one.module).__name__}
    for config in one.tables:
        facts |= {f"{field} of table {config.name!r} in {place}": value for field, value in vars(config).items()}
    for name, weight in one.sharder.shardable_parameters(one.module).items():
        table = f"table {name!r} in {place}"
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

    kinds = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    tensors = {f"{kind} {name!r}": own for kind, named in kinds.items() for name, own in named if is_dense(name)}
    return {name: (tuple(own.shape), str(own.dtype), own.requires_grad) for name, own in tensors.items()}


def sharder_facts(sharder: Any) -> Facts:
    """The settings of a sharder."""
    name = type(sharder).__name__
    return {f"{field} of {name}": value for field, value in vars(sharder).items()}


def refuse_unshardable(found: Sequence[Found]) -> None:
    """Raises ValueError for what sharding would change: modules and tensors that a model has twice, or other forwards.

    Of modules without a sharder of the library, only the names are checked.
    """
    for one in found:
        kind = type(one.module)
        if one.paths[1:]:
            raise ValueError(
                f"{kind.__name__} {one.path!r} is also {one.paths[1]!r} in the model: sharding would replace it under "
                f"one name and leave its unsharded tables under the other. Fix: register it once, and pass its output "
                f"to the modules that use it"
            )
        if not hasattr(one.sharder, "spec"):
            continue
        known = one.sharder.module_type
        for first, second in one.tied:
            raise ValueError(
                f"{first!r} and {second!r} are one tensor: sharding would split the table's and leave the other as it "
                f"is, so both would train apart. Fix: give them separate parameters, or do not shard the collection"
            )
        if kind.forward is not known.forward:
            raise ValueError(
                f"{kind.__name__} {one.path!r} has a forward that its sharded {known.__name__} would not run. Fix: "
                f"pass a sharder of {kind.__name__}, or call the {known.__name__} from a module around it"
            )
