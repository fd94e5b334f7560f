"""What a collection asks of a batch before it looks anything up."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from recshard_lab.sparse.variable_batch import inverse_of


def feature_of(features: KeyedJaggedTensor, feature: str, table: str) -> JaggedTensor:
    """One feature of a batch, for the table of that name.

    Raises:
        ValueError: the batch does not have it.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(f"a collection takes a KeyedJaggedTensor, got {type(features).__name__}")
    keys = features.keys()
    if feature not in keys:
        raise ValueError(
            f"feature {feature!r} of table {table!r} is not in the batch, whose keys are {keys}: "
            f"add it, with lengths 0 for samples without ids"
        )
    return features[feature]


def to_samples(pooled: Tensor, features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Pooled rows of a feature's own bags ``[B_f, D]`` -> rows of the samples of the full batch ``[B, D]``.

    Raises:
        ValueError: a variable batch without inverse indices, in which no sample is common to all features.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None and not features.variable_stride_per_key():
        return pooled
    return pooled.index_select(0, inverse_of(inverse, feature))


def to_most_bags(lengths: Sequence[Tensor]) -> list[Tensor]:
    """Lengths of every lane ``[B_f]`` -> all ``[max B_f]``, with empty bags at the end, as kernels want them."""
    most = max(part.shape[0] for part in lengths)
    return [functional.pad(part, (0, most - part.shape[0])) if part.shape[0] < most else part for part in lengths]


def check_weights(weights: Tensor | None, keys: Sequence[str]) -> Tensor:
    """The per-sample weights that a weighted collection needs.

    Raises:
        ValueError: there are none, or they are not floating point.
    """
    if weights is None:
        raise ValueError(
            f"the collection has is_weighted=True, but the batch of {list(keys)} has no weights: give the "
            f"KeyedJaggedTensor weights, or build the collection with is_weighted=False"
        )
    if not weights.is_floating_point():
        raise ValueError(f"weights must be floating point, got {weights.dtype}: use weights.float()")
    return weights
