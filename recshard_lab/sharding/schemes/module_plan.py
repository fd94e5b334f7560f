"""The modules of a model to shard, and plans by hand: ``construct_module_sharding_plan(ebc, {"t": row_wise()})``."""

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.cores import local_world_size
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.interrupts import uninterrupted
from recshard_lab.sharding.hardware.topology import Topology
from recshard_lab.sharding.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan
from recshard_lab.sharding.plan.types import PlanError, nearest
from recshard_lab.sharding.schemes.generators import ParameterShardingGenerator


@names_wrong_arguments
def construct_module_sharding_plan(
    module: Any,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: Any = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """The plan of one embedding collection, table by table.

    Args:
        module: anything with ``embedding_bag_configs()`` or ``embedding_configs()``; or a module of `sharder`.
        per_param_sharding: table name -> `table_wise(...)`, `row_wise(...)`, ...; every table once.
        sharder: names the tables of a module that does not have them itself. For others the plan does not depend
            on it.
        local_size: ranks per node. Default: ``LOCAL_WORLD_SIZE``, otherwise all ranks.
        world_size: number of ranks. Default: that of the process group, or 1 without one.
        device_type: "cpu" or "cuda", in the placements of each ``sharding_spec``. Default: where ranks compute.

    Raises:
        PlanError: a table without a generator, an unknown table, or a scheme that cannot split its table.
    """
    tables = _tables_of(module, sharder)
    names = [table.name for table in tables]
    for name in per_param_sharding:
        if name not in names:
            raise PlanError(f"table {name!r} does not exist{nearest(name, names)}; tables: {', '.join(names)}")
    world_size = running_world_size() if world_size is None else world_size
    local_size = local_world_size(world_size) if local_size is None else local_size
    topology = Topology(
        world_size, compute_device=device_type or _running_device(local_size), local_world_size=local_size
    )
    plan = EmbeddingModuleShardingPlan()
    for table in tables:
        if table.name not in per_param_sharding:
            raise PlanError(f"table {table.name!r} has no sharding. Fix: {{{table.name!r}: table_wise(rank=0)}}")
        sharding = per_param_sharding[table.name](table, topology)
        plan[table.name] = sharding.on_devices(topology.compute_device, local_size)
    ShardingPlan({"": plan}).validate(tables, world_size)
    return plan


@names_wrong_arguments
def apply_to_all(
    module: Any, parameter_sharding_generator: ParameterShardingGenerator, sharder: Any = None
) -> dict[str, ParameterShardingGenerator]:
    """One generator for every table of `module`, for `construct_module_sharding_plan`.

    Raises:
        PlanError: `module` is not an embedding collection.
    """
    return {table.name: parameter_sharding_generator for table in _tables_of(module, sharder)}


def _tables_of(module: Any, sharder: Any) -> list[BaseEmbeddingConfig]:
    if sharder is not None and not hasattr(sharder, "module_type"):
        raise ValueError(f"sharder is {sharder!r:.80}, expected a sharder. Fix: omit it, or pass one of this module")
    tables = configs_of(module, sharder_of(module, [] if sharder is None else [sharder]))
    if tables is None:
        raise PlanError(
            f"{type(module).__name__} has neither embedding_bag_configs() nor embedding_configs(). "
            f"Fix: pass a collection, or sharder= of this module"
        )
    return tables


def configs_of(module: Any, sharder: Any = None) -> list[BaseEmbeddingConfig] | None:
    """The tables of an embedding collection, or those that its sharder names; None for other modules."""
    for method in ("planned_configs", "embedding_bag_configs", "embedding_configs"):
        if callable(getattr(module, method, None)):
            return list(getattr(module, method)())
    return list(sharder.tables(module)) if hasattr(sharder, "tables") else None


def sharder_of(module: Any, sharders: Iterable[Any]) -> Any:
    """The sharder of a module's class, otherwise of its nearest base class; None without one. The last of a type wins.

    >>> from types import SimpleNamespace
    >>> sharder_of(True, [SimpleNamespace(module_type=kind) for kind in (object, int)]).module_type
    <class 'int'>
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return next((by_type[kind] for kind in type(module).__mro__ if kind in by_type), None)


class Found(NamedTuple):
    """A module of a model that can be sharded.

    Attributes:
        paths: all of its names in the model, the first one as of ``model.named_modules()``.
        module: the module.
        sharder: its sharder, as of `sharder_of`; None if no sharders were passed.
        tables: the tables of an embedding collection, or those that its sharder names.
        model: the model.
    """

    paths: list[str]
    module: Any
    sharder: Any
    tables: list[BaseEmbeddingConfig]
    model: Any

    @property
    def path(self) -> str:
        """The first of its names."""
        return self.paths[0]

    @property
    def frozen(self) -> list[str]:
        """Names in the module of its parameters with ``requires_grad=False``."""
        return [name for name, parameter in self.module.named_parameters() if not parameter.requires_grad]

    @property
    def tied(self) -> list[tuple[str, str]]:
        """Pairs of names in the model of one parameter or buffer of this module, without those of its other paths."""

        def named(module: Any) -> list[tuple[str, Any]]:
            parameters = module.named_parameters(remove_duplicate=False)
            return [*parameters, *module.named_buffers(remove_duplicate=False)]

        own, first, pairs = named(self.module), dict[int, str](), []
        ids, copies = {id(t) for _, t in own}, {f"{path}.{name}" for path in self.paths[1:] for name, _ in own}
        for name, tensor in named(self.model):
            if id(tensor) in ids and name not in copies and first.setdefault(id(tensor), name) != name:
                pairs.append((first[id(tensor)], name))
        return pairs


def find_collections(
    model: Any, sharders: Sequence[Any] | None = None, planned: Container[str] | None = None
) -> list[Found]:
    """The outermost modules to shard, each once with all of its names. What is inside of one is not searched.

    Args:
        model: a torch module. Names in a `DistributedModelParallel` are those of the model inside it.
        sharders: find modules of their types and of subclasses. Default: all embedding collections with tables.
        planned: the paths in a plan. A module that is no embedding collection is found only at one of these.
            Default: everywhere.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> import torch
    >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])
    >>> [found.paths for found in find_collections(torch.nn.ModuleDict({"a": ebc, "b": ebc}))]
    [['a', 'b']]
    """
    model = getattr(model, "_bare", model)
    found: dict[int, Found] = {}
    outer: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if any(path.startswith(f"{other}." if other else "") for other in outer):
            continue
        sharder = sharder_of(module, sharders or ())
        tables = configs_of(module, sharder)
        other_module = planned is not None and path not in planned and configs_of(module) is None
        if (not tables if sharders is None else sharder is None) or other_module:
            continue
        outer.append(path)
        found.setdefault(id(module), Found([], module, sharder, tables or [], model)).paths.append(path)
    return list(found.values())


def running_world_size() -> int:
    """Ranks of the default process group, or 1 without one."""
    with uninterrupted():
        import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _running_device(local_size: int) -> str:
    """The kind of device where ranks compute: "cuda" unless it is a CPU."""
    with uninterrupted():
        import torch

    device = os.environ.get("RECSHARD_DEVICE") or ("cuda" if torch.cuda.device_count() >= local_size else "cpu")
    return "cpu" if device.startswith("cpu") else "cuda"


def running_topology() -> Topology:
    """The ranks of the running process group, 1 without a group, on the devices where they compute.

    The launcher names a rank's device. Without a launcher it is cuda if each rank of the node can have a GPU.
    """
    with uninterrupted():
        import torch

    world_size = running_world_size()
    local = local_world_size(world_size)
    device = os.environ.get("RECSHARD_DEVICE") or ("cuda" if torch.cuda.device_count() >= local else "cpu")
    return Topology(world_size, compute_device=device.partition(":")[0], local_world_size=local)
