"""Tables and batches for the collections' tests."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from recshard_lab.embedding import EmbeddingBagConfig, PoolingType
from recshard_lab.sparse import KeyedJaggedTensor

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
FEATURES = ["liked", "seen", "genre", "unread"]


def tables(pooling: PoolingType = SUM) -> list[EmbeddingBagConfig]:
    """Two features on one table, one feature on two tables, one table wider than the rest."""
    return [
        EmbeddingBagConfig(7, 4, "movies", feature_names=["seen", "liked"], pooling=pooling),
        EmbeddingBagConfig(7, 32, "posters", feature_names=["seen"]),
        EmbeddingBagConfig(5, 8, "genres", feature_names=["genre"], pooling=pooling),
    ]


def batch(seed: int = 0, size: int = 4, weighted: bool = False) -> KeyedJaggedTensor:
    torch.manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES), size)) * (torch.rand(len(FEATURES), 1) < 0.8)
    total = int(lengths.sum())
    values = torch.where(torch.rand(total) < 0.4, torch.randint(0, 2, (total,)) * 4, torch.randint(0, 5, (total,)))
    weights = torch.rand(total) if weighted else None
    return KeyedJaggedTensor(FEATURES, values, weights, lengths=lengths.reshape(-1))


batches = st.builds(batch, seed=st.integers(0, 999), size=st.integers(0, 5), weighted=st.just(True))
