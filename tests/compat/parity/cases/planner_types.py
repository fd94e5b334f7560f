"""Values of the planner: costs, topologies, options, constraints, hashes."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torchrec.distributed.planner import constants
from torchrec.distributed.planner.types import (
    BasicCommsBandwidths,
    CollectiveType,
    CriticalPathEstimate,
    CustomTopologyData,
    DeviceHardware,
    GeneralizedCommsBandwidth,
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PartitionByType,
    Perf,
    PlanDebugStats,
    PlannerError,
    PlannerErrorType,
    Shard,
    SharderData,
    ShardingOption,
    Storage,
    Topology,
    TopologyFactory,
    TrainerConfig,
    hash_sha256_str,
    hash_sha256_to_int,
    round_to_nearest,
)

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, enumerated, option, perf, sequences, store

T = "torchrec.distributed.planner.types."
NAMES = [
    "MAX_SIZE",
    "INTRA_NODE_BANDWIDTH",
    "CROSS_NODE_BANDWIDTH",
    "MIN_CW_DIM",
    "POOLING_FACTOR",
    "NUM_POOLINGS",
    "BIGINT_DTYPE",
    "HBM_CAP",
    "DDR_CAP",
    "SSD_CAP",
    "DDR_MEM_BW",
    "HBM_MEM_BW",
    "SSD_MEM_BW",
    "HBM_TO_DDR_MEM_BW",
    "UVM_CACHING_RATIO",
    "KV_CACHING_RATIO",
    "BATCH_SIZE",
    "BATCHED_COPY_PERF_FACTOR",
    "FULL_BLOCK_EMB_DIM",
    "HALF_BLOCK_PENALTY",
    "QUARTER_BLOCK_PENALTY",
    "BWD_COMPUTE_MULTIPLIER",
    "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER",
    "WEIGHTED_KERNEL_MULTIPLIER",
    "DP_ELEMENTWISE_KERNELS_PERF_FACTOR",
    "HUNDRED_GB",
    "DEFAULT_PERF_ESTIMATOR",
]


def shown(topology: Any) -> dict[str, Any]:
    return {
        "ranks": [topology.world_size, topology.local_world_size, topology.intra_group_size, topology.compute_device],
        "devices": [[d.rank, *store(d.storage), *perf(d.perf)] for d in topology.devices],
        "memories": [topology.hbm_mem_bw, topology.ddr_mem_bw, topology.ssd_mem_bw, topology.hbm_to_ddr_mem_bw],
        "links": [topology.intra_host_bw, topology.inter_host_bw],
        "factors": [
            topology.bwd_compute_multiplier,
            topology.weighted_feature_bwd_compute_multiplier,
            topology.uneven_sharding_perf_multiplier,
        ],
    }


@case(*(f"torchrec.distributed.planner.constants.{name}" for name in NAMES))
def constants_have_these_values() -> Any:
    return {name: getattr(constants, name) for name in NAMES}


@case("torchrec.distributed.planner.constants.kernel_bw_lookup")
def bandwidth_of_kernels() -> Any:
    kernels = ["dense", "fused", "quant", "fused_uvm", "quant_uvm", "fused_uvm_caching", "quant_uvm_caching"]
    kernels += ["key_value", "ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table", "custom"]
    speeds = (1000.0, 100.0, 10.0)
    return [
        [device, kernel, ratio, ahead, constants.kernel_bw_lookup(device, kernel, *speeds, ratio, ahead, 7.0)]
        for device in ("cpu", "cuda", "mtia")
        for kernel in kernels
        for ratio, ahead in ((None, False), (0.5, False), (0.5, True))
    ]


@case(T + "Perf")
def perf_adds_and_totals() -> Any:
    total = Perf(1.0, 2.0, 3.0, 4.0, 5.0, 6.0) + Perf(1.0, 1.0, 1.0, 1.0)
    return perf(total), total.total, total == deepcopy(total), hash(total) == hash(deepcopy(total)), repr(total)


@case(T + "Storage")
def storage_adds_compares_and_fits() -> Any:
    a, b = Storage(3, 2), Storage(1, 5, 1)
    return (
        store(a + b),
        store(a - b),
        a > b,
        a.fits_in(Storage(3, 2)),
        b.fits_in(a),
        repr(a),
        len({a, Storage(3, 2, 0)}),
    )


@case(T + "DeviceHardware", T + "CriticalPathEstimate", T + "PlanDebugStats", T + "SharderData")
def small_records() -> Any:
    device = DeviceHardware(1, Storage(2, 3), Perf(1, 0, 0, 0))
    data = SharderData(fused_params={"a": 1}, qcomm_dtype_sizes={}, storage_usage_type=None)
    return {
        "equal": device == deepcopy(device),
        "set": len({device, deepcopy(device)}),
        "path": CriticalPathEstimate(1.5, 2.0).total(),
        "stats": repr(PlanDebugStats("P", 3)),
        "data": data.fused_params,
    }


@case(T + "PlannerError", T + "PlannerErrorType")
def planner_errors_have_a_type() -> Any:
    error = PlannerError("no", PlannerErrorType.PARTITION)
    kinds = {kind.name: kind.value for kind in PlannerErrorType}
    return str(error), error.error_type, PlannerError(message="x").error_type, isinstance(error, Exception), kinds


@case(T + "PartitionByType", T + "CollectiveType")
def enums_have_these_values() -> Any:
    return {kind.name: kind.value for kinds in (PartitionByType, CollectiveType) for kind in kinds}


@case(T + "Topology")
def topology_defaults_on_cuda() -> Any:
    topology = Topology(2, "cuda")
    return shown(topology), repr(topology)


@case(T + "Topology")
def topology_defaults_on_cpu() -> Any:
    return shown(Topology(world_size=2, compute_device="cpu", hbm_cap=7))


@case(T + "Topology")
def topology_by_position() -> Any:
    return shown(Topology(4, "cuda", 1, 2, 3, 2, 2, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 5.0, None, 6.0, 7.0))


@case(T + "Topology")
def topology_refuses() -> Any:
    return [
        raised(lambda: Topology(2, "xpu")),
        raised(lambda: Topology(2, "cuda", pod_size=3)),
        raised(lambda: Topology(2, "mtia")),
    ]


@case(T + "Topology", T + "CustomTopologyData")
def capacities_may_differ() -> Any:
    data = CustomTopologyData({"hbm_cap": [1, 2], "ssd_cap": [5, 6]}, 2)
    topology = Topology(2, "cuda", hbm_cap=9, custom_topology_data=data)
    return {
        "devices": shown(topology)["devices"],
        "data": [data.has_data("hbm_cap"), data.has_data("ddr_cap"), data.get_data("ssd_cap")],
        "errors": [
            raised(lambda: CustomTopologyData({"x": [1]}, 1)),
            raised(lambda: CustomTopologyData({"hbm_cap": [1]}, 2)),
            raised(lambda: data.get_data("x")),
        ],
    }


@case(T + "BasicCommsBandwidths", T + "CollectiveType")
def basic_bandwidths() -> Any:
    links = BasicCommsBandwidths(2.0, 8.0)
    found = {kind.name: [links.get_bw(4, ranks, kind) for ranks in (2, 4, 8)] for kind in CollectiveType}
    same = links == BasicCommsBandwidths(2.0, 8.0), hash(links) == hash(BasicCommsBandwidths(2.0, 8.0))
    return found, str(links), same, links.inter_host_bw, links.intra_host_bw, str(BasicCommsBandwidths())


class Slow(GeneralizedCommsBandwidth):
    def get_bw(self, local_world_size: int, world_size: int, collective_type: Any) -> float:
        return 1000.0 * world_size if collective_type is CollectiveType.ALL_TO_ALL else 500.0 * local_world_size

    @property
    def intra_host_bw(self) -> float:
        return 10.0

    @property
    def inter_host_bw(self) -> float:
        return 1.0


@case(T + "GeneralizedCommsBandwidth", T + "Topology")
def bandwidths_of_the_user_change_costs() -> Any:
    topology = Topology(4, "cuda", generalized_comms_bandwidths=Slow())
    options = enumerated(bags((100, 128)), None, topology)
    kinds = ("table_wise", "row_wise", "data_parallel")
    found = {
        o.sharding_type: perf(o.shards[0].perf)
        for o in options
        if o.sharding_type in kinds and "uvm" not in o.compute_kernel
    }
    return found, topology.intra_host_bw, raised(GeneralizedCommsBandwidth)


@case(T + "HardwareConfig", T + "TopologyConfigBase")
def hardware_configs_find_issues() -> Any:
    config = HardwareConfig(hbm_cap_bytes=0, ddr_mem_bw=-1.0, additional_params={"a": 1})
    issues = [config.get_validation_issues(device) for device in (None, "cpu", "cuda")]
    return (
        issues,
        config.get_param("a"),
        config.get_param("b", 2),
        config.has_param("b"),
        HardwareConfig().get_validation_issues("cpu"),
    )


@case(T + "TrainerConfig", T + "KernelConfig", T + "TopologyConfigBase")
def configs_validate() -> Any:
    return [
        raised(lambda: TrainerConfig().validate()),
        raised(lambda: TrainerConfig(world_size=2).validate()),
        raised(lambda: KernelConfig("xpu").validate()),
        raised(lambda: KernelConfig("mtia").validate()),
        [
            KernelConfig().compute_device,
            KernelConfig().bwd_compute_multiplier,
            KernelConfig().use_hardware_based_bandwidth,
        ],
    ]


@case(T + "TopologyFactory", T + "TrainerConfig", T + "HardwareConfig", T + "KernelConfig")
def factory_resolves_by_precedence() -> Any:
    make = TopologyFactory.create_topology
    hardware = HardwareConfig(hbm_cap_bytes=7, ddr_cap_bytes=8, intra_host_bw=9.0, hbm_mem_bw=11.0, ssd_mem_bw=12.0)
    return [
        shown(make(TrainerConfig(world_size=2))),
        shown(make(TrainerConfig(world_size=2, hbm_cap_bytes=5, local_world_size=1), hardware)),
        shown(make(TrainerConfig(world_size=1), hardware, KernelConfig("cuda", 3, 4, 5.0, True))),
        shown(make(TrainerConfig(world_size=1, is_dry_run=True, dry_run_hbm_bytes=1, hbm_cap_bytes=5, pod_size=1))),
        shown(
            make(
                TrainerConfig(world_size=1),
                None,
                KernelConfig(generalized_comms_bandwidths=BasicCommsBandwidths(1.0, 2.0)),
            )
        ),
        raised(lambda: make(TrainerConfig())),
    ]


@case(T + "Shard")
def shards_have_a_text() -> Any:
    shard = Shard([2, 3], [0, 1], Storage(1, 0), Perf(1.0, 0.0, 0.0, 0.0), 4)
    return (
        str(shard),
        shard == deepcopy(shard),
        hash(shard) == hash(deepcopy(shard)),
        Shard(size=[1, 1], offset=[0, 0]).rank,
    )


@case(T + "ShardingOption")
def options_have_totals_and_a_text() -> Any:
    one = option("t", [3, 4], [1.0, 2.5])
    one.shards[1].rank = 1
    return {
        "names": [one.fqn, one.path, one.name, one.num_shards, one.num_inputs, one.cache_load_factor],
        "totals": [store(one.total_storage), one.total_perf, one.get_shards_assignment()],
        "text": str(one),
        "processor": one.has_feature_processor,
    }


@case(T + "ShardingOption")
def options_are_pooled_by_their_module() -> Any:
    return [
        [*[o.is_pooled for o in enumerated(module)][:2], ShardingOption.module_pooled(module, "t0")]
        for module in (bags((9, 8)), sequences((9, 8)))
    ]


@case(T + "ShardingOption")
def copies_of_options_share_tensor_and_module() -> Any:
    one = option("t", [3], [1.0])
    other = deepcopy(one)
    other.shards[0].rank = 5
    return [
        other.tensor is one.tensor,
        other.module[1] is one.module[1],
        one.shards[0].rank,
        hash(one) == hash(deepcopy(one)),
        one.storage_hash() == other.storage_hash(),
        one.storage_hash() == option("u", [3], [1.0]).storage_hash(),
    ]


@case(T + "ParameterConstraints", "torchrec.distributed.planner.ParameterConstraints")
def constraints_have_these_fields() -> Any:
    one = ParameterConstraints(
        ["row_wise"], ["fused"], 32, [2.0], [1.0], [64], True, None, True, False, None, ["f"], None, "cpu"
    )
    fields = "sharding_types compute_kernels min_partition pooling_factors num_poolings batch_sizes is_weighted "
    fields += "cache_params enforce_hbm stochastic_rounding bounds_check_mode feature_names output_dtype device_group "
    names = (fields + "key_value_params use_virtual_table").split()
    return [[getattr(made, name) for name in names] for made in (one, ParameterConstraints())]


@case(T + "ParameterConstraints")
def constraints_compare_and_hash() -> Any:
    one, other = ParameterConstraints(["row_wise"]), ParameterConstraints(["table_wise"])
    return one == deepcopy(one), one == other, hash(one) == hash(deepcopy(one)), hash(one) == hash(other)


@case(T + "hash_sha256_str", T + "hash_sha256_to_int", T + "round_to_nearest", T + "HUNDRED_GB")
def hashes_and_rounding() -> Any:
    return (
        hash_sha256_str([1, "a"]),
        str(hash_sha256_to_int([1, "a"])),
        [round_to_nearest(x, 100) for x in (0, 149, 151, 250)],
    )


@case(T + "ShardingOption")
def options_take_every_field() -> Any:
    made = ShardingOption(
        name="t",
        tensor=torch.empty(2, 2, device="meta"),
        module=("m", nn.Module()),
        input_lengths=[1.0, 2.0],
        batch_size=3,
        sharding_type="row_wise",
        partition_by="uniform",
        compute_kernel="fused",
        shards=[],
        enforce_hbm=True,
        stochastic_rounding=False,
        dependency="d",
        feature_names=["f"],
        num_poolings=[1.0, 1.0],
        is_pooled=False,
    )
    return [
        made.enforce_hbm,
        made.stochastic_rounding,
        made.dependency,
        made.feature_names,
        made.num_poolings,
        made.is_pooled,
    ]
