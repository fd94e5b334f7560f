"""``torchrec.distributed`` without planner and pipelines."""

_PLAN = "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
_SPECS = {
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec": "EnumerableShardingSpec ShardingSpec",
    "torch.distributed._shard.sharded_tensor": "Shard ShardedTensor ShardedTensorMetadata",
}


SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed": {
        "distributed": "Awaitable DMPCollection DistributedModelParallel ModuleSharder NoWait "
        "ShardedModule=ShardedCollection "
        "ShardingEnv",
        "sharding": "ParameterSharding",
        "train": "EvalPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist",
        "comm": "get_local_rank get_local_size",
    },
    "torchrec.distributed.types": {
        "sharding": f"{_PLAN} ComputeKernel=EmbeddingComputeKernel",
        "distributed": "Awaitable LazyAwaitable LazyNoWait ModuleSharder NoWait ShardedModule=ShardedCollection "
        "ShardingEnv ShardingStrategy",
        "comm": "CommOp QuantizedCommCodecs",
        "embedding": "DataType",
        **_SPECS,
    },
    "torchrec.distributed.embedding_types": {"sharding": "EmbeddingComputeKernel ShardingType"},
    "torchrec.distributed.embedding": {"distributed": "EmbeddingCollectionSharder ShardedEmbeddingCollection"},
    "torchrec.distributed.embeddingbag": {"distributed": "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection"},
    "torchrec.distributed.mc_embedding": {
        "distributed": "ManagedCollisionEmbeddingCollectionSharder ShardedManagedCollisionEmbeddingCollection",
    },
    "torchrec.distributed.mc_embeddingbag": {
        "distributed": "ManagedCollisionEmbeddingBagCollectionSharder ShardedManagedCollisionEmbeddingBagCollection",
    },
    "torchrec.distributed.fused_embeddingbag": {"distributed": "FusedEmbeddingBagCollectionSharder"},
    "torchrec.distributed.comm": {"comm": "get_local_rank get_local_size"},
    "torchrec.distributed.model_tracker": {"distributed": "ModelDeltaTracker TrackingMode"},
    "torchrec.distributed.model_tracker.model_delta_tracker": {
        "distributed": "ModelDeltaTracker ModelDeltaTrackerTrec=ModelDeltaTracker TrackingMode",
    },
    "torchrec.distributed.model_tracker.types": {"distributed": "TrackingMode"},
    "torchrec.distributed.shard": {"distributed": "shard shard_modules"},
    "torchrec.distributed.model_parallel": {
        "distributed": "DMPCollection DataParallelWrapper DefaultDataParallelWrapper DistributedModelParallel "
        "get_default_sharders"
    },
    "torchrec.distributed.sharding_plan": {
        "sharding": "apply_to_all ParameterShardingGenerator",
        "compat.sharding_plan": "column_wise construct_module_sharding_plan data_parallel grid_shard row_wise "
        "table_row_wise table_wise",
        "distributed": "get_default_sharders get_module_to_default_sharders",
    },
    "torchrec.distributed.fbgemm_qcomm_codec": {
        "comm": "CommType QCommsConfig get_qcomm_codecs get_qcomm_codecs_registry"
    },
}
