"""Random batches as a workload describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner import AccessProfile, Workload

if TYPE_CHECKING:
    from recshard_lab.sparse import KeyedJaggedTensor


def random_batch(
    tables: Sequence[BaseEmbeddingConfig], workload: Workload, rng: np.random.Generator | None = None
) -> KeyedJaggedTensor:
    """One rank's random batch: B bags per feature, ids with the workload's skew.

    Lengths follow a Poisson distribution; if the mean is a whole number, all bags have this length. Hot ids are
    scattered over the rows, as hashing does, so no row shard is hot by its position.

    Args:
        tables: the configs; features of several tables occur once.
        workload: batch size, ids per bag and skew.
        rng: the source of random numbers. Default: a new one with seed 0.

    Raises:
        PlanError: a name in `workload` that no table has.
    """
    workload.check_names(tables)
    import torch

    from recshard_lab.sparse import KeyedJaggedTensor

    rng = np.random.default_rng(0) if rng is None else rng
    keys, lengths, values = [], [], []
    for table in tables:
        for feature in table.feature_names:
            if feature in keys:
                continue
            mean = workload.pooling_factor(feature)
            counts = rng.poisson(mean, workload.batch_size) if mean % 1 else np.full(workload.batch_size, int(mean))
            keys.append(feature)
            lengths.append(counts)
            profile = workload.profile(table.name)
            if profile is None:
                values.append(_ids(table.num_embeddings, int(counts.sum()), workload.skew(table.name), rng))
            else:
                values.append(_used_as(profile, table.num_embeddings, int(counts.sum()), rng))
    ids = torch.from_numpy(np.concatenate(values))
    weights = torch.from_numpy(rng.random(len(ids), dtype=np.float32)) if workload.weighted else None
    return KeyedJaggedTensor(
        keys, ids, weights=weights, lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32))
    )


def _ids(rows: int, count: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """``count`` ids with ``p(k) ~ k ** -alpha``, by the inverse of the continuous distribution."""
    if alpha == 0:
        return rng.integers(0, rows, count, dtype=np.int64)
    u = rng.random(count)
    if abs(alpha - 1) < 1e-9:
        place = np.exp(u * np.log(rows + 1.0))
    else:
        place = (1 + u * ((rows + 1.0) ** (1 - alpha) - 1)) ** (1 / (1 - alpha))
    return _scattered(np.clip(place.astype(np.int64) - 1, 0, rows - 1), rows)


def _used_as(profile: AccessProfile, rows: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` ids whose rows are used as in `profile`. In a table with fewer rows, several of its rows share one.

    The profile's ids are drawn without replacement. Beyond their number, as many new rows are drawn as it extrapolates;
    the remaining ids are drawn a second time.
    """
    counts, uses = np.array(profile.rows)[::-1], np.array(profile.uses)[::-1]
    ends, lookups = (np.concatenate([[0.0], np.cumsum(each)]) for each in (counts, counts * uses))
    sample = int(lookups[-1])
    slots = rng.choice(sample, min(count, sample), replace=False) + 0.5
    more = count - len(slots)
    new = int(profile.distinct(count) - profile.num_rows) if more else 0
    slots = np.concatenate([slots, rng.random(more - new) * sample])
    order = np.concatenate([np.interp(slots, lookups, ends), profile.num_rows + np.arange(new)])
    return _scattered(order.astype(np.int64) % rows, rows)[rng.permutation(count)]


def _scattered(order: np.ndarray, rows: int) -> np.ndarray:
    """Row numbers, hottest first, mapped to positions all over the table."""
    step = next(p for p in (2_654_435_761, 2_147_483_647, 999_999_937) if rows % p)  # a prime: a bijection
    return (order * step) % rows
