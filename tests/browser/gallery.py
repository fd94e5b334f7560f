"""Every widget and every view in one notebook of a real JupyterLab, for the tests that hold of all of them.

A new widget is one more entry of `SHOWN`; a new view one more entry of `example_views`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.browser.lab_server import command, notebook_page, run_all, shut_down, write_notebook
from tests.lab.every_view import codecs, formats, memory_history

THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
WIDTH = 1360  # of the browser's window, in pixels


@dataclass(frozen=True)
class Shown:
    """One widget on the page.

    Args:
        name: of its pictures and tests.
        cell: the Python that shows it.
        ready: a selector that is there once it is drawn.
        varies: selectors of what differs from run to run (process numbers, times): covered in pictures.
        keys: control -> the key that is tried on it, where the one for its kind would change nothing; "" for none.
    """

    name: str
    cell: str
    ready: str
    varies: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)

    @property
    def area(self) -> str:
        """Selects what the cell put out, and nothing of JupyterLab's own around it."""
        return f"[data-shown='{self.name}'] .jp-OutputArea-output"


SETUP = (
    "%load_ext recshard_lab\n"
    "import recshard_lab as rs\n"
    "from recshard_lab.lab import *\n"
    "from tests.browser.gallery import example_views\n"
    "from tests.lab.plans import movielens\n"
    "from tests.lab.recorded import build, plan_of\n"
    "from tests.lab.test_scheme_switcher import MODEL\n"
    "ranks, two = rs.launch(2), rs.Topology(2, ddr_cap=10**9)\n"
    "ranks.exec(MODEL)",
)
SHOWN = (
    Shown(
        "plan_compare",
        "PlanCompare(movielens(), rs.Topology(4, ddr_cap=10**9), schemes={'movie': 'row_wise'})",
        "svg[role=img]",
        keys={"Set all to": "ArrowDown", "Changes from": "Home"},
    ),
    Shown(
        "skew_scale",
        "SkewScale(movielens(), rs.Topology(4, ddr_cap=10**9))",
        "[role=figure][aria-label^='9 plans'] [data-drawn]",
        keys={"Machine": "ArrowDown", "Skew": "End", "Ids per bag": "End"},  # the next step is what the tables have
    ),
    Shown(
        "scheme_switcher",
        "SchemeSwitcher(ranks, 'model', 'train_step', workload=rs.Workload(32, 2.0), topology=two)",
        "svg[role=img]",
        keys=dict.fromkeys(("movie", "user", "genre"), "r"),  # to row-wise
    ),
    Shown(
        "drawing_board",
        "movies = rs.EmbeddingBagConfig(name='movies', num_embeddings=1000, embedding_dim=16, feature_names=['f'])\n"
        "halves = [(0, (0, 600), (0, 16)), (1, (600, 1000), (0, 8)), (0, (600, 1000), (8, 16))]\n"
        "DrawingBoard(movies, two, tiles=halves)",
        "[data-tile]",
    ),
    Shown(
        "live_counters",
        "LiveCounters(ranks, cache_rows=100)",
        "[data-drawn]",
        ("[role=status]",),
    ),
    Shown(
        "step_through",
        "build(ranks, plan_of('row_wise'), 'small')\n"
        "StepThrough(ranks, \"small['model']\", batch=\"small['batch']\", loss=\"small['loss_of']\")",
        ".rs-board svg",
        (".rs-cost",),
        {"Follow": "ArrowDown"},
    ),
    Shown("views", "for view in example_views().values():\n    display(view)", "svg[aria-label^='Simulated']"),
    Shown(
        "ranks_panel",
        "RanksPanel()",
        ".rs-bar span",
        ("td", "pre"),
        {"Export as": ""},  # a single kind of file, nothing to change
    ),
)


