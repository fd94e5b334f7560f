"""The samples of a run, checked before a model reads them: features, labels and table sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from recshard_lab.data import Batch, SampleSource
from recshard_lab.data.batch import Samples
from recshard_lab.planner import tables_of
from recshard_lab.sharding.plan.types import nearest


class CheckedSource:
    """A source whose labels are checked to be 0 or 1, with some or all of its features.

    Args:
        source: the samples.
        features: the features to keep, in this order. Default: all.
        what: name of these samples in errors.

    Attributes:
        transform: applied to every batch, such as a `MultiHot`.

    Raises:
        ValueError: a feature that the samples do not have.

    >>> from recshard_lab.data import SyntheticClicks
    >>> CheckedSource(SyntheticClicks(4, rows=[3, 5]), ["cat_1"]).batch(range(2)).sparse_features.keys()
    ['cat_1']
    """

    def __init__(self, source: SampleSource, features: Sequence[str] | None = None, what: str = "training") -> None:
        for name in features or ():
            if name not in source.features:
                raise ValueError(
                    f"features: {source.source} has no feature {name!r}{nearest(name, source.features)}; it has: "
                    f"{', '.join(source.features)}"
                )
        self.transform: Callable[[Batch], Batch] | None = None
        self._inner, self.source, self._what = source, source.source, what
        self.features = {name: source.features[name] for name in features or source.features}
        order = list(source.features)
        kept = [order.index(name) for name in self.features]
        self._kept = None if kept == list(range(len(order))) else kept

    @property
    def num_dense_features(self) -> int:
        """I, as in the source."""
        return self._inner.num_dense_features

    def __len__(self) -> int:
        return len(self._inner)

    def batch(self, samples: Samples) -> Batch:
        """These samples.

        Raises:
            ValueError: a label that is neither 0 nor 1, with its sample.
        """
        batch = self._inner.batch(samples)
        wrong = (batch.labels != 0) & (batch.labels != 1)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"{self._what} sample {int(samples[at]):,} of {self.source} has the label {float(batch.labels[at]):g}, "
                f"but labels must be 0 or 1"
            )
        if self._kept is not None:
            batch = replace(batch, sparse_features=batch.sparse_features.permute(self._kept))
        return batch if self.transform is None else self.transform(batch)


def check_features(model: torch.nn.Module, source: SampleSource) -> None:
    """Checks that a model and samples have the same features.

    Raises:
        ValueError: a feature that only one of them has, or a table with fewer rows than the feature has ids; by name.
    """
    known: dict[str, Any] = {}
    for tables in tables_of(model).values():
        for table in tables:
            for feature in table.feature_names:
                known.setdefault(feature, []).append(table)
    if not known:
        raise ValueError(f"{type(model).__name__} has no embedding collection, so no table to shard")
    for feature, own in known.items():
        if feature not in source.features:
            raise ValueError(
                f"the model reads a feature {feature!r} that {source.source} does not have"
                f"{nearest(feature, source.features)}; it has: {', '.join(source.features)}"
            )
        for table in own:
            if table.num_embeddings < source.features[feature]:
                raise ValueError(
                    f"feature {feature!r} has {source.features[feature]:,} ids and table {table.name!r} "
                    f"{table.num_embeddings:,} rows. Fix: num_embeddings={source.features[feature]}"
                )
    for feature in source.features:
        if feature not in known:
            raise ValueError(
                f"{source.source} has a feature {feature!r} that the model does not read{nearest(feature, known)}; it "
                f"reads: {', '.join(known)}. Fix: features: [{', '.join(known)}]"
            )
