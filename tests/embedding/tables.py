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


def deduplicated(seed: int = 0, size: int = 5, weighted: bool = False) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """A variable batch with inverse indices in another order of keys, and the equal plain batch."""
    torch.manual_seed(seed)
    bags = torch.randint(1, 4, (len(FEATURES),)).tolist()
    lengths = torch.randint(0, 4, (sum(bags),))
    values = torch.randint(0, 5, (int(lengths.sum()),))
    weights = torch.rand(values.numel()) if weighted else None
    inverse = torch.stack([torch.randint(0, count, (size,)) for count in bags])
    order = list(reversed(range(len(FEATURES))))
    variable = KeyedJaggedTensor(
        FEATURES,
        values,
        weights,
        lengths,
        stride_per_key_per_rank=[[count] for count in bags],
        inverse_indices=([FEATURES[place] for place in order], inverse[order]),
    )
    ids, per_id = variable.to_dict(), []
    full: dict[str, list[torch.Tensor]] = {}
    for feature, row in zip(FEATURES, inverse.tolist(), strict=True):
        full[feature] = [ids[feature].to_dense()[bag] for bag in row]
        per_id += [w for bag in row for w in (ids[feature].to_dense_weights() or [values[:0]] * 9)[bag].tolist()]
    plain = KeyedJaggedTensor(
        FEATURES,
        torch.cat([bag for bags in full.values() for bag in bags]) if size else values[:0],
        torch.tensor(per_id) if weighted else None,
        torch.tensor([bag.numel() for bags in full.values() for bag in bags], dtype=torch.int64),
        stride=size,
    )
    return variable, plain


batches = st.builds(batch, seed=st.integers(0, 999), size=st.integers(0, 5), weighted=st.just(True))
