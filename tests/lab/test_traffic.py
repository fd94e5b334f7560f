"""Traffic: what is predicted for each phase and route is what ranks count, to the byte; and the picture tells it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from recshard_lab.lab import views
from recshard_lab.lab.views.links import links_of
from recshard_lab.lab.views.traffic_phases import PHASES, parts_of, phase_of
from recshard_lab.launcher import Ranks
from recshard_lab.planner import Estimate, estimate
from recshard_lab.sharding import ShardingPlan, Topology, scheme_named, scheme_names
from recshard_lab.sharding.plan.types import ROUTES
from tests.lab.pictures import texts
from tests.lab.plans import many, plan_of, table
from tests.lab.traffic_jobs import counted_steps, even_load, matrices
from tests.launched import launched

pytestmark = pytest.mark.gate

TABLES = [table("movie", 64), table("user", 32), table("genre", 16, 32)]
NODES = Topology(4, local_world_size=2)


ranks = launched(4, nodes=2)


def plan_under(scheme: str, topology: Topology = NODES) -> ShardingPlan:
    return ShardingPlan({"": {t.name: scheme_named(scheme).default(t, topology) for t in TABLES}})  # type: ignore[dict-item]


def same(predicted: Estimate, counted: dict[str, np.ndarray], within: float = 1e-9) -> None:
    """Byte for byte (or within a share), label for label."""
    expected = {label: sent for label, sent in predicted.traffic_by_phase.items() if sent.any()}
    assert set(expected) == set(counted)
    for label, sent in expected.items():
        np.testing.assert_allclose(counted[label], sent, rtol=within, err_msg=label)
    np.testing.assert_allclose(predicted.traffic_bytes, sum(expected.values()))


@pytest.mark.gate
@pytest.mark.parametrize("scheme", scheme_names())
def test_every_phase_sends_what_is_predicted(ranks: Ranks, scheme: str) -> None:
    """To the byte where ids spread evenly; replicas send the rows that a batch touches, about as many as expected."""
    plan = plan_under(scheme)
    found = matrices(ranks.run(counted_steps, plan.to_json(), TABLES))
    replicas = any(any(one.resolved(t, 4, 2).replica_flags) for t, one in plan.pairs(TABLES))
    same(estimate(plan, TABLES, NODES, even_load(TABLES, 4, 4)), found, within=0.08 if replicas else 1e-9)


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "direct"])
@pytest.mark.parametrize("scheme", ["row_wise", "table_row_wise", "grid_shard"])
def test_every_route_sends_what_is_predicted(ranks: Ranks, scheme: str, route: str) -> None:
    plan = plan_under(scheme).with_route(route)
    predicted = estimate(plan, TABLES, NODES, even_load(TABLES, 4, 4))
    same(predicted, matrices(ranks.run(counted_steps, plan.to_json(), TABLES)))
    hops = {"two_hop": {"inside", "across"}, "reduce_scatter": {"reduce_scatter"}}[route]
    assert {label.rsplit("/")[-1] for label in predicted.traffic_by_phase if "output" in label} == hops
    if route == "two_hop":
        links = links_of(4, 2)
        inside, across = (predicted.traffic_by_phase[f"output_dist/rows/{hop}"] for hop in ("inside", "across"))
        assert links.split(inside)[1] == links.split(across)[0] == 0


def test_labels_nobody_foresaw_are_shown_as_they_are() -> None:
    sent = np.array([[0.0, 5.0], [0.0, 0.0]])
    known = SimpleNamespace(traffic_bytes=sent, traffic_by_phase={"output_dist/rows": sent})
    counted = SimpleNamespace(traffic_bytes=sent, traffic_by_phase={"my_own/exchange": sent})
    parts = parts_of(known, counted)
    assert [(part.phase, part.words) for part in parts] == [
        ("rows", "rows to samples: direct"),
        ("other", "my_own/exchange"),
    ]
    assert parts[0].counted is parts[1].predicted is None
    text = views.traffic(known, counted).text
    assert "my_own/exchange" in text
    assert "not run" in views.traffic(known, counted).svg
    assert "not predicted" in views.traffic(known, counted).svg
    assert {phase_of(label) for label in ("dense", "row_norms")} <= set(PHASES)


def test_a_phase_alone_has_its_own_map_and_a_wrong_name_is_told() -> None:
    load = even_load(TABLES, 4, 4)
    found = estimate(plan_under("row_wise"), TABLES, NODES, load)
    rows = views.traffic(found, phase="rows", topology=NODES)
    kb = found.traffic_by_phase["output_dist/rows"].sum() / 1e3
    assert f"rows to samples: {kb:.3g} KB" in rows.title
    assert "▸ rows to samples: direct" in texts(rows.svg)
    assert "no phase is named 'row'; there are: sizes, ids, rows" in views.traffic(found, phase="row").problem
    alone = SimpleNamespace(traffic_bytes=found.traffic_bytes)
    assert "does not divide its traffic into phases" in views.traffic(alone, phase="ids").problem


def test_nodes_and_groups_are_framed_and_named_and_links_between_nodes_are_marked() -> None:
    found = estimate(plan_under("row_wise"), TABLES, NODES, even_load(TABLES, 4, 4))
    flat, nodes = (texts(views.traffic(found, topology=top).svg) for top in (Topology(4), NODES))
    assert {"node 0", "node 1"} <= set(nodes)
    assert not {"node 0", "between nodes"} & set(flat)
    assert any("◥: a link between nodes" in words for words in nodes)
    svg = views.traffic(found, topology=NODES).svg
    assert svg.count("(between nodes)") == 2 * (2 * 2)  # two nodes of two: every link between them says so
    assert len(re.findall(r'd="M[\d.]+ [\d.]+h([\d.]+)v\1z"', svg)) == 2 * (2 * 2)  # and has its corner
    grouped = texts(views.traffic(found, topology=NODES, groups=[[0, 2], [1, 3]]).svg)
    assert {"group 0", "group 1"} <= set(grouped)
    named = [words for words in grouped if words.startswith("rank ")]
    assert named == ["rank 0", "rank 2", "rank 1", "rank 3"]
    assert "each of 4 ranks once" in views.traffic(found, groups=[[0, 1], [1, 3]]).problem


def test_128_ranks_are_added_up_by_node() -> None:
    tables, top = many(50), Topology(128, local_world_size=8)
    found = estimate(plan_of(tables, 128, ("table_wise", "row_wise")), tables, top)
    links = links_of(128, 8)
    cells = links.cells(found.traffic_bytes)
    assert cells.shape == (16, 16)
    assert cells[2, 3] == pytest.approx(found.traffic_bytes[16:24, 24:32].sum())
    near, far = links.split(found.traffic_bytes)
    assert near == pytest.approx(np.trace(cells))
    assert near + far == pytest.approx(cells.sum())
    assert "Each cell adds up 8 x 8 ranks." in texts(views.traffic(found, topology=top).svg)
