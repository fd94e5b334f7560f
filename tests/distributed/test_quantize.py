"""A sharded model becomes a served one: the rows of its shards, a few at a time."""

from __future__ import annotations

from typing import Any

import torch

import recshard_lab as rs
from recshard_lab.distributed import sharded_collections
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases

TABLES = [rs.EmbeddingBagConfig(**table) for table in cases.TABLES]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.collection: Any = rs.EmbeddingBagCollection(TABLES)
        self.dense = torch.nn.Linear(2, 2)


def served_rows(plan: str, kind: str) -> tuple[list[bool], list[int], bool]:
    """On a rank: whether tables have the bytes of the unsharded model, rows of each chunk, and the dense part."""
    torch.manual_seed(0)
    sharded_collections._CHUNK_BYTES = 4 * 64  # several chunks a table
    names = [table.name for table in TABLES]
    whole = Model()
    expected: Any = rs.quantize_embeddings(whole, kind)
    sharded = rs.DistributedModelParallel(whole, plan=rs.ShardingPlan.from_json(plan))
    sizes = [len(rows) for name in names for _, rows in sharded.collections[cases.PATH].row_chunks(name)]
    found: Any = rs.quantize_embeddings(sharded, kind)
    same = [torch.equal(found.collection.packed(name), expected.collection.packed(name)) for name in names]
    return same, sizes, torch.equal(found.dense.weight, expected.dense.weight)


def test_every_scheme_gives_the_bytes_of_the_unsharded_model() -> None:
    plan = cases.plan_of(cases.TABLES, list(scheme_names()), 2).to_json()
    largest = max(table.num_embeddings for table in TABLES)
    with rs.launch(2) as two:
        for kind in ("int8", "fp16"):
            for same, sizes, dense in two.run(served_rows, plan, kind):
                assert all(same)
                assert dense
                assert max(sizes) < largest
                assert sum(sizes) == sum(table.num_embeddings for table in TABLES)
