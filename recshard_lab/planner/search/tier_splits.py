"""Splits of all tables between device and host memory, made together (RecShard, Sethi et al., ASPLOS 2022).

How many rows of a table are worth device memory depends on the other tables. A split takes the rows with the most
lookups per byte of all tables that fit into a share of the device memory. Each table's hot rows and its cold rows are
then split over all ranks: hot rows for equal lookups, cold rows for equal bytes. The ranks are chosen so that they
hold equal bytes of hot rows and equal lookups of cold rows.

Such a split is one proposal of each table. The search starts from all of them together, and improves single tables.

Shape letters: T tables, W ranks.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.tier_shares import hottest_rows
from recshard_lab.planner.workload import OPTIMIZER_STATE_BYTES
from recshard_lab.sharding import ParameterConstraints, Proposal
from recshard_lab.sharding.plan.row_shares import RowShares
from recshard_lab.sharding.plan.tiling import Rect, Span
from recshard_lab.sharding.plan.types import DDR, HBM
from recshard_lab.sharding.schemes.base import allows_both_tiers, usable_ranks
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

FILLED = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.45, 0.3)  # shares of the device memory that hot rows fill
EVENNESS = (1.0, 0.75, 0.5, 0.25, 0.0)  # of lookups; 0 is equal rows
LARGEST = 0.25  # of a rank's memory: a hot shard above that is made smaller, at the price of uneven lookups


def tier_splits(
    model: CostModel, tables: Sequence[BaseEmbeddingConfig], constraints: Mapping[str, ParameterConstraints]
) -> list[dict[int, Proposal]]:
    """Per split, table -> its proposal. Tables that may not use both memories or all ranks have none.

    Proposals of one split have the same `together`, from 1 on.
    """
    top, free = model.topology, []
    for index, table in enumerate(tables):
        limits = constraints.get(table.name)
        schemes = None if limits is None else limits.sharding_types
        rows = schemes is None or "row_wise" in map(str, schemes)
        barred = limits is not None and ("row_wise" in (limits.forbidden_sharding_types or ()) or limits.shards)
        if table.dynamic or model.row_shares[index] is None or not allows_both_tiers(top, limits) or not rows or barred:
            continue
        if len(usable_ranks(top, limits)) == top.world_size:
            free.append(index)
    if not free or model.proposers is not None:
        return []
    room = model.usable_bytes - float(model.fixed_memory.sum())
    found = []
    for number, filled in enumerate(FILLED, 1):
        hot = hottest_rows(model.tables, model.row_shares, model.workload.optimizer, filled * room * top.world_size)
        found.append(_split(model, tables, free, hot.astype(int).tolist(), filled * room, number))
    return found


def _split(
    model: CostModel, tables: Sequence[BaseEmbeddingConfig], free: list[int], hot: list[int], room: float, number: int
) -> dict[int, Proposal]:
    """A proposal of each table of `free` with these numbers of hot rows."""
    ranks = model.topology.world_size
    per_row, per_element = OPTIMIZER_STATE_BYTES[model.workload.optimizer]
    row_bytes = model.tables.cols * (model.tables.element_bytes + per_element) + per_row
    held, read = np.zeros(ranks), np.zeros(ranks)  # bytes of hot rows, lookups of cold rows
    found = {}
    for index in sorted(free, key=lambda at: -hot[at] * row_bytes[at]):
        table, curve, rows = tables[index], model.row_shares[index], hot[index]
        assert curve is not None
        spans: list[tuple[Span, int, str]] = []
        if rows:
            fast = _hot_spans(curve, rows, ranks, LARGEST * room / float(row_bytes[index]))
            sizes = np.array([(end - start) * row_bytes[index] for start, end in fast])
            spans += [(span, rank, HBM) for span, rank in zip(fast, _paired(sizes, held), strict=True)]
        if rows < table.num_embeddings:
            left = table.num_embeddings - rows
            cold = [(a + rows, b + rows) for (a, b), _ in EvenTiling(left, -(-left // ranks), [table.embedding_dim])]
            lookups = np.array([float(curve.share(*span)) * model.tables.ids[index] for span in cold])
            spans += [(span, rank, DDR) for span, rank in zip(cold, _paired(lookups, read), strict=True)]
        rects: tuple[Rect, ...] = tuple((span, (0, table.embedding_dim)) for span, _, _ in spans)
        placed, tiers = tuple(rank for _, rank, _ in spans), tuple(tier for _, _, tier in spans)
        found[index] = Proposal("row_wise", rects, (placed,), tiers, together=number)
    return found


def _hot_spans(curve: RowShares, rows: int, count: int, most: float) -> list[Span]:
    """Rows ``[0, rows)`` in `count` parts of equal lookups; of less equal ones where a part exceeds `most` rows."""
    most = max(most, 2 * rows / count)
    for evenness in EVENNESS:
        sizes = curve.sizes(count, end_row=rows, evenness=evenness)
        if max(sizes) <= most:
            break
    return [(start, end) for start, end in pairwise(accumulate(sizes, initial=0)) if start < end]


def _paired(loads: np.ndarray, held: np.ndarray) -> list[int]:
    """A different rank for each load, the largest load on the rank that holds least; adds the loads to `held`."""
    ranks = np.empty(len(loads), dtype=int)
    ranks[np.argsort(-loads, kind="stable")] = np.argsort(held, kind="stable")[: len(loads)]
    held[ranks] += loads
    return ranks.tolist()
