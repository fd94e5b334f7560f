"""Every constant of the cost model moves the step, in its direction, and none is left out."""

import math
from dataclasses import fields, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig, EmbeddingBagConfig
from recshard_lab.embedding.dynamic.config import DynamicEmbeddingConfig
from recshard_lab.planner import CostModel, Workload
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    Shard,
    ShardingPlan,
    Topology,
    scheme_named,
)
from recshard_lab.sharding.hardware.device_profile import PER_OPTIMIZER, DeviceProfile
from recshard_lab.sharding.hardware.topology import DEVICE_DEFAULTS

OPTIMIZER = "exact_row_wise_adagrad"
FIGURES: dict[str, Any] = {  # none is zero, so that each can be halved and doubled
    "hbm_mem_bw": 9e6, "ddr_mem_bw": 6e6, "cache_bw": 6e7, "intra_host_bw": 2e6, "inter_host_bw": 1e6,
    "intra_host_latency_ms": 0.02, "inter_host_latency_ms": 0.1, "peer_ms": 0.03, "reduce_scatter_cost": 4.0,
    "lookup_ns_per_id": 2.0, "update_ns_per_id": 10.0, "route_ns_per_id": 12.0, "launch_ms": 0.05, "host_ms": 0.08,
    "shard_feature_ms": 0.005, "row_split_ms": 0.4, "norm_ms": 0.4, "norm_ns_per_row": 3.0, "bag_ns": 20.0,
    "sort_ns_per_id": 9.0, "sum_ns_per_number": 2.0, "replica_ms": 0.03, "replicas_ms": 0.2, "cache_bytes": 1e6,
    "contention": 0.2, "half_duplex": 0.4, "step_ms": 0.2, "flops_per_ms": 2e7, "inter_host_peer_ms": 0.04,
    "sync_ms": 0.02, "kernel_ms": 0.03, "gather_row_bytes": 60.0, "tf32_flops_per_ms": 8e7, "matrix_half_batch": 50.0,
    "straggler_sigma": 0.02, "index_ns_per_id": 90.0, "index_ms": 0.1,
}  # fmt: skip
FASTER_IF_MORE = {name for name in FIGURES if name.endswith(("_bw", "flops_per_ms"))} | {"cache_bytes"}
MEMORY_ALONE = {"hbm_cap", "ddr_cap", "reserve_fraction"}  # limit memory, not time
LOAD = Workload(64, 8.0, optimizer=OPTIMIZER, dense_parameters=10_000)
LOADS = {"tf32_flops_per_ms": replace(LOAD, matmul_precision="high", dense_parameters=1_000_000)}


def machine(kind: str, **figures: Any) -> Topology:
    """Four ranks, on one CPU host or on two nodes of GPUs."""
    local = 4 if kind == "host" else 2
    caps = {"hbm_cap": 10**9, "ddr_cap": 10**9}
    where = {"local_world_size": local, "cores_per_host": 4, "compute_device": "cpu" if kind == "host" else "cuda"}
    return Topology(4, **{**caps, **where, **FIGURES, **figures})


@cache
def mixed() -> tuple[list[BaseEmbeddingConfig], ShardingPlan]:
    """Tables under every way to cut, route, and memory, one dynamic; rank 0 has more to do than the others."""
    top = machine("nodes")
    cuts = {
        "rows": scheme_named("row_wise"), "added": scheme_named("row_wise"), "hops": scheme_named("row_wise"),
        "columns": scheme_named("column_wise"), "replicas": scheme_named("data_parallel"),
    }  # fmt: skip
    tables: list[BaseEmbeddingConfig] = [
        EmbeddingBagConfig(name=n, num_embeddings=60 if n == "replicas" else 5000, embedding_dim=32, feature_names=[n])
        for n in (*cuts, "whole", "slow")
    ]
    entries = {t.name: cuts[t.name].default(t, top) for t in tables if t.name in cuts}
    entries["added"] = entries["added"].with_route("reduce_scatter")
    entries["hops"] = entries["hops"].with_route("two_hop")
    for name, tier in (("whole", "hbm"), ("slow", "ddr")):
        entries[name] = ParameterSharding("table_wise", shards=[Shard(0, (0, 5000), (0, 32), tier)])
    tables.append(DynamicEmbeddingConfig("dynamic", 32, 4096))
    entries["dynamic"] = scheme_named("row_wise").default(tables[-1], top)
    return tables, ShardingPlan({"": EmbeddingModuleShardingPlan(entries)})


