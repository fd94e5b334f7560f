"""A recorded step holds the tensors of the unsharded model, sent as the plan says; recording changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recshard_lab.lab.live.recorded_step import RecordedStep, ShardFeatureRecord, record, record_under
from recshard_lab.launcher import RankError, Ranks
from recshard_lab.sharding import ShardingPlan, scheme_names
from tests.lab.recorded import Truth, build, plan_of
from tests.launched import launched

NAMES = {"loss": "loss_of", "optimizer": "dense"}


ranks = launched(2)


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


def recorded(ranks: Ranks, plan: ShardingPlan) -> RecordedStep:
    build(ranks, plan)
    return record(ranks, "model", "batch", **NAMES)


def bags_of(truth: Truth, source: int, feature: str) -> list[np.ndarray]:
    """A rank's ids of one feature, by sample."""
    jagged = truth.batches[source][feature]
    return np.split(jagged.values().numpy(), jagged.offsets()[1:-1].tolist())


def check_ids(step: RecordedStep, truth: Truth) -> None:
    """The ids of each shard feature are those of the batches that the plan's rectangle has, in their order."""
    for rank, kept in enumerate(step.ranks):
        own = [feature.shard for feature in kept.shard_features]
        for feature in kept.shard_features:
            shard, block = feature.shard, step.blocks[feature.shard.block]
            assert shard.rank == rank
            for source, got in enumerate(feature.sources):
                bags = [
                    bag[(shard.rows[0] <= bag) & (bag < shard.rows[1])] - shard.rows[0]
                    for bag in bags_of(truth, source, block.feature)
                ]
                expected = np.concatenate(bags)
                if got.lengths is None:
                    assert np.array_equal(got.ids, np.unique(expected))
                else:
                    assert np.array_equal(got.ids, expected)
                    assert got.lengths.tolist() == [len(bag) for bag in bags]
                sent = [ids for info, ids in step.ranks[source].sent if info == shard]
                assert len(sent) == 1
                assert np.array_equal(sent[0], got.ids)
        planned = step.plan.tables()
        for block in {step.blocks[shard.block] for shard in own}:
            rectangles = {(s.rows, s.cols) for s in planned[block.table].shards if s.rank == rank}
            assert rectangles == {(s.rows, s.cols) for s in own if step.blocks[s.block] == block}


def check_rows(step: RecordedStep, truth: Truth, feature: ShardFeatureRecord, rank: int) -> None:
    """Looked-up, partial and stepped rows, and the gradients that arrived."""
    shard, block = feature.shard, step.blocks[feature.shard.block]
    area = slice(*shard.rows), slice(*shard.cols)
    before, after = (truth.table(block.table, late)[area].numpy() for late in (False, True))
    assert np.array_equal(feature.before, before[feature.touched])
    assert np.allclose(feature.after, after[feature.touched], atol=1e-6)
    columns = slice(block.start + shard.cols[0], block.start + shard.cols[1])
    for source, got in enumerate(feature.sources):
        if shard.replicated and source != rank:
            assert got.rows is None
        bags = bags_of(truth, source, block.feature)
        parts = [bag[(shard.rows[0] <= bag) & (bag < shard.rows[1])] - shard.rows[0] for bag in bags]
        grad = truth.grads[source][:, columns].numpy() / len(step.ranks)
        if block.mean:
            grad = grad / np.maximum(1, [len(bag) for bag in bags])[:, None]
        if got.lengths is None:  # a row of each distinct id
            expected = np.zeros((len(got.ids), shard.cols[1] - shard.cols[0]), dtype=np.float32)
            for part, row in zip(parts, grad, strict=True):
                np.add.at(expected, np.searchsorted(got.ids, part), row)
            assert np.allclose(got.grads, expected, atol=1e-6)
            if got.rows is not None and not shard.replicated:
                assert np.array_equal(got.rows, before[got.ids])
                continue
        else:
            assert np.allclose(got.grads, grad, atol=1e-6)
        if got.rows is not None:
            assert np.allclose(got.rows, [before[part].sum(0) for part in parts], atol=1e-6)


def check(step: RecordedStep, truth: Truth) -> None:
    check_ids(step, truth)
    for rank, kept in enumerate(step.ranks):
        assert kept.batch_size == truth.batches[rank].stride()
        for feature, (lengths, ids) in kept.batch.items():
            assert np.array_equal(ids, truth.batches[rank][feature].values())
            assert np.array_equal(lengths, truth.batches[rank][feature].lengths())
        assert np.allclose(kept.output, truth.pooled[rank].detach(), atol=1e-6)
        assert np.allclose(kept.grad, truth.grads[rank], atol=1e-6)
        assert kept.loss == pytest.approx(truth.losses[rank].item(), rel=1e-5)
        for feature in kept.shard_features:
            check_rows(step, truth, feature, rank)


