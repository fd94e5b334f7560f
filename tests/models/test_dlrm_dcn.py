"""DLRM-DCNv2: MLPerf's own size, on meta."""

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingShardingPlanner, Topology, mlperf
from recshard_lab.models import DLRM_DCN
from recshard_lab.planner import Workload


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


def test_mlperfs_model_is_planned_within_every_ranks_memory() -> None:
    model = mlperfs()
    topology = Topology(8, compute_device="cuda", hbm_cap=80 << 30)
    workload = Workload(
        batch_size=mlperf.GLOBAL_BATCH_SIZE // 8,
        pooling_factors=dict(zip(mlperf.FEATURES, mlperf.MULTI_HOT_SIZES, strict=True)),
    )
    planner = EmbeddingShardingPlanner(topology, workload=workload)
    plan = planner.plan(model)
    held = [0] * 8
    for sharding in plan.plan["embedding_bag_collection"].values():
        for shard in sharding.shards:
            held[shard.rank] += 4 * shard.num_rows * shard.num_cols
    assert sum(held) >= 4 * 204_184_588 * 128
    assert max(held) < 80 << 30
