"""Sources of a loader: samples by number, from memory, memory-mapped files, Parquet or a formula.

Shape letters: b samples asked for, I dense features, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from recshard_lab.data.batch import Batch, Samples, check_samples
from recshard_lab.sparse import KeyedJaggedTensor


@runtime_checkable
class SampleSource(Protocol):
    """Samples by their number; the interface that `BatchLoader` uses.

    `features` has the number of ids of each feature (`num_embeddings` of its table), in the order of the batches.
    `source` names the data in figures and logs.
    """

    source: str
    features: dict[str, int]

    @property
    def num_dense_features(self) -> int:
        """I, the width of a batch's dense features."""
        ...

    def __len__(self) -> int: ...

    def batch(self, samples: Samples) -> Batch:
        """These samples, in this order."""
        ...


class SamplePart:
    """A range of a source: days to train on, half a day to validate.

    Args:
        whole: the source.
        begin, end: which samples of it.

    Raises:
        ValueError: a range outside the source.

    >>> from recshard_lab.data import SyntheticClicks
    >>> part = SamplePart(SyntheticClicks(10, rows=[3, 5]), 8, 10)
    >>> len(part), part.batch(range(0, 2)).labels.shape
    (2, torch.Size([2]))
    """

    def __init__(self, whole: SampleSource, begin: int, end: int) -> None:
        if not isinstance(whole, SampleSource):
            raise ValueError(f"whole must be a source of samples (source, features, batch, len), got {whole!r}")
        if not all(isinstance(at, int) for at in (begin, end)) or not 0 <= begin <= end <= len(whole):
            raise ValueError(f"begin and end must lie in [0, {len(whole)}] in this order, got {begin!r} and {end!r}")
        self.whole, self.begin, self.end = whole, begin, end
        self.features = dict(whole.features)
        self.source = f"{whole.source}, samples {begin:,} to {end:,}"

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def num_dense_features(self) -> int:
        """I, as of the whole."""
        return self.whole.num_dense_features

    def batch(self, samples: Samples) -> Batch:
        """These samples of the range, in this order."""
        check_samples(samples, len(self))
        if isinstance(samples, range):
            return self.whole.batch(range(samples.start + self.begin, samples.stop + self.begin))
        return self.whole.batch(samples + self.begin)


def one_id_each(
    dense: NDArray[np.float32], ids: NDArray[np.integer], labels: NDArray[np.generic], keys: Sequence[str]
) -> Batch:
    """A batch whose samples have exactly one id a feature, as Criteo's: one transposition, no loop over features.

    Args:
        dense: ``[b, I]``; ids: ``[b, F]``, any integers; labels: ``[b]``, numbers; keys: the F features.
    """
    size = len(labels)
    values = torch.empty(len(keys), size, dtype=torch.int64)
    values.copy_(torch.from_numpy(ids).t())
    return Batch(
        torch.from_numpy(dense),
        KeyedJaggedTensor(list(keys), values.view(-1), lengths=_ones(len(keys) * size), stride=size),
        torch.from_numpy(np.asarray(labels, np.float32)),
    )


@lru_cache(4)
def _ones(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.int32)