@pytest.mark.gate
@pytest.mark.parametrize("scheme", scheme_names())
def test_every_tensor_is_that_of_the_unsharded_model(ranks: Ranks, truth: Truth, scheme: str) -> None:
    check(recorded(ranks, plan_of(scheme)), truth)


@pytest.mark.parametrize("route", ["reduce_scatter", "two_hop", "distinct_rows"])
def test_every_output_path_is_recorded(ranks: Ranks, truth: Truth, route: str) -> None:
    check(recorded(ranks, plan_of("row_wise", route=route)), truth)


@pytest.mark.parametrize("scheme", ["row_wise", "column_wise", "data_parallel"])
def test_recording_leaves_training_as_it_is_bit_for_bit(ranks: Ranks, scheme: str) -> None:
    plain = (
        "dense.zero_grad(); loss_of(model(batch)).backward(); dense.step()\n"
        "weights = {name: value.clone() for name, value in model.full_state_dict().items()}"
    )
    build(ranks, plan_of(scheme))
    ranks.exec(plain)
    expected = ranks.pull("weights")[0]
    build(ranks, plan_of(scheme))
    record(ranks, "model", "batch", **NAMES)
    got = ranks.eval("model.full_state_dict()")[0]
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    ranks.exec(plain)  # the next step of both is not recorded
    after = ranks.pull("weights")[0]
    build(ranks, plan_of(scheme))
    ranks.exec(plain)
    ranks.exec(plain)
    assert all(torch.equal(after[name], value) for name, value in ranks.pull("weights")[0].items())


def test_no_recorder_is_left_behind(ranks: Ranks) -> None:
    build(ranks, plan_of("row_wise"))
    hooks = "(model.collections['tables'].executor.recorder, model.collections['tables'].executor.input_dist.recorder)"
    assert ranks.eval(hooks) == [(None, None)] * 2
    record(ranks, "model", "batch", **NAMES)
    assert ranks.eval(hooks) == [(None, None)] * 2
    with pytest.raises(RankError):
        record(ranks, "model", "batch", loss="lambda output: output")
    assert ranks.eval(hooks) == [(None, None)] * 2


@pytest.mark.parametrize("scheme", scheme_names())
def test_bytes_are_those_of_the_trace(ranks: Ranks, scheme: str) -> None:
    step = recorded(ranks, plan_of(scheme))
    build(ranks, plan_of(scheme))
    ranks.exec(
        "from recshard_lab.comm import trace\nwith trace() as seen:\n    dense.zero_grad()\n"
        "    loss_of(model(batch)).backward(); dense.step()\n"
        "counted = seen.bytes_to(2)"
    )
    counted = np.array(ranks.pull("counted"))
    stages = ("ids_arrived", "output", "dense", "gradients_arrived", "optimizer")
    assert np.array_equal(sum(step.traffic(stage) for stage in stages), counted)
    sent = sum(len(ids) for _, ids in step.ranks[0].sent)
    assert step.traffic("ids_arrived")[0].sum() >= 4 * sent
    assert all(step.ms(stage) > 0 for stage in ("ids_arrived", "lookup", "output", "dense", "optimizer"))


def test_two_plans_start_from_the_same_weights_which_are_restored(ranks: Ranks, truth: Truth) -> None:
    build(ranks, plan_of("table_wise"))
    before = ranks.eval("{name: value.clone() for name, value in model.full_state_dict().items()}")[0]
    plans = {"row-wise": plan_of("row_wise"), "column-wise": plan_of("column_wise")}
    steps = record_under(ranks, plans, "model", "batch", **NAMES)
    assert [step.name for step in steps] == list(plans)
    for step in steps:
        check(step, truth)
    after = ranks.eval("model.full_state_dict()")[0]
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert ShardingPlan.from_json(ranks.eval("model.plan.to_json()")[0]).tables()["movie"].sharding_type == "table_wise"


def test_what_cannot_be_recorded_names_the_fix(ranks: Ranks) -> None:
    build(ranks, plan_of("row_wise"))
    with pytest.raises(RankError, match="a step needs a loss of one number, got Tensor of shape"):
        record(ranks, "model", "batch")
    with pytest.raises(ValueError, match="batch must be text, an expression on the ranks"):
        record(ranks, "model", torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks must be a launched session"):
        record(None, "model", "batch")
    with pytest.raises(RankError, match="path must be a collection of the model"):
        record(ranks, "model", "batch", path="nothing")
    ranks.exec(
        "class Twice(Scores):\n"
        "    def forward(self, kjt):\n"
        "        return (self.tables(kjt).values() + self.tables(kjt).values()).sum()\n"
        "doubled = rs.DistributedModelParallel(Twice(fresh().tables))"
    )
    with pytest.raises(RankError, match="the batch is looked up twice"):
        record(ranks, "doubled", "batch")
