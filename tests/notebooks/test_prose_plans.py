"""What notebooks 11 to 14 say in prose is what their cells print, and what the repository's records hold."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import recshard_lab as rs
from tests.notebooks.claims import numbers_in, stored

ROOT = Path(__file__).parents[2]


def test_11_the_planners_plan_beats_the_other_plans_and_is_near_its_bound() -> None:
    planner = stored("11")
    steps = {name: planner.cell("took = {").row(name)[0] for name in rs.sharding.scheme_names()}
    step, bound = (planner.cell("plan.bound_ms").number(after=word) for word in ("step", "bound"))
    assert bound < step < min(steps.values())
    assert planner.cell("mine_waiting").number("%") > 10  # "white space is waiting"


def test_11_the_model_is_a_few_percent_above_the_formula() -> None:
    cell = stored("11").cell("by_formula:.3f")
    formula, model = cell.row("output_dist by the formula")
    assert 1 <= model / formula < 1.06
    assert cell.row("output_dist ")[2] == model
    assert all(whole == pytest.approx(fixed + grows, abs=2e-3) for whole, fixed, grows in (cell.row("lookup "),))


def test_12_the_one_table_of_trust_holds_the_recorded_figures() -> None:
    table = stored("12").prose("This is the one table")
    recorded = json.loads((ROOT / "benchmarks/published.json").read_text())
    fused = {p["name"]: recorded["recorded"][p["name"]] for p in recorded["points"] if p["executor"] == "fused"}

    def row(words: str) -> list[float]:
        return numbers_in(next(part for part in re.split(r"\| \|", table) if words in part))

    for words, executor in (("GPUs of a data sheet", ""), ("HugeCTR alone", "HugeCTR"), ("TorchRec alone", "TorchRec")):
        logs = [abs(math.log(ratio)) for name, ratio in fused.items() if name.startswith(executor)]
        found = row(words)
        assert found[0] == pytest.approx(math.exp(sum(logs) / len(logs)), abs=0.006)
        assert found[-1] == len(logs)
        if not executor:
            assert found[1] == pytest.approx(math.exp(max(logs)), abs=0.006)
    assert all(ratio < 1 for name, ratio in fused.items() if name.startswith("TorchRec"))  # "too short"
    page = (ROOT / "docs/benchmarks.md").read_text()
    error = next(line for line in page.splitlines() if line.startswith("| 2 ranks, 41 models"))
    assert row("default figures")[0] == numbers_in(error.split("|")[2])[0]
    assert [*row("the same, calibrated")] == [*numbers_in(error.split("|")[3]), *numbers_in(error.split("|")[4])]
    choice = next(line for line in page.splitlines() if line.startswith("| 2 ranks: fastest of four"))
    assert row("fastest of four schemes")[:2] == [*numbers_in(choice.split("|")[3]), *numbers_in(choice.split("|")[4])]
    for words, chosen in (
        ("the same, default figures", choice.split("|")[2]),
        ("schemes, calibrated", choice.split("|")[3]),
    ):
        assert row(words)[0] == numbers_in(chosen)[0]
    apart = [recorded["recorded"][p["name"]] for p in recorded["points"] if p["executor"] != "fused"]
    factor, count = row("TensorFlow's sparse Adagrad")
    assert factor == pytest.approx(math.exp(-sum(map(math.log, apart)) / len(apart)), abs=0.006)
    assert count == len(apart)
    assert max(apart) < 1  # "too short"
    assert "81-88%" in table
    assert "81-88%" in page


def test_13_published_and_predicted_steps() -> None:
    what_if = stored("13")
    cell, text = what_if.cell("before / after:"), what_if.prose("NVIDIA trained this model")
    before, after = (rs.planner.MLPERF_PUBLISHED_MS[name] for name in ("before", "after"))
    assert f"a training step: {before:g} ms at first, and {after:g} ms after four changes" in text
    off = [numbers_in(line.rsplit(",", 1)[1])[0] for line in cell.output.splitlines() if "published, -" in line]
    assert len(off) == 2  # "Both predictions are too short"
    published, predicted = cell.row("before / after")
    assert abs(predicted / published - 1) < min(abs(one) for one in off) / 100  # "nearer than the milliseconds"


Capstone = tuple[list[Any], rs.Topology, rs.Workload, dict[str, rs.ParameterConstraints]]


def capstone_of_14() -> Capstone:
    """The tables, ranks, step and baseline of notebook 14."""
    file = rs.planner.read_tables(ROOT / "notebooks/examples/capstone.yaml")
    tables, hosts = file.tables, rs.Topology.preset("h100x16")
    load = file.workload(batch_size=2048, optimizer="exact_row_wise_adagrad")
    large = [t.name for t in tables if t.weight_bytes > hosts.free_memory_bytes() / 2]
    baseline = {t.name: rs.ParameterConstraints(["table_wise"], ranks=[i % 16]) for i, t in enumerate(tables)}
    return tables, hosts, load, baseline | {name: rs.ParameterConstraints(["row_wise"]) for name in large}


def most_read(tables: list[Any], load: rs.Workload) -> list[str]:
    """The solution of exercise a: these five tables row-wise."""
    reads = {t.name: load.pooling_factor(t.feature_names[0]) * t.embedding_dim for t in tables}
    return sorted(reads, key=reads.__getitem__)[-5:]


def test_14_the_capstone_can_be_won_by_its_hint_and_the_planner_is_ahead() -> None:
    capstone = stored("14")
    cell = capstone.cell("scored = ")
    scores = {name: cell.row(f"{name:12}") for name in ("baseline", "row_wise", "column_wise", "yours")}
    assert scores["baseline"][1] == scores["yours"][1] == 0
    planner = capstone.cell("mine_percent")
    step, bound = planner.row("no plan is below")[:2]
    assert bound <= step < min(each[0] for each in scores.values())
    tables, hosts, load, baseline = capstone_of_14()
    hinted = {**baseline, **dict.fromkeys(most_read(tables, load), "row_wise")}
    plans = {"baseline": baseline, "hinted": hinted, "planner": "planner"}
    found = rs.compare_plans(tables, hosts, plans, load)
    assert found["hinted"].fits
    assert found.values["hinted"]["step_ms"] < scores["row_wise"][0] - 0.01  # the solution of exercise a
    assert max(scores["row_wise"][1], scores["column_wise"][1]) < found.score("hinted", "baseline") <= 100
    assert found["planner"].estimate is not None
    assert found["planner"].estimate.step_ms == pytest.approx(step, abs=1e-3)
    assert len(tables) == 40
    assert "40 tables" in capstone.output_of("read_tables")
