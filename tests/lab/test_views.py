"""Views: to scale, titled, small, and honest about what they cannot show."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import ms_text
from recshard_lab.lab.draw.view import WIDGET_MIME, View
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import ParameterSharding, Shard, ShardingPlan, Topology
from tests.grid import every
from tests.lab.pictures import boxes, texts
from tests.lab.plans import movielens, plan_of, table

ALL = ("placement", "memory", "phases", "traffic", "curves")
LOSSES = {"table_wise": [0.7, 0.6, 0.5], "row_wise": [0.7, 0.6, 0.5]}


def predicted(world_size: int = 4, **workload: Any) -> Estimate:
    tables = movielens()
    return estimate(plan_of(tables, world_size), tables, Topology(world_size, ddr_cap=10**7), Workload(**workload))


def drawn(name: str) -> View:
    tables = movielens()
    known = {"plan": plan_of(tables, 4), "tables": tables, "topology": Topology(4), "losses": LOSSES}
    return views.draw(name, **known, estimate=predicted(), note="from a test")


@every(ALL)
def test_an_output_holds_text_an_image_and_a_table_and_stays_small(name: str) -> None:
    view = drawn(name)
    assert "from a test" in view.svg.lower()
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', bundle["text/html"])
    assert data is not None
    assert ET.fromstring(b64decode(data[1])).get("role") == "img"
    assert "<table>" in bundle["text/html"]
    assert view.title in bundle["text/plain"]
    assert len(bundle["text/html"]) < 100_000


def test_pictures_of_one_page_share_no_hatching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those of the second lose their colours when the first is scrolled out of the page."""
    shown: list[str] = []
    monkeypatch.setattr("recshard_lab.lab.draw.view.beside_a_kernel", lambda: True)
    monkeypatch.setattr("ipywidgets.HTML._repr_mimebundle_", lambda self: {WIDGET_MIME: shown.append(self.value)})
    view = views.placement(plan_of(movielens(), 4), movielens())
    for _ in range(2):
        view._repr_mimebundle_()
    first, second = (set(re.findall(r' id="([^"]+)"', markup)) for markup in shown)
    assert first
    assert not first & second


def test_areas_are_proportional_to_bytes() -> None:
    tables = [table("a", 4000), table("b", 1000), table("c", 3000)]
    plan = plan_of(tables, 2, ("row_wise", "table_wise", "column_wise"))
    areas = {words: box.width * box.height for words, box in boxes(views.placement(plan, tables).svg).items()}
    bytes_of = {"a": 4000 * 16 * 4 / 2, "b": 1000 * 16 * 4, "c": 3000 * 16 * 4 / 2}
    assert len(areas) == 5
    ratios = [area / bytes_of[text[0]] for text, area in areas.items()]
    np.testing.assert_allclose(ratios, ratios[0], rtol=2e-3)


def test_memory_stacks_are_proportional_to_bytes_and_the_reserve_is_not_among_them() -> None:
    found = predicted()
    bars = boxes(views.memory(found).svg)
    heights = {tuple(words.split(":")[0].split("\n")): box.height for words, box in bars.items() if "rank" in words}
    assert all(label != "reserve" for _, label in heights)
    names = {"weights": "weights", "output_buffers": "output buffers"}
    ratios = [
        heights[f"rank {rank}, predicted", label] / found.memory_bytes[rank, found.memory_categories.index(name)]
        for rank in range(4)
        for name, label in names.items()
    ]
    np.testing.assert_allclose(ratios, ratios[0], rtol=0.02)


def test_memory_says_which_rank_is_over_and_by_what() -> None:
    tables = movielens()
    view = views.memory(estimate(plan_of(tables, 2), tables, Topology(2, ddr_cap=100_000)))
    assert view.summary.startswith("Does not fit: rank ")
    assert "90 KB usable of 100 KB (10% reserve)" in view.summary


def test_phases_mark_the_critical_rank_and_end_at_the_step() -> None:
    found = predicted()
    view = views.phases(found)
    assert f"▸ rank {found.critical_rank}" in view.svg
    assert f"{found.critical_rank} (critical)" in view.text
    assert ms_text(found.step_ms) in view.title


def test_measured_numbers_stand_beside_predicted_ones() -> None:
    found = predicted()
    measured = SimpleNamespace(
        memory_categories=found.memory_categories,
        memory_bytes=found.memory_bytes * 2,
        step_ms_by_rank=np.full(4, 12.5),
        traffic_bytes=found.traffic_bytes + 1000,
    )
    assert "predicted | counted" in views.memory(found, measured).title
    assert "12.5 ms" in views.phases(found, measured).svg
    assert "Below: counted." in views.traffic(found, measured).svg


def test_traffic_numbers_are_the_bytes_sent() -> None:
    matrix = np.array([[7.0, 1_000_000.0], [250_000.0, 7.0]])
    view = views.traffic(SimpleNamespace(traffic_bytes=matrix))
    assert {"1", "0.25"} <= set(texts(view.svg))
    assert view.title == "Traffic per step: 1.25 MB between 2 ranks"


