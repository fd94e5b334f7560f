"""Replica grid: ranks of a DMPCollection, what each stores, and what a sync sends, as the ranks themselves count it."""

from __future__ import annotations

import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import bytes_text
from recshard_lab.launcher import launch
from recshard_lab.sharding import Topology
from tests.lab.plans import plan_of, table

TABLES = [table("movies", 1000), table("users", 300)]
MODEL = """
import torch
import recshard_lab as rs
from recshard_lab.comm import trace
tables = [
    rs.EmbeddingBagConfig(name=n, num_embeddings=e, embedding_dim=16, feature_names=["f_" + n])
    for n, e in (("movies", 1000), ("users", 300))
]
plan = rs.ShardingPlan.from_json(PLAN)
dmp = rs.distributed.DMPCollection(rs.EmbeddingBagCollection(tables), torch.device("cpu"), plan, 4, 2, None)
with trace() as seen:
    dmp.sync(include_optimizer_state=False)
groups = dmp.grid.sharding_groups
held, sent = dmp.memory_bytes()["weights"], seen.bytes_sent("replicas/weights")
"""


@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_are_the_sharding_groups(contiguous: bool) -> None:
    groups = [[0, 1], [2, 3]] if contiguous else [[0, 2], [1, 3]]
    plan = plan_of(TABLES, 2, ("table_wise", "row_wise"))
    view = views.replica_grid(plan, TABLES, groups, topology=Topology(4, local_world_size=2))
    assert [row[:4] for row in view.numbers.rows] == [
        [str(rank), str(replica), str(place), str(rank // 2)]
        for replica, group in enumerate(groups)
        for place, rank in enumerate(group)
    ]
    step, sync = ("inside a node", "across nodes") if contiguous else ("across nodes", "inside a node")
    assert f"along a row, {step}." in view.summary
    assert f"along a column, {sync}:" in view.summary


def test_weights_and_bytes_of_a_sync_are_those_of_the_ranks() -> None:
    plan = plan_of(TABLES, 2, ("table_wise", "row_wise"))
    with launch(4) as ranks:
        ranks.push({"PLAN": plan.to_json()})
        ranks.exec(MODEL)
        groups, held, sent = ranks.pull("groups")[0], ranks.pull("held"), ranks.pull("sent")
    rows = views.replica_grid(plan, TABLES, groups).numbers.rows
    for rank, *_, weights, synced in rows:
        assert weights == bytes_text(held[int(rank)])
        assert synced == bytes_text(sent[int(rank)])


def test_what_is_no_grid_says_so() -> None:
    plan = plan_of(TABLES, 2, ("row_wise",))
    assert "each rank once, in groups of one size" in views.replica_grid(plan, TABLES, [[0, 1], [2]]).problem
    assert "each rank once, in groups of one size" in views.replica_grid(plan, TABLES, [[0, 1], [1, 2]]).problem
    assert views.replica_grid(plan, TABLES, [[0, 1]]).summary == "One replica on 2 ranks: no sync is needed."
    many = [list(range(64 * n, 64 * n + 64)) for n in range(20)]
    assert "Not drawn: " in views.replica_grid(plan_of(TABLES, 64, ("row_wise",)), TABLES, many).svg
