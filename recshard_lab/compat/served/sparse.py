"""Top level, jagged tensors and types."""

_JAGGED = "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor jt_is_equal kjt_is_equal"
_COLLECTIONS = "EmbeddingBagCollection EmbeddingCollection"

SERVED: dict[str, dict[str, str]] = {
    "torchrec": {
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor Multistreamable Pipelineable",
        "embedding": f"DataType PoolingType EmbeddingBagCollectionInterface {_COLLECTIONS}",
        "compat.modules.configs": "EmbeddingBagConfig EmbeddingConfig",
    },
    "torchrec.sparse": {"sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor"},
    "torchrec.sparse.jagged_tensor": {
        "sparse": f"{_JAGGED} regroup_kts permute_multi_embedding=regroup_kts",
        "sparse.trees": "JaggedTensorMeta=Traceable",
        "compat.jagged": "flatten_kjt_list unflatten_kjt_list",
    },
    "torchrec.sparse.jagged_tensor_validator": {"sparse": "validate_keyed_jagged_tensor"},
    "torchrec.sparse.tensor_dict": {"sparse.interop": "maybe_td_to_kjt"},
    "torchrec.streamable": {"sparse": "Multistreamable Pipelineable"},
    "torchrec.types": {
        "embedding": "DataType",
        "compat.mixins": "CacheMixin CopyMixIn ModuleCopyMixin ModuleNoCopyMixin",
    },
    "torchrec.modules.regroup": {"compat.regroup": "PermuteMultiEmbedding module_init"},
}
