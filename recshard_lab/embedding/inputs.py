"""Checks and conversions of a batch before its lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from recshard_lab.sparse.interop import maybe_td_to_kjt
from recshard_lab.sparse.keyed_jagged_tensor import inverse_of
from recshard_lab.sparse.trees import Traceable

# The out-of-range policy: ids that are not rows of their table raise, are clamped to the nearest row, or are dropped.
#
# Shape letters: N ids of a feature, M of them left, B bags, D columns, E rows.


POLICIES = ("error", "clamp", "ignore")


class OutOfRange(metaclass=Traceable):
    """A policy for ids below 0 or beyond the table, and a count of them.

    Args:
        policy: ``"error"`` raises. ``"clamp"`` replaces an id by the nearest row, 0 or E - 1. ``"ignore"`` drops it: it
            adds nothing to its bag (in a sequence it is a row of zeros), touches no row in backward and no optimizer
            state. A MEAN still divides by the length of the bag in the batch.

    Attributes:
        counts: out-of-range ids so far, by output key; empty under ``"error"``.

    Raises:
        ValueError: another policy.

    >>> policy = OutOfRange("ignore")
    >>> bag, kept = policy.fit(JaggedTensor(torch.tensor([7, 1, -1]), lengths=torch.tensor([2, 1])), "f", "t", 4)
    >>> bag.values().tolist(), bag.lengths().tolist(), kept.tolist(), policy.count()
    ([1], [1, 0], [1], 2)
    """

    def __init__(self, policy: str = "error") -> None:
        if policy not in POLICIES:
            raise ValueError(f"out_of_range must be one of {', '.join(map(repr, POLICIES))}, got {policy!r}")
        self.policy = policy
        self.counts: dict[str, Tensor] = {}

    def fit_all(
        self, bags: Sequence[JaggedTensor], targets: Sequence[tuple[str, str, int]]
    ) -> list[tuple[JaggedTensor, Tensor | None]]:
        """Applies `fit` to every feature of a batch. The host waits once for the device if all ids are rows.

        Args:
            bags: the bags of each feature.
            targets: for each of them its feature, its table, and the table's rows E.
        """
        for bag, (feature, _, _) in zip(bags, targets, strict=True):
            check_ids(bag.values(), f"feature {feature!r} has ids of")
        if torch.compiler.is_compiling():
            inside = [False] * len(bags)
        else:
            inside = _within([bag.values() for bag in bags], [rows for _, _, rows in targets])
        return [
            (bag, None) if within else self._refit(bag, *target)
            for bag, target, within in zip(bags, targets, inside, strict=True)
        ]

    def fit(self, bag: JaggedTensor, feature: str, table: str, rows: int) -> tuple[JaggedTensor, Tensor | None]:
        """The bags to look up in a table, in which every id is a row.

        Args:
            bag: ids ``[N]`` in ``[B]`` bags, of one feature.
            rows: E.

        Returns:
            The bags, and the positions ``[M]`` in ``[0, N)`` of their ids if some were dropped, else None.

        Raises:
            ValueError: ids that are not integers. Under ``"error"`` an out-of-range id, with its feature and sample.
        """
        return self.fit_all([bag], [(feature, table, rows)])[0]

    def _refit(self, bag: JaggedTensor, feature: str, table: str, rows: int) -> tuple[JaggedTensor, Tensor | None]:
        ids, lengths = bag.values(), bag.lengths()
        outside = (ids < 0) | (ids >= rows)
        if self.policy == "error":
            if not torch.compiler.is_compiling():
                raise _error(ids, lengths, outside, feature, table, rows)
            torch._assert_async(~outside.any(), f"feature {feature!r} has an id that is not a row of table {table!r}")
            return bag, None
        key = f"{feature}@{table}"
        self.counts[key] = self.counts.get(key, 0) + outside.sum()
        if self.policy == "clamp":
            return JaggedTensor._unchecked(ids.clamp(0, rows - 1), bag.weights_or_none(), lengths), None
        keep = ~outside
        kept = keep.nonzero().flatten()
        ends = functional.pad(keep.cumsum(0), (1, 0))
        weights = bag.weights_or_none()
        left = ends[functional.pad(lengths.cumsum(0), (1, 0))].diff().to(lengths.dtype)
        return JaggedTensor._unchecked(ids[kept], None if weights is None else weights[kept], left), kept

    def count(self) -> int:
        """Out-of-range ids so far."""
        return sum(int(count) for count in self.counts.values())


def put_back(rows: Tensor, kept: Tensor | None, total: int) -> Tensor:
    """Rows ``[M, D]`` of the ids that were not dropped -> ``[N, D]``, zeros for the others."""
    return rows if kept is None else rows.new_zeros(total, rows.shape[1]).index_copy(0, kept, rows)


def policy_of_bounds_check_mode(mode: Any) -> str:
    """The policy equal to a `BoundsCheckMode` of fbgemm (member or name).

    Raises:
        ValueError: a mode without an equal here. WARNING and IGNORE look up row 0 for an out-of-range id and train that
            row. NONE reads memory beyond the table.

    >>> policy_of_bounds_check_mode("FATAL")
    'error'
    """
    name = str(getattr(mode, "name", mode)).upper().removeprefix("V2_")
    if name == "FATAL":
        return "error"
    if name in ("WARNING", "IGNORE"):
        raise ValueError(
            f"bounds_check_mode={name} is not supported: it looks up row 0 for an out-of-range id and trains that row. "
            f"Fix: use out_of_range='clamp' (the nearest row) or 'ignore' (no row), which count such ids"
        )
    if name == "NONE":
        raise ValueError("bounds_check_mode=NONE is not supported: it reads beyond the table. Fix: use FATAL")
    raise ValueError(f"bounds_check_mode {mode!r} is not a member of fbgemm's BoundsCheckMode. Fix: use FATAL")


def check_ids(ids: Tensor, subject: str = "ids are") -> None:
    """Raises ValueError unless ids are int32 or int64 ``[N]``."""
    if ids.dtype not in (torch.int32, torch.int64) or ids.dim() != 1:
        raise ValueError(f"{subject} {ids.dtype} {list(ids.shape)}, not int32 or int64 [N]. Fix: values.long()")


def _within(ids: Sequence[Tensor], rows: Sequence[int]) -> list[bool]:
    """Whether all ids of each tensor are rows, with one copy to the host."""
    checked = [number for number, own in enumerate(ids) if own.numel() and not own.is_meta]
    ends = torch.stack([end for number in checked for end in ids[number].aminmax()]).tolist() if checked else []
    inside = [True] * len(ids)
    for place, number in enumerate(checked):
        inside[number] = ends[2 * place] >= 0 and ends[2 * place + 1] < rows[number]
    return inside


def _error(ids: Tensor, lengths: Tensor, outside: Tensor, feature: str, table: str, rows: int) -> ValueError:
    place = int(outside.nonzero()[0])
    sample = int(torch.searchsorted(lengths.cumsum(0), place, right=True))
    return ValueError(
        f"feature {feature!r}, sample {sample}: id {int(ids[place])} is not a row of table {table!r}, which has "
        f"ids 0 to {rows - 1}. Fix: correct the id, raise num_embeddings, or use out_of_range='clamp' or 'ignore'"
    )


def check_features(features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Checks that a batch has the features of some tables.

    Raises:
        ValueError: no batch, or a feature that it does not have; the message names the table.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(f"a batch of type {type(features).__name__} is not a KeyedJaggedTensor")
    keys = features.keys()
    for feature, table, _ in targets_of(tables):
        if feature not in keys:
            raise ValueError(
                f"feature {feature!r} of table {table!r} is not in the batch, which has {keys}. "
                f"Fix: add it, with lengths 0 for samples without ids"
            )


def as_batch(features: Any, tables: Sequence[BaseEmbeddingConfig]) -> KeyedJaggedTensor:
    """The batch of a collection: a TensorDict becomes a KeyedJaggedTensor of the tables' features."""
    if isinstance(features, KeyedJaggedTensor):
        return features
    names = dict.fromkeys(feature for table in tables for feature in table.feature_names)
    batch: KeyedJaggedTensor = maybe_td_to_kjt(features, list(names))
    return batch


