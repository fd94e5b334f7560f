"""The launches that the cost model charges on a GPU are those that a step makes on the ledger device."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import launches
from benchmarks.apparatus.step_case import ROWWISE, SGD, StepCase, smaller
from recshard_lab.planner.model.launch_counts import KERNELS, LAUNCHES, Launches

BASE = replace(
    smaller(StepCase("table_wise", SGD, "uniform", **launches.SIZES), tables=26, rows=32, batch=32),
    ranks=8,
    local_ranks=4,
)
ROWS = replace(BASE, layout="row_wise")
COLUMNS = replace(BASE, layout="column_wise")
#: a plan with a property, and the same plan without it
PAIRS = {
    "table_wise": (BASE, None),
    "row_shards": (ROWS, BASE),
    "replicas": (replace(BASE, layout="mixed"), ROWS),
    "two_hop": (replace(ROWS, route="two_hop"), ROWS),
    "distinct_rows": (replace(ROWS, route="distinct_rows"), ROWS),
    "fp16": (replace(ROWS, wire="fp16"), ROWS),
    "bf16": (replace(ROWS, wire="bf16"), ROWS),
    "int8": (replace(ROWS, wire="int8"), ROWS),
    "norms": (replace(COLUMNS, optimizer=ROWWISE), COLUMNS),
}
OTHERS = {  # more ranks, more tables, and plans that have several properties
    "ranks": (replace(ROWS, ranks=32), ("table_wise", "row_shards")),
    "tables": (replace(BASE, tables=8), ("table_wise",)),
    "columns": (COLUMNS, ("table_wise",)),
    "grid": (replace(BASE, layout="grid_shard"), ("table_wise", "row_shards")),
    "reduce_scatter": (replace(ROWS, route="reduce_scatter"), ("table_wise", "row_shards")),
    "replicas alone": (replace(BASE, layout="data_parallel"), ("table_wise", "replicas")),
}
Counted = Mapping[StepCase, list[dict[str, int]]]


@pytest.fixture(scope="module")
def counted() -> Counted:
    """Operators by phase of every case here."""
    cases = list(dict.fromkeys([*(case for case, _ in PAIRS.values()), *(case for case, _ in OTHERS.values())]))
    found = launches.count_in_new_process(cases)
    return {case: counts.by_phase for case, counts in zip(cases, found, strict=True)}


def numbers(by_phase: list[dict[str, int]]) -> np.ndarray:
    """Operators, and kernels, in each phase: ``[2, 6]``."""
    kernels = [sum(KERNELS.get(name, 1) * count for name, count in phase.items()) for phase in by_phase]
    return np.array([[sum(phase.values()) for phase in by_phase], kernels])


@pytest.mark.gate
@pytest.mark.parametrize("name", PAIRS)
def test_a_property_launches_what_the_cost_model_charges_for_it(counted: Counted, name: str) -> None:
    case, without = PAIRS[name]
    found = numbers(counted[case]) - (0 if without is None else numbers(counted[without]))
    assert LAUNCHES[name] == Launches(*(tuple(row) for row in found.tolist()))


@pytest.mark.parametrize("name", OTHERS)
def test_counts_add_up_and_do_not_grow_with_ranks_or_tables(counted: Counted, name: str) -> None:
    case, properties = OTHERS[name]
    charged = sum(np.array(LAUNCHES[each].operators) for each in properties)
    found = numbers(counted[case])[0]
    assert abs(found.sum() - charged.sum()) <= 0.15 * charged.sum(), (found, charged)


def test_every_operator_of_several_kernels_is_launched(counted: Counted) -> None:
    seen = {name for by_phase in counted.values() for phase in by_phase for name in phase}
    assert set(KERNELS) <= seen
