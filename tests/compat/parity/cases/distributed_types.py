"""Types and helpers of `torchrec.distributed`: awaitables, enumerations, environments, codecs, small functions."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed import types as T
from torchrec.distributed import utils as U
from torchrec.distributed.embedding_types import KJTList, ListOfKJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from tests.compat.parity.case import case, raised

TYPES, UTILS = "torchrec.distributed.types", "torchrec.distributed.utils"


def members(kind: Any) -> dict[str, Any]:
    return {member.name: member.value for member in kind}


class Numbers(T.Awaitable[list[int]]):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _wait_impl(self) -> list[int]:
        self.waits += 1
        return [1, 2, 3]


class LazyOnes(T.LazyAwaitable[torch.Tensor]):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _wait_impl(self) -> torch.Tensor:
        self.waits += 1
        return torch.ones(2)


@case(f"{TYPES}.Awaitable", f"{TYPES}.NoWait")
def awaitables() -> Any:
    own = Numbers()
    own.callbacks.append(lambda result: [2 * number for number in result])
    return {"own": own.wait(), "waits": own.waits, "no wait": T.NoWait(5).wait(), "callbacks": len(own.callbacks)}


@case(f"{TYPES}.LazyAwaitable", f"{TYPES}.LazyNoWait")
def lazy_awaitables() -> Any:
    own = LazyOnes()
    before = own.waits
    return {
        "before": before,
        "sum": (own + 1) * 2,
        "shape": list(own.shape),
        "function": torch.cat([own, own]),
        "waits": own.waits,
        "no wait": T.LazyNoWait(torch.zeros(1)) + 1,
    }


@case(
    f"{TYPES}.ComputeDevice",
    f"{TYPES}.EmbeddingEvent",
    f"{TYPES}.ParameterStorage",
    f"{TYPES}.PipelineType",
    f"{TYPES}.StorageUsageType",
    f"{TYPES}.ShardingStrategy",
    f"{TYPES}.CommOp",
    f"{TYPES}.ObjectPoolShardingType",
)
def enumerations() -> Any:
    kinds = (
        T.ComputeDevice, T.EmbeddingEvent, T.ParameterStorage, T.PipelineType, T.StorageUsageType,
        T.ShardingStrategy, T.CommOp, T.ObjectPoolShardingType,
    )  # fmt: skip
    known = {kind.__name__: members(kind) for kind in kinds}
    known["ShardingStrategy"].pop("FULLY_SHARDED", None)  # shards replicas further, which this library does not
    return known


@case(f"{TYPES}.ShardingType")
def schemes() -> Any:
    return {
        kind.name: kind.value
        for kind in T.ShardingType
        if kind.value in ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")
    }


@case(f"{TYPES}.ModuleShardingPlan", f"{TYPES}.EmbeddingModuleShardingPlan", f"{TYPES}.ObjectPoolShardingPlan")
def plans_of_modules() -> Any:
    pool = T.ObjectPoolShardingPlan(T.ObjectPoolShardingType.ROW_WISE)
    return {
        "of tables": issubclass(T.EmbeddingModuleShardingPlan, T.ModuleShardingPlan),
        "of a pool": isinstance(pool, T.ModuleShardingPlan),
        "pool": [pool.sharding_type.value, pool.inference, pool.memory_capacity_per_rank],
        "a dict": issubclass(T.EmbeddingModuleShardingPlan, dict),
    }


@case(f"{TYPES}.ShardingPlan", f"{TYPES}.ParameterSharding")
def a_plan_by_hand() -> Any:
    spec = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 8], "rank:0/cpu"), ShardMetadata([4, 0], [4, 8], "rank:1/cpu")]
    )
    entry = T.ParameterSharding("row_wise", "fused", [0, 1], spec)
    plan = T.ShardingPlan({"bags": T.EmbeddingModuleShardingPlan({"t": entry})})
    found = plan.get_plan_for_module("bags")
    return {
        "scheme": found["t"].sharding_type,
        "kernel": found["t"].compute_kernel,
        "ranks": found["t"].ranks,
        "shards": [[list(s.shard_offsets), list(s.shard_sizes)] for s in found["t"].sharding_spec.shards],
        "placements": [str(s.placement) for s in found["t"].sharding_spec.shards],
        "unknown": plan.get_plan_for_module("other"),
    }


@case(f"{TYPES}.ShardingEnv", ranks=2)
def environments(rank: int) -> Any:
    env, local = T.ShardingEnv.from_process_group(dist.group.WORLD), T.ShardingEnv.from_local(1, 0)
    return {
        "world": [env.world_size, env.rank, env.process_group is dist.group.WORLD],
        "local": [local.world_size, local.rank, local.process_group],
    }


@case(f"{TYPES}.ShardingEnv")
def an_environment_of_many_ranks_without_a_group() -> Any:
    return raised(lambda: T.ShardingEnv.from_local(4, 2))


@case(f"{TYPES}.ShardingEnv2D", ranks=4)
def an_environment_of_replicas(rank: int) -> Any:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    env = T.ShardingEnv2D(*groups, dist.group.WORLD, mesh, 2)
    return {
        "world": env.world_size,
        "rank": env.rank,
        "global": env.process_group is dist.group.WORLD,
        "sharding group": env.sharding_pg is groups[0],
        "replicas": env.replica_pg is groups[1],
        "groups": env.num_sharding_groups(),
        "remapped": [env.remap_rank(other, T.ShardingType.TABLE_WISE) for other in range(2)],
        "remapped by node": [env.remap_rank(other, T.ShardingType.GRID_SHARD) for other in range(4)],
        "row wise": raised(lambda: env.remap_rank(0, T.ShardingType.ROW_WISE)),
        "node": env.node_group_size,
    }


class Cached(T.CacheStatistics):
    @property
    def expected_lookups(self) -> float:
        return 3.0

    def expected_miss_rate(self, clf: float) -> float:
        return 1 - clf

    @property
    def cacheability(self) -> float:
        return 0.5


@case(f"{TYPES}.CacheStatistics", f"{TYPES}.CacheParams")
def caches() -> Any:
    params = T.CacheParams(load_factor=0.25)
    return {
        "own": [Cached().expected_lookups, Cached().expected_miss_rate(0.25), Cached().cacheability],
        "abstract": raised(T.CacheStatistics),
        "load factor": params.load_factor,
        "equal": params == T.CacheParams(load_factor=0.25),
    }


# ---- utils ----


@case(f"{UTILS}.merge_fused_params", f"{UTILS}.add_params_from_parameter_sharding")
def fused_parameters() -> Any:
    entry = T.ParameterSharding("row_wise", "fused_uvm_caching", [0], cache_params=T.CacheParams(load_factor=0.5))
    return {
        "merged": plain_params(U.merge_fused_params({"learning_rate": 0.1, "eps": 1.0}, {"eps": 2.0})),
        "none": plain_params(U.merge_fused_params(None, None)),
        "added": plain_params(U.add_params_from_parameter_sharding({"eps": 1.0}, entry)),
    }


def plain_params(params: dict[str, Any]) -> dict[str, str]:
    return {key: str(getattr(value, "name", value)) for key, value in params.items()}


# ---- embedding types ----


@case("torchrec.distributed.embedding_types.KJTList", "torchrec.distributed.embedding_types.ListOfKJTList")
def lists_of_batches() -> Any:
    own = KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.tensor([2]))
    batches = KJTList([own, own])
    batches[1] = KeyedJaggedTensor(["b"], torch.arange(1), lengths=torch.tensor([1]))
    several = ListOfKJTList([batches, batches])
    return {
        "length": len(batches),
        "first": batches[0],
        "second": batches[1].keys(),
        "iterated": [each.keys() for each in batches],
        "lists": len(several),
        "of lists": several[0][0].keys(),
        "streamable": isinstance(batches, Multistreamable),
    }
