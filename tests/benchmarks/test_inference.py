"""`recshard bench inference`: its figures over small tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import benchmark_named, inference


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
