"""Checks and conversions of a batch before its lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn import functional

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from recshard_lab.sparse.tensor_dict import maybe_td_to_kjt
from recshard_lab.sparse.variable_batch import inverse_of


def feature_of(features: KeyedJaggedTensor, feature: str, table: str) -> JaggedTensor:
    """One feature of a batch.

    Raises:
        ValueError: the batch does not have it; the message names the table.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise ValueError(f"a batch of type {type(features).__name__} is not a KeyedJaggedTensor")
    keys = features.keys()
    if feature not in keys:
        raise ValueError(
            f"feature {feature!r} of table {table!r} is not in the batch, which has {keys}. "
            f"Fix: add it, with lengths 0 for samples without ids"
        )
    return features[feature]


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
    targets = [(feature, table.name, table.num_embeddings) for table in tables for feature in table.feature_names]
    bags = [feature_of(features, feature, table) for feature, table, _ in targets]
    fitted = policy.fit_all(bags, targets)
    return [(bag, *own) for bag, own in zip(bags, fitted, strict=True)]


def to_samples(pooled: Tensor, features: KeyedJaggedTensor, feature: str) -> Tensor:
    """Pooled rows of a feature's own bags ``[B_f, D]`` -> rows of the samples of the full batch ``[B, D]``.

    Raises:
        ValueError: a variable batch without inverse indices.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None and not features.variable_stride_per_key():
        return pooled
    return pooled.index_select(0, inverse_of(inverse, feature))


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


def refuse_script(module: nn.Module) -> NoReturn:
    """Called by ``torch.jit.script``.

    Raises:
        ValueError: always, with the replacement.
    """
    raise ValueError(
        f"torch.jit.script does not compile {type(module).__name__}: torch 2.13 deprecates it, and a KeyedJaggedTensor "
        f"is no TorchScript class. Fix: call torch.export.export(module, (features,)) or torch.compile(module)"
    )
