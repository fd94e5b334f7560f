"""The share of a table's lookups that reads a shard, and the number of distinct rows among them.

Lookups spread evenly over the rows by default. `ParameterConstraints.row_shares` sets another curve. With
`Workload.frequency_ordered`, rows are sorted by use, so the skew of the ids is the skew of the rows.

Shape letters: n shards, T tables.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.workload import Array, TableLoads, Workload
from recshard_lab.sharding import ParameterConstraints, PlanError
from recshard_lab.sharding.plan.row_shares import RowShares


class RowHits(NamedTuple):
    """Hits of n shards.

    Attributes:
        share: ``[n]`` of the table's ids.
        unique: ``[n]`` distinct ids / ids of those in the global batch.
        touched: ``[n]`` distinct rows that each feature of one rank's batch reads, added up over features.
    """

    share: Array
    unique: Array
    touched: Array


def row_hits(
    tables: TableLoads,
    curves: Sequence[RowShares | None],
    of: Array,
    rows: Array,
    first: Array | None,
    world_size: int,
) -> RowHits:
    """Hits of shards. The shards of a table add up to the table's figures in `tables`.

    Args:
        curves: per table, the distribution of its lookups over rows; None for an even one.
        of: ``[n]`` table of each shard; rows: its number of rows; first: its first row.
    """
    share = rows / tables.rows[of]
    unique, touched = tables.unique[of], tables.touched[of] * share
    if first is None or all(curve is None for curve in curves):
        return RowHits(share, unique, touched)
    unique = unique.copy()
    for table in np.unique(of):
        curve = curves[int(table)]
        if curve is None:
            continue
        at = of == table
        start, end = first[at], first[at] + rows[at]
        everything = float(curve.edges[-1])
        share[at] = curve.share(start, end)
        ids = float(tables.ids[table]) * world_size
        if ids > 0:
            whole = float(curve.distinct(0.0, everything, ids))
            found = tables.unique[table] * ids * curve.distinct(start, end, ids) / whole
            unique[at] = np.minimum(1.0, found / np.maximum(share[at] * ids, 1e-9))
            each = float(tables.ids[table] / tables.features[table])
            whole = float(curve.distinct(0.0, everything, each))
            touched[at] = tables.touched[table] * curve.distinct(start, end, each) / whole
    return RowHits(share, unique, touched)


def row_shares_of(
    tables: Sequence[BaseEmbeddingConfig], workload: Workload, constraints: Mapping[str, ParameterConstraints] | None
) -> list[RowShares | None]:
    """Per table, the distribution of its lookups over its rows; None if it is even or unknown.

    Raises:
        PlanError: a curve for another number of rows; rows sorted by use without a known skew.
    """
    ordered = workload.frequency_ordered
    found: list[RowShares | None] = []
    for table in tables:
        constraint = constraints.get(table.name) if constraints else None
        curve = constraint.row_shares if constraint is not None else None
        if table.dynamic:
            if curve is not None or (not isinstance(ordered, bool) and table.name in ordered):
                raise PlanError(
                    f"table {table.name!r} is dynamic: ids are placed by their hash, so its rows have no order of use. "
                    f"Fix: leave it out of row_shares and frequency_ordered"
                )
            found.append(None)
            continue
        if curve is None and (ordered if isinstance(ordered, bool) else table.name in ordered):
            curve = workload.row_shares(table)
        if curve is not None and curve.num_rows != table.num_embeddings:
            raise PlanError(
                f"table {table.name!r} has {table.num_embeddings:,} rows, its row_shares are those of "
                f"{curve.num_rows:,}. Fix: RowShares.of_ids(batches, {table.num_embeddings})"
            )
        found.append(curve)
    return found
