"""What a collection asks of a batch before it looks anything up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from recshard_lab.sparse.variable_batch import inverse_of


def feature_of(features: KeyedJaggedTensor, feature: str, table: BaseEmbeddingConfig) -> JaggedTensor:
    """One feature of a batch.

    Raises:
        ValueError: the batch does not have it.
    """
    keys = features.keys()
    if feature not in keys:
        raise ValueError(
            f"feature {feature!r} of table {table.name!r} is not in the batch, whose keys are {keys}: "
            f"add it, with lengths 0 for samples without ids"
        )
    return features[feature]


def check_ids(ids: Tensor, lengths: Tensor, feature: str, table: BaseEmbeddingConfig) -> None:
    """Refuses ids that are no rows of the table.

    Args:
        ids: ``[N]``.
        lengths: ``[B]``, to name the sample.

    Raises:
        ValueError: ids that are not integers, or one outside ``[0, num_embeddings)``, with its feature and sample.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"feature {feature!r}: ids must be int32 or int64, got {ids.dtype}: use values.long()")
    if ids.numel() == 0:
        return
    low, high = ids.aminmax()
    if int(low) >= 0 and int(high) < table.num_embeddings:
        return
    place = int(((ids < 0) | (ids >= table.num_embeddings)).nonzero()[0])
    sample = int(torch.searchsorted(lengths.cumsum(0), place, right=True))
    raise ValueError(
        f"feature {feature!r}, sample {sample}: id {int(ids[place])} is not a row of table {table.name!r}, which has "
        f"ids 0 to {table.num_embeddings - 1}: fix the id, or raise num_embeddings"
    )


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
