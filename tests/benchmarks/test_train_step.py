"""`recshard bench train-step`: the same case for both sides, live ranks, errors of a side."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import benchmark_named, train_step
from benchmarks.apparatus import environments
from benchmarks.apparatus.environments import PeersMissing
from benchmarks.apparatus.sides import Side, SideFailed
from benchmarks.apparatus.step_case import SGD, StepCase, rectangles, smaller
from benchmarks.apparatus.step_worker import BATCHES, PARITY_LEARNING_RATE, target_of

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
