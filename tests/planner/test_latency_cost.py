"""``cost_model="latency"``: one batch through the forward alone, and memory without optimizer states."""

from dataclasses import replace

import numpy as np
import pytest

import recshard_lab as rl
from recshard_lab import DataType, EmbeddingBagConfig, Topology, Workload
from tests.planner.problems import best_plan

TABLES = [
    EmbeddingBagConfig(10 ** (2 + n % 4), 8 * (1 + n % 3), name=f"t{n}", feature_names=[f"f{n}"]) for n in range(9)
]


@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("solver", ["greedy", "exact"])
def test_plans_are_near_their_bound_and_no_slower_than_those_of_training(world: int, solver: str) -> None:
    topology = Topology(world)
    plan = best_plan(TABLES, topology, cost_model="latency", solver=solver, time_limit_s=5)
    trained = best_plan(TABLES, topology)
    assert plan.estimate.phases == ("input_dist", "lookup", "output_dist", "dense")
    assert plan.bound_ms <= plan.estimate.step_ms * (1 + 1e-9)
    assert plan.gap < 0.05
    of_trained = rl.estimate(trained, TABLES, topology, cost_model="latency")
    assert plan.estimate.step_ms <= of_trained.step_ms * 1.001
    assert of_trained.step_ms < trained.estimate.step_ms


def test_forward_phases_are_those_of_training_without_gradients() -> None:
    topology, workload = Topology(4), Workload(256, optimizer="adam", dense_parameters=10**6)
    plan = rl.plan(TABLES, topology, workload=workload, **{table.name: "row_wise" for table in TABLES})
    step = plan.estimate
    forward = rl.estimate(plan, TABLES, topology, replace(workload, optimizer="exact_sgd"), cost_model="latency")
    np.testing.assert_allclose(forward.ms[:, [0, 2]], step.ms[:, [0, 2]])
    assert (forward.ms[:, 3] < step.ms[:, 3] / 2).all()  # a third of the arithmetic, no all-reduce
    memory = dict(zip(forward.memory_categories, forward.memory_bytes.T, strict=True))
    assert memory["optimizer_state"].max() == 0
    assert memory["dense"].tolist() == [4e6] * 4
    assert not [label for label in forward.traffic_by_phase if "backward" in label or label == "dense"]


def test_memory_has_the_bytes_of_each_number_format() -> None:
    for data_type, row in ((DataType.FP32, 64 * 4), (DataType.FP16, 128), (DataType.INT8, 68), (DataType.INT4, 36)):
        table = EmbeddingBagConfig(1000, 64, "t", data_type, ["f"])
        whole = rl.plan([table], 2, cost_model="latency", t="table_wise").estimate
        assert whole.memory_bytes[:, 0].max() == 1000 * row
        split = rl.plan([table], 2, cost_model="latency", t="column_wise").estimate.memory_bytes[:, 0].sum()
        scales = row - 64 * data_type.bytes_per_element
        assert split == 1000 * (row + scales)  # a scale and an offset in each column shard


def test_a_table_and_a_device_have_their_latency() -> None:
    plan = rl.plan(TABLES, 2, cost_model="latency")
    assert plan.estimate.ms.shape == (2, 4)
    shares = [plan.explain(table.name) for table in TABLES]
    for phase in range(4):
        caused = sum(share.phases[phase].table_ms for share in shares)
        assert caused <= shares[0].phases[phase].ms + 1e-9


def test_pipelines_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one batch at a time, and the workload has pipeline 'sparse_dist'"):
        rl.plan(TABLES, 2, cost_model="latency", workload=Workload(pipeline="sparse_dist"))
