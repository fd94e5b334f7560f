"""Stages of a pipeline really run at the same time: a step takes the longest of them, not their sum.

Exchanges are slowed and the model sleeps, so that neither needs a core; what is left is scheduling.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from recshard_lab.distributed.step.messages import FORWARD
from recshard_lab.train import pipelines
from recshard_lab.train.stages import StageEvent, events_from_chrome_trace, hidden_share
from tests.launched import launched
from tests.train import pipeline_jobs as jobs

ranks = launched(2)


def slowest(ranks: Any, kind: str, message_ms: float, compute_ms: float, label: str, **options: Any) -> float:
    return float(max(ranks.run(jobs.step_ms, kind, message_ms, compute_ms, label, **options)))


@pytest.mark.clock
def test_ids_travel_behind_computing(ranks: Any) -> None:
    """Two messages of 20 ms, 45 ms in the model: 85 ms one after the other, 45 ms side by side.

    Without threads each message leaves between two stages, and the second has only backward to hide behind.
    """
    plain = slowest(ranks, "", 20.0, 45.0, "input_dist")
    unthreaded = slowest(ranks, "TrainPipelineSparseDist", 20.0, 45.0, "input_dist", threads=False)
    overlapped = slowest(ranks, "TrainPipelineSparseDist", 20.0, 45.0, "input_dist")
    assert plain >= 85
    assert 45 <= overlapped < 0.8 * plain
    assert 45 <= unthreaded < 0.9 * plain


@pytest.mark.clock
def test_sizes_and_ids_of_two_batches_travel_at_once_when_prefetched(ranks: Any) -> None:
    """Two messages of 40 ms, little to compute: 80 ms a step with one batch ahead, 40 ms with two."""
    one = slowest(ranks, "TrainPipelineSparseDist", 40.0, 5.0, "input_dist")
    two = slowest(ranks, "PrefetchTrainPipelineSparseDist", 40.0, 5.0, "input_dist")
    assert one >= 80
    assert 0.9 * 40 <= two < 0.75 * one  # steps differ a little: their median may be below their mean


@pytest.mark.clock
def test_rows_come_home_behind_the_step_before_when_semi_synchronous(ranks: Any) -> None:
    plain = slowest(ranks, "TrainPipelineSparseDist", 40.0, 35.0, FORWARD)
    semi = slowest(ranks, "TrainPipelineSemiSync", 40.0, 35.0, FORWARD, start_batch=1)
    assert plain >= 75
    assert 40 <= semi < 0.8 * plain


def test_torch_profiler_tells_the_same_stages(tmp_path: Path) -> None:
    from torch._C._profiler import _ExperimentalConfig

    model, data = jobs.dlrm(), iter(jobs.batches())
    with pipelines.TrainPipelineSparseDist(model, jobs.dense_optimizer(model), jobs.CPU) as pipeline:
        pipeline.progress(data)
        config = _ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config
        ) as profile:
            for _ in range(4):
                pipeline.progress(data)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = {(event.stage, event.batch): event for event in events_from_chrome_trace(tmp_path / "trace.json", rank=3)}
    assert {"load", "copy", "input_dist", "forward", "backward", "optimizer"} <= {stage for stage, _ in found}
    assert {event.rank for event in found.values()} == {3}
    assert {batch for stage, batch in found if stage == "backward"} == {1, 2, 3, 4}


def test_a_trace_without_stages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text(json.dumps({"traceEvents": []}))
    with pytest.raises(ValueError, match="no stage in this trace"):
        events_from_chrome_trace(tmp_path / "empty.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="has no Chrome trace"):
        events_from_chrome_trace(tmp_path / "broken.json")
    with pytest.raises(ValueError, match="a list 'traceEvents'"):
        events_from_chrome_trace({"events": 3})


def test_the_hidden_share_is_counted_rank_by_rank() -> None:
    dist = [StageEvent(rank, "input_dist", 1, 0.0, 2.0) for rank in (0, 1)]
    assert hidden_share([*dist, StageEvent(0, "forward", 0, 0.0, 2.0)]) == 0.5
    assert hidden_share([*dist, StageEvent(0, "forward", 0, 5.0, 6.0)]) == 0.0
    assert hidden_share([]) != hidden_share([])  # NaN
