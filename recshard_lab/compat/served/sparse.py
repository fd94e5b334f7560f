"""Top level, jagged tensors and types."""

_JAGGED = "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor jt_is_equal kjt_is_equal"
_COLLECTIONS = "EmbeddingBagCollection EmbeddingCollection"

SERVED: dict[str, dict[str, str]] = {
    "torchrec": {
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor Multistreamable Pipelineable",
        "embedding": f"DataType PoolingType EmbeddingBagConfig EmbeddingConfig EmbeddingBagCollectionInterface "
        f"{_COLLECTIONS}",
    },
    "torchrec.sparse": {"sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor"},
    "torchrec.sparse.jagged_tensor": {"sparse": f"{_JAGGED} regroup_kts"},
    "torchrec.streamable": {"sparse": "Multistreamable Pipelineable"},
    "torchrec.types": {"embedding": "DataType"},
}
