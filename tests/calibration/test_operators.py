"""Figures from operators and collectives: exact on simulated times, and measured on a GPU where there is one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab.calibration import clock, collectives, operators
from recshard_lab.calibration.alone import figures_alone, time_alone
from recshard_lab.calibration.calibrating import calibrate, default_topology
from recshard_lab.sharding import Topology
from tests.calibration import simulated
from tests.calibration.simulated import FIGURES
from tests.launched import launched

GPUS = torch.cuda.device_count()


ranks = launched(4, devices="cpu")


@pytest.mark.gate
def test_operators_and_collectives_give_back_the_figures_that_made_their_times(ranks: Any) -> None:
    timed = operators.slowest(ranks.run(simulated.operators_on_ledger))
    timed += collectives.joined(ranks.run(simulated.collectives_on_ledger))
    assert {one.sizes[1] for one in timed if one.op == "all_to_all"} == {2, 4}  # separate latency from peers
    gpus = Topology(4, compute_device="cuda")
    found = figures_alone(timed, gpus)
    assert set(found) == {*FIGURES, "hbm_cap"}
    for name, value in FIGURES.items():
        expected = {**getattr(gpus, name), **value} if isinstance(value, dict) else value
        assert found[name] == pytest.approx(expected, rel=1e-6), name


@pytest.mark.gate
def test_device_times_come_from_events_with_one_wait_at_the_end(ranks: Any) -> None:
    order, times = ranks.run(simulated.order_of_real_clock)[0]
    assert order == ["event", "run", "event"] * clock.REPEATS + ["wait"]
    assert times == [0.5] * clock.REPEATS


@pytest.mark.gate
def test_fast_and_slow_ranks_warm_a_collective_up_with_equally_many_calls(ranks: Any) -> None:
    """Otherwise they wait for each other forever."""
    found = [ranks.run(simulated.warm_up_calls, seconds)[0] for seconds in (0.0, 0.003)]
    assert found == [clock.COLLECTIVE_WARM_UP] * 2


def test_times_too_short_for_the_copies_in_them_are_an_error() -> None:
    timed = [
        clock.TimedOperator(op, sizes, simulated.ms_of(op, sizes))
        for op, sizes in [
            *(("copy", (64,)), ("launch", (1,)), ("kernel", (1,)), ("read", (1,))),
            *(("dense", (batch, 8)) for batch in (8, 64)),
            *((op, (64, cols)) for op in ("gather", "reread") for cols in (8, 64)),
            *((op, (64, cols, 32, 4096)) for op in ("lookup", "train/exact_sgd") for cols in (8, 64)),
        ]
    ]
    assert figures_alone(timed, Topology(1, "cuda"))["update_cost"]["exact_sgd"] == pytest.approx(1.1)
    broken = [clock.TimedOperator(one.op, one.sizes, 1e-9) if "train" in one.op else one for one in timed]
    with pytest.raises(ValueError, match=r"backward with exact_sgd took .* Fix: end other programs"):
        figures_alone(broken, Topology(1, "cuda"))


@pytest.mark.cuda
@pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU here")
def test_a_gpu_calibrates() -> None:
    with recshard_lab.launch(GPUS) as launched:
        timed = time_alone(launched)
        found = figures_alone(timed, default_topology(launched))
        assert 1e8 < found["hbm_mem_bw"] < 2e10
        assert found["hbm_mem_bw"] < found["cache_bw"]
        assert 1e-3 < found["launch_ms"] < 0.1
        assert found["flops_per_ms"] < found["tf32_flops_per_ms"]
        done = calibrate(launched, 20.0, progress=False)
    assert done.profile.compute_device == "cuda"
    assert done.profile.machine["device"] == torch.cuda.get_device_name()
    assert done.profile.machine["driver"] != "none"
    assert done.profile.error < done.before_error
    assert done.topology.hbm_cap == torch.cuda.get_device_properties(0).total_memory


@pytest.mark.gate
def test_calibrating_simulated_gpus_gives_back_their_steps(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [*ranks.run(simulated.operators_on_ledger)[0]]
    alone += collectives.joined(ranks.run(simulated.collectives_on_ledger))
    before = Topology(2, compute_device="cuda", hbm_cap=141 * 10**9)
    truth = replace(replace(before, **figures_alone(alone, before)), step_ms=0.4, sync_ms=0.06, route_ns_per_id=0.09)
    simulated.simulate_steps(monkeypatch, alone, truth)
    answers = {"_memory_bytes": truth.hbm_cap, "machine": {"device": "simulated"}, "kernels_on_rank": {}}
    found = calibrate(simulated.FakeRanks(2, "cuda", **answers), 5.0, progress=False)
    assert found.profile.error < 0.02
    assert found.new_error < 0.02 < found.new_before_error
    for name in ("hbm_mem_bw", "intra_host_bw", "step_ms"):
        assert getattr(found.topology, name) == pytest.approx(getattr(truth, name), rel=0.2), name
    assert found.topology.hbm_cap == truth.hbm_cap
    assert found.topology.compute_device == "cuda"
    assert "2 ranks on simulated" in found.summary()
