"""The gate of the promised figures: what it fails on, what it forgives, and what it writes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import benchmarks
from benchmarks import Benchmark, Figure
from benchmarks.gate import GATED, IN_DOCS, __main__, verdicts
from benchmarks.gate.docs import PAGES, readme_rows, with_tables
from benchmarks.gate.record import FLOOR, Pass, Record, Recorded, measure, recorded
from benchmarks.gate.reference import Reference, time_reference
from benchmarks.gate.verdicts import Verdict, judge

ROOT = Path(__file__).parents[2]
RECORD = Record(ROOT / ".ci/figures.json")
TARGET = 100.0
KNOWN = {"a time": Recorded(80.0, "ms", ratio=8.0, variation=0.1)}  # the reference step takes 10 ms


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


def judged(values: Sequence[float], reference_ms: Sequence[float] | float = 10.0) -> tuple[Verdict, int]:
    benchmark, counted, measuring = fake(values, reference_ms)
    (verdict,) = judge(benchmark, KNOWN, measuring)
    return verdict, len(counted)


def test_a_kept_figure_is_measured_once() -> None:
    verdict, passes = judged([90.0])
    assert (verdict.missed, passes) == ("", 1)


def at_the_recorded_speed(unit: str, value: float, step_ms: float, at_most: bool = True) -> Verdict:
    """The verdict on a figure whose bound is 100, recorded while the reference step took 10 ms."""
    benchmark = Benchmark("fake", "", lambda: [Figure("a figure", value, unit, at_most=at_most)], {"a figure": TARGET})
    known = {"a figure": Recorded(80.0, unit, at_most, step_ms=10.0)}
    return judge(benchmark, known, lambda b: Pass(tuple(b.run()), Reference(step_ms, step_ms)))[0]


def test_a_time_is_judged_at_the_recorded_machines_speed() -> None:
    assert at_the_recorded_speed("ms", 180.0, 20.0).missed == ""
    assert at_the_recorded_speed("ms", 220.0, 20.0).missed == "110 ms misses its target of at most 100 ms"
    assert at_the_recorded_speed("ms", 101.0, 5.0).missed, "a fast machine does not make the target smaller or larger"
    assert at_the_recorded_speed("MB", 101.0, 20.0).missed, "bytes do not depend on speed"
    assert at_the_recorded_speed("GB/s", 99.0, 20.0, at_most=False).missed, "a rate is not divided"


def test_one_outlier_is_measured_again_and_forgiven() -> None:
    verdict, passes = judged([300.0, 81.0, 82.0])
    assert (verdict.missed, passes) == ("", 3)
    assert verdict.figure.value == 82.0
    assert [figure.value for figure in verdict.tries] == [300.0, 81.0, 82.0]


def test_a_figure_that_sits_on_its_target_fails_when_two_of_three_miss() -> None:
    verdict, _ = judged([101.0, 99.0, 102.0])
    assert verdict.missed == "101 ms misses its target of at most 100 ms"
    assert judged([101.0, 99.0, 98.0])[0].missed == ""


def test_two_kept_tries_after_a_missed_one_are_needed_not_one() -> None:
    assert judged([101.0, 150.0, 80.0])[0].missed


def test_a_real_regression_fails_though_the_target_is_kept() -> None:
    verdict, passes = judged([99.0] * 3, 8.0)  # 12.4 steps against 8 recorded
    assert passes == 3
    assert verdict.missed == "12.38 reference steps, recorded 8, at most 10: slower code"


def test_a_slow_machine_slows_the_reference_step_too_and_passes() -> None:
    assert judged([99.0], 12.0) == judged([99.0], 12.0)
    assert judged([99.0], 12.0)[0].missed == ""


def test_a_slower_pass_in_a_busy_moment_is_measured_again() -> None:
    verdict, passes = judged([99.0, 80.0, 80.0], [8.0, 10.0, 10.0])
    assert (verdict.missed, passes, verdict.ratio) == ("", 3, 8.0)


def test_nan_counts_as_the_worst_try() -> None:
    assert judged([math.nan, 80.0, 82.0])[0].figure.value == 82.0
    assert judged([math.nan, math.nan, 82.0])[0].missed


def test_a_rate_is_judged_from_below_and_has_no_ratio() -> None:
    values = iter([3.0, 5.0, 3.5])
    benchmark = Benchmark("fake", "", lambda: [Figure("rate", next(values), "GB/s", at_most=False)], {"rate": 4.0})
    (verdict,) = judge(benchmark, {"rate": Recorded(5.0, "GB/s", False)}, lambda b: Pass((*b.run(),), Reference(1, 1)))
    assert verdict.missed == "3.5 GB/s misses its target of at least 4 GB/s"
    assert verdict.ratio is None


def test_the_cpu_time_is_compared_and_a_figure_without_one_has_no_ratio() -> None:
    for beside, ratio in (({"CPU": 40.0}, 8.0), ({}, None)):
        figure = Figure("a time", 99.0, "ms", beside=beside)
        benchmark = Benchmark("fake", "", lambda figure=figure: [figure], {"a time": TARGET})
        (verdict,) = judge(benchmark, KNOWN, lambda b: Pass((*b.run(),), Reference(wall=20.0, cpu=5.0)))
        assert verdict.ratio == ratio
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


def test_a_target_that_no_figure_has_is_an_error() -> None:
    benchmark = Benchmark("fake", "", lambda: [Figure("a time", 90.0, "ms")], {"a time": TARGET, "other": 1.0})
    with pytest.raises(ValueError, match="did not measure 'other', which is a target"):
        judge(benchmark, KNOWN, lambda b: Pass((*b.run(),), Reference(10.0, 10.0)))


def test_a_record_keeps_medians_and_how_far_the_worst_pass_was_above() -> None:
    benchmark, _, measuring = fake([80.0, 90.0, 120.0])
    found = recorded(measuring(benchmark) for _ in range(3))
    assert found == {"a time": Recorded(90.0, "ms", ratio=9.0, variation=0.333, step_ms=10.0)}
    assert found["a time"].most == pytest.approx(9 * 1.4995)
    assert Recorded(90.0, "ms", ratio=9.0, variation=0.01).most == pytest.approx(9 * (1 + FLOOR))


def test_a_record_is_read_back_and_a_benchmark_added_to_it(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    benchmark, _, measuring = fake([80.0, 90.0, 85.0])
    Record(file).add(benchmark, 3, measuring)
    again = Record(file)
    assert again.figures("fake")["a time"].value == 85.0
    assert again.entries["fake"]["passes"] == 3
    assert again.figures("another") == {}


@pytest.mark.parametrize(("values", "code"), [([90.0], 0), ([101.0, 102.0, 103.0], 1), ([150.0, 90.0, 80.0], 0)])
def test_check_writes_every_try_and_exits_with_one_after_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[float], code: int
) -> None:
    file, out = tmp_path / "record.json", tmp_path / "new" / "tries.json"
    benchmark, _, measuring = fake([80.0])
    Record(file).add(benchmark, 1, measuring)
    benchmark, _, measuring = fake(values)
    monkeypatch.setattr(__main__, "benchmark_named", lambda name: benchmark)
    monkeypatch.setattr(__main__, "judge", lambda b, known: judge(b, known, measuring))
    assert __main__.main(["--record", str(file), "check", "fake", "--out", str(out)]) == code
    answers = json.loads(out.read_text())
    assert {"machine", "date", "figures"} == set(answers)
    (figure,) = answers["figures"]
    assert figure["tries"] == values
    assert figure["ok"] is (code == 0)
    assert figure["target"] == TARGET
    assert figure["reference_step_ms"] == [10.0] * len(values)
    assert figure["median"] == sorted(values)[len(values) // 2]


def test_tries_are_written_when_a_later_benchmark_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmark, _, measuring = fake([90.0])
    kept = Verdict("fake", measuring(benchmark).figures[:1], (Pass((), Reference(1, 1)),), KNOWN["a time"])
    answers = iter([[kept]])

    def judging(*_: object) -> list[Verdict]:
        if answer := next(answers, None):
            return answer
        raise RuntimeError("the measured program ended")

    monkeypatch.setattr(__main__, "judge", judging)
    out = tmp_path / "tries.json"
    with pytest.raises(RuntimeError, match="the measured program ended"):
        __main__.main(["check", "plan", "compare", "--out", str(out)])
    assert len(json.loads(out.read_text())["figures"]) == 1


def test_the_reference_step_takes_milliseconds_and_is_measured_beside_a_benchmark() -> None:
    assert 0.5 < time_reference(3).cpu < 500
    found = measure(Benchmark("fake", "", lambda: [Figure("a time", 90.0, "ms")], {"a time": TARGET}))
    assert found.figures[0].target == TARGET
    assert found.reference.wall > 0


@pytest.mark.parametrize("name", [*dict.fromkeys((*GATED, *IN_DOCS))])
def test_every_promised_figure_is_recorded(name: str) -> None:
    promised = benchmarks.benchmark_named(name).targets
    assert promised
    assert RECORD.figures(name).keys() == promised.keys()


@pytest.mark.parametrize("name", ["plan", "compare"])
def test_figures_of_one_process_are_compared_with_the_reference_step(name: str) -> None:
    assert all(figure.most for figure in RECORD.figures(name).values())


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_targets_of_the_code_and_the_recorded_values(page: str) -> None:
    text = (ROOT / page).read_text()
    assert with_tables(text, PAGES[page], RECORD) == text, "python -m benchmarks.gate docs"


def test_the_command_writes_every_page(tmp_path: Path) -> None:
    for page in PAGES:
        target = tmp_path / page
        target.parent.mkdir(exist_ok=True)
        target.write_text(re.sub(r"^\| .*\n", "", (ROOT / page).read_text(), flags=re.MULTILINE))
    assert __main__.main(["--record", str(ROOT / ".ci/figures.json"), "docs", str(tmp_path)]) == 0
    for page, tables in PAGES.items():
        for name in tables:
            inside = re.compile(f"<!-- {name}: begin -->.*<!-- {name}: end -->", re.DOTALL)
            written, committed = (inside.findall((root / page).read_text()) for root in (tmp_path, ROOT))
            assert written == committed


def test_another_target_or_value_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import plan

    text = (ROOT / "docs/benchmarks.md").read_text()
    tables = PAGES["docs/benchmarks.md"]
    monkeypatch.setitem(plan.TARGETS, plan.name_of(26, 8), 12345.0)
    assert "at most 12345 ms" in with_tables(text.replace("at most", ""), tables, RECORD)
    with pytest.raises(ValueError, match="does not have one <!-- figures: begin -->"):
        with_tables("no table", tables, RECORD)


def test_a_missed_target_is_marked_in_the_readme() -> None:
    rows = list(readme_rows(RECORD))[2:]
    assert len(rows) == 6
    recorded = RECORD.figures("published")
    for row, steps in zip(rows[-2:], ("all steps", "fused kernels"), strict=True):
        error = recorded[f"predicted against published step times, mean error, {steps}"].value
        assert f"| {error:.3g} %" in row
        assert ("missed" in row) == (error > 25.0)


def test_ci_checks_the_figures_by_the_gate() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert "python -m benchmarks.gate check" in script
    assert "recshard bench" not in script
    assert verdicts.TRIES == 3
