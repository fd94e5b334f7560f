"""The framework of the figures: what is kept, what is missed, how files become benchmarks."""

import json
import math
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks import Figure


def test_a_target_is_a_bound_on_the_right_side() -> None:
    for unit, value, at_most, ok in (
        *(("ms", 2.0, True, True), ("ms", 2.1, True, False), ("ms", math.nan, True, False)),
        *(("GB/s", 2.0, False, True), ("GB/s", 1.9, False, False)),
    ):
        assert Figure("f", value, unit, target=2.0, at_most=at_most).ok is ok, (value, at_most)
    assert Figure("no target", 1e9, "ms").ok


def test_json_holds_value_unit_target_and_ok_of_every_figure() -> None:
    figures = [Figure("a", 1.5, "s", target=2.0), Figure("b", 3.0, "GB/s", target=4.0, at_most=False)]
    assert json.loads(benchmarks.as_json(figures)) == {
        "a": {"value": 1.5, "unit": "s", "target": 2.0, "ok": True},
        "b": {"value": 3.0, "unit": "GB/s", "target": 4.0, "ok": False},
    }


def test_a_new_file_is_a_new_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ['"""The answer."""', "from benchmarks import Figure", "figures = lambda: [Figure('it', 42, '')]"]
    (tmp_path / "answer.py").write_text("\n".join(lines))
    monkeypatch.setattr(benchmarks, "__path__", [*benchmarks.__path__, str(tmp_path)])
    assert "answer" in benchmarks.benchmark_names()
    found = benchmarks.benchmark_named("answer")
    assert (found.about, found.figures()[0].value) == ("The answer.", 42)
    monkeypatch.delitem(sys.modules, "benchmarks.answer")


def test_every_benchmark_says_what_it_measures() -> None:
    every = map(benchmarks.benchmark_named, benchmarks.benchmark_names())
    assert not [found.name for found in every if len(found.about.split()) <= 4 or not callable(found.figures)]
