"""``torchrec.inference``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.inference": {},
    "torchrec.inference.modules": {
        "compat.inference.modules": "BatchingMetadata PredictFactory PredictModule QualNameMetadata "
        "quantize_embeddings quantize_inference_model set_pruning_data shard_quant_model "
        "trim_torch_package_prefix_from_typename",
    },
    "torchrec.inference.dlrm_predict": {"compat.inference.dlrm": "DLRMModelConfig DLRMPredictModule"},
    "torchrec.inference.state_dict_transform": {
        "compat.inference.state_dicts": "state_dict_all_gather_keys state_dict_gather state_dict_to_device",
    },
}
