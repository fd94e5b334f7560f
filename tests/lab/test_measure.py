"""The measuring job: what it counts is what the plan says, on ranks that really run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recshard_lab.calibration.steps import reference, time_on_rank
from recshard_lab.lab import PlanCompare, measure_plan
from recshard_lab.lab.compare.measure import random_batch
from recshard_lab.lab.live.on_ranks import run_beside_truth
from recshard_lab.launcher import launch
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import PlanError, Topology
from tests.lab.plans import movielens, plan_of


@pytest.mark.gate
def test_two_ranks_report_bytes_that_the_estimate_predicts() -> None:
    tables, workload = movielens(), Workload(batch_size=64, optimizer="exact_row_wise_adagrad")
    plan = plan_of(tables, 2)
    predicted = estimate(plan, tables, Topology(2), workload)
    with launch(2) as ranks:
        found = measure_plan(ranks, plan, tables, workload, steps=3)
        with pytest.raises(PlanError, match="rank"):
            measure_plan(ranks, plan_of(tables, 3), tables, workload)
        widget = PlanCompare(tables, Topology(2), workload)
        widget.button.click()
        assert widget.worker.wait("run")
        assert "Measured: " in widget.message.value
        assert "data-measured-ms=" in widget.cards["mine"].value
        assert "data-measured-ms=" not in widget.cards["auto"].value
        widget.runs.which.value = "every plan"
        widget.button.click()
        assert widget.worker.wait("run")
        assert all("data-measured-ms=" in card.value for card in widget.cards.values())
        assert all(record["measured_ms"] > 0 for record in widget.comparison.records())
        widget.set(world_size=4)
        widget.button.click()
        assert "The plan is for 4 ranks, 2 are launched" in widget.message.value
    assert found.step_ms > 0
    assert set(found.backends) == {table.name for table in tables}
    for name in ("weights", "optimizer_state"):
        at = found.memory_categories.index(name)
        np.testing.assert_allclose(found.memory_bytes[:, at], predicted.memory_bytes[:, at])
    away = found.traffic_bytes - np.diag(np.diag(found.traffic_bytes))
    assert away.sum() == pytest.approx(predicted.traffic_bytes.sum(), rel=0.1)


def test_measurements_leave_the_random_numbers_of_the_ranks_as_they_are() -> None:
    tables, workload = movielens(), Workload(batch_size=16)
    plan = plan_of(tables, 2)
    with launch(2, seed=7) as ranks:
        before = ranks.eval("torch.get_rng_state()")
        measure_plan(ranks, plan, tables, workload, steps=1)
        ranks.run(run_beside_truth, plan.to_json(), tables, workload, 1)
        ranks.run(time_on_rank, [reference(2)], 1, 1.0, 0)
        after = ranks.eval("torch.get_rng_state()")
    assert not torch.equal(*before)
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("alpha", [0.0, 1.0, 1.2])
def test_random_batches_follow_the_workload(alpha: float) -> None:
    tables = movielens()
    workload = Workload(batch_size=4000, pooling_factors={"f_movie": 2.5}, zipf_alpha=alpha)
    batch = random_batch(tables, workload, np.random.default_rng(0))
    assert batch.keys() == [f"f_{table.name}" for table in tables]
    assert batch.stride() == 4000
    ids = batch["f_movie"].values().numpy()
    assert len(ids) / 4000 == pytest.approx(2.5, abs=0.1)
    assert ids.min() >= 0
    assert ids.max() < 1682
    share = np.sort(np.bincount(ids, minlength=1682))[::-1][:16].sum() / len(ids)
    chances = np.arange(1, 1683) ** -alpha
    assert share == pytest.approx(chances[:16].sum() / chances.sum(), rel=0.25, abs=0.02)
