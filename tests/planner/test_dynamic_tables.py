"""The planner with dynamic tables: schemes, bytes, memory, time, files and refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import yaml

import recshard_lab as rs
from recshard_lab.planner import CostModel, Workload, estimate
from recshard_lab.planner.read.table_files import SCHEMA, read_tables
from recshard_lab.sharding import (
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
    scheme_names,
)
from recshard_lab.sharding.plan.row_shares import RowShares
from tests.refusals import not_refused

NODES = Topology(4, local_world_size=2, cores_per_host=2)
REPLICATING = {"data_parallel", "flex_shard"}


def user(name: str = "user", **more: Any) -> rs.DynamicEmbeddingConfig:
    return rs.DynamicEmbeddingConfig(name, 64, 40_000, 80_000, **more)


def twin(table: rs.DynamicEmbeddingConfig) -> rs.EmbeddingBagConfig:
    """A static table of the same size."""
    return rs.EmbeddingBagConfig(
        table.num_embeddings, table.embedding_dim, name=table.name, feature_names=table.feature_names
    )


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_scheme_gives_whole_partitions_or_is_refused_with_a_fix(scheme: str) -> None:
    table = user()
    if scheme in REPLICATING:
        with pytest.raises(PlanError, match=r"table 'user' .*Fix: .*allow table_wise"):
            rs.plan([table], NODES, user=scheme)
        return
    plan = rs.plan([table], NODES, user=scheme)
    assert plan.tables()["user"].sharding_type == scheme
    assert all(edge % table.row_unit == 0 for shard in plan.tables()["user"].shards for edge in shard.rows)


def test_the_index_is_priced_in_time_and_bytes_and_ids_take_8_bytes() -> None:
    table, load = user(), Workload(512, 8.0)
    dynamic, static = (
        estimate(ShardingPlan({"": {"user": ParameterSharding("table_wise", ranks=[1])}}), [each], NODES, load)
        for each in (table, twin(table))
    )
    ids = dynamic.traffic_by_phase["input_dist/ids"]
    np.testing.assert_allclose(ids, 2 * static.traffic_by_phase["input_dist/ids"])
    assert ids[0, 1] == 8 * (512 * 8 + 512)
    assert (dynamic.traffic_by_phase["output_dist/rows"] == static.traffic_by_phase["output_dist/rows"]).all()
    index_ms = 4 * 512 * 8 * NODES.index_ns_per_id * 1e-6 + NODES.index_ms
    lookup = dynamic.phases.index("lookup")
    assert dynamic.ms[1, lookup] - static.ms[1, lookup] == pytest.approx(index_ms, rel=1e-6)
    at = dynamic.memory_categories.index("index")
    assert dynamic.memory_bytes[:, at].tolist() == [0, table.num_embeddings * 26, 0, 0]
    assert "index" not in static.memory_categories
    same = [dynamic.memory_categories.index(name) for name in ("weights", "optimizer_state")]
    assert (dynamic.memory_bytes[:, same] == static.memory_bytes[:, same]).all()


def array_bytes(value: Any) -> int:
    """Bytes of all tensors inside, without numbers."""
    if isinstance(value, dict):
        return sum(map(array_bytes, value.values()))
    return value.nbytes if isinstance(value, torch.Tensor) and value.numel() > 1 else 0


def test_the_index_bytes_are_those_of_the_tensors_of_an_index() -> None:
    for more in ({}, {"admit": 2}, {"admit": 0.5}):
        table = rs.DynamicEmbeddingConfig("user", 8, 4096, **more)
        collection = rs.DynamicEmbeddingBagCollection([table], rs.embedding.EmbOptimType.EXACT_SGD, {"lr": 0.1})
        state = collection.table("user").state()
        found = sum(map(array_bytes, (own for name, own in state.items() if name not in ("weight", "states"))))
        assert found == table.num_embeddings * table.index_bytes_per_row, more


def test_plans_and_answers_name_the_index() -> None:
    plan = rs.plan([user(), user("item", admit=2)], 4, item="table_wise")
    assert "indexes of dynamic tables: at most" in str(plan.estimate)
    assert f"The index of item takes {2 * 26 * user().num_embeddings / 1e6:.1f} MB" in str(plan.explain("item"))
    assert plan.explain("user").index_bytes >= 26 * user().num_embeddings
    static = rs.plan([twin(user())], 4)
    assert "index" not in str(static.explain("user"))


def test_what_a_dynamic_table_cannot_do_is_refused() -> None:
    rows = user().num_embeddings
    halves = [Shard(0, (0, 100), (0, 64)), Shard(1, (100, rows), (0, 64))]
    limits: list[tuple[dict[str, Any], str]] = [
        ({"compute_kernels": ["dense"]}, "its optimizer runs in backward. Fix: allow kernel 'fused'"),
        ({"route": "distinct_rows"}, "does not send its ids. Fix: route='direct'"),
        ({"row_shares": RowShares.zipf(rows, 1.0)}, "rows have no order of use. Fix: leave it out of row_shares"),
        (
            {"shards": halves},
            r"rows \(0, 100\) of a shard are not whole partitions of 10,112 rows. .* multiples of 10112",
        ),
    ]
    made = partial(rs.plan, [user()], NODES)
    refusals = [(partial(made, user=ParameterConstraints(**limit)), said) for limit, said in limits]
    load = Workload(frequency_ordered=["user"], zipf_alpha=1.0)
    refusals.append((partial(made, workload=load), "Fix: leave it out of row_shares"))
    assert not_refused(refusals, PlanError) == []


def test_replicas_and_torchrecs_formulas_are_refused() -> None:
    table = user()
    rect = (0, table.num_embeddings), (0, 64)
    plan = ShardingPlan({"": {"user": ParameterSharding("data_parallel", shards=[Shard(r, *rect) for r in range(4)])}})
    with pytest.raises(PlanError, match=r"is dynamic: its rows cannot be replicated. Fix: use row_wise"):
        plan.validate([table], 4)
    with pytest.raises(ValueError, match=r"no formulas for the dynamic table 'user'. Fix: cost_model='recshard'"):
        rs.EmbeddingShardingPlanner(NODES, cost_model="torchrec").plan_tables([table])


def test_sorted_rows_and_distinct_ids_are_options_of_static_tables_alone() -> None:
    load = Workload(512, 8.0, zipf_alpha=1.2, frequency_ordered=True, index_dedup=True)
    tables = [user(), rs.EmbeddingBagConfig(80_000, 64, name="item", feature_names=["item"])]
    model = CostModel(tables, NODES, load)
    assert model.row_shares[0] is None
    assert model.row_shares[1] is not None
    row_wise = scheme_named("row_wise").default(tables[0], NODES)
    assert len({shard.num_rows for shard in row_wise.shards}) == 1


FILE = """
- {name: user, dynamic: true, capacity: 40000, max_capacity: 80000, embedding_dim: 64, feature_names: [u],
   evict: lfu, admit: 2, zipf_alpha: 1.1}
