"""Codecs in the cost model: the bytes that comm's codecs write, counted by hand and on ranks that run."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.comm import CommType, QCommsConfig, make_codec
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.lab import measure_plan
from recshard_lab.launcher import launch
from recshard_lab.planner import CostModel, Workload, estimate
from recshard_lab.planner.model.codecs import WIRE_FORMATS, codec_names
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.sharding import ROUTES, ParameterConstraints, PlanError, ShardingPlan, Topology, scheme_named
from tests.planner.problems import best_plan, random_tables
from tests.planner.test_routes import FREE, LOAD, plans, table
from tests.planner.test_terms import compared

MOVIES = EmbeddingBagConfig(name="movies", num_embeddings=1000, embedding_dim=64, feature_names=["movie"])
REFUSED = ("reduce_scatter", "int8")
PAIRS = [("fp16", "fp32"), ("bf16", "int8"), ("int8", "fp16"), ("int8", "int8")]


def coded(load: Workload, pair: tuple[str, str]) -> Workload:
    return replace(load, codecs=pair)


def test_formats_are_those_of_comm() -> None:
    assert set(WIRE_FORMATS) == {one.value for one in CommType}
    for kind, width in product(CommType, (1, 4, 64, 256)):
        known, codec = WIRE_FORMATS[kind.value], make_codec(kind)
        assert known.element_bytes * width + known.row_bytes == codec.encoded_width(width) * codec.wire_dtype.itemsize
        assert known.adds == codec.adds_on_wire


def test_codecs_are_given_as_sharders_take_them() -> None:
    assert Workload().codecs == ("fp32", "fp32")
    for given_as in ("FP16/bf16", ("fp16", "bf16"), QCommsConfig(CommType.FP16, CommType.BF16)):
        assert Workload(codecs=given_as).codecs == ("fp16", "bf16")
    assert codec_names(CommType.INT8) == ("int8", "int8")
    with pytest.raises(ValueError, match=r"'fp61' is not a number format.*Fix: use one of fp32"):
        Workload(codecs="fp61")


def test_bytes_on_the_wire_are_what_counting_by_hand_gives() -> None:
    topology, load = Topology(2, ddr_cap=10**9), Workload(128, 10.0)
    plan = ShardingPlan({"": {"movies": scheme_named("table_wise").default(MOVIES, topology, [1])}})
    ids, head, sizes = 4 * (1280 + 128), 32, 32 + 16  # sizes to a rank without and with a shard feature
    for codec, row in (("fp32", 256), ("fp16", 128), ("bf16", 128), ("int8", 64 + 8)):
        found = estimate(plan, [MOVIES], topology, coded(load, (codec, "fp32")))
        assert found.traffic_bytes.tolist() == [[0, sizes + ids + 128 * 256], [head + 128 * row, 0]], codec
        back = estimate(plan, [MOVIES], topology, coded(load, ("fp32", codec)))
        assert back.traffic_bytes.tolist() == [[0, sizes + ids + 128 * row], [head + 128 * 256, 0]], codec


@pytest.mark.parametrize("route", ROUTES)
def test_half_precision_halves_what_rows_send_and_leaves_the_ids(route: str) -> None:
    top = Topology(8, local_world_size=4, ddr_cap=10**9)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, top)}}).with_route(route)
    load = Workload(128, 10.0)
    plain, half = (estimate(plan, [MOVIES], top, coded(load, (name, name))) for name in ("fp32", "fp16"))
    off = ~np.eye(8, dtype=bool)
    ids = 48 + 4 * (1280 / 8 + 128)  # sizes; to each of 8 row shards
    np.testing.assert_allclose((half.traffic_bytes - ids)[off], (plain.traffic_bytes - ids)[off] / 2)
    one = plain.memory_categories.index("output_buffers")
    extra = half.memory_bytes[:, one] / plain.memory_bytes[:, one]
    assert (extra > 1).all()  # rows, and their coded copies
    assert (extra <= 1.5).all()


@given(plans(), st.sampled_from(PAIRS))
def test_the_terms_never_say_more_than_the_model(drawn: Any, pair: tuple[str, str]) -> None:
    tables, plan, top = drawn
    if pair[0] == "int8":
        plan = plan.with_route("direct")
    model = CostModel(tables, top, coded(LOAD, pair))
    terms, truth = compared(model, plan_loads(model, plan.pairs(tables)))
    assert terms <= truth * (1 + 1e-9)


@pytest.mark.parametrize(("route", "pair"), [(r, p) for r in ROUTES for p in PAIRS if (r, p[0]) != REFUSED])
def test_the_terms_of_even_plans_are_exact(route: str, pair: tuple[str, str]) -> None:
    tables, _ = random_tables(5, 0)
    top = Topology(8, local_world_size=4, ddr_cap=10**12)
    plan = ShardingPlan({"": {t.name: scheme_named("row_wise").default(t, top) for t in tables}}).with_route(route)
    model = CostModel(tables, top, Workload(256, 10.0, codecs=pair))
    terms, truth = compared(model, plan_loads(model, plan.pairs(tables)))
    assert terms == pytest.approx(truth, rel=1e-6)


def test_rows_that_do_not_add_are_refused_on_the_way_that_adds_and_never_planned_on_it() -> None:
    top = Topology(4, local_world_size=2, ddr_cap=10**9, reduce_scatter_cost=0.01)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, top)}}).with_route("reduce_scatter")
    load = Workload(4096, 10.0, codecs="int8")
    with pytest.raises(PlanError, match=r"reduce_scatter.*int8 cannot be added.*fp16/int8"):
        estimate(plan, [MOVIES], top, load)
    with pytest.raises(PlanError, match="int8 cannot be added"):
        best_plan([MOVIES], top, workload=load, route="reduce_scatter")
    net = Topology(4, inter_host_bw=1e4, intra_host_bw=1e4, reduce_scatter_cost=0.25, **FREE)
    big, only = table("big", 10**6, 64), {"big": ParameterConstraints(["row_wise"])}
    for codecs, routes in (("fp16", {"reduce_scatter"}), ("int8", {"direct"})):
        assert {
            one.route
            for one in best_plan([big], net, 4096, constraints=only, workload=replace(load, codecs=codecs))
            .tables()
            .values()
        } == routes


def test_a_slow_network_gains_and_torchrecs_formulas_refuse_what_they_do_not_know() -> None:
    slow = Topology(4, ddr_cap=10**10, intra_host_bw=1e4, cores_per_host=4)
    plan = ShardingPlan({"": {"movies": scheme_named("row_wise").default(MOVIES, slow)}})
    ms = [estimate(plan, [MOVIES], slow, Workload(2048, codecs=codecs)).step_ms for codecs in ("fp32", "fp16", "int8")]
    assert ms[0] > 1.5 * ms[1] > 1.5 * ms[2]
    with pytest.raises(ValueError, match=r"torchrec.*fp32"):
        estimate(plan, [MOVIES], slow, Workload(codecs="fp16"), cost_model="torchrec")


@pytest.mark.gate
def test_two_ranks_send_the_bytes_that_are_predicted() -> None:
    sizes = {"a": (50, 16), "b": (400, 64), "c": (90, 32), "d": (30, 8)}
    tables = [EmbeddingBagConfig(rows, dim, name=n, feature_names=[f"f_{n}"]) for n, (rows, dim) in sizes.items()]
    top, load = Topology(2), Workload(batch_size=32, pooling_factors=2.0)
    schemes = {"a": "table_wise", "b": "row_wise", "c": "column_wise", "d": "table_wise"}
    plan = ShardingPlan({"": {t.name: scheme_named(schemes[t.name]).default(t, top) for t in tables}})
    with launch(2) as ranks:
        sent = {}
        for pair in [("fp32", "fp32"), *PAIRS]:
            found = measure_plan(ranks, plan, tables, coded(load, pair), steps=4).traffic_bytes
            sent[pair] = found - np.diag(np.diag(found)), estimate(plan, tables, top, coded(load, pair)).traffic_bytes
    plain_counted, plain_predicted = sent.pop(("fp32", "fp32"))
    for pair, (counted, predicted) in sent.items():
        saved = plain_counted - counted  # ids are drawn, and the same in every run
        assert saved.sum() > 0, pair
        np.testing.assert_allclose(saved, plain_predicted - predicted, err_msg=str(pair))
