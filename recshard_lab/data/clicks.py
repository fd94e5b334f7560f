"""Clicks out of a formula: Zipf ids, a planted model whose best possible AUC is known, any number of samples.

    logit(sample) = bias + sum_f  s_f * weight(f, id_f) + sum_i  v_i * dense_i + pairs of latent factors
    label ~ Bernoulli(sigmoid(logit))

Every number is a function of (seed, sample) or (seed, feature, id), made by hashing: nothing is stored, so there may
be billions of samples and tables of any size, and any sample can be had at any time on any rank.

Shape letters: b samples, F features, I dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recshard_lab import mlperf
from recshard_lab.arguments import checks_arguments
from recshard_lab.data.batch import Batch, Samples, check_samples
from recshard_lab.data.source import one_id_each

_U64 = np.uint64
_STEP = _U64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)
_EVEN, _LOW = _U64(0x0000FFFF0000FFFF), _U64(0xFFFFFFFF)
_MOST_ROWS = 1 << 31
_LATENT = 2
_TRIED = 4096
MISSING = np.iinfo(np.int64).min
"""The value of a count that was not recorded."""


@dataclass(frozen=True)
class Best:
    """What the planted model itself reaches on some samples: no model can be expected to do better."""

    auc: float
    log_loss: float


def mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number hashed to 64 bits (the finaliser of SplitMix64, Steele, Lea and Flood 2014)."""
    numbers = (numbers ^ (numbers >> _U64(30))) * _MIX_1
    numbers = (numbers ^ (numbers >> _U64(27))) * _MIX_2
    return numbers ^ (numbers >> _U64(31))


def uniform(hashed: NDArray[np.uint64]) -> NDArray[np.float64]:
    """In [0, 1), from the upper 53 bits."""
    return (hashed >> _U64(11)).astype(np.float64) * 2.0**-53


