"""Types and helpers of `torchrec.distributed`: awaitables, enumerations, environments, codecs, small functions."""

from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torchrec.distributed import types as T
from torchrec.distributed import utils as U
from torchrec.distributed.embedding import get_ec_index_dedup, set_ec_index_dedup
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList, ListOfKJTList, OptimType
from torchrec.distributed.embeddingbag import construct_output_kt
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from tests.compat.parity.case import case, on_ranks, raised

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


class LazyTable(T.LazyGetItemMixin[str, torch.Tensor], T.LazyAwaitable[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _wait_impl(self) -> dict[str, torch.Tensor]:
        self.waits += 1
        return {"a": torch.tensor([1.0, 2.0])}


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


@case(f"{TYPES}.LazyGetItemMixin", f"{TYPES}.GetItemLazyAwaitable")
def an_item_is_lazy_too() -> Any:
    own = LazyTable()
    item = own["a"]
    return {
        "lazy": isinstance(item, T.GetItemLazyAwaitable),
        "before": own.waits,
        "used": item + 1,
        "waited": item.wait(),
        "waits": own.waits,
        "missing": raised(lambda: own["b"].wait()),
    }


@case(f"{TYPES}.DeviceToHostTensorAwaitable", differs="TorchRec's needs CUDA; here a CPU tensor is there at once")
def a_copy_to_the_host() -> Any:
    return raised(lambda: T.DeviceToHostTensorAwaitable(torch.ones(1)).wait())


@case(f"{TYPES}.Awaitable", f"{TYPES}.ModuleSharder", f"{TYPES}.ShardedModule", f"{TYPES}.GenericMeta")
def generics_take_parameters() -> Any:
    names = ("Awaitable", "LazyAwaitable", "NoWait", "LazyNoWait", "ModuleSharder", "QuantizedCommCodec")
    return {
        **{name: getattr(T, name)[torch.Tensor] is not None for name in names},
        "ShardedModule": T.ShardedModule[int, int, int, int] is not None,
        "meta": isinstance(T.ModuleSharder, T.GenericMeta),
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


@case("torchrec.distributed.embedding_types.OptimType")
def optimizer_kinds() -> Any:
    return members(OptimType)


@case(f"{TYPES}.ComputeKernel")
def a_kernel_of_its_own_enumeration() -> Any:
    return {"default": T.ComputeKernel.DEFAULT.value, "fused": EmbeddingComputeKernel.FUSED.value}


@case(f"{TYPES}.ShardingType")
def schemes() -> Any:
    return {
        kind.name: kind.value
        for kind in T.ShardingType
        if kind.value in ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard")
    }


@case(f"{TYPES}.rank_device")
def devices_of_ranks() -> Any:
    return {
        "cpu": T.rank_device("cpu", 3),
        "cuda": raised(lambda: T.rank_device("cuda", 1)),
        "unknown": raised(lambda: T.rank_device("tpu", 0)),
    }


@case(f"{TYPES}.get_tensor_size_bytes", f"{TYPES}.compute_storage_usage")
def sizes_of_tensors() -> Any:
    tensor = torch.empty(10, 4, device="meta")
    kernels = (("cuda", "fused"), ("cuda", "fused_uvm"), ("cuda", "fused_uvm_caching"), ("cpu", "fused"),
               ("cpu", "dense"), ("cuda", "quant"), ("cpu", "quant"), ("cuda", "quant_uvm"))  # fmt: skip
    return {
        "bytes": T.get_tensor_size_bytes(tensor),
        **{
            f"{kind.name} {device} {kernel}": T.compute_storage_usage(tensor, device, kernel, kind)
            for kind in T.StorageUsageType
            for device, kernel in kernels
        },
    }


@case(f"{TYPES}.NoOpQuantizedCommCodec", f"{TYPES}.QuantizedCommCodecs", f"{TYPES}.QuantizationContext")
def a_codec_without_effect() -> Any:
    codec, tensor = T.NoOpQuantizedCommCodec(), torch.tensor([1.5, -2.0])
    codecs = T.QuantizedCommCodecs()
    return {
        "encoded": codec.encode(tensor),
        "decoded": codec.decode(tensor),
        "dtype": codec.quantized_dtype() if callable(codec.quantized_dtype) else codec.quantized_dtype,
        "size": codec.calc_quantized_size(7),
        "context": codec.create_context(),
        "forward": codecs.forward.encode(tensor),
        "backward": codecs.backward.decode(tensor),
        "padded": list(codec.padded_size(tensor, [2, 2], 0, None)),
        "codec": isinstance(codec, T.QuantizedCommCodec),
        "variable": str(T.QuantizationContext),
    }


class Streamed(Multistreamable):
    def record_stream(self, stream: Any) -> None:
        """Nothing."""


@case(f"{TYPES}.NullShardedModuleContext", f"{TYPES}.NullShardingContext")
def contexts_without_content() -> Any:
    return {
        "module": isinstance(T.NullShardedModuleContext(), Multistreamable),
        "sharding": isinstance(T.NullShardingContext(), Multistreamable),
        "stream": T.NullShardedModuleContext().record_stream(None),
        "abstract": raised(Multistreamable),
        "own": isinstance(Streamed(), Multistreamable),
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


@case(f"{TYPES}.ShardingBucketMetadata", f"{UTILS}.get_bucket_metadata_from_shard_metadata")
def buckets_of_row_shards() -> Any:
    shards = [ShardMetadata([0, 0], [8, 4], "rank:0/cpu"), ShardMetadata([8, 0], [4, 4], "rank:1/cpu")]
    found = U.get_bucket_metadata_from_shard_metadata(shards, 6)
    own = T.ShardingBucketMetadata([1, 2], [0, 1], 5)
    return {
        "per shard": found.num_buckets_per_shard,
        "offsets": found.bucket_offsets_per_shard,
        "size": found.bucket_size,
        "own": [own.num_buckets_per_shard, own.bucket_offsets_per_shard, own.bucket_size],
        "uneven": raised(lambda: U.get_bucket_metadata_from_shard_metadata(shards, 5)),
    }


@case(f"{TYPES}.ShardingEnv")
def environments() -> Any:
    def job(rank: int) -> Any:
        env, local = T.ShardingEnv.from_process_group(dist.group.WORLD), T.ShardingEnv.from_local(1, 0)
        return {
            "world": [env.world_size, env.rank, env.process_group is dist.group.WORLD],
            "local": [local.world_size, local.rank, local.process_group],
        }

    return on_ranks(2, job)


@case(f"{TYPES}.ShardingEnv")
def an_environment_of_many_ranks_without_a_group() -> Any:
    return raised(lambda: T.ShardingEnv.from_local(4, 2))


@case(f"{TYPES}.ShardingEnv2D")
def an_environment_of_replicas() -> Any:
    def job(rank: int) -> Any:
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

    return on_ranks(4, job)


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


@case(f"{TYPES}.ShardingPlanner")
def a_planner_of_the_user() -> Any:
    class Mine(T.ShardingPlanner):
        def plan(self, module: Any, sharders: Any) -> Any:
            return T.ShardingPlan({})

        def collective_plan(self, module: Any, sharders: Any) -> Any:
            return self.plan(module, sharders)

    return {"abstract": raised(T.ShardingPlanner), "plan": Mine().collective_plan(nn.Linear(1, 1), []).plan}


# ---- utils ----


@case(f"{UTILS}.append_prefix", f"{UTILS}.get_class_name", f"{UTILS}.none_throws", f"{UTILS}.assert_instance")
def small_functions() -> Any:
    return {
        "prefix": [U.append_prefix(*pair) for pair in (("a", "b"), ("", "b"), ("a", ""), ("", ""))],
        "class": U.get_class_name(nn.Linear(1, 1)),
        "value": U.none_throws(3),
        "none": raised(lambda: U.none_throws(None)),
        "zero": U.none_throws(0),
        "instance": U.assert_instance("x", str),
        "other": raised(lambda: U.assert_instance("x", int)),
        "device": U.get_device_type(),
    }  # fmt: skip


@case(f"{UTILS}.add_prefix_to_state_dict", f"{UTILS}.filter_state_dict")
def names_of_state_dicts() -> Any:
    state = {"w": 1, "b.c": 2}
    U.add_prefix_to_state_dict(state, "m.")
    known = OrderedDict([("a.x", 1), ("a.y.z", 2), ("ab.x", 3), ("b.x", 4), ("a", 5)])
    return {"added": state, "filtered": U.filter_state_dict(known, "a"), "nothing": U.filter_state_dict(known, "z")}


class Drawn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)


@case(f"{UTILS}.init_parameters")
def parameters_on_meta_are_allocated() -> Any:
    module = Drawn()
    U.init_parameters(module, torch.device("cpu"))
    return module.weight


class Moved(U.CopyableMixin):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)


def let_torchrec_copy() -> None:
    """TorchRec's copies name a class that torch's CPU builds lack."""
    c10d = torch._C._distributed_c10d
    if not hasattr(c10d, "ProcessGroupNCCL"):
        c10d.ProcessGroupNCCL = type("ProcessGroupNCCL", (), {})  # type: ignore[misc]


@case(f"{UTILS}.copy_to_device", f"{UTILS}.CopyableMixin")
def copies_to_a_device() -> Any:
    let_torchrec_copy()
    layer = nn.Sequential(nn.Linear(1, 1), Moved())
    copied = U.copy_to_device(layer, torch.device("cpu"), torch.device("meta"))
    mixin = Moved()
    return {
        "copied": [str(own.device) for own in copied.parameters()],
        "original": [str(own.device) for own in layer.parameters()],
        "another": copied is not layer,
        "mixin": str(mixin.copy(torch.device("cpu")).layer.weight.device),
    }


@case(f"{UTILS}.get_unsharded_module_names")
def modules_without_shards() -> Any:
    return [U.get_unsharded_module_names(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))]


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


@case(f"{UTILS}.create_global_tensor_shape_stride_from_metadata")
def shapes_of_sharded_tables() -> Any:
    spec = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 8], "rank:0/cpu"), ShardMetadata([0, 8], [4, 8], "rank:1/cpu")]
    )
    rows = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 8], "rank:0/cpu"), ShardMetadata([4, 0], [3, 8], "rank:1/cpu")]
    )
    found = [
        U.create_global_tensor_shape_stride_from_metadata(T.ParameterSharding(scheme, "fused", [0, 1], own), 2)
        for scheme, own in (("column_wise", spec), ("row_wise", rows))
    ]
    return [[list(shape), list(stride)] for shape, stride in found]


