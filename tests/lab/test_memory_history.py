"""Memory over time: counted on CPU ranks against torch's own sizes, and read from a snapshot of the CUDA allocator."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from recshard_lab.lab import record_memory, views
from recshard_lab.lab.charts.spec import Area
from recshard_lab.lab.draw.theme import MEMORY, look_of
from recshard_lab.lab.live.memory_history import MemoryHistory, allocation_recorder, history_of_snapshot
from recshard_lab.launcher import LaunchError, launch
from tests.lab.recorded import build, plan_of

MATRIX = 64 * 64 * 4


def counted(step: Any) -> MemoryHistory:
    recorder = allocation_recorder()
    with recorder:
        step()
    return MemoryHistory.of(0, "counted", {"weights": 100}, recorder.done(), recorder.now())


def test_every_allocation_is_counted_until_it_is_freed() -> None:
    a = torch.ones(64, 64)

    def step() -> None:
        b = a @ a  # 1 matrix lives
        c = b + a  # 2
        b.add_(1)  # in place: no more
        view = c[:4]  # a view: no more
        del b, c
        assert view.numel()  # the view keeps all of c
        d = torch.empty(10 * 64, 64)  # c and 10
        del d, view

    history = counted(step)
    assert history.total[0] == 100
    assert history.total[-1] == 100
    assert history.peak[1] == 100 + 11 * MATRIX
    assert [size for _, size, _ in history.blocks] == [10 * MATRIX, MATRIX]
    assert history.blocks[0][2].startswith("empty in step")
    assert set(np.diff(history.total).tolist()) <= {0, MATRIX, -MATRIX, 10 * MATRIX, -10 * MATRIX}


def test_backward_allocates_gradients() -> None:
    layer, x = torch.nn.Linear(64, 64, bias=False), torch.ones(64, 64)

    def step() -> None:
        layer(x).square().mean().backward()

    history = counted(step)
    assert layer.weight.grad is not None
    assert history.size["gradients"][-1] == MATRIX  # the weight's gradient stays
    assert history.size["activations"][-1] == 0
    assert history.size["activations"].max() >= 2 * MATRIX


@pytest.mark.gate
def test_ranks_report_the_memory_of_a_step() -> None:
    with launch(2) as ranks:
        build(ranks, plan_of("row_wise"))
        ranks.exec("def train_step():\n    dense.zero_grad()\n    loss_of(model(batch)).backward()\n    dense.step()")
        ranks.exec("train_step()")
        held = ranks.eval("model.memory_bytes()")
        found = record_memory(ranks, "model", "train_step")
        for rank, history in enumerate(found):
            assert (history.rank, history.source) == (rank, "counted")
            assert history.at_peak["weights"] == held[rank]["weights"]
            assert history.size["exchange_buffers"].max() > 0
            assert history.size["exchange_buffers"][-1] <= history.size["exchange_buffers"].max()
            assert np.all(np.diff(history.ms) >= 0)
            view = views.memory_over_time(history)
            assert view.summary.startswith("Peak ")
            assert not view.problem
        ranks.stop()
        with pytest.raises(LaunchError, match="'model' is gone"):
            record_memory(ranks, "model", "train_step")


def entry(action: str, addr: int, size: int, time_us: int, *names: tuple[str, str]) -> dict[str, Any]:
    """As the allocator writes it; frames from the innermost out."""
    frames = [{"filename": file, "name": name, "line": 7} for file, name in names]
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


LAYER = ("/x/site-packages/torch/nn/modules/linear.py", "forward"), ("/x/model.py", "forward")
EXCHANGE = ("/x/torch/_tensor.py", "empty"), ("/x/recshard_lab/comm/collectives.py", "issue_all_to_all")
BACKWARD = (("/x/torch/autograd/graph.py", "_engine_run_backward"), ("/x/torch/_tensor.py", "backward"))
SNAPSHOT = {
    "segments": [],
    "device_traces": [
        [
            entry("segment_alloc", 0, 2_000_000, 1_000),
            entry("alloc", 1, 600, 1_000, *LAYER),
            entry("alloc", 2, 400, 2_000, *EXCHANGE),
            entry("free_requested", 2, 400, 3_000),
            entry("free_completed", 2, 400, 3_000),
            entry("alloc", 2, 700, 4_000, *BACKWARD),  # the same address again
            entry("free_completed", 1, 600, 5_000),
            entry("free_completed", 9, 50, 6_000),  # was there before the step
        ]
    ],
}


def test_a_snapshot_of_the_cuda_allocator_becomes_a_history() -> None:
    history = history_of_snapshot(SNAPSHOT, 0, 1, {"weights": 1000}, 1050, 7.0, capacity=2000)
    assert history.ms.tolist() == [0, 0, 1, 2, 3, 4, 5, 7]
    assert history.total.tolist() == [1050, 1650, 2050, 1650, 2350, 1750, 1700, 1700]
    assert history.size["exchange_buffers"].tolist() == [0, 0, 400, 0, 0, 0, 0, 0]
    assert history.size["gradients"].tolist() == [0, 0, 0, 0, 700, 700, 700, 700]
    assert history.peak == (3.0, 2350)
    assert [block[:2] for block in history.blocks] == [("gradients", 700), ("activations", 600)]
    assert history.blocks[1][2] == "forward (model.py:7)"
    view = views.memory_over_time(history)
    assert "It exceeds 2 KB." in view.summary
    assert "capacity 2 KB" in view.svg
    assert view.chart is not None
    stack = [mark for mark in view.chart.panels[0].marks if isinstance(mark, Area)]
    assert [area.name for area in stack] == [look_of(name, MEMORY).label for name in history.size]
    assert list(stack[0].low) == [0.0] * 8
    assert all(lower.high == upper.low for lower, upper in pairwise(stack))
    assert list(stack[-1].high) == history.total.tolist()
    assert "700 B by " in view.chart.note
    assert history_of_snapshot({"device_traces": []}, 0, 0, {"weights": 5}, 5, 1.0).peak == (0.0, 5)
