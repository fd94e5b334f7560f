"""The closed formulas of bytes in the schemes' docstrings against the cost model and against bytes that ranks count."""

import re
from typing import Any

import numpy as np
import pytest

import recshard_lab as rs
from recshard_lab.lab import measure_plan
from recshard_lab.launcher import launch
from recshard_lab.sharding import ParameterSharding, ShardingPlan, Topology, scheme_named, scheme_names

CASES = [
    {"W": 4, "N": 2, "B": 512, "L": 10, "D": 32, "E": 8_000},
    {"W": 4, "N": 2, "B": 64, "L": 40, "D": 16, "E": 400},  # most rows repeat: replicas exchange distinct rows
]
MODELLED = [*CASES, {"W": 8, "N": 4, "B": 256, "L": 1, "D": 64, "E": 80_000}]


def formula(scheme: str) -> str:
    """The formula in the docstring of the scheme's file, as Python."""
    module = __import__(type(scheme_named(scheme)).__module__, fromlist=["__doc__"])
    found = re.search(r"Bytes between ranks per step.*?``(4 \*.*?)``", module.__doc__ or "", re.DOTALL)
    assert found is not None, f"{scheme} has no formula"
    return " ".join(found[1].split())


def distinct(rows: float, ids: float) -> float:
    """Distinct rows among `ids` ids of `rows` equally likely rows."""
    return rows * (1 - (1 - 1 / rows) ** ids)


def bytes_by_formula(scheme: str, case: dict[str, int]) -> float:
    rows, ids = case["E"], case["B"] * case["L"]
    names: dict[str, Any] = {**case, "U": distinct(rows, ids), "min": min}
    if scheme == "flex_shard":
        hot = max(1, rows // 100)
        names |= {"h": hot / rows, "U": distinct(hot, ids * hot / rows)}
    return float(eval(formula(scheme), {"__builtins__": {}}, names))


def problem(scheme: str, case: dict[str, int]) -> tuple[ShardingPlan, list[rs.EmbeddingBagConfig], rs.Workload]:
    table = rs.EmbeddingBagConfig(case["E"], case["D"], name="t", feature_names=["f"])
    plan = ShardingPlan({"": {"t": ParameterSharding(scheme)}})  # type: ignore[dict-item]
    return plan.resolved([table], case["W"], case["N"]), [table], rs.Workload(case["B"], float(case["L"]))


def without_sizes(traffic: dict[str, np.ndarray]) -> float:
    """Bytes between different ranks, without the messages of sizes."""
    kept = [sent for label, sent in traffic.items() if label != "input_dist/sizes"]
    return float(sum(sent.sum() - sent.trace() for sent in kept))


@pytest.mark.parametrize("scheme", scheme_names())
def test_the_formula_is_what_the_cost_model_counts(scheme: str) -> None:
    for case in MODELLED:
        plan, tables, workload = problem(scheme, case)
        found = rs.estimate(plan, tables, Topology(case["W"], local_world_size=case["N"]), workload)
        replicated = scheme in ("data_parallel", "flex_shard")  # the model estimates distinct rows by bins of ranks
        expected = bytes_by_formula(scheme, case)
        assert without_sizes(found.traffic_by_phase) == pytest.approx(expected, rel=0.01 if replicated else 1e-9)


@pytest.mark.gate
def test_the_formula_is_what_ranks_count() -> None:
    with launch(4, nodes=2) as ranks:
        for case in CASES:
            for scheme in scheme_names():
                plan, tables, workload = problem(scheme, case)
                counted = without_sizes(measure_plan(ranks, plan, tables, workload, steps=4).traffic_by_phase)
                assert counted == pytest.approx(bytes_by_formula(scheme, case), rel=0.02), (scheme, case)