@case(f"{UTILS}.maybe_annotate_embedding_event")
def annotations() -> Any:
    with U.maybe_annotate_embedding_event(T.EmbeddingEvent.LOOKUP, "bags", "row_wise"):
        return 1


@case(f"{UTILS}.modify_input_for_feature_processor")
def features_are_processed_before_they_travel() -> Any:
    features = KeyedJaggedTensor(["a", "b"], torch.arange(4), weights=torch.ones(4), lengths=torch.tensor([1, 1, 2, 0]))
    processor = PositionWeightedModule(3)
    with torch.no_grad():
        processor.position_weight.copy_(torch.tensor([2.0, 3.0, 4.0]))
    U.modify_input_for_feature_processor(
        features, nn.ModuleDict({"a": processor, "b": processor}), False
    )  # fmt: skip
    return features.weights()


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


@case("torchrec.distributed.embeddingbag.construct_output_kt")
def an_output_from_parts() -> Any:
    parts = [torch.ones(2, 3), torch.zeros(2, 1)]
    return {
        "several": construct_output_kt(parts, ["a", "b"], [3, 1]),
        "one": construct_output_kt(parts[:1], ["a"], [3]),
    }


@case("torchrec.distributed.embedding.get_ec_index_dedup", "torchrec.distributed.embedding.set_ec_index_dedup")
def the_switch_of_distinct_ids() -> Any:
    before = get_ec_index_dedup()
    set_ec_index_dedup(True)
    after = get_ec_index_dedup()
    set_ec_index_dedup(False)
    return [before, after, get_ec_index_dedup()]
