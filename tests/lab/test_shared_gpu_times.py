"""Times that ranks measured on a shared GPU are labelled wherever they are shown."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recshard_lab import EmbeddingBagConfig, Topology
from recshard_lab.calibration import calibrate
from recshard_lab.cli.bench import refuse_shared_gpu
from recshard_lab.cli.training_demo import summary_table
from recshard_lab.comm import CollectiveEvent, Trace, times_note
from recshard_lab.distributed.state.reshard import Resharded
from recshard_lab.lab import views
from recshard_lab.lab.compare.measure import Measured, measure_plan
from recshard_lab.lab.demo.experiment import Outcome
from recshard_lab.lab.demo.training import Comparison, Run
from recshard_lab.lab.exporting.exportable import Candidate
from recshard_lab.lab.exporting.plan_report import _note
from recshard_lab.lab.magics.output import time_bars
from recshard_lab.launcher import CellResult, LaunchError, Ranks
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.train.stages import StageLog, events_from_collectives
from tests.launched import launched

NOTE = "shared GPU: bytes and results are real, times are not"
SENTENCE = "Shared GPU: bytes and results are real, times are not."
PHASES = SimpleNamespace(phases=("lookup", "dense"), ms=[[3.0, 1.0], [1.0, 1.0]], step_ms=4.0, critical_rank=0)


def measured(note: str) -> Measured:
    return Measured.of([{"step_ms": 4.0, "memory": {}, "sent": {}}] * 2, 10, {}, note)


@pytest.fixture
def shares_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launcher sets on a rank that shares a GPU."""
    monkeypatch.setenv("RECSHARD_TIMES_NOTE", NOTE)


ranks = launched(2, devices="cpu")


def as_if_shared(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = ranks._world
    monkeypatch.setattr(world, "shape", replace(world.shape, devices=("cuda:0", "cuda:0")))


def test_what_ranks_of_a_shared_gpu_report_is_labelled(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    table = EmbeddingBagConfig(50, 4, name="t", feature_names=["f"])
    plan = EmbeddingShardingPlanner(Topology(2)).plan_tables([table])
    assert measure_plan(ranks, plan, [table], Workload(batch_size=4), steps=1).times_note == ""
    as_if_shared(ranks, monkeypatch)
    assert ranks.times_note == NOTE
    assert measure_plan(ranks, plan, [table], Workload(batch_size=4), steps=1).times_note == NOTE
    assert [row.device for row in ranks.status()] == ["cuda:0", "cuda:0"]
    assert "over gloo on cuda:0, cuda:0, ready in" in repr(ranks)


def test_calibration_refuses_a_shared_gpu(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_shared(ranks, monkeypatch)
    with pytest.raises(ValueError, match=r"2 ranks share cuda:0: .*Fix: launch\(1\)"):
        calibrate(ranks)


def test_benchmarks_refuse_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSHARD_SHARE_GPU", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refuse_shared_gpu()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(LaunchError, match=r"RECSHARD_SHARE_GPU=1: a benchmark measures times.*Fix: unset"):
        refuse_shared_gpu()


@pytest.mark.parametrize("note", [NOTE, ""])
def test_pictures_and_tables_of_measured_steps_are_labelled(note: str) -> None:
    found = measured(note)
    comparison = Comparison(
        SimpleNamespace(source="synthetic ratings"),  # type: ignore[arg-type]
        2,
        (Run("row_wise", outcomes={"random": Outcome(0.5, [1.0], 4.0, found), "time": Outcome(0.5, [1.0], 4.0)}),),
    )
    log = StageLog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSHARD_TIMES_NOTE", note)
        log = StageLog()
        with log.stage("forward", 0), log.stage("input_dist", 1):
            pass
    candidate = Candidate("plan", SimpleNamespace(), [], Topology(2), Workload(), None, found)  # type: ignore[arg-type]
    shown = {
        "phases": views.phases(PHASES, found).text,
        "balance": views.balance(PHASES, found).text,
        "timeline": views.timeline(log.events).text,
        "demo": " ".join(map(str, summary_table(comparison).renderables)),
        "report": _note([candidate]),
    }
    assert {name for name, text in shown.items() if SENTENCE in text} == (set(shown) if note else set())
    assert (NOTE in str(found)) is bool(note)
    assert (NOTE in time_bars([CellResult(0, {}, 0.5)], note)) is bool(note)


def test_times_that_a_rank_measures_are_labelled(shares_a_gpu: None) -> None:
    assert times_note() == NOTE
    event = CollectiveEvent("all_to_all", "input_dist/ids", (8,), 1.0, ms=2.0)
    assert [stage.times_note for stage in events_from_collectives(Trace([event]), rank=0)] == [NOTE]
    assert NOTE in repr(Resharded(8, 0.5, 0, ("t",)))
