"""Balance: who holds up which phase, what that costs, and who waits, predicted and measured."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recshard_lab.lab import measure_plan, views
from recshard_lab.lab.compare.measure import Measured, waited
from recshard_lab.lab.draw.theme import ms_text
from recshard_lab.launcher import launch
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.sharding import Topology
from tests.lab.pictures import boxes
from tests.lab.plans import movielens, plan_of, table


def predicted(world_size: int = 4, **more: Any) -> Estimate:
    tables = movielens()
    topology = Topology(world_size, "cuda")
    return estimate(plan_of(tables, world_size, ("table_wise", "row_wise")), tables, topology, **more)


def measured(estimate: Estimate, waits: list[float]) -> Any:
    return SimpleNamespace(step_ms_by_rank=np.full(len(waits), 10.0), waited_ms={"input_dist/ids": np.array(waits)})


def test_what_is_lost_is_the_step_less_that_of_ranks_that_all_do_the_mean() -> None:
    found = predicted()
    even = replace(found, ms=np.repeat(found.ms.mean(axis=0, keepdims=True), 4, axis=0))
    rows = {row[0]: row for row in views.balance(found).numbers.rows}
    assert rows["step"][2] == ms_text(found.plain_step_ms)
    assert rows["step"][3] == ms_text(even.plain_step_ms)
    assert rows["step"][5] == ms_text(found.plain_step_ms - even.plain_step_ms)
    assert ms_text(found.plain_step_ms - even.plain_step_ms) in views.balance(found).title
    assert views.balance(even).summary == "All ranks do the same in every phase: no rank waits."


def test_work_and_waiting_of_a_rank_add_up_to_the_step() -> None:
    found = predicted()
    heights: dict[str, dict[str, float]] = {}
    for words, box in boxes(views.balance(found).svg).items():
        who, _, what = words.partition("\n")
        if who.endswith(", predicted") and what.startswith(("at work", "waiting")):
            heights.setdefault(who, {})[what.split(":")[0]] = box.height
    assert len(heights) == 4
    for rank in range(4):
        own = heights[f"rank {rank}, predicted"]
        whole = sum(own.values())
        assert whole == pytest.approx(sum(heights["rank 0, predicted"].values()), abs=0.1)
        assert own["at work"] / whole == pytest.approx(found.ms[rank].sum() / found.plain_step_ms, abs=0.002)


def test_measured_waiting_stands_beside_predicted_and_names_the_last() -> None:
    found = predicted()
    view = views.balance(found, measured(found, [2.0, 1.0, 0.0, 1.0]))
    assert "Measured: ranks wait 10% of the step." in view.summary
    assert "rank 2 last" in view.svg
    assert re.search(r"measured waiting: ids to shards\s+rank 0\s+2 ms\s+1 ms\s+0 ms", view.text)
    high = boxes(view.svg)
    work, wait = (high[f"rank 0, measured\n{what}"].height for what in ("at work: 8 ms", "waiting: 2 ms"))
    assert work / wait == pytest.approx(4, rel=0.01)
    only = views.balance(found, SimpleNamespace(step_ms_by_rank=np.full(4, 10.0)))
    assert "Their waiting was not measured." in only.svg
    other = views.balance(found, SimpleNamespace(step_ms_by_rank=np.full(3, 10.0)))
    assert "not the same plan" in other.problem


def test_waiting_is_what_a_rank_is_longer_in_an_exchange_than_the_last_to_come() -> None:
    took = [{"ids": [5.0, 9.0, 1.0, 1.0], "part": [1.0]}, {"ids": [2.0, 1.0, 2.0, 4.0]}]  # two exchanges a step
    found = waited(took, steps=2)
    assert set(found) == {"ids"}
    np.testing.assert_allclose(found["ids"], np.median([[3 + 8, 0 + 0], [0 + 0, 1 + 3]], axis=1))
    one = {"step_ms": 1.0, "memory": {}, "sent": {}}
    assert Measured.of([one, one], 1, {}).waited_ms == {}


@pytest.mark.clock
def test_the_rank_that_holds_all_tables_is_the_one_that_others_wait_for() -> None:
    tables = [table(f"t{n}", 20_000, 64) for n in range(6)]
    plan = plan_of(tables, 1, ("table_wise",))  # all on rank 0
    workload = Workload(batch_size=2048, pooling_factors={f"f_t{n}": 20.0 for n in range(6)})
    found = estimate(plan, tables, Topology(2), workload)
    with launch(2) as ranks:
        real = measure_plan(ranks, plan, tables, workload, steps=5)
    rows = next(values for label, values in real.waited_ms.items() if label.startswith("output_dist/"))
    assert rows[1] > 5 * rows[0]
    assert all((values >= 0).all() for values in real.waited_ms.values())
    assert sum(values.max() for values in real.waited_ms.values()) < 3 * real.step_ms
    view = views.balance(found, real)
    assert "rank 0 last" in view.svg
    names = {row[0]: row[1] for row in view.numbers.rows}
    assert names["lookup"] == "rank 0"
    assert names["measured waiting: rows to samples: direct"] == "rank 1"


def by_hand(ms: list[list[float]], phases: tuple[str, ...] = ("lookup", "output_dist", "dense")) -> views.View:
    return views.balance(SimpleNamespace(phases=phases, ms=ms))


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        # lookup is longest and balanced; most is lost in output_dist, by rank 1, which is not the busiest
        (
            [[20.0, 1.0, 3.0], [20.0, 3.0, 0.0], [20.0, 2.0, 3.0]],
            "lost in output dist, where rank 1 is slowest: perfect balance would save 1 ms of it (33%).",
        ),
        # lookup is longest and loses 1 ms of 20; output_dist loses 2 ms of 3
        (
            [[20.0, 0.0, 1.0], [18.0, 0.0, 1.0], [19.0, 3.0, 1.0]],
            "lost in output dist, where rank 2 is slowest: perfect balance would save 2 ms of it (67%).",
        ),
        # most is lost where ranks are least alike in ms, not in share: dense loses all but a third of 0.3 ms
        (
            [[9.0, 1.0, 0.3], [6.0, 1.0, 0.0], [6.0, 1.0, 0.0]],
            "lost in lookup, where rank 0 is slowest: perfect balance would save 2 ms of it (22%).",
        ),
    ],
    ids=["longest phase balanced", "longest phase loses less", "largest share is small"],
)
def test_what_is_told_is_the_phase_that_loses_most_not_the_longest_or_the_first(
    ms: list[list[float]], words: str
) -> None:
    view = by_hand(ms)
    assert words in view.summary
    table, names = np.array(ms), {"lookup": 0, "output dist": 1, "dense": 2}
    lost = table.max(axis=0) - table.mean(axis=0)
    rows = {row[0]: row for row in view.numbers.rows}
    for label, phase in names.items():
        assert rows[label][5] == ms_text(lost[phase])
    drawn = {hover.split("\n")[0] for hover in boxes(view.svg) if "\nlost:" in hover}
    assert drawn == {label for label, phase in names.items() if lost[phase] > 0}
    assert ms_text(lost.sum()) in view.title


def test_the_waiting_that_is_told_is_the_mean_of_all_ranks() -> None:
    view = by_hand([[20.0, 1.0], [20.0, 3.0], [20.0, 2.0]], ("lookup", "output_dist"))
    assert view.summary.startswith("Ranks wait 4.3% of the step.")  # 2, 0 and 1 of 23 ms
    waiting = next(row for row in view.numbers.rows if row[0] == "waiting")
    assert waiting[1:5] == ["rank 0", "2 ms", "1 ms", "0 ms"]
