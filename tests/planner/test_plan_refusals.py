"""What the planner says when nothing fits or a wish cannot be met, and that it says so quickly."""

import re
import time

import pytest

from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import (
    ParameterConstraints,
    PlanError,
    Topology,
)
from tests.planner.problems import random_tables, table


def test_what_does_not_fit_is_said_with_a_change_that_makes_it_fit() -> None:
    movies = [table("movies", 40_000_000, 128)]
    topology = Topology(2, "cuda", hbm_cap=16 * 10**9, reserve_fraction=0)
    only = {"movies": ParameterConstraints(sharding_types=["table_wise"])}
    with pytest.raises(PlanError) as caught:
        EmbeddingShardingPlanner(topology, constraints=only).plan_tables(movies)
    text = str(caught.value)
    assert "table 'movies' (40,000,000 x 128, 20.5 GB) does not fit on any rank under table_wise" in text
    assert "allow row_wise over 2 ranks" in text
    assert "fp16 weights" in text
    more = {"movies": ParameterConstraints(sharding_types=["table_wise", "row_wise"])}
    EmbeddingShardingPlanner(topology, constraints=more).plan_tables(movies)
    named = re.search(r"hbm_cap=(\d+)", text)
    assert named is not None
    larger = Topology(2, "cuda", hbm_cap=int(named[1]), reserve_fraction=0)
    EmbeddingShardingPlanner(larger, constraints=only).plan_tables(movies)


def test_a_refusal_may_be_had_at_once() -> None:
    tables, workload = random_tables(26, 1)
    topology = Topology(8, "cuda", hbm_cap=10**9)
    spent = []
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(PlanError, match=r"does not fit on any rank under table_wise, .* after the reserve\)\.$"):
            EmbeddingShardingPlanner(topology, workload=workload).plan_tables(tables, explain=False)
        spent.append(1e3 * (time.process_time() - start))
    assert min(spent) < 50


def test_too_much_for_all_ranks_says_by_how_much() -> None:
    tables = [table(f"t{i}", 1_000_000, 64) for i in range(4)]  # 1.02 GB
    with pytest.raises(
        PlanError, match=r"All tables need at least 1.0 GB, 2 ranks have 400.0 MB: 6\d\d.\d MB too little"
    ):
        EmbeddingShardingPlanner(Topology(2, ddr_cap=2 * 10**8, reserve_fraction=0)).plan_tables(tables)


def test_impossible_wishes_are_refused() -> None:
    movies = [table("movies", 100, 8)]
    for wish, said in [
        (ParameterConstraints(sharding_types=["data_parallel"], ranks=[0]), "cannot be cut by data_parallel on ranks"),
        (ParameterConstraints(ranks=[7]), "rank 7 does not exist"),
        (ParameterConstraints(sharding_types=["row_wide"]), "did you mean 'row_wise'"),
    ]:
        with pytest.raises(PlanError, match=said):
            EmbeddingShardingPlanner(Topology(2), constraints={"movies": wish}).plan_tables(movies)
    with pytest.raises(PlanError, match="'movie' that does not exist"):
        EmbeddingShardingPlanner(Topology(2), constraints={"movie": ParameterConstraints()}).plan_tables(movies)
    with pytest.raises(PlanError, match="no tables"):
        EmbeddingShardingPlanner(Topology(2)).plan_tables([])
    with pytest.raises(ValueError, match="at least one entry"):
        ParameterConstraints(sharding_types=[])
    with pytest.raises(ValueError, match="'fast' does not exist"):
        ParameterConstraints(compute_kernels=["fast"])
