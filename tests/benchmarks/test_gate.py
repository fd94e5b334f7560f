"""The gate of the promised figures: what it fails on, what it forgives, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import benchmarks
from benchmarks import Benchmark, Figure
from benchmarks.gate import GATED, IN_DOCS, NIGHTLY, __main__
from benchmarks.gate.docs import PAGES, readme_rows, with_tables
from benchmarks.gate.record import FLOOR, Pass, Record, Recorded, measure, recorded
from benchmarks.gate.reference import Reference, time_reference
from benchmarks.gate.verdicts import Verdict, judge

ROOT = Path(__file__).parents[2]
RECORD = Record(ROOT / ".ci/figures.json")
TARGET = 100.0
KNOWN = {"a time": Recorded(80.0, "ms", ratio=8.0, variation=0.1, step_ms=10.0)}


def fake(
    values: Sequence[float], reference_ms: Sequence[float] | float = 10.0
) -> tuple[Benchmark, list[int], Callable]:
    """A benchmark of one figure that takes these values in turn, the count of its passes, and what measures it."""
    counted: list[int] = []
    steps = [reference_ms] * len(values) if isinstance(reference_ms, float) else reference_ms

    def measuring(benchmark: Benchmark) -> Pass:
        counted.append(1)
        number = len(counted) - 1
        return Pass(tuple(benchmark.run()), Reference(steps[number], steps[number]))

    def figures() -> list[Figure]:
        value = values[len(counted) - 1]
        return [Figure("a time", value, "ms", beside={"CPU": value}), Figure("without a target", 7.0, "ms")]

    return Benchmark("fake", "fakes", figures, {"a time": TARGET}), counted, measuring


def judged(value: float, reference_ms: float = 10.0) -> Verdict:
    benchmark, counted, measuring = fake([value], reference_ms)
    (verdict,) = judge(benchmark, KNOWN, measuring)
    assert len(counted) == 1, "measured once, kept or missed"
    return verdict


def at_the_recorded_speed(unit: str, value: float, step_ms: float, at_most: bool = True) -> Verdict:
    """The verdict on a figure whose bound is 100, recorded while the reference step took 10 ms."""
    benchmark = Benchmark("fake", "", lambda: [Figure("a figure", value, unit, at_most=at_most)], {"a figure": TARGET})
    known = {"a figure": Recorded(80.0, unit, at_most, step_ms=10.0)}
    return judge(benchmark, known, lambda b: Pass(tuple(b.run()), Reference(step_ms, step_ms)))[0]


def test_a_time_is_judged_in_reference_steps_and_other_units_as_they_are() -> None:
    assert at_the_recorded_speed("ms", 180.0, 20.0).missed == ""
    assert at_the_recorded_speed("ms", 220.0, 20.0).missed == "11 reference steps, at most 10"
    assert at_the_recorded_speed("s", 0.101, 10.0).missed == ""
    assert at_the_recorded_speed("ms", 51.0, 5.0).missed, "a fast machine keeps a target in fewer milliseconds"
    assert at_the_recorded_speed("MB", 101.0, 20.0).missed == "101 MB misses its target of at most 100 MB"
    assert at_the_recorded_speed("GB/s", 99.0, 20.0, at_most=False).missed, "a rate is not divided"


def test_a_cpu_time_misses_where_the_code_is_slower_than_recorded() -> None:
    assert judged(80.0 * (1 + FLOOR)).missed == ""
    assert judged(121.0).missed == "12.1 reference steps, at most 12"


def test_the_cpu_time_is_compared_where_there_is_one() -> None:
    for beside, steps in (({"CPU": 40.0}, 8.0), ({}, 4.95)):
        figure = Figure("a time", 99.0, "ms", beside=beside)
        benchmark = Benchmark("fake", "", lambda figure=figure: [figure], {"a time": TARGET})
        (verdict,) = judge(benchmark, KNOWN, lambda b: Pass((*b.run(),), Reference(wall=20.0, cpu=5.0)))
        assert verdict.steps == steps
        assert verdict.missed == ""


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({}, "has no record of 'a time'"),
        (KNOWN | {"gone": Recorded(1.0, "ms")}, "did not measure 'gone', which is recorded"),
    ],
)
def test_a_figure_that_is_not_recorded_or_not_measured_is_an_error(known: dict[str, Recorded], why: str) -> None:
    benchmark, _, measuring = fake([90.0])
    with pytest.raises(ValueError, match=why):
        judge(benchmark, known, measuring)


def test_a_record_keeps_medians_and_how_far_the_worst_pass_was_above() -> None:
    benchmark, _, measuring = fake([80.0, 90.0, 120.0])
    found = recorded(measuring(benchmark) for _ in range(3))
    assert found == {"a time": Recorded(90.0, "ms", ratio=9.0, variation=0.333, step_ms=10.0)}
    assert found["a time"].most(1000.0) == pytest.approx(9 * (1 + FLOOR))
    assert Recorded(90.0, "ms", ratio=9.0, variation=0.6, step_ms=10.0).most(1000.0) == pytest.approx(9 * 1.9)


def test_a_record_is_read_back_and_a_benchmark_added_to_it(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    benchmark, _, measuring = fake([80.0, 90.0, 85.0])
    Record(file).add(benchmark, 3, measuring)
    again = Record(file)
    assert again.figures("fake")["a time"].value == 85.0
    assert again.entries["fake"]["passes"] == 3
    assert again.figures("another") == {}


@pytest.mark.parametrize(("value", "code"), [(90.0, 0), (121.0, 1)])
def test_check_writes_every_figure_and_exits_with_one_after_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, code: int
) -> None:
    file, out = tmp_path / "record.json", tmp_path / "new" / "figures.json"
    benchmark, _, measuring = fake([80.0])
    Record(file).add(benchmark, 1, measuring)
    benchmark, _, measuring = fake([value])
    monkeypatch.setattr(__main__, "benchmark_named", lambda name: benchmark)
    monkeypatch.setattr(__main__, "judge", lambda b, known: judge(b, known, measuring))
    assert __main__.main(["--record", str(file), "check", "fake", "--out", str(out)]) == code
    answers = json.loads(out.read_text())
    assert {"machine", "date", "figures"} == set(answers)
    (figure,) = answers["figures"]
    assert figure["value"] == value
    assert figure["target"] == TARGET
    assert figure["reference_step_ms"] == 10.0
    assert figure["steps"] == value / 10
    assert (figure["missed"] == "") is (code == 0)


def test_the_reference_step_is_measured_beside_a_benchmark() -> None:
    assert time_reference(3).cpu > 0
    found = measure(Benchmark("fake", "", lambda: [Figure("a time", 90.0, "ms")], {"a time": TARGET}))
    assert found.figures[0].target == TARGET
    assert found.reference.wall > 0


@pytest.mark.parametrize("name", [*dict.fromkeys((*GATED, *NIGHTLY, *IN_DOCS))])
def test_every_promised_figure_is_recorded(name: str) -> None:
    promised = benchmarks.benchmark_named(name).targets
    assert promised
    assert RECORD.figures(name).keys() == promised.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_targets_of_the_code_and_the_recorded_values(page: str) -> None:
    text = (ROOT / page).read_text()
    assert with_tables(text, PAGES[page], RECORD) == text, "python -m benchmarks.gate docs"


def test_a_missed_target_is_marked_in_the_readme() -> None:
    rows = list(readme_rows(RECORD))[2:]
    assert len(rows) == 6
    recorded = RECORD.figures("published")
    for row, steps in zip(rows[-2:], ("all steps", "fused kernels"), strict=True):
        error = recorded[f"predicted against published step times, mean error, {steps}"].value
        assert f"| {error:.3g} %" in row
        assert ("missed" in row) == (error > 25.0)