def normal(hashed: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Mean 0, deviation 1, nearly normal: the sum of the hash's four 16-bit quarters."""
    pairs = (hashed & _EVEN) + ((hashed >> _U64(16)) & _EVEN)
    summed = ((pairs & _LOW) + (pairs >> _U64(32))).astype(np.float64)
    summed -= 4 * 32767.5
    summed *= 3**0.5 / 65536
    return summed


@checks_arguments
def scaled_rows(
    memory_bytes: int, rows: Sequence[int] = mlperf.ROWS, embedding_dim: int = mlperf.EMBEDDING_DIM, item_bytes: int = 4
) -> list[int]:
    """The rows of MLPerf's tables under a cap that lets them fit into a memory, as ``--max-ind-range`` caps them.

    Args:
        memory_bytes: of all tables together.
        rows: of each table before; embedding_dim, item_bytes: numbers of a row and bytes of a number.

    Raises:
        ValueError: not even one row of each table fits, or sizes below 1.

    >>> scaled_rows(1 << 30)[:4], sum(scaled_rows(1 << 30)) * 512 <= 1 << 30
    ([246994, 39060, 17295, 7424], True)
    """
    if not rows or min(*rows, embedding_dim, item_bytes) < 1:
        raise ValueError(
            f"rows, embedding_dim and item_bytes must be from 1, got {rows}, {embedding_dim} and {item_bytes}"
        )
    budget = memory_bytes // (embedding_dim * item_bytes)
    if budget < len(rows):
        raise ValueError(
            f"memory_bytes is {memory_bytes:,}: {len(rows)} tables of one row need "
            f"{len(rows) * embedding_dim * item_bytes:,}"
        )
    low, high = 1, max(rows)
    while low < high:
        cap = (low + high + 1) // 2
        low, high = (cap, high) if sum(min(cap, own) for own in rows) <= budget else (low, cap - 1)
    return [min(low, own) for own in rows]


class SyntheticClicks:
    """A source of clicks drawn from a planted model, with Criteo's 13 counts and 26 categories or any others.

    Args:
        num_samples: how many there are; they cost nothing until they are asked for.
        rows: ids of each feature, most frequent first; MLPerf's, capped to `memory_bytes`, when left out.
        memory_bytes: of all tables with MLPerf's 128 columns in float32, where `rows` is left out.
        num_dense: I.
        zipf: id k is drawn with a probability like ``(k + 1) ** -zipf``.
        signal: deviation of the planted logit; 0 leaves nothing to learn.
        click_rate: which share of labels is 1, within a percent or two.
        seed: the same seed gives the same samples.

    Raises:
        ValueError: sizes that cannot be.

    >>> data = SyntheticClicks(1000, rows=[10, 2000], seed=3)
    >>> data.batch(range(0, 4)).sparse_features.keys(), 0.6 < data.best(range(1000)).auc < 1
    (['cat_0', 'cat_1'], True)
    """

    @checks_arguments
    def __init__(
        self,
        num_samples: int,
        rows: Sequence[int] | None = None,
        *,
        memory_bytes: int = 1 << 26,
        num_dense: int = mlperf.DENSE_FEATURES,
        zipf: float = 1.05,
        signal: float = 1.5,
        click_rate: float = 0.25,
        seed: int = 0,
    ) -> None:
        self.rows = list(scaled_rows(memory_bytes) if rows is None else rows)
        if not 0 <= num_samples < 1 << 40 or not 0 <= num_dense <= 1 << 16 or not 0 <= seed < 1 << 62:
            raise ValueError(
                f"num_samples must be from 0 to 2**40, num_dense to 65,536, seed to 2**62, got {num_samples}, "
                f"{num_dense}, {seed}"
            )
        if not self.rows or not all(0 < own < _MOST_ROWS for own in self.rows):
            raise ValueError(f"rows must be numbers from 1 to 2**31, one per feature, got {self.rows}")
        if not 0 <= zipf <= 10 or not 0 <= signal <= 100 or not 0 < click_rate < 1:
            raise ValueError(
                f"zipf must be from 0 to 10, signal from 0 to 100, click_rate between 0 and 1, got {zipf}, {signal}, "
                f"{click_rate}"
            )
        self.num_samples, self.dense_count, self.seed = num_samples, num_dense, seed
        self.zipf, self.signal = zipf, signal
        self.keys = [f"cat_{number}" for number in range(len(self.rows))]
        self.features = dict(zip(self.keys, self.rows, strict=True))
        self.source = f"synthetic clicks with planted signal, {num_samples:,} samples, seed {seed}"
        self._feature = mixed(np.arange(1, len(self.rows) + 1, dtype=np.uint64) * _STEP + _U64(seed))
        self._counts = mixed(np.arange(1, num_dense + 1, dtype=np.uint64) * _STEP - _U64(seed))
        strength = 0.3 + uniform(mixed(self._feature))
        self._strength = strength / np.sqrt((strength**2).sum())
        self.bias = self._bias_for(click_rate)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_dense_features(self) -> int:
        """I."""
        return self.dense_count

    def ids(self, samples: Samples) -> NDArray[np.int64]:
        """The one id of each feature, int64 ``[b, F]``, Zipf distributed: smaller ones more often."""
        drawn = uniform(mixed(self._numbers(samples)[:, None] + self._feature))
        rows, rest = np.array(self.rows, float), 1 - self.zipf
        # the inverse of the distribution with density x ** -zipf on [1, rows + 1)
        span = np.log(rows + 1) if abs(rest) < 1e-9 else ((rows + 1) ** rest - 1)
        drawn *= span
        at = np.exp(drawn) if abs(rest) < 1e-9 else np.exp(np.log1p(drawn) / rest)
        return np.minimum(at.astype(np.int64) - 1, np.array(self.rows) - 1)

    def counts(self, samples: Samples) -> NDArray[np.int64]:
        """The dense features as they are logged, int64 ``[b, I]``: heavy tails, some -1, some `MISSING`."""
        drawn = mixed(self._numbers(samples)[:, None] + self._counts)
        column = np.arange(self.dense_count)
        counts = np.exp(1 + column % 4 + (0.5 + column % 3) * normal(drawn)).astype(np.int64) - (column % 5 == 1)
        missing = uniform(mixed(drawn)) < 0.06 * (column % 8)
        return np.where(missing, MISSING, counts)

    def probability(self, samples: Samples) -> NDArray[np.float64]:
        """The planted chance of a click, ``[b]``: what a perfect model would say."""
        return self._probability(self.ids(samples), logged(self.counts(samples)))

    def labels(self, samples: Samples) -> NDArray[np.bool_]:
        """Clicks, ``[b]``, drawn with their planted chance."""
        return self._drawn(samples, self.probability(samples))

    def logs(self, samples: Samples) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64]]:
        """Labels ``[b]``, counts ``[b, I]`` and ids ``[b, F]``: what a log would hold of these samples."""
        ids, counts = self.ids(samples), self.counts(samples)
        return self._drawn(samples, self._probability(ids, logged(counts))), counts, ids

    def best(self, samples: Samples) -> Best:
        """AUC and log loss of the planted chances on these samples."""
        chance, labels = self.probability(samples), self.labels(samples)
        order = np.argsort(chance, kind="stable")
        ranks = np.empty(len(order))
        ranks[order] = np.arange(1, len(order) + 1)
        clicks = int(labels.sum())
        pairs = clicks * (len(labels) - clicks)
        area = (ranks[labels].sum() - clicks * (clicks + 1) / 2) / pairs if pairs else float("nan")
        said = np.where(labels, chance, 1 - chance)
        return Best(float(area), float(-np.log(said).mean()))

    def batch(self, samples: Samples) -> Batch:
        """These samples; dense features are ``log(1 + max(count, 0))``, 0 where missing."""
        check_samples(samples, self.num_samples)
        ids, dense = self.ids(samples), logged(self.counts(samples))
        return one_id_each(dense, ids, self._drawn(samples, self._probability(ids, dense)), self.keys)

    def _numbers(self, samples: Samples) -> NDArray[np.uint64]:
        numbers = np.arange(samples.start, samples.stop) if isinstance(samples, range) else samples
        return mixed(numbers.astype(np.uint64) * _STEP + _U64(self.seed + 1))

    def _drawn(self, samples: Samples, chance: NDArray[np.float64]) -> NDArray[np.bool_]:
        return uniform(mixed(self._numbers(samples) ^ _STEP)) < chance

    def _probability(self, ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        return _sigmoid(self.bias + self._logit(ids, dense))

    def _logit(self, ids: NDArray[np.int64], dense: NDArray[np.float32]) -> NDArray[np.float64]:
        """Without the bias."""
        hashed = mixed(ids.astype(np.uint64) * _STEP + self._feature)
        linear = normal(hashed) @ self._strength
        latent = [normal(mixed(hashed + _U64(part))) for part in range(1, _LATENT + 1)]
        pairs = sum((own[:, :-1] * own[:, 1:] for own in latent), start=np.zeros((len(ids), len(self.rows) - 1)))
        crossed = pairs.sum(1) / max(1.0, (_LATENT * pairs.shape[1]) ** 0.5)
        counted = np.zeros(len(ids))
        if self.dense_count:
            weight = normal(mixed(self._counts)) / self.dense_count**0.5
            counted = (dense / (1 + np.arange(self.dense_count) % 4) - 1) @ weight
        return self.signal * (0.8 * linear + 0.4 * crossed + 0.4 * counted)

    def _bias_for(self, click_rate: float) -> float:
        """The bias with which the chances of some samples have this mean."""
        some = range(_TRIED)
        logits = self._logit(self.ids(some), logged(self.counts(some)))
        low, high = -100.0 * (1 + self.signal), 100.0 * (1 + self.signal)
        while high - low > 1e-9:
            bias = (low + high) / 2
            low, high = (bias, high) if _sigmoid(bias + logits).mean() < click_rate else (low, bias)
        return low


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-logits))


def logged(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """``log(1 + max(count, 0))``, as the DLRM reference transforms Criteo's counts; 0 where missing."""
    return np.log1p(np.maximum(counts, 0)).astype(np.float32)
