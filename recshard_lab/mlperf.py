"""The recommendation benchmark of MLPerf Training, DLRM-DCNv2 on multi-hot Criteo 1TB: its sizes and nothing else.

Data, models and the planner read the same figures here; the file imports nothing. A table has one feature, in the order
of Criteo's 26 categories.

Source: MLPerf Training, ``recommendation_v2/torchrec_dlrm`` (its README and launch arguments), with the
hyperparameters of its reference at batch 65,536.

>>> f"{sum(ROWS):,} rows, {sum(MULTI_HOT_SIZES)} lookups a sample"
'204,184,588 rows, 214 lookups a sample'
"""

# fmt: off
ROWS: tuple[int, ...] = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)
"""Rows of each table; the five largest are hashed to 40 million."""

MULTI_HOT_SIZES: tuple[int, ...] = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1,
    6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)
"""Ids of every bag of each feature: fixed, not a mean."""
# fmt: on

FEATURES: tuple[str, ...] = tuple(f"cat_{number}" for number in range(len(ROWS)))
DENSE_FEATURES = 13
EMBEDDING_DIM = 128
DENSE_ARCH_LAYERS: tuple[int, ...] = (512, 256, 128)
OVER_ARCH_LAYERS: tuple[int, ...] = (1024, 1024, 512, 256, 1)
DCN_LAYERS = 3
DCN_LOW_RANK = 512

GLOBAL_BATCH_SIZE = 65_536
OPTIMIZER = "exact_adagrad"
LEARNING_RATE = 0.005
EPS = 1e-8
TARGET_AUC = 0.80275
