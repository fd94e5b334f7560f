"""Row shards at both ends of a table: a hole before the first, and a last one with fewer rows than the others."""

import numpy as np
import pytest

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import ParameterSharding, PlanError, Shard, ShardingPlan, Topology, scheme_named
from recshard_lab.sharding.plan.tiling import Rect, find_fault
from recshard_lab.sharding.schemes.even_tiling import EvenTiling

TABLE = EmbeddingBagConfig(name="movies", num_embeddings=10, embedding_dim=8, feature_names=["movie"])


def turned(rect: Rect) -> Rect:
    """Rows as columns."""
    return rect[1], rect[0]


HOLES = [  # row shards, the hole, the fix
    ([(2, 6), (6, 10)], (0, 2), (0, 6)),
    ([(0, 4), (6, 10)], (4, 6), (0, 6)),
    ([(0, 4), (4, 9)], (9, 10), (4, 10)),
    ([(9, 10)], (0, 9), (0, 10)),
]


def test_a_hole_before_between_or_after_shards_is_found_with_its_fix() -> None:
    for turn, size in ((lambda rect: rect, (10, 8)), (turned, (8, 10))):
        for spans, hole, fix in HOLES:
            fault = find_fault([turn((span, (0, 8))) for span in spans], *size)
            assert (fault.kind, fault.rect, fault.fix) == ("hole", turn((hole, (0, 8))), turn((fix, (0, 8))))


def test_a_plan_with_a_hole_before_its_first_row_shard_is_refused() -> None:
    shards = [Shard(0, (2, 6), (0, 8)), Shard(1, (6, 10), (0, 8))]
    plan = ShardingPlan({"": {"movies": ParameterSharding("row_wise", shards=shards)}})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=r"no shard covers rows \[0, 2\) x cols \[0, 8\).*rank 0 rows=\(0, 6\)"):
        plan.validate([TABLE], 2)


LAST = {  # rows, ranks: row shards; three blocks fill 9 rows, so that rank 3 has none
    (10, 4): [(0, 3), (3, 6), (6, 9), (9, 10)],
    (10, 3): [(0, 4), (4, 8), (8, 10)],
    (9, 4): [(0, 3), (3, 6), (6, 9)],
    (12, 4): [(0, 3), (3, 6), (6, 9), (9, 12)],
    (3, 4): [(0, 1), (1, 2), (2, 3)],
}


def test_the_last_row_shard_has_the_rows_that_are_left() -> None:
    for (rows, ranks), expected in LAST.items():
        table = EmbeddingBagConfig(name="movies", num_embeddings=rows, embedding_dim=8, feature_names=["movie"])
        made = scheme_named("row_wise").default(table, Topology(ranks))
        assert [(shard.rank, shard.rows) for shard in made.shards] == list(enumerate(expected))
        cut = EvenTiling(rows, -(-rows // ranks), [8])
        assert [span for span, _ in cut] == [cut[i][0] for i in range(len(cut))] == expected
        sizes, of, _ = cut.sizes()
        assert [sizes[k] for k in of] == [(end - start, 8) for start, end in expected]


def test_the_last_row_shard_costs_its_own_rows() -> None:
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(TABLE, Topology(4))}})
    found = estimate(plan, [TABLE], Topology(4, cores_per_host=4), Workload(60, 2.0))
    weights = found.memory_bytes[:, found.memory_categories.index("weights")]
    assert weights.tolist() == [3 * 8 * 4] * 3 + [1 * 8 * 4]
    inputs = found.memory_bytes[:, found.memory_categories.index("input_buffers")]
    # 120 ids of each of 4 ranks by rows, and all 60 lengths
    np.testing.assert_allclose(inputs, [4 * 4 * (120 * rows / 10 + 60) for rows in (3, 3, 3, 1)])


def test_a_shard_on_a_rank_below_0_or_beyond_the_last_is_refused() -> None:
    for rank in (-1, -4, 4, 5):
        shards = [Shard(0, (0, 5), (0, 8)), Shard(rank, (5, 10), (0, 8))]
        plan = ShardingPlan({"": {"movies": ParameterSharding("custom", shards=shards)}})  # type: ignore[dict-item]
        with pytest.raises(PlanError, match=rf"table 'movies' .*rank {rank}\b"):
            plan.validate([TABLE], 4)


def test_replicas_of_some_columns_are_refused() -> None:
    shards = [Shard(rank, (0, 5), (0, 4)) for rank in range(2)]
    shards += [Shard(0, (0, 5), (4, 8)), Shard(1, (5, 10), (0, 8))]
    plan = ShardingPlan({"": {"movies": ParameterSharding("custom", shards=shards)}})  # type: ignore[dict-item]
    with pytest.raises(PlanError, match=r"rows \[0, 5\) x cols \[0, 4\) .*whole rows"):
        plan.validate([TABLE], 2)
