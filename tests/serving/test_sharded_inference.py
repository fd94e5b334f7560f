"""Inference with tables split over devices of one process, or over launched ranks, equals the unsharded model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import recshard_lab as rl
from recshard_lab import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PlanError,
    PoolingType,
    ShardingPlan,
    shard_for_inference,
)
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import Case, Model, batch_of
from tests.grid import worlds
from tests.launched import launched
from tests.serving import inference_jobs as jobs

BIT_EXACT = ["table_wise", "column_wise", "data_parallel", "table_column_wise"]  # no row is a sum over devices


def same(one: Any, other: Any, exact: bool = False) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(one, other, **tolerance)


def check(case: Case, world: int, exact: bool = False) -> None:
    """Every batch of a case over virtual devices and unsharded."""
    model = Model(case)
    served = shard_for_inference(model, ShardingPlan.from_json(case.plan), ["cpu"] * world)
    for ranks in case.steps:
        for bags in ranks:
            batch = batch_of(bags, case.weighted)
            (out, logits, keys), (expected, wanted, names) = served(batch), model(batch)
            assert keys == names
            same(out, expected.detach(), exact)
            same(logits, wanted.detach(), exact)
            assert not logits.requires_grad


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme(scheme: str, sequence: bool) -> None:
    for world in (1, 2, 3, 4):
        tables = cases.sequence_tables() if sequence else cases.TABLES
        steps = cases.random_steps(3, tables, world, steps=1, samples=6)
        plan = cases.plan_of(tables, [scheme], world).to_json()
        case = Case(tables, plan, steps, sequence=sequence, weighted=not sequence)
        check(case, world, exact=sequence or scheme in BIT_EXACT)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), world=st.integers(1, 4), sequence=st.booleans())
def test_random_tilings(data: Any, world: int, sequence: bool) -> None:
    check(data.draw(cases.cases(world, sequence)), world)


@pytest.mark.parametrize("policy", ["error", "clamp", "ignore"])
@pytest.mark.parametrize("sequence", [False, True])
def test_ids_that_are_no_rows(policy: str, sequence: bool) -> None:
    tables = cases.sequence_tables() if sequence else cases.TABLES
    steps = cases.random_steps(5, tables, 2, steps=1, samples=4)
    for own in steps[0][0].values():
        own[0] = [10_000, -3, *own[0]]
    case = Case(tables, cases.plan_of(tables, ["row_wise", "column_wise"], 2).to_json(), steps, sequence=sequence)
    case.out_of_range = policy
    if policy != "error":
        check(case, 2)
        return
    model = Model(case)
    served = shard_for_inference(model, ShardingPlan.from_json(case.plan), ["cpu", "cpu"])
    with pytest.raises(ValueError, match="is not a row of table") as expected:
        model(batch_of(steps[0][0]))
    with pytest.raises(ValueError, match="is not a row of table") as found:
        served(batch_of(steps[0][0]))
    assert str(found.value) == str(expected.value)


def tables_that_share() -> EmbeddingBagCollection:
    """Two tables that read one feature, in three number formats."""
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(20, 8, "movies", DataType.FP16, ["seen", "liked"]),
            EmbeddingBagConfig(30, 6, "genres", feature_names=["seen"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(10, 2, "ages", DataType.FP64, ["age"]),
        ]
    )


def shared_batch() -> KeyedJaggedTensor:
    values = torch.tensor([99, 1, 9, 0, 5, 5, 7, 3])
    return KeyedJaggedTensor(["other", "age", "liked", "seen"], values, lengths=torch.tensor([1, 0, 1, 1, 0, 3, 1, 1]))


def test_shared_features_number_formats_and_unread_features() -> None:
    ebc = tables_that_share()
    for schemes in (["row_wise"], ["column_wise", "row_wise", "table_wise"]):
        made = {table.name: rl.row_wise() for table in ebc.embedding_bag_configs()}
        if schemes[0] == "column_wise":
            made = {"movies": rl.column_wise(ranks=[1, 0]), "genres": rl.row_wise(), "ages": rl.table_wise(rank=1)}
        plan = ShardingPlan({"": rl.sharding.construct_module_sharding_plan(ebc, made, world_size=2)})
        served = shard_for_inference(ebc, plan, ["cpu", "cpu"])
        one, other = served(shared_batch()), ebc(shared_batch())
        assert one.keys() == other.keys()
        same(one.values(), other.values().detach())


def test_a_model_is_not_changed_and_its_dense_part_is_copied() -> None:
    case = jobs.case(2)
    model = Model(case)
    served = shard_for_inference(model, ShardingPlan.from_json(case.plan), ["cpu", "cpu"])
    assert type(model.collection) is EmbeddingBagCollection
    before = served(batch_of(case.steps[0][0]))[1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(served(batch_of(case.steps[0][0]))[1], before)


def test_from_a_training_model_of_one_process_and_from_its_checkpoint(tmp_path: Path) -> None:
    case = jobs.case(1)
    dmp = rl.DistributedModelParallel(Model(case), plan=ShardingPlan.from_json(case.plan))
    dmp(batch_of(case.steps[0][0]))[1].sum().backward()  # steps the tables
    rl.save_checkpoint(tmp_path / "run", dmp)
    with torch.no_grad():
        expected = dmp(batch_of(case.steps[0][0]))[1].clone()
    plan = ShardingPlan.from_json(jobs.case(3).plan)
    live = shard_for_inference(dmp, plan, ["cpu"] * 3)
    same(live(batch_of(case.steps[0][0]))[1], expected)
    with torch.device("meta"):
        empty = Model(case)
    read = shard_for_inference(empty, plan, ["cpu"] * 3, checkpoint=tmp_path / "run")
    same(read(batch_of(case.steps[0][0]))[1], expected)


def test_wrong_arguments_are_named() -> None:
    ebc = tables_that_share()
    for devices in ([], "cpu", [None]):
        with pytest.raises(ValueError, match="device"):
            shard_for_inference(ebc, None, devices)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"names module 'x'"):
        shard_for_inference(ebc, ShardingPlan({"x": {}}), ["cpu"])
    with pytest.raises(PlanError, match=r"is not in the plan"):
        shard_for_inference(ebc, ShardingPlan({}), ["cpu"])
    with pytest.raises(ValueError, match="has no embedding collection"):
        shard_for_inference(nn.Linear(1, 1), devices=["cpu"])
    with pytest.raises(ValueError, match="output_device applies to devices of one process"):
        shard_for_inference(ebc, output_device="cpu")


ranks = launched(worlds(1, 2, 4))


@pytest.mark.parametrize(("sequence", "dtype"), [(False, None), (True, None), (False, "int8")])
def test_over_launched_ranks(ranks: Any, sequence: bool, dtype: str | None, tmp_path: Path) -> None:
    case = jobs.case(ranks.world_size, sequence=sequence)
    plain = ranks.run(jobs.over_ranks, case, str(tmp_path / "plain"))
    for found, fp32 in zip(ranks.run(jobs.over_ranks, case, str(tmp_path / "run"), dtype), plain, strict=True):
        assert (found["states"], found["gradients"]) == (0, [])
        for one in ("unsharded", "live", "quantized", "checkpoint", "planned"):
            same(found[one], found["expected"])
        assert dtype is None or found["bytes"] < fp32["bytes"]


def test_devices_need_all_rows_in_the_process(ranks: Any) -> None:
    if ranks.world_size == 1:
        return
    with pytest.raises(rl.RankError, match="is sharded over"):
        ranks.run(jobs.devices_of_a_sharded_model, jobs.case(ranks.world_size))
