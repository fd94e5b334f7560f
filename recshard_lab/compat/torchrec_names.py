"""TorchRec 1.8's public names, module by module: what `coverage` compares with. Type variables are left out."""

PUBLIC = {
    "torchrec": (
        "DataType EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingBagConfig EmbeddingCollection "
        "EmbeddingConfig JaggedTensor KeyedJaggedTensor KeyedTensor Multistreamable Pipelineable PoolingType"
    ),
    "torchrec.sparse.jagged_tensor": (
        "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor JaggedTensorMeta KeyedJaggedTensor KeyedTensor "
        "flatten_kjt_list jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts unflatten_kjt_list"
    ),
    "torchrec.modules.embedding_configs": (
        "BaseEmbeddingConfig CountBasedEvictionPolicy CountTimestampMixedEvictionPolicy DATA_TYPE_NUM_BITS "
        "EmbeddingBagConfig EmbeddingConfig EmbeddingTableConfig FeatureL2NormBasedEvictionPolicy "
        "FeatureScoreBasedEvictionPolicy FeatureScoreMapping NoEvictionPolicy PoolingType QuantConfig "
        "ShardingType TimestampBasedEvictionPolicy VirtualTableEvictionPolicy data_type_to_dtype "
        "data_type_to_sparse_type dtype_to_data_type pooling_type_to_pooling_mode pooling_type_to_str"
    ),
    "torchrec.modules.embedding_modules": (
        "EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingCollection EmbeddingCollectionInterface "
        "get_embedding_names_by_table process_pooled_embeddings reorder_inverse_indices"
    ),
    "torchrec.modules.fused_embedding_modules": (
        "EmbeddingFusedOptimizer FusedEmbeddingBagCollection FusedEmbeddingCollection "
        "convert_optimizer_type_and_kwargs fuse_embedding_optimizer"
    ),
    "torchrec.modules.mlp": "MLP Perceptron",
    "torchrec.modules.activation": "SwishLayerNorm",
    "torchrec.modules.crossnet": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet",
    "torchrec.modules.deepfm": "DeepFM FactorizationMachine",
    "torchrec.modules.hash_mc_evictions": (
        "HashZchEvictionConfig HashZchEvictionModule HashZchEvictionPolicyName HashZchEvictionScorer "
        "HashZchOptEvictionModule HashZchPerFeatureTtlScorer HashZchSingleTtlScorer HashZchThresholdEvictionModule "
        "get_eviction_module get_eviction_scorer get_kernel_from_policy"
    ),
    "torchrec.modules.hash_mc_modules": "HashZchManagedCollisionModule TrainInputMapper",
    "torchrec.modules.mc_embedding_modules": (
        "BaseManagedCollisionEmbeddingCollection ManagedCollisionEmbeddingBagCollection "
        "ManagedCollisionEmbeddingCollection evict return_custom_metadata return_remapped_lengths_as_mask"
    ),
    "torchrec.modules.mc_modules": (
        "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
        "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
        "apply_mc_method_to_jt_dict average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter"
    ),
    "torchrec.modules.utils": (
        "SequenceVBEContext check_module_output_dimension construct_jagged_tensors "
        "construct_jagged_tensors_inference construct_modulelist_from_single_module "
        "convert_list_of_modules_to_modulelist deterministic_dedup extract_module_or_tensor_callable "
        "get_module_output_dimension init_mlp_weights_xavier_uniform jagged_index_select_with_empty "
        "make_hash_zch_buckets_non_persistent reset_module_states_post_sharding"
    ),
    "torchrec.modules.regroup": "KTRegroupAsDict PermuteMultiEmbedding module_init",
    "torchrec.modules.embedding_tower": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    "torchrec.modules.feature_processor": (
        "BaseFeatureProcessor BaseGroupedFeatureProcessor PositionWeightedModule PositionWeightedProcessor "
        "offsets_to_range_traceble position_weighted_module_update_features"
    ),
    "torchrec.modules.feature_processor_": (
        "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule PositionWeightedModuleCollection "
        "get_stride_per_key_per_rank get_weights_list"
    ),
    "torchrec.modules.fp_embedding_modules": (
        "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper apply_feature_processors_to_kjt"
    ),
    "torchrec.distributed": (
        "Awaitable DataLoadingThread DistributedModelParallel EvalPipelineSparseDist ModuleSharder NoWait "
        "ParameterSharding PrefetchTrainPipelineSparseDist ShardedModule ShardingEnv ShardingPlanner "
        "TrainPipeline TrainPipelineBase TrainPipelineSparseDist get_local_rank get_local_size "
        "get_unsharded_module_names sharded_model_copy"
    ),
    "torchrec.distributed.types": (
        "Awaitable CacheParams CacheStatistics CommOp ComputeDevice ComputeKernel DMPCollectionConfig "
        "DMPCollectionContext DeviceToHostTensorAwaitable EmbeddingEvent EmbeddingModuleShardingPlan GenericMeta "
        "GetItemLazyAwaitable KeyValueParams LazyAwaitable LazyGetItemMixin LazyNoWait ModuleSharder "
        "ModuleShardingPlan NoOpQuantizedCommCodec NoWait NullShardedModuleContext NullShardingContext "
        "ObjectPoolShardingPlan ObjectPoolShardingType ParameterSharding ParameterStorage PipelineType "
        "QuantizationContext QuantizedCommCodec QuantizedCommCodecs ShardedModule ShardingBucketMetadata "
        "ShardingEnv ShardingEnv2D ShardingPlan ShardingPlanner ShardingStrategy ShardingType StorageUsageType "
        "compute_storage_usage get_tensor_size_bytes rank_device scope"
    ),
    "torchrec.distributed.embedding": (
        "EC_INDEX_DEDUP EmbeddingCollectionAwaitable EmbeddingCollectionContext EmbeddingCollectionSharder "
        "FUSED_PARAM_IS_SSD_TABLE FUSED_PARAM_SSD_TABLE_LIST ShardedEmbeddingCollection "
        "create_sharding_infos_by_sharding_device_group get_device_from_parameter_sharding get_ec_index_dedup "
        "pad_vbe_kjt_lengths set_ec_index_dedup"
    ),
    "torchrec.distributed.embeddingbag": (
        "EmbeddingAwaitable EmbeddingBagCollectionAwaitable EmbeddingBagCollectionContext "
        "EmbeddingBagCollectionSharder EmbeddingBagSharder FUSED_PARAM_IS_SSD_TABLE FUSED_PARAM_SSD_TABLE_LIST "
        "ShardedEmbeddingBag ShardedEmbeddingBagCollection VariableBatchEmbeddingBagCollectionAwaitable "
        "construct_output_kt create_sharding_infos_by_sharding_device_group get_device_from_parameter_sharding "
        "replace_placement_with_meta_device"
    ),
    "torchrec.distributed.embedding_types": (
        "BaseEmbeddingLookup BaseEmbeddingSharder BaseEmbeddingUpdate BaseGroupedFeatureProcessor "
        "BaseQuantEmbeddingSharder DTensorMetadata EmbeddingAttributes EmbeddingComputeKernel "
        "FeatureShardingMixIn GroupedEmbeddingConfig InputDistOutputs KJTList ListOfKJTList ModuleShardingMixIn "
        "OptimType ShardedConfig ShardedEmbeddingModule ShardedEmbeddingTable ShardedMetaConfig "
        "compute_kernel_to_embedding_location"
    ),
    "torchrec.distributed.model_parallel": (
        "DMPCollection DataParallelWrapper DefaultDataParallelWrapper DistributedModelParallel HybridEvalDMP "
        "get_module get_unwrapped_module"
    ),
    "torchrec.distributed.planner": (
        "EmbeddingPlannerBase EmbeddingShardingPlanner ParameterConstraints Topology bytes_to_gb sharder_name"
    ),
    "torchrec.distributed.planner.types": (
        "BATCH_SIZE BWD_COMPUTE_MULTIPLIER BasicCommsBandwidths CROSS_NODE_BANDWIDTH CollectiveType "
        "CriticalPathEstimate CustomTopologyData DDR_CAP DDR_MEM_BW DeviceHardware Enumerator "
        "GeneralizedCommsBandwidth HBM_CAP HBM_MEM_BW HBM_TO_DDR_MEM_BW HUNDRED_GB HardwareConfig "
        "INTRA_NODE_BANDWIDTH KernelConfig POOLING_FACTOR ParameterConstraints PartitionByType Partitioner Perf "
        "PerfModel PlanDebugStats PlanLoader PlannerError PlannerErrorType Proposer SSD_CAP SSD_MEM_BW Shard "
        "ShardEstimator SharderData ShardingOption Stats Storage StorageReservation Topology TopologyConfigBase "
        "TopologyFactory TrainerConfig WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER hash_planner_context_inputs "
        "hash_planner_context_inputs_str hash_sha256_str hash_sha256_to_int round_to_nearest"
    ),
    "torchrec.distributed.planner.constants": (
        "BATCHED_COPY_PERF_FACTOR BATCH_SIZE BIGINT_DTYPE BWD_COMPUTE_MULTIPLIER CROSS_NODE_BANDWIDTH DDR_CAP "
        "DDR_MEM_BW DEFAULT_PERF_ESTIMATOR DP_ELEMENTWISE_KERNELS_PERF_FACTOR FULL_BLOCK_EMB_DIM "
        "HALF_BLOCK_PENALTY HBM_CAP HBM_MEM_BW HBM_TO_DDR_MEM_BW HUNDRED_GB INTRA_NODE_BANDWIDTH KV_CACHING_RATIO "
        "MAX_SIZE MIN_CW_DIM NUM_POOLINGS POOLING_FACTOR QUARTER_BLOCK_PENALTY SSD_CAP SSD_MEM_BW "
        "UVM_CACHING_RATIO WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER WEIGHTED_KERNEL_MULTIPLIER kernel_bw_lookup"
    ),
    "torchrec.distributed.planner.planners": (
        "BATCH_SIZE EmbeddingPlannerBase EmbeddingShardingPlanner MAX_SIZE extract_plan to_sharding_plan "
        "validate_compute_kernels validate_modules_inclusion_in_sharding_plan validate_rank_assignment"
    ),
    "torchrec.distributed.planner.enumerators": (
        "DEFAULT_PERF_ESTIMATOR EmbeddingEnumerator GUARDED_COMPUTE_KERNELS GUARDED_SHARDING_TYPES_FOR_FP_MODULES "
        "POOLING_FACTOR get_partition_by_type"
    ),
    "torchrec.distributed.planner.proposers": (
        "DynamicProgrammingProposer EmbeddingOffloadScaleupProposer GreedyProposer GridSearchProposer "
        "MAX_PROPOSALS UniformProposer proposers_to_proposals_list"
    ),
    "torchrec.distributed.planner.partitioners": (
        "GreedyPerfPartitioner MemoryBalancedPartitioner OrderedDeviceHardware ShardingOptionGroup SortBy"
    ),
    "torchrec.distributed.planner.storage_reservations": (
        "BIGINT_DTYPE FixedAbsoluteStorageReservation FixedPercentageStorageReservation "
        "HeuristicalStorageReservation InferenceStorageReservation POOLING_FACTOR StorageReservationType"
    ),
    "torchrec.distributed.planner.shard_estimators": (
        "BIGINT_DTYPE DATA_TYPE_NUM_BITS DEFAULT_PERF_ESTIMATOR EmbeddingOffloadStats EmbeddingPerfEstimator "
        "EmbeddingStorageEstimator KV_CACHING_RATIO NUM_POOLINGS UVM_CACHING_RATIO calculate_pipeline_io_cost "
        "calculate_shard_storages get_num_poolings"
    ),
    "torchrec.distributed.planner.stats": (
        "BIGINT_DTYPE EmbeddingStats IMBALANCE_STAT_MEASURE MIN_WIDTH NoopEmbeddingStats round_to_one_sigfig"
    ),
    "torchrec.distributed.planner.utils": (
        "BinarySearchPredicate LuusJaakolaSearch NUM_POOLINGS build_sharder_data build_sharder_data_map "
        "bytes_to_gb bytes_to_mb extract_comm_data_type_size gb_to_bytes get_num_poolings is_prefetch_pipelined "
        "mb_to_bytes placement prod reset_shard_rank sharder_name storage_repr_in_gb"
    ),
    "torchrec.distributed.sharding_plan": (
        "MIN_CW_DIM apply_to_all calculate_shard_sizes_and_offsets column_wise construct_module_sharding_plan "
        "data_parallel get_default_sharders get_module_to_default_sharders get_sharding_constructor_from_type "
        "grid_shard placement placement_helper row_wise table_row_wise table_wise"
    ),
    "torchrec.distributed.train_pipeline": (
        "ArgInfo ArgInfoStepFactory CallArgs DataLoadingThread EvalPipelineSparseDist GradientAccumulationConfig "
        "GradientAccumulationWrapper PrefetchTrainPipelineSparseDist SparseDataDistUtil StageOut "
        "StagedTrainPipeline TorchCompileConfig Tracer TrainPipeline TrainPipelineBase TrainPipelineContext "
        "TrainPipelineFusedSparseDist TrainPipelinePT2 TrainPipelineSparseDist "
        "TrainPipelineSparseDistCompAutograd"
    ),
    "torchrec.distributed.comm": (
        "get_group_rank get_local_rank get_local_size get_node_group_size get_num_groups "
        "get_topology_domain_multiple get_topology_group_world_size intra_and_cross_node_pg "
        "intra_and_cross_node_pg_2D"
    ),
    "torchrec.distributed.fbgemm_qcomm_codec": (
        "CommType QCommsConfig comm_type_to_sparse_type get_qcomm_codecs get_qcomm_codecs_registry"
    ),
    "torchrec.distributed.model_tracker": (
        "DeltaStore IndexedLookup ModelDeltaTracker ModelTrackerConfigs SUPPORTED_MODULES Trackers TrackingMode "
        "UniqueRows UpdateMode"
    ),
    "torchrec.distributed.shards_wrapper": "LocalShardsWrapper",
    "torchrec.distributed.shard": "shard shard_modules",
    "torchrec.distributed.utils": (
        "CopyableMixin EmbeddingQuantizationUtils ForkedPdb add_params_from_parameter_sharding "
        "add_prefix_to_state_dict append_prefix assert_instance convert_to_fbgemm_types copy_to_device "
        "create_global_tensor_shape_stride_from_metadata emb_opt_type_to_optimizer_class filter_state_dict "
        "get_bucket_metadata_from_shard_metadata get_class_name get_device_type get_unsharded_module_names "
        "init_parameters maybe_annotate_embedding_event merge_fused_params modify_input_for_feature_processor "
        "none_throws optimizer_type_to_emb_opt_type sharded_model_copy weights_bytes_in_emb_kernel"
    ),
    "torchrec.distributed.mc_embedding": (
        "ManagedCollisionEmbeddingCollectionContext ManagedCollisionEmbeddingCollectionSharder "
        "ShardedManagedCollisionEmbeddingCollection"
    ),
    "torchrec.distributed.mc_embeddingbag": (
        "ManagedCollisionEmbeddingBagCollectionContext ManagedCollisionEmbeddingBagCollectionSharder "
        "ShardedManagedCollisionEmbeddingBagCollection"
    ),
    "torchrec.distributed.embedding_tower_sharding": (
        "EmbeddingTowerCollectionContext EmbeddingTowerCollectionSharder EmbeddingTowerSharder ShardedEmbeddingTower "
        "ShardedEmbeddingTowerCollection TowerLazyAwaitable"
    ),
    "torchrec.distributed.fused_embeddingbag": (
        "FusedEmbeddingBagCollectionSharder ShardedFusedEmbeddingBagCollection"
    ),
    "torchrec.distributed.quant_embeddingbag": (
        "FUSED_PARAM_IS_SSD_TABLE FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS FUSED_PARAM_REGISTER_TBE_BOOL "
        "MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS QuantEmbeddingBagCollectionSharder "
        "QuantFeatureProcessedEmbeddingBagCollectionSharder QuantManagedCollisionEmbeddingBagCollectionSharder "
        "ShardedMCEBCLookup ShardedQuantEbcInputDist ShardedQuantEmbeddingBagCollection "
        "ShardedQuantFeatureProcessedEmbeddingBagCollection ShardedQuantManagedCollisionEmbeddingBagCollection "
        "create_infer_embedding_bag_sharding flatten_feature_lengths "
        "get_device_for_first_shard_from_sharding_infos get_device_from_parameter_sharding "
        "get_device_from_sharding_infos"
    ),
    "torchrec.optim": (
        "Adagrad Adam CombinedOptimizer FusedOptimizer FusedOptimizerModule GradientClipping "
        "GradientClippingOptimizer KeyedOptimizer KeyedOptimizerWrapper LAMB LarsSGD OptimizerWrapper "
        "PartialRowWiseAdam PartialRowWiseLAMB RowWiseAdagrad SGD SemisyncOptimizer WarmupOptimizer WarmupPolicy "
        "WarmupStage apply_optimizer_in_backward"
    ),
    "torchrec.optim.apply_optimizer_in_backward": "apply_optimizer_in_backward",
    "torchrec.optim.clipping": "GradientClipping GradientClippingOptimizer",
    "torchrec.optim.fused": "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule",
    "torchrec.optim.keyed": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
    "torchrec.optim.optimizers": (
        "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD in_backward_optimizer_filter"
    ),
    "torchrec.optim.rowwise_adagrad": "RowWiseAdagrad adagrad",
    "torchrec.optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
    "torchrec.models.dlrm": (
        "DLRM DLRMTrain DLRMWrapper DLRM_DCN DLRM_Projection DenseArch InteractionArch InteractionDCNArch "
        "InteractionProjectionArch OverArch SparseArch choose"
    ),
    "torchrec.models.deepfm": "DenseArch FMInteractionArch OverArch SimpleDeepFMNN SimpleDeepFMNNWrapper SparseArch",
    "torchrec.datasets.random": "RandomRecDataset",
    "torchrec.datasets.movielens": (
        "COLUMN_TYPE_CASTERS DEFAULT_COLUMN_NAMES DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES "
        "MOVIES_FILENAME RATINGS_FILENAME movielens_20m movielens_25m"
    ),
    "torchrec.datasets.criteo": (
        "BinaryCriteoUtils CAT_FEATURE_COUNT COLUMN_TYPE_CASTERS CriteoIterDataPipe DAYS DEFAULT_CAT_NAMES "
        "DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES DEFAULT_LABEL_NAME FREQUENCY_THRESHOLD INT_FEATURE_COUNT "
        "InMemoryBinaryCriteoIterDataPipe TOTAL_TRAINING_SAMPLES criteo_kaggle criteo_terabyte"
    ),
    "torchrec.datasets.utils": (
        "Batch Limit LoadFiles PATH_MANAGER_KEY ParallelReadConcat ReadLinesFromCSV idx_split_train_val "
        "rand_split_train_val safe_cast train_filter val_filter"
    ),
    "torchrec.metrics.ne": (
        "NEMetric NEMetricComputation compute_cross_entropy compute_logloss compute_ne get_ne_states"
    ),
    "torchrec.metrics.auc": (
        "AUCMetric AUCMetricComputation GROUPING_KEYS LABELS PREDICTIONS REQUIRED_INPUTS WEIGHTS compute_auc "
        "compute_auc_per_group"
    ),
    "torchrec.metrics.gauc": (
        "GAUCMetric GAUCMetricComputation compute_gauc_3d compute_window_auc get_auc_states to_3d"
    ),
    "torchrec.metrics.ndcg": ("NDCGComputation NDCGMetric NUM_SESSIONS REQUIRED_INPUTS SESSION_KEY SUM_NDCG"),
    "torchrec.metrics.calibration": (
        "CALIBRATION_DENOM CALIBRATION_NUM CalibrationMetric CalibrationMetricComputation compute_calibration "
        "get_calibration_states"
    ),
    "torchrec.metrics.ctr": ("CTRMetric CTRMetricComputation CTR_DENOM CTR_NUM compute_ctr get_ctr_states"),
    "torchrec.metrics.recall_session": (
        "NUM_FALSE_NEGATIVE NUM_TRUE_POS RecallSessionMetric RecallSessionMetricComputation ranking_within_session"
    ),
    "torchrec.metrics.throughput": ("MAX_WINDOW_TS ThroughputMetric"),
    "torchrec.metrics.metric_module": (
        "MODEL_METRIC_LABEL REC_METRICS_MAPPING RecMetricModule STATE_METRICS_NAMESPACE_MAPPING StateMetric "
        "generate_metric_module"
    ),
    "torchrec.metrics.metrics_config": (
        "BatchSizeStage DefaultMetricsConfig DefaultTaskInfo EmptyMetricsConfig MetricsConfig RecComputeMode "
        "RecMetricDef RecMetricEnum RecMetricEnumBase RecTaskInfo SessionMetricDef StateMetricEnum ThroughputDef "
        "validate_batch_size_stages"
    ),
    "torchrec.metrics.rec_metric": (
        "MAX_BUFFER_COUNT MetricComputationReport RecMetric RecMetricComputation RecMetricException RecMetricList "
        "WindowBuffer"
    ),
    "torchrec.quant": "EmbeddingBagCollection",
    "torchrec.quant.embedding_modules": (
        "DATA_TYPE_NUM_BITS DEFAULT_ROW_ALIGNMENT EmbeddingBagCollection EmbeddingCollection "
        "FeatureProcessedEmbeddingBagCollection MODULE_ATTR_CACHE_FEATURES_ORDER "
        "MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS "
        "MODULE_ATTR_REGISTER_TBES_BOOL MODULE_ATTR_REMOVE_STBE_PADDING_BOOL MODULE_ATTR_ROW_ALIGNMENT_INT "
        "MODULE_ATTR_USE_BATCHING_HINTED_OUTPUT MODULE_ATTR_USE_UNFLATTENED_LENGTHS_FOR_BATCHING "
        "QuantManagedCollisionEmbeddingBagCollection QuantManagedCollisionEmbeddingCollection "
        "for_each_module_of_type_do quant_prep_customize_row_alignment quant_prep_enable_cache_features_order "
        "quant_prep_enable_quant_state_dict_split_scale_bias "
        "quant_prep_enable_quant_state_dict_split_scale_bias_for_types quant_prep_enable_register_tbes "
        "quantize_state_dict"
    ),
    "torchrec.quant.utils": "meta_to_cpu_placement populate_fx_names recursive_populate_fx_names",
    "torchrec.fx": "Tracer symbolic_trace",
    "torchrec.fx.tracer": "Tracer is_fx_tracing symbolic_trace",
    "torchrec.inference": "",
    "torchrec.types": "CacheMixin CopyMixIn DataType ModuleCopyMixin ModuleNoCopyMixin",
    "torchrec.streamable": "Multistreamable Pipelineable",
    "torchrec.tensor_types": "UInt2Tensor UInt4Tensor UIntXTensor down_size fill_defaults find_arg_of_type up_size",
}
"""Module -> names, space between them."""
