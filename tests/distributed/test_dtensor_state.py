"""Tables as DTensors in state dicts: what they contain, torch's checkpoints of them, and what they cannot describe."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import ParameterSharding, Shard, ShardingPlan
from recshard_lab.distributed.state.forms import check_placements
from recshard_lab.sharding import EmbeddingModuleShardingPlan
from tests.distributed import cases, state_form_jobs
from tests.distributed.jobs import Case

FLAT = ["table_wise", "row_wise", "column_wise", "data_parallel"]


def plan_text(schemes: list[str], world: int = 2) -> str:
    return cases.plan_of(cases.TABLES, schemes, world).to_json()


def case_of(schemes: list[str], optimizer: str = "exact_row_wise_adagrad") -> Case:
    return Case(cases.TABLES, plan_text(schemes), [], optimizer=optimizer)


@pytest.mark.gate
@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("turn", range(4))
def test_dtensors_hold_the_shards_under_the_unsharded_names(two: Any, turn: int, optimizer: str) -> None:
    schemes = FLAT[turn:] + FLAT[:turn]
    expected = {"table_wise": ["R"], "row_wise": ["S(0)"], "column_wise": ["S(1)"]}
    for wrong, placements, shared in two.run(state_form_jobs.as_dtensors, case_of(schemes, optimizer)):
        assert wrong == []
        assert shared
        by_table = {name.split(".")[-2]: placement for name, placement in placements.items()}
        assert by_table == {
            table["name"]: expected[scheme]
            for table, scheme in zip(cases.TABLES, schemes, strict=True)
            if scheme in expected
        }


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize(
    ("forms", "onto"),
    [(("dtensor", "dtensor"), 2), (("dtensor", "sharded_tensor"), 1), (("sharded_tensor", "dtensor"), 1)],
)
def test_torchs_checkpoints_reshard_them_onto_another_plan_and_world(
    two: Any, tmp_path: Path, optimizer: str, forms: tuple[str, str], onto: int
) -> None:
    for turn in (1, 2):
        case = case_of(FLAT[:3], optimizer)
        other = replace(case, plan=plan_text(FLAT[turn:] + FLAT[:turn], onto))
        path = str(tmp_path / str(turn))
        assert two.run(state_form_jobs.through_torch, case, other, path, forms, onto) == [[], []]


@pytest.mark.parametrize(("form", "tables"), [("ShardedTensor", "row_wise"), ("DTensor", "column_wise")])
def test_torchs_state_dict_functions_read_and_fill_sharded_models(
    two: Any, tmp_path: Path, form: str, tables: str
) -> None:
    saved, loaded = case_of([*FLAT[:3], tables]), case_of(FLAT[::-1])
    job = state_form_jobs.through_torchs_functions
    for wrong, types in two.run(job, saved, loaded, str(tmp_path / "run"), form == "DTensor"):
        assert wrong == []
        assert types == [form]


def test_torchs_state_dict_functions_refuse_what_they_would_read_wrongly(two: Any) -> None:
    for errors in two.run(state_form_jobs.refused_by_torchs_functions, case_of(["row_wise"])):
        assert [error.partition(": ")[0] for error in errors] == ["ValueError"] * 5, errors
        fused, combined, filled, dense, broadcast = errors
        assert "cannot read EmbeddingFusedOptimizer" in fused
        assert fused == filled
        assert "cannot read CombinedOptimizer" in combined
        assert "Fix: optimizer.state_dict() and optimizer.load_state_dict()" in combined
        assert "'collection.embedding_bags.movies.weight', a sharded table on the dense kernel" in dense
        assert "Fix: save_checkpoint(path, dmp, optimizer)" in dense
        assert "Fix: pass the state dict on every rank, without broadcast_from_rank0" in broadcast


def test_output_dtensor_must_be_a_truth_value() -> None:
    with pytest.raises(ValueError, match=r"output_dtensor must be True or False, got 'yes'. Fix: "):
        recshard_lab.distributed.EmbeddingBagCollectionSharder({"output_dtensor": "yes"})


def test_shards_in_host_memory_beside_a_gpu_are_refused() -> None:
    shards = [Shard(0, (0, 4), (0, 8)), Shard(1, (4, 8), (0, 8), "ddr")]
    check_placements("t", "row_wise", shards, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"table 't' has shards in host memory, and a DTensor on cuda would copy them"):
        check_placements("t", "row_wise", shards, torch.device("cuda"))


def hot_plan() -> str:
    """Every table: its first row on both ranks, the others split by rows."""
    entries = {}
    for table in cases.TABLES:
        rows, cols = table["num_embeddings"], (0, table["embedding_dim"])
        shards = [Shard(0, (0, 1), cols), Shard(1, (0, 1), cols), Shard(1, (1, 2), cols), Shard(0, (2, rows), cols)]
        entries[table["name"]] = ParameterSharding("custom", shards=shards)
    return ShardingPlan({cases.PATH: EmbeddingModuleShardingPlan(entries)}).to_json()


@pytest.mark.parametrize("plan", [plan_text(FLAT), plan_text(FLAT[::-1]), hot_plan()], ids=["flat", "reversed", "hot"])
def test_either_form_fills_a_model_of_the_same_plan_and_its_replicas(two: Any, plan: str) -> None:
    assert two.run(state_form_jobs.between_forms, replace(case_of(FLAT), plan=plan)) == [[], []]


def test_other_tilings_other_forms_and_other_plans_are_refused_by_name_on_all_ranks(two: Any) -> None:
    entry = cases.pinwheel(cases.TABLES[1], 2)
    grid = ShardingPlan.from_json(plan_text(FLAT))
    grid = ShardingPlan(
        {cases.PATH: EmbeddingModuleShardingPlan({**grid.plan[cases.PATH], cases.TABLES[1]["name"]: entry})}
    ).to_json()
    for weights, states, form, loaded, loaded_states in two.run(
        state_form_jobs.refusals, case_of(["row_wise"]), grid, plan_text(["table_wise"])
    ):
        expected = (
            "ValueError: table 'users' (custom) is split along rows and columns, which the placements of a DTensor "
            'cannot describe. Fix: state_dict(form="sharded_tensor"), which describes any tiling'
        )
        assert weights == states == expected
        assert (
            form
            == "ValueError: form='tensor' is not supported. Supported: sharded_tensor, dtensor. Fix: use one of them"
        )
        assert "the state has another sharding. Fix: load it with torch.distributed.checkpoint" in loaded
        assert "momentum1' has local shards" in loaded_states
