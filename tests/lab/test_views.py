"""Views: to scale, titled, small, and honest about what they cannot show."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recshard_lab.lab import views
from recshard_lab.lab.draw.view import WIDGET_MIME, View
from recshard_lab.planner import EmbeddingShardingPlanner, Estimate, Workload, estimate
from recshard_lab.sharding import ParameterSharding, Shard, ShardingPlan, Topology
from tests.lab.plans import many, movielens, plan_of, table

SVG = "{http://www.w3.org/2000/svg}"
ALL = ("placement", "memory", "phases", "traffic", "curves")
LOSSES = {"table_wise": [0.7, 0.6, 0.5], "row_wise": [0.7, 0.6, 0.5]}


def predicted(world_size: int = 4, **workload: Any) -> Estimate:
    tables = movielens()
    return estimate(plan_of(tables, world_size), tables, Topology(world_size, ddr_cap=10**7), Workload(**workload))


def drawn(name: str) -> View:
    tables = movielens()
    known = {"plan": plan_of(tables, 4), "tables": tables, "topology": Topology(4), "losses": LOSSES}
    return views.draw(name, **known, estimate=predicted(), note="from a test")


def rectangles(svg: str) -> list[tuple[str, float, float]]:
    """Tooltip, width and height of every rectangle that has a tooltip."""
    found = []
    for rect in ET.fromstring(svg).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.append((title.text or "", float(rect.get("width", 0)), float(rect.get("height", 0))))
    return found


def test_every_view_is_registered_in_the_order_it_is_offered() -> None:
    others = ["access_skew", "jagged_anatomy", "follow_id", "step_frames", "timeline", "planner_search", "counters"]
    others += ["side_by_side", "memory_over_time", "overflow", "replica_grid", "wire_formats"]
    others += ["pareto", "waterfall", "parameter_server", "number_formats"]
    assert views.view_names() == [*ALL[:3], "balance", *ALL[3:], *others]
    assert views.views_of("estimate") == ["memory", "phases", "balance", "traffic"]


@pytest.mark.parametrize("name", ALL)
def test_the_static_twin_has_a_title_and_the_role_of_an_image(name: str) -> None:
    view = drawn(name)
    root = ET.fromstring(view.svg)
    assert not view.problem
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title") is not None
    assert root.find(f"{SVG}title").text == view.title  # type: ignore[union-attr]
    assert view.title in (root.get("aria-label") or "")
    assert "from a test" in view.svg.lower()


@pytest.mark.parametrize("name", ALL)
def test_an_output_holds_text_an_image_and_a_table_and_stays_small(name: str) -> None:
    view = drawn(name)
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    data = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', bundle["text/html"])
    assert data is not None
    assert ET.fromstring(b64decode(data[1])).get("role") == "img"
    assert "<table>" in bundle["text/html"]
    assert view.title in bundle["text/plain"]
    assert len(bundle["text/html"]) < 100_000


@pytest.mark.parametrize("name", ["memory", "phases", "curves"])
def test_the_interactive_figure_has_traces_and_the_same_title(name: str) -> None:
    view = drawn(name)
    assert len(view.figure.data) > 0
    assert view.figure.layout.title.text == view.title


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
    areas = {text: width * height for text, width, height in rectangles(views.placement(plan, tables).svg)}
    bytes_of = {"a": 4000 * 16 * 4 / 2, "b": 1000 * 16 * 4, "c": 3000 * 16 * 4 / 2}
    assert len(areas) == 5
    ratios = [area / bytes_of[text[0]] for text, area in areas.items()]
    np.testing.assert_allclose(ratios, ratios[0], rtol=2e-3)


def test_a_block_too_small_for_the_scale_is_listed_by_name() -> None:
    tables = [table("huge", 1_000_000), table("tiny", 3)]
    svg = views.placement(plan_of(tables, 1, ("table_wise",)), tables).svg
    assert "tiny, 3 x 16" in svg
    assert "too small to draw" in svg


def test_a_tooltip_tells_rows_columns_bytes_and_kernel() -> None:
    tables = [table("movies", 1000)]
    text = rectangles(views.placement(plan_of(tables, 2, ("row_wise",)), tables).svg)[1][0]
    assert text.split("\n") == [
        "movies (row_wise, fused kernel)",
        "rows 500 to 1,000 of 1,000",
        "cols 0 to 16 of 16",
        "32 KB",
    ]


def test_every_scheme_has_a_hatching_and_a_label_of_its_own() -> None:
    tables = movielens()
    svg = views.placement(plan_of(tables, 4), tables).svg
    assert len(set(re.findall(r'<pattern id="[^"]*-(\w+)-\w+"', svg))) == 3  # table-wise is the plain one
    for label in ("table-wise", "row-wise", "column-wise", "data-parallel"):
        assert f"{label} (" in svg


def test_memory_stacks_are_proportional_to_bytes_and_the_reserve_is_not_among_them() -> None:
    found = predicted()
    bars = rectangles(views.memory(found).svg)
    heights = {
        (text.split("\n")[0], text.split("\n")[1].split(":")[0]): height for text, _, height in bars if "rank" in text
    }
    assert all(label != "reserve" for _, label in heights)
    names = {"weights": "weights", "output_buffers": "output buffers"}
    ratios = [
        heights[f"rank {rank}, predicted", label] / found.memory_bytes[rank, found.memory_categories.index(name)]
        for rank in range(4)
        for name, label in names.items()
    ]
    np.testing.assert_allclose(ratios, ratios[0], rtol=0.02)


def test_a_capacity_far_above_the_bars_keeps_its_unit() -> None:
    tables = movielens()
    view = views.memory(estimate(plan_of(tables, 2), tables, Topology(2, ddr_cap=10**12)))
    assert "Capacity 1,000 GB, " in view.svg or "Capacity 1 TB, " in view.svg


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
    from recshard_lab.lab.draw.theme import ms_text

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
    texts = [element.text for element in ET.fromstring(view.svg).iter(f"{SVG}text")]
    assert "1" in texts
    assert "0.25" in texts
    assert view.title == "Traffic per step: 1.25 MB between 2 ranks"


def test_curves_say_how_far_apart_they_are() -> None:
    assert views.curves(LOSSES).summary == "All 2 curves are equal, bit for bit."
    assert "0.1" in views.curves({"a": [0.5, 0.4], "b": [0.5, 0.5]}).summary


def test_curves_that_are_not_meant_to_agree_are_told_in_words() -> None:
    view = views.curves({"a": ([8, 16], [2.0, 1.0]), "b": ([8, 16], [1.0, 1.0])}, summary="They were simulated.")
    assert view.summary == "They were simulated."
    assert len(re.findall(r"<title>[ab]\nstep ", view.svg)) == 4  # few points are marked
    alone = views.curves({"a": ([8, 16], [2.0, 1.0]), "b": ([9], [1.5])})
    assert len(re.findall(r"<title>[ab]\nstep ", alone.svg)) == 3  # a curve of one point has no line
    assert alone.summary == "Last loss of each curve: a 1, b 1.5."


def test_the_caption_of_one_curve_names_its_ends_and_extremes() -> None:
    assert views.curves({"a": [0.7, 0.6, 0.5]}).summary == "The loss is 0.7 at step 1 and 0.5 at step 3."
    bent = views.curves({"a": ([0, 8, 16], [2.0, 1.0, 1.5])}, x_label="user", y_label="ids")
    assert bent.summary == "The ids is 2 at user 0 and 1.5 at user 16. The lowest value is 1 at user 8."


def test_values_that_span_decades_are_on_logarithmic_axes_on_request() -> None:
    sizes, ms = [0.001, 0.1, 10.0, 1000.0], [0.2, 0.3, 3.0, 300.0]
    view = views.curves({"ms": (sizes, ms)}, log_x=True, log_y=True)
    assert view.chart is not None
    panel = view.chart.panels[0]
    assert (panel.x.kind, panel.y.kind) == ("log10", "log10")
    assert {"0.001", "1", "1,000", "10", "100"} <= {t.text for t in ET.fromstring(view.svg).iter(f"{SVG}text")}
    flat = views.curves({"ms": ([0.0, 1.0], [0.0, 2.0])}, log_x=True, log_y=True)
    assert flat.chart is not None
    assert {axis.kind for axis in (flat.chart.panels[0].x, flat.chart.panels[0].y)} == {"linear"}


def test_an_empty_plan_is_a_message() -> None:
    view = views.placement(ShardingPlan({}), [])
    assert view.problem == "The plan is empty: no table is placed."
    assert view.problem in view.svg
    assert view.problem in view.text


def test_one_table_on_one_rank_is_drawn() -> None:
    tables = [table("only", 10)]
    plan = plan_of(tables, 1, ("table_wise",))
    found = estimate(plan, tables, Topology(1))
    for name in ("placement", "memory", "phases", "traffic"):
        view = views.draw(name, plan=plan, tables=tables, estimate=found)
        assert not view.problem
        ET.fromstring(view.svg)


def test_a_rank_that_holds_nothing_is_shown_empty() -> None:
    tables = [table("only", 10)]
    assert ">empty<" in views.placement(plan_of(tables, 1, ("table_wise",)), tables, Topology(2)).svg


@pytest.mark.parametrize("name", ["placement", "memory", "phases", "traffic"])
def test_a_thousand_tables_on_128_ranks_are_summed_up_within_a_second(name: str) -> None:
    tables, topology = many(1000), Topology(128)
    plan = plan_of(tables, 128, ("table_wise", "row_wise"))
    found = estimate(plan, tables, topology)
    took = []
    for _ in range(3):  # the machine is shared: the fastest counts, and time at work, as nothing is waited for
        begun = time.process_time()
        view = views.draw(name, plan=plan, tables=tables, topology=topology, estimate=found)
        svg, html = view.svg, view._repr_html_()
        took.append(time.process_time() - begun)
    assert min(took) < 1.0
    assert not view.problem
    ET.fromstring(svg)
    assert len(html) < 120_000


@pytest.mark.parametrize("name", ["memory", "phases", "traffic"])
def test_a_number_that_is_not_one_is_named(name: str) -> None:
    found = predicted()
    broken = {
        "memory": replace(found, memory_bytes=np.where(np.eye(4, 5) > 0, np.nan, found.memory_bytes)),
        "phases": replace(found, ms=np.full_like(found.ms, np.nan)),
        "traffic": replace(found, traffic_bytes=np.full((4, 4), np.inf)),
    }
    view = views.view_named(name)(broken[name])
    assert "is not a number" in view.problem
    assert view.problem in view.text


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


@pytest.mark.parametrize("name", ["memory", "balance", "phases", "traffic"])
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
    hovers = [title for title, _, _ in rectangles(view.svg)]
    assert [title for title in hovers if "two_hop" in title] == [
        title for title in hovers if title.startswith("movie ")
    ]
    assert not any("reduce_scatter" in title for title in hovers)
    routes = {row[1]: row[3] for row in view.numbers.rows}
    assert view.numbers.heads[3] == "route"
    assert routes["movie"] == "two_hop"
    assert routes["user"] == "direct"


def test_x_values_that_double_are_on_a_logarithmic_axis_with_a_tick_each() -> None:
    ranks = [8.0, 16.0, 32.0, 64.0, 128.0]
    view = views.curves({"step": (ranks, [5.0, 4.0, 3.0, 2.5, 2.4])}, x_label="H100s")
    places = {
        text.text: float(text.get("x", 0))
        for text in ET.fromstring(view.svg).iter(f"{SVG}text")
        if text.get("text-anchor") == "middle"
    }
    assert list(places) == ["8", "16", "32", "64", "128"]
    np.testing.assert_allclose(np.diff(list(places.values())), np.diff(list(places.values()))[0], atol=0.1)
    assert view.figure.layout.xaxis.type == "log"
    assert list(view.figure.layout.xaxis.ticktext) == list(places)
    steps = views.curves({"loss": [5.0, 4.0, 3.0, 2.5, 2.4, 2.3, 2.2, 2.1]})
    assert steps.figure.layout.xaxis.type != "log"


def test_marks_of_curves_are_dashed_lines_at_their_x() -> None:
    view = views.curves({"loss": [float(n) for n in range(20, 0, -1)]}, marks=[5, 10], note="dashed: the plan changed.")
    assert view.svg.count('stroke-dasharray="4 3"') == 2
    assert [shape.x0 for shape in view.figure.layout.shapes] == [5, 10]
    assert "Dashed: the plan changed." in view.svg


def test_many_ranks_show_a_line_where_tables_are_too_small_and_nothing_where_there_are_none() -> None:
    tables = [table("large", 100_000), table("small", 10)]
    shards = {name: ParameterSharding("table_wise", ranks=[rank]) for name, rank in (("large", 0), ("small", 5))}
    plan = ShardingPlan({"": shards}).resolved(tables, 24)  # type: ignore[dict-item]
    svg = views.placement(plan, tables, Topology(24, local_world_size=24), width=500).svg
    assert [high for words, _, high in rectangles(svg) if words.startswith("small")] == [2.0]
    assert "stroke-dasharray" not in svg
    assert "A line: too small to draw." in svg
    few = views.placement(plan.resolved(tables, 24), tables, Topology(24), width=3000).svg
    assert ">empty<" in few


def test_words_that_do_not_fit_a_block_leave_no_gap() -> None:
    tables = [table("movie", 1682)]
    svg = views.placement(plan_of(tables, 4, ("data_parallel",)), tables, Topology(4), width=376).svg
    words = ("movi…", "movie", "108 KB", "1,682 x 16")
    lines = [float(t.get("y", 0)) for t in ET.fromstring(svg).iter(f"{SVG}text") if t.text in words]
    gaps = {round(b - a, 1) for a, b in pairwise(lines) if 0 < b - a < 40}
    assert gaps == {13.0}


def test_marks_of_a_sweep_are_at_their_tick_unless_another_mark_is_there() -> None:
    from recshard_lab import Workload, sweep

    found = sweep(many(8), Workload(65_536), topology=["a100", "h100"], world_size=[2, 4, 8])
    svg = ET.fromstring(views.pareto(found).svg)
    ticks = [float(t.get("x", 0)) for t in svg.iter(f"{SVG}text") if t.text in ("2", "4", "8")]
    marks = [path for path in svg.iter(f"{SVG}path") if "simulated step" in (path.findtext(f"{SVG}title") or "")]
    assert len(marks) == 6
    boxes = [_middle(path.get("d", "")) for path in marks]
    for x, y in boxes:
        near = min(ticks, key=lambda tick: abs(tick - x))
        crowded = sum(abs(ox - near) < 15 and abs(oy - y) < 14 for ox, oy in boxes) > 1
        assert crowded or abs(x - near) < 1


def _middle(d: str) -> tuple[float, float]:
    """The centre of a marker."""
    x, y, *_ = (float(n) for n in re.findall(r"-?[\d.]+", d))
    return x, y