Fitted = tuple[JaggedTensor, JaggedTensor, Tensor | None]
"""Bags of one feature as in the batch, then the two results of `OutOfRange.fit`."""


def fit_features(
    features: KeyedJaggedTensor, tables: Sequence[BaseEmbeddingConfig], policy: OutOfRange
) -> list[Fitted]:
    """The bags of every feature of every table. The host waits once for the device if all ids are rows.

    Raises:
        ValueError: the batch does not have a feature, or `OutOfRange.fit` raises.
    """
    check_features(features, tables)
    targets = targets_of(tables)
    bags = [features[feature] for feature, _, _ in targets]
    fitted = policy.fit_all(bags, targets)
    return [(bag, *own) for bag, own in zip(bags, fitted, strict=True)]


def targets_of(tables: Sequence[BaseEmbeddingConfig]) -> list[tuple[str, str, int]]:
    """Of each feature of each table the feature, the table and its rows E."""
    return [(feature, table.name, table.num_embeddings) for table in tables for feature in table.feature_names]


def to_samples(pooled: Tensor, features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Pooled rows of a feature's own bags ``[B_f, D]`` -> rows of the samples of the full batch ``[B, D]``.

    Raises:
        ValueError: a variable batch without inverse indices.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None and not features.variable_stride_per_key():
        return pooled
    return pooled.index_select(0, inverse_of(inverse, feature))


def joined_samples(pooled: Tensor, features: KeyedJaggedTensor, names: Sequence[str], dims: Sequence[int]) -> Tensor:
    """`to_samples` of the columns of several features ``[max B_f, sum of D]``."""
    if not features.variable_stride_per_key() and features.inverse_indices_or_none() is None:
        return pooled
    parts = zip(pooled.split(list(dims), dim=1), names, strict=True)
    return torch.cat([to_samples(part, features, name) for part, name in parts], dim=1)


def to_most_bags(lengths: Sequence[Tensor]) -> list[Tensor]:
    """Lengths of every shard feature ``[B_f]`` -> all ``[max B_f]``, with empty bags at the end."""
    most = max(part.shape[0] for part in lengths)
    return [functional.pad(part, (0, most - part.shape[0])) if part.shape[0] < most else part for part in lengths]


def check_weights(weights: Tensor | None, keys: Sequence[str]) -> Tensor:
    """The per-sample weights of a weighted collection's batch.

    Raises:
        ValueError: the batch has none, or they are not floating point.
    """
    if weights is None:
        raise ValueError(
            f"the batch of {list(keys)} has no weights, and the collection has is_weighted=True. Fix: pass weights to "
            f"the KeyedJaggedTensor, or build the collection with is_weighted=False"
        )
    if not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype}, not floating point. Fix: weights.float()")
    return weights