- {name: item, num_embeddings: 900, embedding_dim: 64, feature_names: [i]}
"""


def test_files_have_dynamic_tables(tmp_path: Path) -> None:
    (tmp_path / "tables.yaml").write_text(FILE)
    found = read_tables(tmp_path / "tables.yaml")
    expected = rs.DynamicEmbeddingConfig("user", 64, 40_000, 80_000, feature_names=["u"], evict="lfu", admit=2)
    assert found.tables[0] == expected
    assert not found.tables[1].dynamic
    assert found.zipf_alpha == {"user": 1.1}
    jsonschema.validate(yaml.safe_load(FILE), SCHEMA)
    assert rs.plan(str(tmp_path / "tables.yaml"), 2).estimate.fits
    (tmp_path / "tables.csv").write_text(
        "name,dynamic,capacity,embedding_dim,feature_names,admit,num_embeddings\n"
        "user,true,40000,64,u,0.5,\nitem,false,,64,i,,900\n"
    )
    first, second = read_tables(tmp_path / "tables.csv").tables
    assert first == rs.DynamicEmbeddingConfig("user", 64, 40_000, feature_names=["u"], admit=0.5)
    assert not second.dynamic


MISTAKES = [
    ("dynamic: true, num_embeddings: 9", "field 'num_embeddings': a dynamic table does not have it. Fix: write"),
    ("dynamic: true", "field 'capacity' is missing. Fix: add it"),
    ("dynamic: 1, capacity: 9", "field 'dynamic': must be true or false, got 1. Fix: dynamic: true"),
    ("num_embeddings: 9, evict: lru", "field 'evict': a static table does not have it. Fix: add dynamic: true"),
    ("dynamic: true, capacity: 9, evict: fifo", "field 'evict': evict='fifo' is not supported. Fix: use 'lru'"),
    ("dynamic: true, capacity: 9, max_capacity: 8", "capacity 9 is above max_capacity 8. Fix: raise max_capacity"),
]


def test_mistakes_in_files_name_field_and_fix(tmp_path: Path) -> None:
    for line, message in MISTAKES:
        text = f"- {{name: user, embedding_dim: 8, feature_names: [u], {line}}}\n"
        (tmp_path / "tables.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_tables(tmp_path / "tables.yaml")
        if "max_capacity" not in line:
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_a_script_for_dynamic_tables_needs_the_model() -> None:
    with pytest.raises(PlanError, match=r"table 'user' is dynamic, .* Fix: pass model="):
        rs.plan([user()], 2).to_script()
