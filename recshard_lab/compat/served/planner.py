"""``torchrec.distributed.planner``."""

_P = "compat.planner"
_BANDWIDTHS = (
    "CROSS_NODE_BANDWIDTH DDR_CAP DDR_MEM_BW HBM_CAP HBM_MEM_BW HBM_TO_DDR_MEM_BW HUNDRED_GB INTRA_NODE_BANDWIDTH "
    "SSD_CAP SSD_MEM_BW"
)
_FACTORS = "BATCH_SIZE BWD_COMPUTE_MULTIPLIER POOLING_FACTOR WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER"
_ESTIMATES = "BIGINT_DTYPE DEFAULT_PERF_ESTIMATOR KV_CACHING_RATIO NUM_POOLINGS UVM_CACHING_RATIO"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed.planner": {
        f"{_P}.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        f"{_P}.constraints": "ParameterConstraints",
        f"{_P}.topology": "Topology",
        f"{_P}.utils": "bytes_to_gb sharder_name",
    },
    "torchrec.distributed.planner.types": {
        f"{_P}.constants": f"{_BANDWIDTHS} {_FACTORS}",
        f"{_P}.costs": "CriticalPathEstimate DeviceHardware Perf PlannerError PlannerErrorType Storage",
        f"{_P}.topology": "BasicCommsBandwidths CollectiveType CustomTopologyData GeneralizedCommsBandwidth Topology",
        f"{_P}.topology_configs": "HardwareConfig KernelConfig TopologyConfigBase TopologyFactory TrainerConfig",
        f"{_P}.options": "PartitionByType Shard ShardingOption",
        f"{_P}.constraints": "ParameterConstraints",
        f"{_P}.base": "Enumerator Partitioner PerfModel PlanDebugStats PlanLoader Proposer ShardEstimator SharderData "
        "Stats StorageReservation",
        f"{_P}.hashes": "hash_planner_context_inputs hash_planner_context_inputs_str hash_sha256_str "
        "hash_sha256_to_int round_to_nearest",
    },
    "torchrec.distributed.planner.constants": {
        f"{_P}.constants": f"{_BANDWIDTHS} {_FACTORS} {_ESTIMATES} BATCHED_COPY_PERF_FACTOR "
        "DP_ELEMENTWISE_KERNELS_PERF_FACTOR FULL_BLOCK_EMB_DIM HALF_BLOCK_PENALTY MAX_SIZE MIN_CW_DIM "
        "QUARTER_BLOCK_PENALTY WEIGHTED_KERNEL_MULTIPLIER kernel_bw_lookup",
    },
    "torchrec.distributed.planner.planners": {
        f"{_P}.constants": "BATCH_SIZE MAX_SIZE",
        f"{_P}.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
        f"{_P}.plans": "extract_plan to_sharding_plan validate_compute_kernels "
        "validate_modules_inclusion_in_sharding_plan validate_rank_assignment",
    },
    "torchrec.distributed.planner.enumerators": {
        f"{_P}.constants": "DEFAULT_PERF_ESTIMATOR POOLING_FACTOR",
        f"{_P}.enumerators": "EmbeddingEnumerator GUARDED_SHARDING_TYPES_FOR_FP_MODULES get_partition_by_type",
    },
    "torchrec.distributed.planner.proposers": {
        f"{_P}.offload": "EmbeddingOffloadScaleupProposer",
        f"{_P}.proposers": "DynamicProgrammingProposer GreedyProposer GridSearchProposer MAX_PROPOSALS UniformProposer "
        "proposers_to_proposals_list",
    },
    "torchrec.distributed.planner.partitioners": {
        f"{_P}.partitioners": "GreedyPerfPartitioner MemoryBalancedPartitioner OrderedDeviceHardware "
        "ShardingOptionGroup SortBy",
    },
    "torchrec.distributed.planner.perf_models": {f"{_P}.perf_models": "NoopPerfModel NoopStorageModel"},
    "torchrec.distributed.planner.storage_reservations": {
        f"{_P}.constants": "BIGINT_DTYPE POOLING_FACTOR",
        f"{_P}.reservations": "FixedAbsoluteStorageReservation FixedPercentageStorageReservation "
        "HeuristicalStorageReservation InferenceStorageReservation StorageReservationType",
    },
    "torchrec.distributed.planner.shard_estimators": {
        "embedding": "DATA_TYPE_NUM_BITS",
        f"{_P}.constants": _ESTIMATES,
        f"{_P}.cache": "EmbeddingOffloadStats",
        f"{_P}.estimators": "EmbeddingPerfEstimator EmbeddingStorageEstimator calculate_pipeline_io_cost "
        "calculate_shard_storages",
        f"{_P}.utils": "get_num_poolings",
    },
    "torchrec.distributed.planner.stats": {
        f"{_P}.constants": "BIGINT_DTYPE",
        f"{_P}.stats": "EmbeddingStats IMBALANCE_STAT_MEASURE MIN_WIDTH NoopEmbeddingStats round_to_one_sigfig",
    },
    "torchrec.distributed.planner.utils": {
        f"{_P}.constants": "NUM_POOLINGS",
        f"{_P}.utils": "BinarySearchPredicate LuusJaakolaSearch build_sharder_data build_sharder_data_map bytes_to_gb "
        "bytes_to_mb extract_comm_data_type_size gb_to_bytes get_num_poolings is_prefetch_pipelined mb_to_bytes "
        "placement prod reset_shard_rank sharder_name storage_repr_in_gb",
    },
    "torchrec.distributed.types": {f"{_P}.cache": "CacheParams CacheStatistics"},
}
