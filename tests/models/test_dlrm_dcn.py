"""DLRM-DCNv2: MLPerf's own size, on meta."""

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, mlperf
from recshard_lab.models import DLRM_DCN


def mlperfs() -> DLRM_DCN:
    """All 204 million rows."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=rows, embedding_dim=mlperf.EMBEDDING_DIM, feature_names=[name]
        )
        for name, rows in zip(mlperf.FEATURES, mlperf.ROWS, strict=True)
    ]
    return DLRM_DCN(
        EmbeddingBagCollection(tables, device="meta"),
        mlperf.DENSE_FEATURES,
        mlperf.DENSE_ARCH_LAYERS,
        mlperf.OVER_ARCH_LAYERS,
        mlperf.DCN_LAYERS,
        mlperf.DCN_LOW_RANK,
        dense_device="meta",
    )


def test_mlperfs_model_has_its_sizes_without_memory() -> None:
    model = mlperfs()
    assert {p.device.type for p in model.parameters()} == {"meta"}
    tables = sum(p.numel() for p in model.embedding_bag_collection.parameters())
    assert tables == 204_184_588 * 128
    # 13-512-256-128, three layers of (3456 x 512, 512 x 3456, 3456), 3456-1024-1024-512-256-1
    assert sum(p.numel() for p in model.parameters()) - tables == 16_044_545
