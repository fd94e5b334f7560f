"""``torchrec.quant``."""

SERVED: dict[str, dict[str, str]] = {
    "torchrec.quant": {"embedding": "EmbeddingBagCollection=QuantEmbeddingBagCollection"},
    "torchrec.quant.embedding_modules": {
        "embedding": "DATA_TYPE_NUM_BITS EmbeddingBagCollection=QuantEmbeddingBagCollection "
        "EmbeddingCollection=QuantEmbeddingCollection",
    },
}
