"""`recshard bench serve`: what it reads of the load generator, and the bundle that it serves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import benchmark_named, serve
from recshard_lab.serving import load_bundle
from recshard_lab.serving.server.bodies import example


def test_a_request_that_was_not_answered_ends_the_run() -> None:
    good = "1700000000000000\t200\t900\n"
    assert serve.parsed(good * 2) == [0.0009, 0.0009]
    with pytest.raises(RuntimeError, match="3 requests, some with the status 503"):
        serve.parsed(good * 2 + "1700000000000000\t503\t100\n")
    with pytest.raises(RuntimeError, match="0 requests"):
        serve.parsed("")


def test_requests_in_flight_at_the_end_and_in_the_warm_up_are_left_out() -> None:
    early, late = "1700000000000000\t200\t900\n", "1700000002000000\t200\t700\n"
    cut = "1700000002000100\t0\t300\n"
    assert serve.parsed(early + late + cut, warm_s=1, in_flight=1) == [0.0007]
    with pytest.raises(RuntimeError, match="status 0"):
        serve.parsed(early + cut * 2, in_flight=1)


def test_a_run_does_not_count_the_requests_of_the_run_before(tmp_path: Path) -> None:
    """The load generator appends to its log."""
    appends = f"printf '1700000000000000\\t200\\t1500\\n' >> {tmp_path}/log"
    for _ in range(2):
        assert serve.durations(["sh", "-c", appends], tmp_path / "log", "address", 1, None) == [0.0015]


def test_without_the_load_generator_it_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="apt-get install nghttp2-client"):
        benchmark_named("serve").run()


def test_the_overhead_is_the_median_difference_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 2 ms, 1 of CPU time. Windows of the server take 5, 9 and 6 ms, 3 of CPU time."""
    windows, asked, order = iter([0.005, 0.009, 0.006]), 0, []

    def window() -> list[float]:
        nonlocal asked
        asked += 10
        order.append("requests")
        return [next(windows)] * 10

    def metrics() -> dict[str, float]:
        counted = {"recshard_request_seconds_count": asked, "process_cpu_seconds_total": 0.003 * asked}
        return {**counted, "recshard_model_seconds_sum": 0.001 * asked, "recshard_model_seconds_count": asked}

    def paced(model: object, batch: object, rate: float, seconds: float) -> list[tuple[float, float]]:
        assert rate == 100
        order.append("calls")
        return [(0.002, 0.001)] * 5

    monkeypatch.setattr(serve, "_paced", paced)
    over, cpu, outside = serve.overhead(None, None, metrics, window, rate=100, pairs=3)
    assert order[1:] == ["calls", "requests", "requests", "calls", "calls", "requests"]
    assert (over.value, over.beside["lowest"], over.beside["highest"]) == pytest.approx((4, 3, 7))
    assert (cpu.value, outside.value, over.target) == pytest.approx((2, 5, 1))


@pytest.mark.nightly
def test_the_bundle_has_the_features_of_the_figure(tmp_path: Path) -> None:
    serve.write_model(tmp_path / "v1", rows=20, width=8)
    model = load_bundle(tmp_path / "v1")
    assert (len(model.inputs.sparse), len(model.inputs.dense)) == (serve.FEATURES, serve.DENSE)
    assert model.predict(example(model.inputs, 1))["probability"].shape == (1,)
