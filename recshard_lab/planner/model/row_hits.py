"""Which share of a table's lookups falls into a rectangle, and how many distinct rows that is.

Lookups spread evenly over the rows unless somebody says otherwise: `ParameterConstraints.row_shares`, or
`Workload.frequency_ordered`, by which the skew of the workload's ids is that of their rows.

Shape letters: n rectangles, T tables.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.workload import Array, TableLoads, Workload
from recshard_lab.sharding import ParameterConstraints, PlanError
from recshard_lab.sharding.plan.row_shares import RowShares


class RowHits(NamedTuple):
    """Of n rectangles.

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
    """Hits of rectangles; what all rows of a table have together is what `tables` says.

    Args:
        curves: for each table how its lookups spread; evenly where None.
        of: ``[n]`` table of each rectangle; rows: how many it has; first: which is the first.
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
    """For each table how its lookups spread over its rows, where that is known and uneven.

    Raises:
        PlanError: a curve of another number of rows; a name in `frequency_ordered` that is no table; ids said to be
            sorted by use of which no skew is known.
    """
    ordered = workload.frequency_ordered
    names = {table.name for table in tables}
    if not isinstance(ordered, bool):
        unknown = [name for name in ordered if name not in names]
        if unknown:
            raise PlanError(
                f"frequency_ordered names {unknown[0]!r}, which is not a table. Fix: use any of "
                f"{', '.join(sorted(names))}"
            )
    found: list[RowShares | None] = []
    for table in tables:
        wish = constraints.get(table.name) if constraints else None
        curve = wish.row_shares if wish is not None else None
        if curve is None and (ordered if isinstance(ordered, bool) else table.name in ordered):
            curve = workload.row_shares(table)
        if curve is not None and curve.num_rows != table.num_embeddings:
            raise PlanError(
                f"table {table.name!r} has {table.num_embeddings:,} rows, its row_shares are those of "
                f"{curve.num_rows:,}. Fix: RowShares.of_ids(batches, {table.num_embeddings})"
            )
        found.append(curve)
    return found
