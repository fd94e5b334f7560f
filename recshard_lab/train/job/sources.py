"""What a run reads, looked at before it reaches a model: features chosen, labels and tables checked."""

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
    """A source whose labels are 0 or 1, and of whose features some may be left out.

    Args:
        source: the samples.
        features: those to keep, in this order; all when left out.
        what: which samples they are, for errors.

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
        """I, as of the source."""
        return self._inner.num_dense_features

    def __len__(self) -> int:
        return len(self._inner)

    def batch(self, samples: Samples) -> Batch:
        """These samples.

        Raises:
            ValueError: a label that is neither 0 nor 1, by its sample.
        """
        batch = self._inner.batch(samples)
        wrong = (batch.labels != 0) & (batch.labels != 1)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"{self._what} sample {int(samples[at]):,} of {self.source} has the label {float(batch.labels[at]):g}, "
                f"and labels are 0 or 1"
            )
        if self._kept is not None:
            batch = replace(batch, sparse_features=batch.sparse_features.permute(self._kept))
        return batch if self.transform is None else self.transform(batch)


def check_features(model: torch.nn.Module, source: SampleSource) -> None:
    """Refuses a model and samples that do not belong together.

    Raises:
        ValueError: a feature that only one of them knows, or a table with fewer rows than the feature has ids; by name.
    """
    known: dict[str, Any] = {}
    for tables in tables_of(model).values():
        for table in tables:
            for feature in table.feature_names:
                known.setdefault(feature, []).append(table)
    if not known:
        raise ValueError(f"{type(model).__name__} holds no embedding collection: there is nothing to shard")
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
                    f"{table.num_embeddings:,} rows: give it as many"
                )
    for feature in source.features:
        if feature not in known:
            raise ValueError(
                f"{source.source} has a feature {feature!r} that the model does not know{nearest(feature, known)}; it "
                f"knows: {', '.join(known)}. Fix: features: [{', '.join(known)}]"
            )
