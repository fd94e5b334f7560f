"""The timeline: every stage where it ran, to scale, with what was hidden and what waited."""

from __future__ import annotations

import re

from recshard_lab.lab import views
from recshard_lab.train.stages import StageEvent
from tests.lab.pictures import boxes


def pipelined(ranks: int = 2, batches: int = 5) -> list[StageEvent]:
    """Steps of 10 ms: 1 ms of waiting, 5 forward, 3 backward, 1 optimizer; ids of the next batch for 8 ms."""
    found = []
    for rank in range(ranks):
        for batch in range(batches):
            start = batch * 0.010
            cuts = [("wait", 0, 1), ("forward", 1, 6), ("backward", 6, 9), ("optimizer", 9, 10), ("input_dist", 2, 10)]
            for stage, begin, end in cuts:
                of = batch + 1 if stage == "input_dist" else batch
                found.append(StageEvent(rank, stage, of, start + begin / 1e3, start + end / 1e3))
    return found


def test_bars_stand_where_stages_ran_and_are_as_long() -> None:
    view = views.timeline(pipelined(), batches=(1, 3))
    found = boxes(view.svg)
    forward = found["rank 0, batch 2\nforward: 5 ms"]
    backward = found["rank 0, batch 2\nbackward: 3 ms"]
    dist = found["rank 1, batch 3\ninput dist: 8 ms"]
    assert abs(forward.width / backward.width - 5 / 3) < 0.01
    assert abs(dist.width / forward.width - 8 / 5) < 0.01
    assert abs(forward.x + forward.width - backward.x) < 0.02
    assert abs(dist.x - forward.x - forward.width / 5) < 0.02  # it begins 1 ms after the forward
    assert not any("batch 0" in words for words in found)


def test_the_numbers_are_those_of_the_steps() -> None:
    view = views.timeline(pipelined())
    assert view.title == "Timeline of batches 0 to 5: 10 ms a step"
    assert "100% of input_dist ran behind computing" in view.summary
    assert "waited 1 ms of its 10 ms (10%)" in view.summary
    assert re.search(r"input dist\s+8 ms\s+8 ms\s+100%", view.text)
    assert len(view.figure.data) == 5
    assert view.figure.layout.title.text == view.title


def test_many_ranks_are_cut_and_nothing_is_a_message() -> None:
    view = views.timeline(pipelined(ranks=12))
    assert "The first 8 of 12 ranks." in view.svg
    assert "rank 8" not in view.svg
    assert "no batch has passed the pipeline yet" in views.timeline([]).problem
    assert "No stage of batches 90 to 91" in views.timeline(pipelined(), batches=(90, 91)).problem
