"""A workload measured from batches: ids a bag, and how often each table's rows are used."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.access import AccessProfile, as_array, bags_by_feature, in_turn


def measure(batches: Iterable[Any], tables: Sequence[BaseEmbeddingConfig]) -> dict[str, Any]:
    """The arguments of `Workload` that batches say: batch_size, pooling_factors, access.

    Raises:
        ValueError: no batch; one that lacks a table's feature, holds an id outside its table, or has another batch
            size than the first.
    """
    if not tables:
        raise ValueError("tables is empty: name the tables whose ids are counted")
    ids: dict[str, list[Any]] = {table.name: [] for table in tables}
    found: dict[str, int] = {}
    sizes: list[int] = []
    for number, batch in enumerate(in_turn(batches)):
        bags = bags_by_feature(batch)
        counted: dict[str, tuple[Any, int]] = {}
        for table in tables:
            parts = []
            for feature in table.feature_names:
                if feature not in bags:
                    raise ValueError(
                        f"batch {number} has no feature {feature!r}, which table {table.name!r} reads; it has "
                        f"{', '.join(map(str, bags))}"
                    )
                values, lengths = _ids_of(bags[feature], feature)
                if values.size and not 0 <= values.min() <= values.max() < table.num_embeddings:
                    bad = values.min() if values.min() < 0 else values.max()
                    raise ValueError(
                        f"batch {number}: feature {feature!r} has the id {bad}, table {table.name!r} has rows 0 to "
                        f"{table.num_embeddings - 1:,}"
                    )
                parts.append(values)
                counted[feature] = (values.size, len(lengths))
            ids[table.name].append(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64))
        sizes.append(next((size for _, size in counted.values()), 0))
        wrong = {feature: size for feature, (_, size) in counted.items() if size != sizes[0]}
        if wrong:
            feature, size = next(iter(wrong.items()))
            raise ValueError(
                f"batch {number}: feature {feature!r} has {size} bags where the first batch has {sizes[0]}: measure "
                f"batches of one size"
            )
        for feature, (count, _) in counted.items():
            found[feature] = found.get(feature, 0) + count
    if not sizes:
        raise ValueError("no batches: give at least one")
    samples = sum(sizes)
    access = {}
    for table in tables:
        if not sum(map(len, ids[table.name])):
            continue  # never looked up: its pooling factors are 0
        profile = AccessProfile.of_ids(ids[table.name], source=f"measured from {len(sizes)} batches")
        bags_of = samples * max(1, table.num_features())
        access[table.name] = replace(profile, pooling_factor=profile.num_ids / bags_of)
    return {
        "batch_size": sizes[0],
        "pooling_factors": {feature: count / samples for feature, count in found.items()},
        "access": access,
    }


def _ids_of(bags: Any, feature: str) -> tuple[Any, Any]:
    if not (callable(getattr(bags, "values", None)) and callable(getattr(bags, "lengths", None))):
        raise ValueError(f"feature {feature!r} must be a JaggedTensor, with values() and lengths(), got {bags!r:.60}")
    return as_array(bags.values()), as_array(bags.lengths())