def test_the_caption_of_curves_names_their_distance_or_ends() -> None:
    assert views.curves(LOSSES).summary == "All 2 curves are equal, bit for bit."
    assert "0.1" in views.curves({"a": [0.5, 0.4], "b": [0.5, 0.5]}).summary
    assert views.curves({"a": [0.7, 0.6, 0.5]}).summary == "The loss is 0.7 at step 1 and 0.5 at step 3."
    bent = views.curves({"a": ([0, 8, 16], [2.0, 1.0, 1.5])}, x_label="user", y_label="ids")
    assert bent.summary == "The ids is 2 at user 0 and 1.5 at user 16. The lowest value is 1 at user 8."
    alone = views.curves({"a": ([8, 16], [2.0, 1.0]), "b": ([9], [1.5])})
    assert len(re.findall(r"<title>[ab]\nstep ", alone.svg)) == 3  # a curve of one point has no line
    assert alone.summary == "Last loss of each curve: a 1, b 1.5."


def test_values_that_span_decades_are_on_logarithmic_axes_on_request() -> None:
    sizes, ms = [0.001, 0.1, 10.0, 1000.0], [0.2, 0.3, 3.0, 300.0]
    view = views.curves({"ms": (sizes, ms)}, log_x=True, log_y=True)
    assert view.chart is not None
    panel = view.chart.panels[0]
    assert (panel.x.kind, panel.y.kind) == ("log10", "log10")
    assert {"0.001", "1", "1,000", "10", "100"} <= set(texts(view.svg))


def test_a_loss_that_became_nan_says_where() -> None:
    view = views.curves({"row_wise": [0.7, 0.6, float("nan")], "table_wise": [0.7, 0.6, 0.5]})
    assert "row-wise: loss became nan at step 3" in view.summary
    ET.fromstring(view.svg)
    assert "loss became nan" in views.curves({"a": [float("nan")]}).problem


def test_measured_ranks_of_another_plan_are_refused_in_words() -> None:
    other = SimpleNamespace(step_ms_by_rank=np.ones(3), memory_categories=("weights",), memory_bytes=np.ones((3, 1)))
    assert "not the same plan" in views.phases(predicted(), other).problem
    assert "not the same plan" in views.memory(predicted(), other).problem


def test_a_view_that_fails_shows_its_error_and_wrong_arguments_still_raise() -> None:
    stray = ShardingPlan({"": {"a": ParameterSharding("custom", shards=[Shard(5, (0, 10), (0, 16))])}})  # type: ignore[dict-item]
    assert "rank 5" in views.placement(stray, [table("a", 10)], Topology(2)).problem
    with pytest.raises(TypeError, match="estimat"):
        views.memory(estimat=predicted())


@every(["memory", "balance", "phases", "traffic"])
def test_a_view_of_an_estimate_takes_a_plan_too(name: str) -> None:
    tables = [table("a", 10), table("b", 300)]
    plan = EmbeddingShardingPlanner(topology=Topology(2)).plan_tables(tables)
    view = views.view_named(name)(plan)
    assert not view.problem
    assert view.text == views.view_named(name)(estimate(plan, tables, Topology(2))).text
    by_hand = ShardingPlan({"": {"a": ParameterSharding("row_wise", ranks=[0, 1])}})  # type: ignore[dict-item]
    assert "Fix: call rs.estimate(plan, tables, topology)" in views.view_named(name)(by_hand).problem


def test_a_new_view_is_one_function_and_its_drawing_may_fail_too() -> None:
    from recshard_lab.text_table import TextTable

    @views.register_view("Balance")
    def my_balance(estimate: Any) -> View:
        def draw(uid: str) -> Any:
            raise RuntimeError("no ink")

        return View("my_balance", "Balance", "", TextTable((), ()), draw)

    try:
        assert views.view_names()[-1] == "my_balance"
        assert "RuntimeError: no ink" in views.draw("my_balance", estimate=predicted(), width=10).svg
        with pytest.raises(ValueError, match="exists already"):
            views.register_view("Balance")(my_balance)
    finally:
        views.unregister_view("my_balance")


def test_names_are_escaped() -> None:
    tables = [table("<script>&", 100)]
    view = views.placement(plan_of(tables, 1, ("table_wise",)), tables)
    ET.fromstring(view.svg)
    assert "<script>" not in view.svg + view.table + view._repr_html_()


def test_placement_names_the_routes_that_are_not_direct_and_only_those() -> None:
    tables = movielens()
    plan = plan_of(tables, 4)
    direct = views.draw("placement", plan=plan, tables=tables, topology=Topology(4))
    assert "Output path" not in direct.svg
    assert "route" not in direct.numbers.heads
    plan.plan[""]["movie"] = plan.plan[""]["movie"].with_route("two_hop")  # row-wise
    plan.plan[""]["user"] = plan.plan[""]["user"].with_route("reduce_scatter")  # table-wise: nothing to add
    view = views.draw("placement", plan=plan, tables=tables, topology=Topology(4))
    assert view.summary.endswith("Output path: two_hop (movie).")
    assert view.numbers.heads[3] == "route"
    routes = {row[1]: row[3] for row in view.numbers.rows}
    assert (routes["movie"], routes["user"]) == ("two_hop", "direct")
