"""`recshard bench train`: real ranks, sides that take turns, and figures that name what they compare."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import train
from benchmarks.apparatus.sides import Side
from benchmarks.apparatus.step_case import ROWWISE, StepCase
from benchmarks.apparatus.train_case import TrainCase, dealt, from_dict

SMALL = StepCase("table_wise", ROWWISE, "zipf", tables=4, rows=40, dim=8, batch=16, pooling=3)


def test_cases_survive_the_wire_and_deal_every_table_once() -> None:
    case = TrainCase(SMALL, link_ms=2.0, collections=2)
    assert from_dict(case.to_dict()) == case
    assert dealt(case) == [[0, 1], [2, 3]]


def test_every_figure_has_a_name_of_its_own_and_switches_differ_in_one_thing() -> None:
    jobs = list(train._jobs(train.QUICK_BATCHES, with_torchrec=True))
    assert len({job.name for job in jobs}) == len(jobs)
    switches = [job for job in jobs if job.name.startswith("switch")]
    assert len(switches) == 10
    for job in switches:
        on, off = job.cases["on"].to_dict(), job.cases["off"].to_dict()
        assert sum(on[name] != off[name] for name in on) == 1, job.name
    assert [job.name for job in jobs if "theirs" in job.cases] == [f"pipelines, local batch {n}" for n in (32, 512)]


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValueError, match="no figure has 'fast link' in its name; there are: pipelines"):
        train.figures(only=["fast link"])


@pytest.mark.nightly
def test_a_figure_tells_all_pipelines_beside_the_plain_loop_and_the_bound(monkeypatch: Any) -> None:
    monkeypatch.setattr(train, "ROUND_S", 0.01)
    case = TrainCase(SMALL, link_ms=3.0, hidden=8)
    with Side("ours", sys.executable, program="train_worker") as one, Side("ours", program="train_worker") as other:
        sides = {"threads": one, "inline": other}
        one.order({"do": "build", "case": case.to_dict()})
        other.order({"do": "build", "case": replace(case, threads=False).to_dict()})
        figure = train._pipelines("slow link 3 ms", sides, rounds=1)
        assert figure.beside["dist"] >= 6  # two messages
        assert figure.beside["plain"] >= 12  # and rows home, gradients back
        assert figure.beside["max"] == max(figure.beside[part] for part in ("copy", "dist", "compute"))
        assert figure.target == pytest.approx(1.15 * figure.beside["max"])
        assert {"threads", "no threads", "prefetch", "semi_sync", "base", "hidden"} <= figure.beside.keys()
        found = one.order({"do": "build", "case": replace(case, collections=2, fuse_exchanges=False).to_dict()})
        assert found == [{"ok": True}] * 2
