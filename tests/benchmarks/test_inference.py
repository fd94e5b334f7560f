"""`recshard bench inference`: its figures over small tables."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import benchmark_named, inference
from benchmarks.apparatus.sides import Side
from recshard_lab.serving.inference import latency


def test_sizes_keep_their_targets() -> None:
    found = benchmark_named("inference").run(only=["size"])
    assert [figure.name for figure in found] == ["size of int8 over fp32", "size of int4 over fp32"]
    assert [figure.value for figure in found] == [68 / 256, 36 / 256]
    assert all(figure.target is not None and figure.ok for figure in found)


@pytest.mark.nightly
def test_latencies_are_of_every_kind_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TABLES": 3, "ROWS": 50, "BATCHES": (1, 4), "ROUND_S": 0.001}.items():
        monkeypatch.setattr(inference, name, value)
    found = {figure.name: figure for figure in inference.latencies(2, with_torchrec=False)}
    for batch in (1, 4):
        times: list[Any] = [
            found[f"lookup, batch {batch}, ours, {kind}"].value for kind in (*inference.TRAINED, *inference.SERVED)
        ]
        assert min(times) > 0
    assert found["batch 4: int8 is faster than fused fp32 by"].target == 1.5
    assert found["batch 1: int8 is faster than fused fp32 by"].target is None


@pytest.mark.nightly
def test_predictions_are_beside_every_measured_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TABLES": 3, "ROWS": 50, "BATCHES": (1, 4)}.items():
        monkeypatch.setattr(inference, name, value)
    monkeypatch.setattr(latency, "PROBES", (latency.Probe(2, 8, 2, 1, 20), latency.Probe(2, 8, 64, 4, 20)))
    *plans, error = inference.predictions(2)
    assert [figure.name.partition(", int8")[0] for figure in plans] == [
        f"call, batch {batch}, {plan}" for batch in (1, 4) for plan in ("table-wise", "row-wise", "column-wise")
    ]
    assert all(figure.value > 0 and figure.beside["predicted ms"] > 0 for figure in plans)
    assert error.value >= 1


@pytest.mark.nightly
def test_a_worker_has_the_tables_it_was_told_to_build() -> None:
    with Side("ours", sys.executable, 1, 1, "lookup_worker") as side:
        order = {"do": "build", "tables": 2, "rows": 10, "dim": 64, "pooling": 3}
        sizes = [side.order({**order, "kind": kind})[0]["bytes"] for kind in (*inference.TRAINED, *inference.SERVED)]
    assert sizes == [2 * 10 * 256, 2 * 10 * 256, 2 * 10 * 68, 2 * 10 * 36]
