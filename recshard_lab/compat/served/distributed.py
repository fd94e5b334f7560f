"""``torchrec.distributed`` without planner and pipelines."""

_PLAN = "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
_SPECS = {
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec": "EnumerableShardingSpec ShardingSpec",
    "torch.distributed._shard.sharded_tensor": "Shard ShardedTensor ShardedTensorMetadata",
}


SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed": {
        "distributed": "Awaitable DMPCollection DistributedModelParallel ModuleSharder NoWait ShardingEnv",
        "compat.distributed.sharded_module": "ShardedModule",
        "sharding": "ParameterSharding",
        "train": "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase "
        "TrainPipelineSparseDist",
        "comm": "get_local_rank get_local_size",
        "compat.distributed.types": "ShardingPlanner",
        "compat.distributed.utils": "get_unsharded_module_names",
    },
    "torchrec.distributed.types": {
        "sharding": _PLAN,
        "distributed": "Awaitable LazyAwaitable LazyNoWait ModuleSharder NoWait ShardingEnv ShardingStrategy",
        "compat.distributed.sharded_module": "ShardedModule",
        "compat.distributed.types": "ComputeDevice ComputeKernel DeviceToHostTensorAwaitable "
        "EmbeddingEvent GenericMeta GetItemLazyAwaitable LazyGetItemMixin ModuleShardingPlan NoOpQuantizedCommCodec "
        "NullShardedModuleContext NullShardingContext ObjectPoolShardingPlan ObjectPoolShardingType ParameterStorage "
        "PipelineType QuantizationContext QuantizedCommCodec ShardingBucketMetadata ShardingEnv2D ShardingPlanner "
        "StorageUsageType compute_storage_usage get_tensor_size_bytes rank_device",
        "comm": "CommOp",
        "compat.distributed.codecs": "QuantizedCommCodecs",
        "embedding": "DataType",
        **_SPECS,
    },
    "torchrec.distributed.embedding_types": {
        "sharding": "EmbeddingComputeKernel ShardingType",
        "distributed": "BaseEmbeddingSharder=CollectionSharder ShardedEmbeddingModule=ShardedCollection",
        "compat.distributed.embedding_types": "KJTList ListOfKJTList OptimType",
    },
    "torchrec.distributed.embedding": {
        "distributed": "EmbeddingCollectionSharder ShardedEmbeddingCollection",
        "distributed.awaitable": "EmbeddingCollectionAwaitable=LazyDict",
        "distributed.sharded_collections": "EmbeddingCollectionContext=ShardedModuleContext",
        "compat.distributed.embedding_types": "EC_INDEX_DEDUP get_device_from_parameter_sharding get_ec_index_dedup "
        "set_ec_index_dedup",
    },
    "torchrec.distributed.embeddingbag": {
        "distributed": "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection",
        "distributed.awaitable": "EmbeddingBagCollectionAwaitable=LazyKeyedTensor "
        "VariableBatchEmbeddingBagCollectionAwaitable=LazyKeyedTensor",
        "distributed.sharded_collections": "EmbeddingBagCollectionContext=ShardedModuleContext",
        "compat.distributed.embedding_types": "construct_output_kt get_device_from_parameter_sharding",
    },
    "torchrec.distributed.mc_embedding": {
        "distributed": "ManagedCollisionEmbeddingCollectionSharder ShardedManagedCollisionEmbeddingCollection",
        "distributed.sharded_collections": "ManagedCollisionEmbeddingCollectionContext=ShardedModuleContext",
    },
    "torchrec.distributed.mc_embeddingbag": {
        "distributed": "ManagedCollisionEmbeddingBagCollectionSharder ShardedManagedCollisionEmbeddingBagCollection",
        "distributed.sharded_collections": "ManagedCollisionEmbeddingBagCollectionContext=ShardedModuleContext",
    },
    "torchrec.distributed.fused_embeddingbag": {
        "distributed": "FusedEmbeddingBagCollectionSharder "
        "ShardedFusedEmbeddingBagCollection=ShardedEmbeddingBagCollection",
    },
    "torchrec.distributed.comm": {
        "comm": "get_local_rank get_local_size",
        "compat.distributed.comm": "get_group_rank get_node_group_size get_num_groups get_topology_domain_multiple "
        "get_topology_group_world_size intra_and_cross_node_pg intra_and_cross_node_pg_2D",
    },
    "torchrec.distributed.utils": {
        "compat.distributed.utils": "CopyableMixin ForkedPdb add_params_from_parameter_sharding "
        "add_prefix_to_state_dict append_prefix assert_instance copy_to_device "
        "create_global_tensor_shape_stride_from_metadata filter_state_dict get_bucket_metadata_from_shard_metadata "
        "get_class_name get_device_type get_unsharded_module_names init_parameters maybe_annotate_embedding_event "
        "merge_fused_params modify_input_for_feature_processor none_throws",
    },
    "torchrec.distributed.shards_wrapper": {"torch.distributed.tensor._shards_wrapper": "LocalShardsWrapper"},
    "torchrec.distributed.model_tracker": {
        "distributed": "TrackingMode",
        "distributed.row_tracker": "UniqueRows DeltaStore=DeltaStoreTrec IndexedLookup UpdateMode "
        "ModelDeltaTracker SUPPORTED_MODULES",
    },
    "torchrec.distributed.model_tracker.delta_store": {
        "distributed.row_tracker": "DeltaStore=DeltaStoreTrec DeltaStoreTrec",
    },
    "torchrec.distributed.model_tracker.model_delta_tracker": {
        "distributed": "TrackingMode",
        "distributed.row_tracker": "ModelDeltaTracker ModelDeltaTrackerTrec=ModelDeltaTracker SUPPORTED_MODULES",
    },
    "torchrec.distributed.model_tracker.types": {
        "distributed": "TrackingMode",
        "distributed.row_tracker": "UniqueRows IndexedLookup UpdateMode DeltaTrackerConfig",
    },
    "torchrec.distributed.shard": {
        "distributed": "shard",
        "compat.shard_modules": "shard_modules _shard_modules=shard_modules",
    },
    "torchrec.distributed.model_parallel": {
        "distributed": "DMPCollection DataParallelWrapper DefaultDataParallelWrapper DistributedModelParallel "
        "get_default_sharders",
        "compat.distributed.model_parallel": "get_module get_unwrapped_module",
    },
    "torchrec.distributed.sharding_plan": {
        "sharding": "apply_to_all ParameterShardingGenerator",
        "compat.sharding_plan": "column_wise construct_module_sharding_plan data_parallel grid_shard row_wise "
        "table_row_wise table_wise",
        "compat.distributed.shard_sizes": "MIN_CW_DIM calculate_shard_sizes_and_offsets "
        "get_sharding_constructor_from_type placement placement_helper",
        "distributed": "get_default_sharders get_module_to_default_sharders",
    },
    "torchrec.distributed.fbgemm_qcomm_codec": {
        "compat.distributed.codecs": "CommType QCommsConfig get_qcomm_codecs get_qcomm_codecs_registry",
    },
}
