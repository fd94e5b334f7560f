"""Reports: one file, no network, no script, both themes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recshard_lab.lab import views, write_report
from recshard_lab.lab.exporting.report import Section
from recshard_lab.text_table import TextTable
from tests.lab.plans import movielens, plan_of


def written(path: Path, plotly: str = "none") -> str:
    tables = movielens()
    placed = views.placement(plan_of(tables, 4), tables)
    sections = {
        "Plans": ["Four schemes, one model.", placed, placed],
        "Loss": views.curves({"row_wise": [0.7, 0.5], "table_wise": [0.7, 0.5]}),
        "AUC": TextTable(("scheme", "AUC"), [("row-wise", "0.781")]),
    }
    return write_report(
        path / "report.html", "Plans & losses", sections, note="synthetic <ratings>", plotly=plotly
    ).read_text()


def test_a_report_of_still_pictures_opens_without_the_network_and_runs_no_script(tmp_path: Path) -> None:
    page = written(tmp_path)
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "@import" not in page
    assert "prefers-color-scheme:dark" in page
    assert len(page) < 3_000_000


def test_a_report_with_interactive_pictures_asks_nothing_of_the_network_and_forbids_itself_to(tmp_path: Path) -> None:
    page = written(tmp_path, "embed")
    assert not re.search(r'(?:src|href)="(?!#|data:)', page)
    assert "default-src 'none'" in page
    assert "connect-src" not in page
    assert "Copyright" not in page  # plotly.js is packed
    assert len(page.encode()) < 3_000_000


def test_a_report_that_asks_the_network_says_what_and_where(tmp_path: Path) -> None:
    from plotly.offline import get_plotlyjs_version

    page = written(tmp_path, "cdn")
    address = f"https://cdn.plot.ly/plotly-{get_plotlyjs_version()}.min.js"
    assert re.findall(r'src="(http[^"]*)"', page) == [address]
    assert f"They load plotly.js from {address}" in page
    assert 'integrity="sha256-' in page
    with pytest.raises(ValueError, match=r"must be one of embed, cdn, none, got 'web'.*Fix:"):
        written(tmp_path, "web")


def test_a_page_without_pictures_carries_no_plotly(tmp_path: Path) -> None:
    assert len(write_report(tmp_path / "r.html", "T", {"AUC": "0.78"}).read_text()) < 10_000


def test_a_list_of_sections_does_too(tmp_path: Path) -> None:
    path = write_report(tmp_path / "r.html", "T", [Section("Run it", ["$ recshard demo"])])
    assert '<pre tabindex="0">$ recshard demo</pre>' in path.read_text()


def test_an_empty_or_a_huge_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one section"):
        write_report(tmp_path / "r.html", "T", {})
    with pytest.raises(ValueError, match="more than 3,000,000"):
        write_report(tmp_path / "r.html", "T", {"long": "x" * 3_000_001})