def example_views() -> dict[str, Any]:
    """Every registered view of something small, by name."""
    import numpy as np
    import torch

    from recshard_lab import EmbeddingShardingPlanner, KeyedJaggedTensor, Workload, estimate, sweep
    from recshard_lab.lab import compare_plans, views
    from recshard_lab.lab.live.samples import Sample
    from recshard_lab.planner import AccessProfile, compare_servers
    from recshard_lab.sharding import Topology
    from tests.lab.plans import movielens, plan_of
    from tests.lab.recorded import recorded_step
    from tests.lab.test_live_counters import one
    from tests.lab.test_timeline import pipelined

    tables, topology = movielens(), Topology(4, ddr_cap=10**7)
    plan = plan_of(tables, 4)
    known: dict[str, Any] = {"plan": plan, "tables": tables, "topology": topology}
    known["estimate"] = estimate(plan, tables, topology, Workload())
    known["losses"] = {"table-wise": [0.7, 0.6, 0.55, 0.5], "row-wise": [0.7, 0.62, 0.56, 0.52]}
    known["events"] = pipelined()
    known["sweep"] = sweep(tables, Workload(), topology="h100", world_size=[2, 4, 8])
    planner = EmbeddingShardingPlanner(topology, keep_search=True)
    known["search"] = planner.plan_tables(tables).search
    compared = {name: name for name in ("planner", "table_wise", "row_wise", "data_parallel")}
    known["comparison"] = compare_plans(tables, topology, compared)
    drawn = {name: views.draw(name, **known) for name in views.views_of(*known)}
    counts = (np.random.default_rng(3).zipf(1.3, 20_000) - 1) % 1682
    drawn["access_skew"] = views.access_skew(
        {"movie": AccessProfile.of_ids([counts])}, num_embeddings=1682, world_size=4
    )
    batch = KeyedJaggedTensor(["user", "movie"], torch.arange(5), lengths=torch.tensor([1, 1, 2, 1]))
    drawn["jagged_anatomy"] = views.jagged_anatomy(batch)
    drawn["follow_id"] = views.follow_id(plan, tables, "f_movie", 1200, home_rank=1, topology=topology)
    seen = [
        Sample.of(
            [{"step": 10 * i, "ms": 1.0, "number": i, "tables": one(lookups={"hbm": 30 * i + r})} for r in (0, 9)]
        )
        for i in range(4)
    ]
    drawn["counters"] = views.counters(seen)
    drawn["overflow"] = views.overflow(plan, tables, replace(topology, ddr_cap=1_300_000), Workload())
    drawn["replica_grid"] = views.replica_grid(
        plan_of(tables, 2), tables, [[0, 2], [1, 3]], topology=Topology(4, local_world_size=2)
    )
    drawn["wire_formats"] = views.wire_formats(codecs())
    drawn["memory_over_time"] = views.memory_over_time(memory_history(40))
    drawn["step_frames"] = views.step_frames(recorded_step())
    drawn["waterfall"] = views.waterfall({"before": 8.0, "graphs": 4.0, "copies": 5.0}, published={"before": 9.0})
    drawn["parameter_server"] = views.parameter_server(compare_servers(tables, Workload(512, 10.0, zipf_alpha=1.05)))
    drawn["number_formats"] = views.number_formats(formats())
    return {name: drawn[name] for name in views.view_names() if name in drawn}


def shown(name: str) -> Shown:
    """An entry of `SHOWN`."""
    return next(one for one in SHOWN if one.name == name)


@contextmanager
def gallery(lab: tuple[Path, str, str]) -> Iterator[Any]:
    """The page with everything on it; ``data-shown`` tells the outputs apart."""
    folder, address, token = lab
    write_notebook(folder / "gallery.ipynb", [*SETUP, *(one.cell for one in SHOWN)])
    with notebook_page(address, token, "gallery.ipynb", WIDTH) as page:
        run_all(page)
        names = [*("" for _ in SETUP), *(one.name for one in SHOWN)]
        page.evaluate(
            """names => document.querySelectorAll('.jp-Notebook .jp-CodeCell').forEach((cell, i) => {
            cell.querySelector('.jp-OutputArea').dataset.shown = names[i]; })""",
            names,
        )
        for one in SHOWN:
            page.wait_for_selector(f"{one.area} {one.ready}")
        stretch(page)
        yield page
        shut_down(page)


def stretch(page: Any) -> None:
    """Makes the window as high as the notebook: whatever is scrolled away counts as hidden for axe-core."""
    high = page.evaluate("() => document.querySelector('.jp-Notebook .jp-WindowedPanel-viewport').scrollHeight")
    page.set_viewport_size({"width": WIDTH, "height": int(high) + 400})


@contextmanager
def added(page: Any, selector: str, markup: str) -> Iterator[None]:
    """Something more at the end of an element, for a while."""
    page.evaluate(
        """([selector, markup]) => document.querySelector(selector).insertAdjacentHTML('beforeend',
        `<div id="added">${markup}</div>`)""",
        [selector, markup],
    )
    try:
        yield
    finally:
        page.evaluate("() => document.querySelector('#added').remove()")


@contextmanager
def unfolded(page: Any, name: str) -> Iterator[None]:
    """All that is folded away in a widget is shown, for a while."""
    toggle = """([area, open]) => document.querySelectorAll(`${area} details`).forEach(one => {
        if (open && !one.open) one.dataset.folded = ""; else if (!open && !("folded" in one.dataset)) return;
        one.open = open; })"""
    page.evaluate(toggle, [shown(name).area, True])
    stretch(page)
    try:
        yield
    finally:
        page.evaluate(toggle, [shown(name).area, False])


def wear(page: Any, theme: str) -> None:
    """Changes JupyterLab's theme and waits until it is there."""
    light = "true" if theme == "light" else "false"
    if page.evaluate("() => document.body.dataset.jpThemeLight") == light:
        return
    command(page, "apputils:change-theme", theme=THEMES[theme])
    page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")
    page.wait_for_function("() => !document.querySelector('#jupyterlab-splash')")
    page.wait_for_function(  # live figures are painted anew
        """light => [...document.querySelectorAll("[data-shown] .xtick text")].every(
        one => getComputedStyle(one).fill.match(/\\d+/g).slice(0, 3).every(part => Number(part) < 140 === light))""",
        arg=theme == "light",
    )
