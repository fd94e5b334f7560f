"""Exports: what is written can be read back, says everything, and a file that cannot hold a thing is refused."""

from __future__ import annotations

import contextlib
import re
import subprocess
import xml.etree.ElementTree as ET
import zipfile
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import fields
from html.parser import HTMLParser
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import recshard_lab as rs
from recshard_lab.lab import export, views
from recshard_lab.lab.draw.view import message_view
from recshard_lab.sharding import ParameterConstraints, PlanError, ShardingPlan, Topology
from tests.lab.plans import SCHEMES, many, movielens, plan_of
from tests.test_bad_arguments import JUNK


def planned(schemes: Sequence[str] = (), world_size: int = 2) -> ShardingPlan:
    wishes = {table.name: ParameterConstraints(sharding_types=list(schemes)) for table in movielens() if schemes}
    planner = rs.EmbeddingShardingPlanner(Topology(world_size), 64, constraints=wishes)
    return planner.plan_tables(movielens())


def six() -> dict[str, Any]:
    """What a page of six plans of 26 tables on 8 ranks is made of."""
    tables, topology = many(26), Topology.preset("h100x8")
    plans = {f"all {scheme}": plan_of(tables, 8, (scheme,)) for scheme in SCHEMES}
    plans |= {"mixed": plan_of(tables, 8), "planner": rs.EmbeddingShardingPlanner(topology).plan_tables(tables)}
    return {"thing": plans, "tables": tables, "topology": topology, "workload": rs.Workload(batch_size=2048)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = six()
    return export(given.pop("thing"), tmp_path_factory.mktemp("page") / "six.html", python="export(plans)", **given)


# ---- pages ----


def test_six_plans_of_26_tables_on_8_ranks_are_one_file_of_at_most_3_mb(page: Path) -> None:
    assert page.stat().st_size <= 3_000_000
    text = page.read_text()
    assert not re.findall(r'(?:src|href)=(?!"#|"data:).{30}', text.split("<script")[0])
    assert len(re.findall(r'<div id="p[^"]+" role="group"', text)) == 6 * len(CHARTS) == 18
    assert text.count("<figure>") == 6 * len(views.views_of(*known()))


CHARTS = {"memory", "phases", "balance"}  # the others are geometry


def known() -> list[str]:
    return ["plan", "tables", "topology", "estimate"]


def test_a_page_names_every_figure_that_it_was_predicted_from(page: Path) -> None:
    text = page.read_text()
    for each in (*fields(Topology), *fields(rs.Workload)):
        assert f">{each.name}</td>" in text, each.name
    assert "2,048" in text


def test_a_page_tells_the_python_and_the_versions(page: Path) -> None:
    import plotly.offline
    import torch

    text = page.read_text()
    assert '<pre tabindex="0">export(plans)</pre>' in text
    for version in (rs.__version__, torch.__version__, plotly.offline.get_plotlyjs_version()):
        assert version in text


def test_the_plans_inside_a_page_load_back_equal(page: Path) -> None:
    links = re.findall(r'href="data:text/plain;base64,([^"]+)" download="([^"]+)"', page.read_text())
    found = {name: ShardingPlan.from_json(b64decode(text).decode()) for text, name in links}
    wanted = six()
    assert len(found) == 6
    for name, plan in wanted["thing"].items():
        assert found[f"{name.replace(' ', '_')}.json"] == plan.resolved(wanted["tables"], 8)


def test_a_page_compares_what_python_computes(page: Path) -> None:
    from recshard_lab.lab.draw.theme import ms_text

    given = six()
    row = re.search(r"<tr><td[^>]*>Step</td>(.*?)</tr>", page.read_text())
    assert row is not None
    shown = re.findall(r"<td[^>]*>([^<]+)</td>", row[1])
    wanted = [
        rs.estimate(plan.resolved(given["tables"], 8), given["tables"], given["topology"], given["workload"]).step_ms
        for plan in given["thing"].values()
    ]
    assert [cell.replace(" (best)", "") for cell in shown] == [ms_text(value) for value in wanted]
    assert [cell for cell in shown if "best" in cell] == [f"{ms_text(min(wanted))} (best)"]


def test_a_page_is_well_nested_and_escapes_names(page: Path, tmp_path: Path) -> None:
    plans = {"<b>mine</b>": planned(), "theirs & ours": planned(["row_wise"])}
    odd = export(plans, tmp_path / "odd.html", python="a < b").read_text()
    assert "<b>mine" not in odd
    assert "&lt;b&gt;mine" in odd
    for text in (odd, page.read_text()):
        open_tags: list[str] = []

        class Nesting(HTMLParser):
            def handle_starttag(self, tag: str, attrs: object, tags: list[str] = open_tags) -> None:
                if tag not in ("meta", "img", "br"):
                    tags.append(tag)

            def handle_startendtag(self, tag: str, attrs: object) -> None:
                pass

            def handle_endtag(self, tag: str, tags: list[str] = open_tags) -> None:
                assert tags.pop() == tag

        Nesting().feed(text)
        assert open_tags == []


# ---- pictures ----


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_png_has_the_pictures_size_and_its_colours(theme: str, tmp_path: Path) -> None:
    view = views.placement(planned(), movielens())
    drawing = view.draw("x")
    path = export(view, tmp_path / "x.png", theme=theme, scale=1.5)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert image.size == (round(drawing.width * 1.5), round(drawing.height * 1.5))
        pixels = np.asarray(image.convert("RGB"))
    paper = {"light": (255, 255, 255), "dark": (22, 25, 29)}[theme]
    assert tuple(pixels[2, 2]) == paper
    assert tuple(pixels[-3, -3]) == paper
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50
    ink = np.abs(pixels[: round(30 * 1.5)].astype(int) - np.array(paper)).sum(axis=2) > 300
    assert ink.mean() > 0.005  # the title is there: its words were drawn


def test_a_png_too_large_or_of_no_size_is_refused_with_the_scale_that_would_do(tmp_path: Path) -> None:
    view = views.placement(planned(), movielens())
    with pytest.raises(ValueError, match=r"pixels is not made. Fix: scale=") as refused:
        export(view, tmp_path / "x.png", scale=100)
    largest = float(re.search(r"scale=([\d.]+)", str(refused.value))[1])  # type: ignore[index]
    assert 5 < largest < 100
    for odd in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale must be a positive number of pixels"):
            export(view, tmp_path / "x.png", scale=odd)
    with pytest.raises(ValueError, match="is not made"):
        export(view, tmp_path / "x.png", scale=1e-4)
    with pytest.raises(ValueError, match="theme must be one of light, dark, got 'blue'"):
        export(view, tmp_path / "x.png", theme="blue")


def test_a_png_without_resvg_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recshard_lab.lab.draw import sheet

    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    sheet._has_fonts.cache_clear()
    with pytest.raises(ImportError, match=r"pip install resvg_py"):
        export(message_view("a", "b", "c"), tmp_path / "x.png")


# ---- plans and scripts ----


def test_a_plan_loads_back_equal_whoever_made_it(tmp_path: Path) -> None:
    for plan in (planned(), plan_of(movielens(), 4)):
        assert ShardingPlan.from_json(export(plan, tmp_path / "p.json").read_text()) == plan
    plans = {"mine": planned(["row_wise"]), "theirs": planned()}
    assert ShardingPlan.from_json(export(plans, tmp_path / "p.json", plan="mine").read_text()) == plans["mine"]
    with pytest.raises(ValueError, match=r"has 2 plans \('mine', 'theirs'\).*plan='mine'"):
        export(plans, tmp_path / "p.json")
    with pytest.raises(ValueError, match=r"has no plan 'yours'; plans: 'mine', 'theirs'"):
        export(plans, tmp_path / "p.json", plan="yours")


@pytest.mark.nightly
def test_the_script_of_a_plan_that_was_drawn_by_hand_trains_on_two_ranks(tmp_path: Path) -> None:
    tables = movielens()
    given = {"tables": tables, "topology": Topology(2), "workload": rs.Workload(batch_size=8)}
    script = export(plan_of(tables, 2), tmp_path / "train.sh", **given)
    assert "WORLD_SIZE = 2" in export(plan_of(tables, 2), tmp_path / "train.py", **given).read_text()
    command = ["bash", str(script), "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"step 3: loss 0\.\d+", done.stdout)


def test_the_shell_file_of_several_nodes_asks_where_they_meet(tmp_path: Path) -> None:
    planner = rs.EmbeddingShardingPlanner(Topology(4, local_world_size=2))
    script = export(planner.plan_tables(movielens()), tmp_path / "train.sh")
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "host:port of one node" in done.stderr
    assert "--nproc-per-node 2 --nnodes 2" in script.read_text()


def test_a_folder_and_a_zip_hold_one_of_each(tmp_path: Path) -> None:
    plans = {"mine": planned(["row_wise"]), "Mine!": planned()}
    folder = export(plans, tmp_path / "all")
    names = {path.name for path in folder.iterdir()}
    stem = "2_plans_for_6_tables"
    wanted = {f"{stem}.{kind}" for kind in ("html", "svg", "png")} | {"about.txt"}
    wanted |= {f"{name}.{kind}" for name in ("mine", "mine_2") for kind in ("json", "py", "sh")}
    assert names == wanted
    assert all(f"{name}: " in (folder / "about.txt").read_text() for name in wanted - {"about.txt"})
    packed = zipfile.ZipFile(BytesIO(export(plans, tmp_path / "all.zip").read_bytes()))
    assert {Path(name).name for name in packed.namelist()} == wanted
    assert packed.read(f"{stem}/mine_2.json") == (folder / "mine_2.json").read_bytes()


# ---- what is refused ----


@pytest.mark.parametrize("thing", [None, 3, "plan", [], {}, [1], {"a": 1}, {"a": []}, object(), np.arange(3)])
def test_what_cannot_be_exported_is_refused(thing: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="export takes a view, a list or dictionary of views"):
        export(thing, tmp_path / "x.html")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("x.pdf", r"cannot export to x.pdf: .pdf is not supported.* .html \(a page\).* and a folder"),
        ("none/x.html", "x.html cannot be written: the folder .*none.* does not exist"),
        (3, r"export: path must be str \| pathlib.Path, got 3"),
        ("x.json", "has no plan to write. Fix: .html, .svg or .png"),
        ("x.py", "has no plan to write"),
    ],
)
def test_a_file_that_cannot_be_is_refused(name: Any, words: str, tmp_path: Path) -> None:
    view = views.placement(planned(), movielens())
    with pytest.raises(ValueError, match=words):
        export(view, tmp_path / name if isinstance(name, str) else name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("html", ("thing", "plotly", "title", "python", "tables", "topology", "workload", "measured")),
        ("svg", ("thing", "path")),
        ("png", ("theme", "scale")),
        ("json", ("thing", "plan")),
        ("py", ("model",)),
    ],
)
def test_a_wrong_argument_is_a_value_error(
    kind: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"thing": {"mine": planned()}, "path": f"x.{kind}", "plotly": "none"}
    for argument, junk in product(arguments, JUNK):
        with contextlib.suppress(ValueError):  # anything else fails the test
            export(**{**given, argument: junk})


def test_a_plan_of_which_nothing_is_known_asks_for_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"export\(\.\.\., tables=\.\.\., topology=\.\.\.\); \.json needs neither"):
        export(plan_of(movielens(), 2), tmp_path / "x.html")
    with pytest.raises(ValueError, match="export has no argument 'table' for plans; arguments: tables, topology"):
        export(plan_of(movielens(), 2), tmp_path / "x.html", table=3)


def test_views_and_lists_and_dictionaries_of_them_are_pages_and_pictures(tmp_path: Path) -> None:
    one, two = views.placement(planned(), movielens()), views.curves({"loss": [0.7, 0.6]})
    for thing, count in ((one, 1), ([one, two], 2), ({"mine": one, "theirs": [one, two]}, 3)):
        text = export(thing, tmp_path / "x.html", title="Pictures").read_text()
        assert text.count("<figure>") == count
        assert "<h1>Pictures</h1>" in text
        root = ET.fromstring(export(thing, tmp_path / "x.svg").read_text())
        assert sum(each.get("role") == "img" for each in root.iter()) == (1 if count == 1 else 1 + count)
