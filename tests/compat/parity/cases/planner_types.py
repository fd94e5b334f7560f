"""Values of the planner: costs, topologies, options, constraints, hashes."""

from typing import Any

from torchrec.distributed.planner.types import (
    CollectiveType,
    GeneralizedCommsBandwidth,
    ParameterConstraints,
    Topology,
)

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, enumerated, option, perf, store

T = "torchrec.distributed.planner.types."


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


@case(T + "Topology")
def topology_defaults_on_cuda() -> Any:
    topology = Topology(2, "cuda")
    return shown(topology), repr(topology)


@case(T + "Topology")
def topology_refuses() -> Any:
    return [
        raised(lambda: Topology(2, "xpu")),
        raised(lambda: Topology(2, "cuda", pod_size=3)),
        raised(lambda: Topology(2, "mtia")),
    ]


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


@case(T + "ParameterConstraints", "torchrec.distributed.planner.ParameterConstraints")
def constraints_have_these_fields() -> Any:
    one = ParameterConstraints(
        ["row_wise"], ["fused"], 32, [2.0], [1.0], [64], True, None, True, False, None, ["f"], None, "cpu"
    )
    fields = "sharding_types compute_kernels min_partition pooling_factors num_poolings batch_sizes is_weighted "
    fields += "cache_params enforce_hbm stochastic_rounding bounds_check_mode feature_names output_dtype device_group "
    names = (fields + "key_value_params use_virtual_table").split()
    return [[getattr(made, name) for name in names] for made in (one, ParameterConstraints())]
