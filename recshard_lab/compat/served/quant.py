"""``torchrec.quant``."""

_ROOM = "compat.quant.modules"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.quant": {_ROOM: "EmbeddingBagCollection"},
    "torchrec.quant.embedding_modules": {
        "embedding": "DATA_TYPE_NUM_BITS",
        _ROOM: "DEFAULT_ROW_ALIGNMENT EmbeddingBagCollection EmbeddingCollection "
        "FeatureProcessedEmbeddingBagCollection MODULE_ATTR_CACHE_FEATURES_ORDER "
        "MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS "
        "MODULE_ATTR_REGISTER_TBES_BOOL MODULE_ATTR_REMOVE_STBE_PADDING_BOOL MODULE_ATTR_ROW_ALIGNMENT_INT "
        "MODULE_ATTR_USE_BATCHING_HINTED_OUTPUT MODULE_ATTR_USE_UNFLATTENED_LENGTHS_FOR_BATCHING "
        "QuantManagedCollisionEmbeddingBagCollection QuantManagedCollisionEmbeddingCollection "
        "for_each_module_of_type_do quant_prep_customize_row_alignment quant_prep_enable_cache_features_order "
        "quant_prep_enable_quant_state_dict_split_scale_bias "
        "quant_prep_enable_quant_state_dict_split_scale_bias_for_types quant_prep_enable_register_tbes "
        "quantize_state_dict",
    },
    "torchrec.distributed.quant_embeddingbag": {
        _ROOM: "MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",
        "compat.quant.sharded": "FUSED_PARAM_IS_SSD_TABLE FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS "
        "FUSED_PARAM_REGISTER_TBE_BOOL QuantEmbeddingBagCollectionSharder "
        "QuantFeatureProcessedEmbeddingBagCollectionSharder QuantManagedCollisionEmbeddingBagCollectionSharder "
        "ShardedQuantEmbeddingBagCollection ShardedQuantFeatureProcessedEmbeddingBagCollection "
        "ShardedQuantManagedCollisionEmbeddingBagCollection flatten_feature_lengths get_device_from_parameter_sharding",
    },
    "torchrec.distributed.quant_embedding": {
        "compat.quant.sharded": "QuantEmbeddingCollectionSharder QuantManagedCollisionEmbeddingCollectionSharder "
        "ShardedQuantEmbeddingCollection ShardedQuantManagedCollisionEmbeddingCollection "
        "get_device_from_parameter_sharding",
    },
    "torchrec.distributed.mc_modules": {"compat.quant.sharded": "InferManagedCollisionCollectionSharder"},
    "torchrec.quant.utils": {_ROOM: "meta_to_cpu_placement"},
}
