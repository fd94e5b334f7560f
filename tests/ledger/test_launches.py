"""`recshard bench launches`: one mirrored process counts what real ranks count, and its rows keep what they promise."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

import recshard_lab
from benchmarks import launches
from benchmarks.apparatus.step_case import ROWWISE, SGD, StepCase, smaller
from benchmarks.launches import StepCounts
from tests.ledger.jobs import register

LAYOUTS = [("table_wise", SGD), ("row_wise", SGD), ("mixed", SGD), ("column_wise", ROWWISE)]


def small(layout: str, optimizer: str = SGD, ranks: int = 2) -> StepCase:
    case = StepCase(layout, optimizer, "uniform", **launches.SIZES)
    return replace(smaller(case, tables=8, rows=32, batch=32), ranks=ranks, local_ranks=ranks)


def count_on_rank(case: StepCase) -> dict[str, Any]:
    register("ledger")
    return asdict(launches.count_second_step(case))


@pytest.fixture(scope="module")
def real() -> Iterator[list[StepCounts]]:
    """Counts of rank 0 of two real ranks, layout after layout."""
    with recshard_lab.launch(2) as pair:
        yield [StepCounts(**pair.run(count_on_rank, small(*layout))[0]) for layout in LAYOUTS]


@pytest.fixture(scope="module")
def mirrored() -> list[StepCounts]:
    """The same counted in one process."""
    return launches.count_in_new_process([small(*layout) for layout in LAYOUTS])


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(LAYOUTS)), ids=[layout for layout, _ in LAYOUTS])
def test_a_mirrored_rank_counts_as_a_real_one(real: list[StepCounts], mirrored: list[StepCounts], number: int) -> None:
    assert mirrored[number] == real[number]
    assert mirrored[number].collectives == (5 if LAYOUTS[number][1] == ROWWISE else 4)


@pytest.mark.gate
def test_kernels_to_join_do_not_grow_with_ranks_or_tables_and_lookups_are_a_phase_with_any_kernel() -> None:
    sizes = [{"ranks": 2, "tables": 8}, {"ranks": 8, "tables": 8}, {"ranks": 8, "tables": 16}]
    layouts = {"table_wise": 1, "row_wise": 1, "column_wise": 1, "grid_shard": 1, "mixed": 2}
    chosen = [replace(small(layout), local_ranks=2, **size) for layout in layouts for size in sizes]
    own = [replace(small("row_wise"), kernel=kernel) for kernel in launches.OWN_KERNELS]
    found = launches.count_in_new_process([*chosen, *own])
    for case, counts in zip(chosen, found, strict=False):
        assert counts.join <= layouts[case.layout], launches.label(case)
    for counts in found[len(chosen) :]:
        lookups = set(counts.by_phase[1])
        assert lookups
        assert lookups.isdisjoint({name for phase in (0, 2) for name in counts.by_phase[phase]})


@pytest.mark.gate
def test_rows_name_counts_and_the_lines_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    coded = replace(small("row_wise"), wire="fp16")
    monkeypatch.setattr(launches, "cases", lambda: [small("row_wise", ranks=4), coded])
    row, second, *most = launches.figures(lines=True)
    assert second.name == "W=2 row_wise, SGD, fp16 messages"
    assert "recshard_lab/comm/" not in second.note  # codecs count what they cut on the device
    assert row.name == "W=4 row_wise, SGD"
    assert row.value == len(row.note.splitlines()) == 1
    assert "recshard_lab/distributed/step/batch.py:" in row.note
    assert row.beside["kernels to join"] == 1
    promised = {name for name in launches.TARGETS if launches.MOST in name and "row norms" not in name}
    assert {figure.name for figure in most} == promised
    with pytest.raises(RuntimeError, match="W=2 diagonal, SGD could not be counted"):
        launches.count_in_new_process([small("diagonal")])
