"""``torchrec.modules``."""

_COLLECTIONS = "EmbeddingBagCollection EmbeddingCollection"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.modules": {},
    "torchrec.modules.embedding_configs": {
        "embedding": "DataType PoolingType DATA_TYPE_NUM_BITS pooling_type_to_str QuantConfig",
        "sharding": "ShardingType",
        "compat.modules.configs": "BaseEmbeddingConfig EmbeddingBagConfig EmbeddingConfig EmbeddingTableConfig "
        "data_type_to_dtype dtype_to_data_type pooling_type_to_pooling_mode",
    },
    "torchrec.modules.embedding_modules": {
        "embedding": f"{_COLLECTIONS} EmbeddingBagCollectionInterface EmbeddingCollectionInterface "
        "get_embedding_names_by_table=embedding_names_by_table",
        "compat.modules.configs": "EmbeddingBagConfig EmbeddingConfig",
        "compat.modules.utils": "process_pooled_embeddings reorder_inverse_indices",
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    },
    "torchrec.modules.fused_embedding_modules": {
        "embedding": "FusedEmbeddingBagCollection FusedEmbeddingCollection",
        "compat.modules.fused": "convert_optimizer_type_and_kwargs fuse_embedding_optimizer",
    },
    "torchrec.modules.activation": {"models": "SwishLayerNorm"},
    "torchrec.modules.crossnet": {"models": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet"},
    "torchrec.modules.deepfm": {"models": "DeepFM FactorizationMachine"},
    "torchrec.modules.embedding_tower": {"compat.modules.towers": "EmbeddingTower EmbeddingTowerCollection"},
    "torchrec.modules.feature_processor": {
        "compat.modules.feature_processors": "BaseFeatureProcessor BaseGroupedFeatureProcessor PositionWeightedModule "
        "PositionWeightedProcessor offsets_to_range_traceble position_weighted_module_update_features",
    },
    "torchrec.modules.feature_processor_": {
        "models": "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule "
        "PositionWeightedModuleCollection",
        "compat.modules.feature_processors": "get_stride_per_key_per_rank get_weights_list",
    },
    "torchrec.modules.fp_embedding_modules": {
        "models": "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper apply_feature_processors_to_kjt",
    },
    "torchrec.modules.hash_mc_evictions": {
        "embedding": "HashZchEvictionConfig HashZchEvictionPolicyName",
        "compat.managed_collision.evictions": "HashZchEvictionModule HashZchEvictionScorer HashZchOptEvictionModule "
        "HashZchPerFeatureTtlScorer HashZchSingleTtlScorer HashZchThresholdEvictionModule get_eviction_module "
        "get_eviction_scorer get_kernel_from_policy",
    },
    "torchrec.modules.hash_mc_modules": {
        "embedding": "HashZchManagedCollisionModule",
        "compat.managed_collision.mapping": "TrainInputMapper",
    },
    "torchrec.modules.mc_embedding_modules": {
        "embedding": "ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingCollection "
        "BaseManagedCollisionEmbeddingCollection",
        "compat.managed_collision.mapping": "return_remapped_lengths_as_mask",
    },
    "torchrec.modules.mc_modules": {
        "compat.managed_collision.mapping": "apply_mc_method_to_jt_dict",
        "embedding": "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
        "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
        "average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter",
    },
    "torchrec.modules.lazy_extension": {"compat.modules.lazy_extension": "LazyModuleExtensionMixin lazy_apply"},
    "torchrec.modules.mlp": {"compat.modules.mlp": "MLP Perceptron"},
    "torchrec.modules.regroup": {"embedding": "KTRegroupAsDict"},
    "torchrec.modules.utils": {
        "compat.modules.utils": "check_module_output_dimension construct_jagged_tensors "
        "construct_jagged_tensors_inference construct_modulelist_from_single_module "
        "convert_list_of_modules_to_modulelist deterministic_dedup extract_module_or_tensor_callable "
        "get_module_output_dimension init_mlp_weights_xavier_uniform jagged_index_select_with_empty "
        "reset_module_states_post_sharding",
    },
}
