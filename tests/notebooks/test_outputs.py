"""What is stored of a notebook's outputs, what is refused, and what two runs of a cell may differ in."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import recshard_lab as rs
from recshard_lab.lab import PlanCompare, views
from tests.notebooks import claims, outputs, refresh, runs
from tests.notebooks.outputs import NotStorable, difference, problems, stored_form, stored_forms, text_of

TABLE = rs.EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name="movie", feature_names=["movie"])


def shown(**data: Any) -> Any:
    return new_output("execute_result", data={kind.replace("_", "/", 1): value for kind, value in data.items()})


def printed(text: str, name: str = "stdout") -> Any:
    return new_output("stream", name=name, text=text)


def test_the_richest_static_form_is_kept_alone() -> None:
    form = stored_form(shown(text_plain="a", text_html="<b>a</b>", **{"application_vnd.plotly.v1+json": {}}))
    assert form.data == {"text/html": "<b>a</b>"}
    assert stored_form(shown(text_plain="\x1b[31ma\x1b[0m")).data == {"text/plain": "a"}
    assert form.execution_count is None


def test_an_error_keeps_its_last_line() -> None:
    error = new_output("error", ename="ValueError", evalue="no", traceback=["File /root/x.py", "ValueError: no"])
    form = stored_form(error)
    assert form.traceback == ["ValueError: no"]
    assert not problems(form)


def test_a_widget_without_a_static_picture_bitmaps_alone_and_warnings_are_refused() -> None:
    with pytest.raises(NotStorable, match="needs text/html"):
        stored_form(shown(text_plain="HBox()", **{"application_vnd.jupyter.widget-view+json": {}}))
    with pytest.raises(NotStorable, match="no static form"):
        stored_form(shown(image_png="iVBO"))
    with pytest.raises(NotStorable, match="stderr: 'a warning'"):
        stored_form(printed("a warning", "stderr"))


def test_a_view_and_a_widget_are_stored_as_their_picture_and_numbers() -> None:
    plan = rs.plan([TABLE], rs.Topology(2), movie="row_wise")
    view = views.placement(plan, [TABLE])
    widget = PlanCompare([TABLE], rs.Topology(2), schemes={"movie": "row_wise"})
    try:
        for shows in (view, widget):
            form = stored_form(new_output("display_data", data=shows._repr_mimebundle_()))
            assert list(form.data) == ["text/html"]
            assert "<img" in form.data["text/html"]
            assert "Placement: 1 table on 2 ranks." in text_of(form)
            assert "<svg" in outputs.markup(form)
            assert not problems(form)
    finally:
        widget.close()
    assert text_of(stored_form(shown(text_html=view._repr_html_()))).startswith("Placement: 1 table on 2 ranks.")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"wrote {tempfile.gettempdir()}/run/a.json", "path"),
        (f"in {Path.home()}", "path"),
        (sys.prefix, "path"),
        ("/home/somebody/a.py", "path"),
        ("C:\\Users\\a", "path"),
        ("&lt;Ranks pid=2213&gt;", "process 2213"),
        ("rank 0 is process 2213", "process 2213"),
        ("&lt;object at 0x7f00aa00bb11&gt;", "address"),
        ("<table><th>rank</th><th>process</th></table>", "column of processes"),
        ('<img src="data:image/png;base64,AA">', "bitmap (image/png)"),
        ("a" * 7000, "7,000 characters"),
    ],
)
def test_what_belongs_to_a_machine_is_named(text: str, problem: str) -> None:
    found = problems(stored_form(shown(text_html=text)))
    assert problem in " ".join(found)


BAR = '<svg aria-label="Time per rank: {}"><path d="M0 0L{} 4"/><text>rank 0</text><text>{} ms</text></svg>'


def bar(label: str, end: str, ms: str) -> list[Any]:
    return stored_forms([shown(text_html=BAR.format(label, end, ms)), printed("[0] ███ " + ms + " ms of waiting\n")])


def test_two_runs_are_compared_by_all_they_show_and_timed_ones_by_their_words() -> None:
    one = bar("rank 0 waits most", "10", "3.5")
    assert difference(one, bar("rank 0 waits most", "10", "3.5")) == ""
    assert '-<path d="M0 0L10 4"/>' in difference(one, bar("rank 0 waits most", "12", "3.5"))
    assert "3.5" in difference(one, bar("rank 0 waits most", "10", "3.7"))
    assert not difference(one, bar("rank 0 waits most", "10", "3.6")), "one in the last digit"
    assert difference(one, bar("rank 1 waits most", "99", "812"), timed=True) == ""
    assert "the run gave ['text/html']" in difference(one, one[:1], timed=True)
    assert "words are alike" in difference(
        one, bar("no ranks are running, launch them first", "1", "1")[:1] + one[1:], True
    )
    assert "words are alike" in difference(one, [one[0], printed("")], timed=True)


def notebook(*sources: str) -> Any:
    made = new_notebook(cells=[new_markdown_cell("# Title"), *map(new_code_cell, sources)])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return made


def test_refresh_runs_a_notebook_and_stores_its_outputs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(refresh, "FOLDER", tmp_path)
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    lines = "print('row_wise   AUC 0.7331, 29 ids')\nprint('table_wise AUC 0.7330, 1,290 ids')"
    nbformat.write(notebook("3 + 4", lines), tmp_path / "05_a.ipynb")
    bad = notebook("import os, sys", "print('process', os.getpid())", "print(sys.prefix)")
    nbformat.write(bad, tmp_path / "06_b.ipynb")
    before = (tmp_path / "06_b.ipynb").read_bytes()
    assert refresh.main(["05", "06"]) == 1
    told = capsys.readouterr()
    assert "05_a.ipynb: " in told.out
    assert "06_b.ipynb: not stored\ncell 2 (\"print('process', os.getpid())\"): it names process" in told.err
    assert "cell 3 ('print(sys.prefix)'): it names the path" in told.err
    assert (tmp_path / "06_b.ipynb").read_bytes() == before
    found = claims.stored("05")
    assert [cell.execution_count for cell in found.notebook.cells[1:]] == [None, None]
    assert found.output_of("3 + 4") == "7"
    cell = found.cell("row_wise")
    assert cell.number("ids") == 29
    assert cell.number(after="table_wise AUC") == 0.733
    assert cell.row("table_wise") == [0.733, 1290]
    assert cell.numbers == [0.7331, 29, 0.733, 1290]
    assert found.prose("# T") == "# Title"
    with pytest.raises(AssertionError, match="no number before 'GB'"):
        cell.number("GB")
    with pytest.raises(AssertionError, match="0 code cells have 'nothing'"):
        found.cell("nothing")
    with pytest.raises(ValueError, match=r"no notebook begins with '99'. Fix: pass one of \['05_a', '06_b'\]"):
        refresh.main(["99"])
