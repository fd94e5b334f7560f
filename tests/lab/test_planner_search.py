"""The picture of a planner's search: every mark where its numbers are, what fits told apart without colour."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from recshard_lab.lab import views
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.planner.search.trace import SearchTrace
from recshard_lab.sharding import PlanError, Topology
from tests.lab.pictures import SVG, texts
from tests.planner.problems import random_tables


@cache
def search(cap: float = 100.0, ranks: int = 4) -> SearchTrace:
    tables, workload = random_tables(12, 0)
    fair = sum(table.weight_bytes for table in tables) / ranks
    topology = Topology(ranks, "cuda", hbm_cap=int(cap * fair))
    planner = EmbeddingShardingPlanner(topology, workload=workload, keep_search=True)
    try:
        kept = planner.plan_tables(tables, explain=False).search
    except PlanError as refusal:
        assert cap < 1
        kept = refusal.search
    assert kept is not None
    return kept


def marks(svg: str) -> dict[str, tuple[float, float]]:
    """Tooltip -> where the mark begins."""
    found = {}
    for path in ET.fromstring(svg).iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None:
            start = re.match(r"M(-?[\d.]+)[ ,](-?[\d.]+)", path.get("d", ""))
            assert start is not None
            found[title.text or ""] = float(start[1]), float(start[2])
    return found


def test_marks_of_the_frontier_stand_where_their_numbers_are() -> None:
    found = search(1.25)
    frontier = found.frontier()
    assert len(frontier) > 3
    places = [
        spot for words, spot in marks(views.planner_search(found).svg).items() if words.startswith("on the Pareto")
    ]
    at = np.array(places)  # in the order of the frontier
    held, ms = np.array([(one.memory_bytes, one.step_ms) for one in frontier]).T
    for pixels, values in ((at[:, 0], held), (at[:, 1], ms)):  # tops of diamonds: all by the same five pixels too high
        shares = (pixels - pixels[0]) / (pixels[-1] - pixels[0])
        np.testing.assert_allclose(shares, (values - values[0]) / (values[-1] - values[0]), atol=0.02)


def test_it_says_how_near_the_best_the_plan_is_and_what_one_scheme_would_cost() -> None:
    found = search()
    view = views.planner_search(found)
    assert found.chosen is not None
    assert found.lower_bound is not None
    assert f"{found.seen:,} plans evaluated" in view.title
    words = texts(view.svg)
    assert any(word.startswith("lower bound ") for word in words)
    assert any(word.startswith("chosen ") for word in words)
    assert any(word.startswith("A rank can use ") for word in words)
    shown = " ".join(words)
    for label in ("table-wise", "row-wise", "column-wise", "data-parallel"):
        assert label in shown
    far = 100 * (found.chosen.step_ms / found.lower_bound - 1)
    said = re.search(r"at most ([\d.]+)% longer than the best there is", view.summary)
    assert said is not None
    assert float(said[1]) == pytest.approx(far, rel=0.06)
    best = min(one.step_ms for one in found.single_schemes.values() if one.fits and not one.elsewhere)
    alone = re.search(r"All tables under [a-z-]+: ([\d.]+)% longer", view.summary)
    assert alone is not None
    assert float(alone[1]) == pytest.approx(100 * (best / found.chosen.step_ms - 1), rel=0.06)


def test_what_does_not_fit_is_a_cross_beyond_the_line_of_the_cap() -> None:
    found = search(1.25)
    over = [one for one in found.candidates if not one.fits]
    assert over
    svg = views.planner_search(found).svg
    groups = {g.get("data-series"): g for g in ET.fromstring(svg).iter(f"{SVG}g") if g.get("data-x")}
    crosses = groups[f"{len(over):,} plans: does not fit"]
    assert min(float(x) for x in crosses.get("data-x", "").split()) > found.usable_bytes
    assert len(crosses) == len(crosses.get("data-x", "").split())
    assert f"{len(over):,} plans: does not fit" in texts(svg)


def test_where_nothing_fits_it_says_so_and_draws_what_was_tried() -> None:
    view = views.planner_search(search(0.4))
    assert view.title.endswith("none fits")
    assert "no plan that fits" in view.summary
    assert "does not fit" in view.table
    assert "chosen " not in " ".join(texts(view.svg)).replace("chosen plan", "")


def test_a_search_that_was_not_kept_or_has_no_number_is_a_message() -> None:
    assert "keep_search=True" in views.planner_search(None).problem
    found = search()
    blank = [replace(one, step_ms=float("nan")) for one in found.candidates]
    broken = replace(found, candidates=tuple(blank), single_schemes={}, chosen=None)
    assert "None of" in views.planner_search(broken).problem
    some = replace(found, candidates=(*found.candidates[:9], *blank[9:]), chosen=found.candidates[0])
    view = views.planner_search(some)
    assert f"{len(blank) - 9:,} plans have no number and are not drawn." in view.summary
    assert "nan" not in view.svg
