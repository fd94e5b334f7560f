"""Predicted beside measured latency of plans on devices of one process, and over launched ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rl
from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, ShardingPlan, Topology
from recshard_lab.serving.inference import compare_latencies, latency, measure_devices, shard_for_inference

PLACES = ["cpu", "cpu"]


class Towers(nn.Module):
    """Tables and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(40, 8, f"t{one}", feature_names=[f"f{one}"]) for one in range(3)]
        self.tables, self.over = EmbeddingBagCollection(tables), nn.Linear(24, 100)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(batch).values())


def batch(samples: int = 6) -> KeyedJaggedTensor:
    lengths = torch.full((3 * samples,), 2)
    return KeyedJaggedTensor(["f0", "f1", "f2"], torch.arange(6 * samples) % 40, lengths=lengths)


def sharded(dtype: str | None = None) -> dict[str, Any]:
    """The model under three plans."""
    model, names = Towers(), ["t0", "t1", "t2"]
    schemes = {
        "table_wise": {name: rl.table_wise(rank=number % 2) for number, name in enumerate(names)},
        "row_wise": {name: rl.row_wise() for name in names},
        "column_wise": {name: rl.column_wise(ranks=[0, 1]) for name in names},
    }
    found = {}
    for scheme, chosen in schemes.items():
        split = rl.sharding.construct_module_sharding_plan(model.tables, chosen, world_size=2)
        found[scheme] = shard_for_inference(model, ShardingPlan({"tables": split}), PLACES, dtype=dtype)
    return found


def topology(**figures: Any) -> Topology:
    """Devices on which only `figures` take time."""
    nothing = {**dict.fromkeys(latency.COSTS, 0.0), **dict.fromkeys((*latency.SPEEDS, "ddr_mem_bw"), 1e30)}
    free = dict.fromkeys(("peer_ms", "intra_host_latency_ms", "step_ms"), 0.0)
    return Topology(2, cores_per_host=2, **{**nothing, **free, "flops_per_ms": 1e30, **figures})


def test_one_table_has_prediction_and_measurement_of_each_plan() -> None:
    served = sharded("int8")
    found = compare_latencies(served, batch(), topology=topology(row_split_ms=0.5, host_ms=0.1), calls=2)
    assert [one.plan for one in found.plans] == ["table_wise", "row_wise", "column_wise"]
    assert [round(one.predicted_ms, 9) for one in found.plans] == [0.2, 0.7, 0.2]  # input and output; rows are split
    assert all(0 < one.measured_ms <= one.p90_ms for one in found.plans)
    lines = str(found).splitlines()
    assert lines[0].startswith("Latency of one call with 6 samples.")
    assert lines[2].split()[:8] == ["plan", "devices", "predicted", "ms", "measured", "ms", "p90", "ms"]
    assert [line.split()[0] for line in lines[3:]] == ["table_wise", "row_wise", "column_wise"]
    assert found.records()[1]["input_dist_ms"] == pytest.approx(0.6)
    assert found.records()[1]["predicted_over_measured"] == found.plans[1].predicted_ms / found.plans[1].measured_ms


def test_work_of_the_batch_is_counted_once() -> None:
    """36 ids of the batch, not 36 on each device; 6 samples through 2,500 numbers of the dense part."""
    served = sharded()["table_wise"]
    (ids,) = served.latency(batch(), topology=topology(lookup_ns_per_id=1e6), calls=2).plans
    assert ids.phases_ms["lookup"] == pytest.approx(24.0)  # device 0 has two of the three tables, with 12 ids each
    (dense,) = served.latency(batch(), topology=topology(flops_per_ms=1000.0), calls=2).plans
    assert dense.phases_ms["dense"] == pytest.approx(2 * 2500 * 6 / 1000)
    (odd,) = served.latency(batch(5), topology=topology(lookup_ns_per_id=1e6), calls=2).plans
    assert odd.phases_ms["lookup"] == pytest.approx(20.0)  # 5 samples do not divide by 2


def test_fitted_figures_predict_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    true = topology(
        host_ms=0.1, launch_ms=0.02, shard_feature_ms=0.003, row_split_ms=0.3, route_ns_per_id=20.0, bag_ns=9.0,
        cache_bw=3e6, ddr_mem_bw=1e6,
    )  # fmt: skip

    def in_turn(calls: Sequence[partial[Any]], rounds: int) -> list[list[float]]:
        if len(calls) == 2:  # one sample and 1,024 samples of the dense part
            return [[1.0], [1.0 + 1023 * 0.001]]
        loads = [latency._workload(call.func, call.args, 2) for call in calls]
        return [[latency._estimated(call.func, load, true).step_ms] for call, load in zip(calls, loads, strict=True)]

    served = sharded()
    monkeypatch.setattr(latency, "_in_turn", in_turn)
    sizes = ((1, 8, 2, 1), (4, 8, 2, 1), (2, 8, 64, 16), (2, 32, 64, 8), (2, 32, 256, 2))
    monkeypatch.setattr(latency, "PROBES", [latency.Probe(*own, rows=40) for own in sizes])
    found = replace(measure_devices(PLACES), cores_per_host=2)
    assert found.flops_per_ms == pytest.approx(2 * 512**2 / 0.001)
    assert found.matrix_half_batch == pytest.approx(999 / 2)
    for model in served.values():
        load = latency._workload(model, (batch(),), 2)
        load = replace(load, dense_parameters=0, dense_flops_per_sample=0.0)
        one, other = (latency._estimated(model, load, each).step_ms for each in (found, true))
        assert one == pytest.approx(other, rel=0.05)
