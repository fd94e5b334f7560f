"""`recshard bench train-step`: the same case for both sides, live ranks, errors of a side."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import Figure, benchmark_named, train_step
from benchmarks.apparatus import environments
from benchmarks.apparatus.environments import PeersMissing
from benchmarks.apparatus.run_cases import put_to_sides
from benchmarks.apparatus.sides import Side, SideFailed
from benchmarks.apparatus.step_case import ROWWISE, SGD, StepCase, rectangles, smaller
from benchmarks.apparatus.step_worker import BATCHES, PARITY_LEARNING_RATE, target_of
from recshard_lab.cli import app
from recshard_lab.sharding import PlanError

SMALL = {"tables": 4, "rows": 40, "dim": 8, "batch": 16, "pooling": 3}


def test_case_names_differ_and_every_scheme_of_theirs_has_a_target() -> None:
    cases = train_step.cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.layout for case in cases} >= {"table_wise", "row_wise", "column_wise", "data_parallel", "mixed"}
    assert all(train_step.target(case) >= 1.2 for case in cases)


def test_plans_spread_tables_over_both_ranks() -> None:
    placed = Counter(entry["shards"][0][0] for entry in rectangles(StepCase("table_wise", SGD, "zipf").plan()).values())
    assert placed == {0: 4, 1: 4}
    mixed = rectangles(StepCase("mixed", SGD, "zipf").plan())
    assert Counter(entry["scheme"] for entry in mixed.values()) == dict.fromkeys(
        ("table_wise", "row_wise", "column_wise", "data_parallel"), 2
    )


def test_the_most_frequent_row_has_its_share_of_zipf() -> None:
    case = StepCase("row_wise", SGD, "zipf", rows=1000, tables=20)
    ids = case.bag_ids(0, 0)
    ((_, most),) = Counter(ids.tolist()).most_common(1)
    expected = 1 / np.sum(np.arange(1, 1001) ** -1.2)
    assert most / len(ids) == pytest.approx(expected, rel=0.05)
    assert not np.array_equal(ids, case.bag_ids(1, 0))
    assert np.array_equal(ids, case.bag_ids(0, 0))


@pytest.mark.nightly
def test_a_side_times_steps_and_trains_as_torch_does(tmp_path: Path) -> None:
    case = smaller(StepCase("row_wise", SGD, "uniform"), **SMALL)
    with Side("ours") as side:
        side.build(case)
        assert side.steps(2) > 0
        side.build(case, comparing=True)
        side.train(5, str(tmp_path / "w"))
    weights = [torch.tensor(w, requires_grad=True) for w in case.first_weights().values()]
    for number in range(5):
        for rank in range(2):
            bags = torch.from_numpy(case.bag_ids(rank, number % BATCHES)).view(case.tables, case.batch, case.pooling)
            out = torch.cat([w[ids].sum(1) for w, ids in zip(weights, bags, strict=True)], 1)
            out.backward((out.detach() - target_of(case, rank)) / (2 * case.batch))  # ranks' gradients are averaged
        with torch.no_grad():
            for weight in weights:
                assert weight.grad is not None
                weight -= PARITY_LEARNING_RATE * weight.grad
                weight.grad = None
    with np.load(tmp_path / "w.1.npz") as trained:
        for name, weight in zip(case.table_names(), weights, strict=True):
            np.testing.assert_allclose(trained[f"{name} 0 0"], weight.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_a_rank_that_cannot_build_says_why_and_one_that_ends_too() -> None:
    with pytest.raises(SideFailed, match="ModuleNotFoundError: No module named 'torchrec'"), Side("theirs") as theirs:
        theirs.build(smaller(StepCase("row_wise", SGD, "uniform"), **SMALL))
    with pytest.raises(SideFailed, match=r"rank \d ended"), Side("ours", "/bin/false") as nobody:
        nobody.order({"do": "steps", "count": 1})


@pytest.mark.nightly
def test_a_case_that_torchrec_cannot_run_is_told_without_a_target() -> None:
    case = smaller(StepCase("table_wise", ROWWISE, "uniform"), **SMALL)
    both = {"ours": sys.executable, "theirs": sys.executable}
    (figure,) = put_to_sides([case], partial(train_step.one, rounds=1), both)
    assert "TorchRec cannot: ModuleNotFoundError" in figure.name
    assert figure.beside["ours"] > 0
    assert figure.target is None


@pytest.mark.nightly
def test_a_world_of_one_is_measured_beside_the_fused_collection() -> None:
    assert {case.name for case in train_step.W1_CASES} == train_step.TARGETS.keys()
    figure = train_step.world_of_one(smaller(train_step.W1_CASES[0], **SMALL), rounds=3)
    assert figure.value > 0
    assert figure.beside.keys() == {"DMP ms", "fused ms"}


def test_options_and_cases_that_do_not_exist_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"'plan' has no option --quick; it has: none"):
        benchmark_named("plan").run(quick=True)
    with pytest.raises(ValueError, match="no case has 'diagonal' in its name"):
        train_step.figures(only=["diagonal"])
    monkeypatch.setitem(environments.BUILT_FOR, "torch", "0.1")
    monkeypatch.delenv("RECSHARD_PEERS", raising=False)
    with pytest.raises(PeersMissing, match=r"torch==0\.1"), environments.TorchRecEnv():
        pass


def test_numbers_beside_have_columns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Figure("a", 1.5, "x", target=1.0, at_most=False, beside={"ours": 12.0}), Figure("b", float("nan"), "x")]
    monkeypatch.setattr(train_step, "figures", lambda **_: rows)
    found = CliRunner().invoke(app, ["bench", "train-step"]).output
    assert "ours" in found
    assert "not run" in found
    assert '"value": null' in CliRunner().invoke(app, ["bench", "train-step", "--json"]).output


def test_a_scheme_that_is_not_registered_is_refused() -> None:
    with pytest.raises(PlanError, match="no scheme 'diagonal'"):
        StepCase("diagonal", SGD, "uniform").plan()
