"""Moves, checkpoints and pipelines on a device give what they give on the CPU."""

from pathlib import Path
from typing import Any

import pytest

import recshard_lab as rl
from recshard_lab import ShardingPlan
from recshard_lab.distributed.state.moves import DEFAULT_ROUND_BYTES
from tests.distributed import cases
from tests.ledger import jobs
from tests.ledger.test_step import FLAT, case_of

PIPELINES: list[tuple[str, dict[str, Any]]] = [
    ("TrainPipelineBase", {}),
    ("TrainPipelineSparseDist", {"threads": False}),
    ("TrainPipelineSparseDist", {"threads": True}),
    ("PrefetchTrainPipelineSparseDist", {"threads": True}),
    ("TrainPipelineSemiSync", {"threads": True, "start_batch": 1}),
]


@pytest.mark.parametrize("optimizer", ["exact_sgd", "exact_row_wise_adagrad"])
def test_live_resharding(ranks: Any, device: str, optimizer: str) -> None:
    case = case_of(ranks.world_size, ["table_wise"], optimizer=optimizer)
    case.steps += case.steps
    orders = FLAT, FLAT[::-1], ["row_wise"]
    plans = [cases.plan_of(cases.TABLES, order, ranks.world_size).to_json() for order in orders]
    for wrong, differing in ranks.run(jobs.moved, case, device, plans):
        assert not wrong
        assert not differing


def test_a_checkpoint_loads_under_another_plan_on_device_and_cpu(ranks: Any, device: str, tmp_path: Path) -> None:
    case = case_of(ranks.world_size, FLAT, optimizer="exact_row_wise_adagrad")
    other = cases.plan_of(cases.TABLES, FLAT[1:], ranks.world_size).to_json()
    assert ranks.run(jobs.saved_and_loaded, case, device, str(tmp_path / "saved"), other) == [[]] * ranks.world_size


def test_an_asynchronous_save_copies_the_state_from_the_device(ranks: Any, device: str, tmp_path: Path) -> None:
    case = case_of(ranks.world_size, FLAT, optimizer="exact_row_wise_adagrad")
    assert ranks.run(jobs.saved_in_background, case, device, str(tmp_path / "saved")) == [[]] * ranks.world_size


@pytest.mark.parametrize(("kind", "switches"), PIPELINES)
def test_pipelines_whose_tables_move_are_those_of_the_cpu(ranks: Any, device: str, kind: str, switches: Any) -> None:
    for differing, losses, expected in ranks.run(jobs.pipelined, device, kind, switches):
        assert losses == pytest.approx(expected, rel=0 if device == "ledger" else 1e-5, abs=0)
        assert not differing or device == "cuda"


def test_gathering_on_rank_0_needs_two_messages_elsewhere_and_with_offload_no_whole_table_on_any_device() -> None:
    rows, messages = 75_000, 2 * DEFAULT_ROUND_BYTES
    table = rows * 32 * 4
    assert table > DEFAULT_ROUND_BYTES
    tables = [
        {"name": f"t{n}", "num_embeddings": rows, "embedding_dim": 32, "feature_names": [f"f{n}"]} for n in range(3)
    ]
    plan = cases.plan_of(tables, ["row_wise", "table_wise"], 2)
    plan = ShardingPlan({"": plan.plan[cases.PATH]}).to_json()
    with rl.launch(2) as two:
        first, other = two.run(jobs.gathering_bytes, plan, rows, True, False)
        assert first >= 3 * table
        assert other <= table
        for everyone in (False, True):
            assert max(two.run(jobs.gathering_bytes, plan, rows, everyone, True)) <= messages
        assert min(two.run(jobs.gathering_bytes, plan, rows, False, False)) >= 3 * table