def step_and_bound(kind: str, load: Workload = LOAD, **figures: Any) -> tuple[float, float]:
    """The step in ms by the phases, and by the linear terms that solvers and bounds use."""
    tables, plan = mixed()
    top = machine(kind, **figures)
    model = CostModel(tables, top, load)
    loads = plan_loads(model, plan.pairs(tables))
    spent = model.terms.spent(loads, top.num_nodes)[:-1]
    return float(model.step_ms(loads)), float(spent.max(axis=1).sum())


def test_every_constant_is_known_here() -> None:
    named = set(FIGURES) | MEMORY_ALONE | set(PER_OPTIMIZER)
    for defaults in DEVICE_DEFAULTS.values():
        assert set(defaults) - {"ddr_cap"} == named - {"ddr_cap"}
    whole = {"world_size", "local_world_size", "compute_device", "cores_per_host", "device_groups"}
    assert {spec.name for spec in fields(Topology)} == named | whole


def directions(name: str) -> list[bool]:
    """On a host and on nodes: whether the step and its linear terms grow with a constant."""
    moved = []
    for kind in ("host", "nodes"):
        load = LOADS.get(name, LOAD)
        (low, low_bound), (base, _), (high, high_bound) = (
            step_and_bound(kind, load, **{name: FIGURES[name] * times}) for times in (0.5, 1.0, 2.0)
        )
        if name == "half_duplex":  # of uneven ranks the busiest one gains: what it receives is less than it sends
            moved.append(low != base != high)
            continue
        if name in FASTER_IF_MORE:
            low, high, low_bound, high_bound = high, low, high_bound, low_bound
        assert low <= base <= high, name
        assert low_bound <= high_bound, name
        moved.append(low < base < high and low_bound < high_bound)
    return moved


def test_every_constant_moves_the_step_in_its_direction() -> None:
    assert [name for name in FIGURES if not any(directions(name))] == []


def test_constants_of_an_optimizer_move_steps_with_that_optimizer_alone() -> None:
    for kind, name in product(("host", "nodes"), PER_OPTIMIZER):

        def step(kind: str = kind, name: str = name, **values: float) -> float:
            return step_and_bound(kind, **{name: {OPTIMIZER: 1.0, "exact_sgd": 1.0} | values})[0]

        assert step(**{OPTIMIZER: 0.5}) < step() < step(**{OPTIMIZER: 2.0}), (kind, name)
        assert step(exact_sgd=9.0) == step(), (kind, name)


def test_an_optimizers_own_time_per_id_replaces_the_common_one() -> None:
    own = {"update_id_ns": {OPTIMIZER: 30.0}}
    assert step_and_bound("host", **own) == step_and_bound("host", update_ns_per_id=30.0)
    assert step_and_bound("host", **own) == step_and_bound("host", **own, update_ns_per_id=99.0)


def test_ranks_beyond_the_cores_and_capacity() -> None:
    assert step_and_bound("host", cores_per_host=2)[0] > 1.5 * step_and_bound("host")[0]
    for name in MEMORY_ALONE:
        assert step_and_bound("nodes", **{name: 0.5}) == step_and_bound("nodes")


def test_a_device_profile_hands_every_constant_to_its_topology() -> None:
    plain = Topology(2, "cuda", cores_per_host=2)
    where = {"world_size": 2, "local_world_size": 2, "compute_device": "cuda", "cores_per_host": 2}
    for name in (*FIGURES, *sorted(MEMORY_ALONE), *PER_OPTIMIZER):
        value = {OPTIMIZER: 3.5} if name in PER_OPTIMIZER else 0.75
        profile = DeviceProfile(**where, figures={name: value}, machine={}, date="2026-01-01")  # type: ignore[arg-type]
        made = DeviceProfile.from_json(profile.to_json()).topology()
        assert getattr(made, name) == value != getattr(plain, name), name
        assert replace(made, **{name: getattr(plain, name)}) == plain, name


def test_the_constants_of_the_dense_part_scale_it_alone() -> None:
    none = replace(LOAD, dense_parameters=0)
    for figures in ({"flops_per_ms": 1e5}, {"step_ms": 5.0}):
        assert step_and_bound("host", **figures)[0] > step_and_bound("host")[0]
    assert step_and_bound("host", none, flops_per_ms=1e5) == step_and_bound("host", none)
    slowest = 1 + FIGURES["straggler_sigma"] * math.sqrt(2 * math.log(4))
    more = step_and_bound("host", none, step_ms=5.0)[0] - step_and_bound("host", none, step_ms=0.0)[0]
    assert np.isclose(more, 5.0 * slowest)
