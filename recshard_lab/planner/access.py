"""Reuse of a table's rows: it determines how many of a batch's ids are distinct, at any batch size.

Notation: a profile's sample has N ids, and c of them are one row; a batch has n ids.

- **n <= N**, by rarefaction: a batch of n ids keeps each of the N with probability n / N, so the batch has a row
  of c uses with probability ``1 - (1 - n/N) ** c`` and ``U(n) = sum over rows of that`` (Hurlbert, Ecology 52, 1971;
  ids are kept independently instead of exactly n of them, which differs by O(1/N)). ``U(N)`` is the sample's count.
- **n > N**, by extrapolation: the probability that the next id is a new row is ``f1 / N`` with f1 the
  rows used once (Good, Biometrika 40, 1953), which is the slope of U at N. U continues as the power law through
  (N, U(N)) with that slope (Heaps' law): ``U(n) = U(N) * (n / N) ** (f1 / U(N))``, at most the table's rows.

Both treat ids as exchangeable. If ids that are close in time resemble each other, a real batch has fewer distinct ids.
`AccessProfile.unique_fraction` is the counted share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from recshard_lab.arguments import checks_arguments, names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding.plan.row_shares import RowShares, ids_in, in_turn

# facebookresearch/dlrm_datasets, 2021, 856 tables, batches of 65,536: most uses of a bin -> its share of lookups
META_2021_REUSE: dict[int, float] = dict(
    zip(
        (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        (.07, .04, .07, .10, .12, .10, .07, .06, .05, .05, .05, .05, .05, .04, .03, .02, .02),
        strict=True,
    )
)  # fmt: skip
META_2021_POOLING = 15.8  # mean ids per bag in these tables
META_2021_BATCH = 65_536


@checks_arguments
@dataclass(frozen=True)
class AccessProfile:
    """A histogram of uses: how many rows of one table occur how often in a sample of its ids.

    Args:
        uses: numbers of uses c, ascending, positive; fractions are allowed, for the bins of a histogram.
        rows: number of rows with that many uses; as long as `uses`.
        pooling_factor: mean ids per bag in the sample; None if unknown.
        coverage: share of the bags that have an id, the samples that have the feature; None if unknown.
        ids_per_batch: mean ids per batch; None if the sample has no batches.
        unique_fraction: counted mean of distinct ids / ids per batch; None if the sample has no batches.
        source: the origin of the sample, for readers.

    Raises:
        ValueError: lists of different lengths, nothing used, numbers that are not positive or not ascending.

    >>> profile = AccessProfile(uses=(1.0, 6.0), rows=(4.0, 1.0))  # four rows used once, one six times
    >>> profile.num_ids, profile.unique_at(10), round(float(profile.unique_at(5)), 2)
    (10.0, 0.5, 0.6)
    """

    uses: tuple[float, ...]
    rows: tuple[float, ...]
    pooling_factor: float | None = None
    ids_per_batch: float | None = None
    unique_fraction: float | None = None
    source: str = field(default="", compare=False)
    coverage: float | None = None

    def __post_init__(self) -> None:
        if len(self.uses) != len(self.rows) or not self.uses:
            raise ValueError(
                f"uses and rows must be lists of one length of at least 1, got {len(self.uses)} and "
                f"{len(self.rows)} entries. Fix: give one number of rows for each number of uses"
            )
        uses, rows = np.array(self.uses, dtype=float), np.array(self.rows, dtype=float)
        if not (np.isfinite(uses).all() and (uses > 0).all() and (np.diff(uses) > 0).all()):
            raise ValueError(f"uses must be positive and ascending, got {self.uses!r:.80}. Fix: sort them")
        if not (np.isfinite(rows).all() and (rows > 0).all()):
            raise ValueError(f"rows must be positive, got {self.rows!r:.80}. Fix: leave out uses without rows")
        if self.coverage is not None and not 0 <= self.coverage <= 1:
            raise ValueError(f"coverage must be from 0 to 1, got {self.coverage!r}. Fix: 0.9 is 90% of the bags")

    @classmethod
    def meta_2021(cls, pooling_factor: float = META_2021_POOLING, batch_size: int = META_2021_BATCH) -> "AccessProfile":
        """The histogram of reuse that Meta published for 856 production tables, as the profile of one table.

        All rows of a bin get the bin's geometric mean as their uses. The published shares are rounded, and are scaled
        to a sum of one. With this, 14.4% of a batch's ids are distinct; the published count is 14.5%.

        Args:
            pooling_factor: of the table. Default: the mean of all tables.
            batch_size: of the sample, in samples.

        >>> meta = AccessProfile.meta_2021()
        >>> round(float(meta.unique_at(meta.num_ids)), 3)
        0.144
        """
        ends = np.array(list(META_2021_REUSE), dtype=float)
        shares = np.array(list(META_2021_REUSE.values()))
        low = np.concatenate([[1.0], ends[:-1] + 1.0])
        uses = np.sqrt(low * ends)
        ids = batch_size * pooling_factor
        rows = shares / shares.sum() * ids / uses
        return cls(
            tuple(uses.tolist()),
            tuple(rows.tolist()),
            pooling_factor,
            source="facebookresearch/dlrm_datasets, 2021, mean of 856 tables",
        )

    @classmethod
    @names_wrong_arguments
    def of_ids(cls, batches: Iterable[Any], source: str = "") -> "AccessProfile":
        """Counts ids.

        Args:
            batches: arrays or tensors of ids, one per batch.
            source: the origin of the sample, for readers.

        Raises:
            ValueError: no ids; ids that are negative or not whole numbers.

        >>> AccessProfile.of_ids([[3, 3, 5], [3, 7, 7]]).uses
        (1.0, 2.0, 3.0)
        """
        seen, counts, sizes = [], [], []
        for batch in in_turn(batches):
            ids = ids_in(batch)
            if ids.size and ids.min() < 0:
                raise ValueError(f"ids must be whole numbers from 0 up, got {ids.min()}. Fix: remove negative ids")
            rows, used = np.unique(ids, return_counts=True)
            seen.append(rows)
            counts.append(used)
            sizes.append(ids.size)
        if not sum(sizes):
            raise ValueError(f"{len(sizes)} batches contain no ids. Fix: pass batches with ids")
        _, place = np.unique(np.concatenate(seen), return_inverse=True)
        total = np.bincount(place, weights=np.concatenate(counts))
        uses, rows = np.unique(total, return_counts=True)
        return cls(
            tuple(uses.tolist()),
            tuple(rows.astype(float).tolist()),
            ids_per_batch=sum(sizes) / len(sizes),
            unique_fraction=sum(map(len, seen)) / sum(sizes),
            source=source or f"{len(sizes)} batches",
        )

    @property
    def num_ids(self) -> float:
        """Ids of the sample, N."""
        return float(np.dot(self.uses, self.rows))

    @property
    def num_rows(self) -> float:
        """Distinct rows of the sample, U(N)."""
        return float(sum(self.rows))

    @names_wrong_arguments
    def distinct(self, num_ids: float, num_embeddings: float = float("inf")) -> float:
        """Expected distinct rows among `num_ids` ids, by the formulas above.

        Args:
            num_ids: n, from 0 up.
            num_embeddings: rows of the table, an upper bound of the result.
        """
        if not num_ids >= 0:
            raise ValueError(f"num_ids must not be negative, got {num_ids!r}. Fix: num_ids=1000")
        seen, uses, rows = self.num_ids, np.array(self.uses), np.array(self.rows)
        share = min(1.0, num_ids / seen)
        if share < 1:
            found = float((rows * -np.expm1(uses * np.log1p(-share))).sum())
        else:
            once = float(rows[uses == 1].sum())
            found = self.num_rows * (num_ids / seen) ** (once / self.num_rows)
        return min(found, num_embeddings, num_ids)

    @names_wrong_arguments
    def unique_at(self, num_ids: float, num_embeddings: float = float("inf")) -> float:
        """Expected distinct ids / ids in a batch of `num_ids`; 1.0 for none."""
        return self.distinct(num_ids, num_embeddings) / num_ids if num_ids > 0 else 1.0

    @names_wrong_arguments
    def hottest(self, rows: float) -> float:
        """The hot-row curve: the share of lookups that go to the `rows` most used rows.

        >>> AccessProfile(uses=(1.0, 6.0), rows=(4.0, 1.0)).hottest(1)
        0.6
        """
        if not rows >= 0:
            raise ValueError(f"rows must not be negative, got {rows!r}. Fix: rows=1000")
        uses, held = np.array(self.uses)[::-1], np.array(self.rows)[::-1]
        taken = np.clip(float(rows) - np.concatenate([[0.0], np.cumsum(held)[:-1]]), 0.0, held)
        return float(np.dot(taken, uses)) / self.num_ids

    @names_wrong_arguments
    def row_shares(self, num_embeddings: int) -> RowShares:
        """The distribution of lookups over the rows of a table whose ids are sorted by use.

        Rows that are not in the sample share ``f1 / N`` of the lookups, by Good's formula above.

        Args:
            num_embeddings: rows of the table. If the sample has more rows, only the most used count.

        >>> AccessProfile(uses=(1.0, 6.0), rows=(4.0, 1.0)).row_shares(9).rows_for(0.36)  # 4 in 10 may be new rows
        1
        """
        uses, rows = np.array(self.uses)[::-1], np.array(self.rows)[::-1]
        edges = np.concatenate([[0.0], np.cumsum(rows)]).round()
        keep = np.concatenate([[True], np.diff(edges) > 0])
        mass = np.add.reduceat(uses * rows, np.flatnonzero(keep[1:])) if keep[1:].any() else np.zeros(0)
        edges = edges[keep]
        whole = float(num_embeddings)
        if len(edges) > 1 and edges[-1] > whole:
            inside = np.minimum(edges, whole)
            mass = mass * np.diff(inside) / np.diff(edges)
            kept = np.diff(inside) > 0
            return RowShares.of_curve(np.concatenate([[0.0], inside[1:][kept]]), mass[kept])
        if edges[-1] < whole:
            once = float(rows[uses == 1].sum()) / self.num_ids
            unseen = mass.sum() * once
            edges, mass = np.append(edges, whole), np.append(mass * (1 - once), unseen)
        return RowShares.of_curve(edges, mass)


def bags_by_feature(batch: Any) -> Mapping[str, Any]:
    """Feature -> object with ``values()`` and ``lengths()``, of a KeyedJaggedTensor or a batch with one.

    Raises:
        ValueError: neither.
    """
    features = getattr(batch, "sparse_features", batch)
    if isinstance(features, Mapping):
        return features
    if not callable(getattr(features, "to_dict", None)):
        raise ValueError(
            f"a batch must be a KeyedJaggedTensor, have one as sparse_features, or map features to JaggedTensors, "
            f"got a {type(batch).__name__}. Fix: pass the sparse features"
        )
    found: Mapping[str, Any] = features.to_dict()
    return found


def measure(batches: Iterable[Any], tables: Sequence[BaseEmbeddingConfig]) -> dict[str, Any]:
    """The arguments of `Workload` measured from batches: batch_size, pooling_factors, access.

    Each table's profile has its pooling factor, its coverage, and the curve of its accesses (`AccessProfile.hottest`).

    Raises:
        ValueError: no batch; one that lacks a table's feature, holds an id outside its table, or has another batch
            size than the first.
    """
    if not tables:
        raise ValueError("tables is empty. Fix: pass the tables whose ids are counted")
    ids: dict[str, list[Any]] = {table.name: [] for table in tables}
    found: dict[str, int] = {}
    filled = dict.fromkeys(ids, 0)
    sizes: list[int] = []
    for number, batch in enumerate(in_turn(batches)):
        bags = bags_by_feature(batch)
        counted: dict[str, tuple[Any, int]] = {}
        for table in tables:
            parts = []
            for feature in table.feature_names:
                if feature not in bags:
                    raise ValueError(
                        f"batch {number} has no feature {feature!r}, which table {table.name!r} reads. Fix: add it "
                        f"to the batch, which has {', '.join(map(str, bags))}"
                    )
                values, lengths = _ids_of(bags[feature], feature)
                if values.size and not 0 <= values.min() <= values.max() < table.num_embeddings:
                    bad = values.min() if values.min() < 0 else values.max()
                    raise ValueError(
                        f"batch {number}: feature {feature!r} has the id {bad}, but table {table.name!r} has rows 0 "
                        f"to {table.num_embeddings - 1:,}. Fix: increase num_embeddings"
                    )
                parts.append(values)
                filled[table.name] += int(np.count_nonzero(lengths))
                counted[feature] = (values.size, len(lengths))
            ids[table.name].append(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))
        sizes.append(next((size for _, size in counted.values()), 0))
        wrong = {feature: size for feature, (_, size) in counted.items() if size != sizes[0]}
        if wrong:
            feature, size = next(iter(wrong.items()))
            raise ValueError(
                f"batch {number}: feature {feature!r} has {size} samples, the first batch has {sizes[0]}. Fix: "
                f"pass batches of one size"
            )
        for feature, (count, _) in counted.items():
            found[feature] = found.get(feature, 0) + count
    if not sizes:
        raise ValueError("got no batches. Fix: pass at least one")
    samples = sum(sizes)
    access = {}
    for table in tables:
        if not sum(map(len, ids[table.name])):
            continue  # never looked up: its pooling factors are 0
        profile = AccessProfile.of_ids(ids[table.name], source=f"measured from {len(sizes)} batches")
        bags_of = samples * max(1, table.num_features())
        coverage = filled[table.name] / bags_of
        access[table.name] = replace(profile, pooling_factor=profile.num_ids / bags_of, coverage=coverage)
    return {
        "batch_size": sizes[0],
        "pooling_factors": {feature: count / samples for feature, count in found.items()},
        "access": access,
    }


def _ids_of(bags: Any, feature: str) -> tuple[Any, Any]:
    if not (callable(getattr(bags, "values", None)) and callable(getattr(bags, "lengths", None))):
        raise ValueError(
            f"feature {feature!r} must be a JaggedTensor with values() and lengths(), got {bags!r:.60}. Fix: "
            f"JaggedTensor(values, lengths)"
        )
    return ids_in(bags.values()), ids_in(bags.lengths())
