"""``torchrec.modules``."""

_CONFIGS = "BaseEmbeddingConfig DataType EmbeddingBagConfig EmbeddingConfig PoolingType"
_COLLECTIONS = "EmbeddingBagCollection EmbeddingCollection"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.modules": {},
    "torchrec.modules.embedding_configs": {
        "embedding": f"{_CONFIGS} DATA_TYPE_NUM_BITS data_type_to_dtype dtype_to_data_type pooling_type_to_str "
        "EmbeddingTableConfig=BaseEmbeddingConfig QuantConfig",
        "sharding": "ShardingType",
    },
    "torchrec.modules.embedding_modules": {
        "embedding": f"{_COLLECTIONS} EmbeddingBagConfig EmbeddingConfig EmbeddingBagCollectionInterface "
        "EmbeddingCollectionInterface "
        "get_embedding_names_by_table=embedding_names_by_table",
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    },
    "torchrec.modules.fused_embedding_modules": {
        "embedding": "FusedEmbeddingBagCollection FusedEmbeddingCollection fuse_embedding_optimizer",
    },
    "torchrec.modules.activation": {"models": "SwishLayerNorm"},
    "torchrec.modules.crossnet": {"models": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet"},
    "torchrec.modules.deepfm": {"models": "DeepFM FactorizationMachine"},
    "torchrec.modules.embedding_tower": {"models": "EmbeddingTower EmbeddingTowerCollection tower_input_params"},
    "torchrec.modules.feature_processor": {"models": "PositionWeightedProcessor"},
    "torchrec.modules.feature_processor_": {
        "models": "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule "
        "PositionWeightedModuleCollection",
    },
    "torchrec.modules.fp_embedding_modules": {
        "models": "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper",
    },
    "torchrec.modules.hash_mc_evictions": {"embedding": "HashZchEvictionConfig HashZchEvictionPolicyName"},
    "torchrec.modules.hash_mc_modules": {"embedding": "HashZchManagedCollisionModule"},
    "torchrec.modules.mc_embedding_modules": {
        "embedding": "ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingCollection "
        "BaseManagedCollisionEmbeddingCollection",
    },
    "torchrec.modules.mc_modules": {
        "embedding": "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
        "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
        "average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter",
    },
    "torchrec.modules.mlp": {"models": "MLP Perceptron"},
    "torchrec.modules.regroup": {"embedding": "KTRegroupAsDict"},
}
