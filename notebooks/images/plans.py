"""Draws the pictures of notebooks 11 to 14: ``python notebooks/images/plans.py``, or by draw.py."""

import json
import math
import random
from pathlib import Path
from typing import Any

import recshard_lab as rs
from recshard_lab.lab import views
from recshard_lab.lab.draw.svg import Svg, standalone

FOLDER = Path(__file__).parent
EXECUTORS = {"TorchRec": "#9cc4ee", "HugeCTR": "#9ad6ae", "SOK": "#f6bd83", "TF2": "#d6c4ee", "TF2, sparse": "#eceff3"}


def save(markup: Any, name: str) -> None:
    (FOLDER / name).write_text(standalone(markup) + "\n")


def waiting() -> Any:
    """The tables of notebook 11, whole, on eight ranks in turn."""
    draw = random.Random(1)
    names = [f"t{i}" for i in range(26)]
    sizes = {name: (int(10 ** draw.uniform(3, 7)), draw.choice([32, 64, 128])) for name in names}
    tables = [rs.EmbeddingBagConfig(rows, dim, name=name, feature_names=[name]) for name, (rows, dim) in sizes.items()]
    ids = {name: draw.uniform(1, 20) for name in names} | {"t16": 60.0}
    load = rs.Workload(batch_size=4096, pooling_factors=ids, optimizer="exact_row_wise_adagrad")
    in_turn = {name: rs.ParameterConstraints(["table_wise"], ranks=[i % 8]) for i, name in enumerate(names)}
    plan = rs.plan(tables, rs.Topology.preset("h100x8"), workload=load, constraints=in_turn)
    return views.phases(plan.estimate, note="Predicted: 26 whole tables, in turn on 8 H100s.").svg


def trust() -> str:
    """Predicted / published, one dot per published step, by executor."""
    low, high, left, wide, top, row = 1 / 8, 2.0, 132.0, 700.0, 74.0, 42.0
    rows: dict[str, list[float]] = {name: [] for name in EXECUTORS}
    found = json.loads((FOLDER.parents[1] / "benchmarks" / "published.json").read_text())
    for point in found["points"]:
        name = point["name"].split(",")[0] if point["executor"] == "fused" else "TF2, sparse"
        rows[name].append(found["recorded"][point["name"]])
    count = sum(map(len, rows.values()))
    words = f"{count} published steps. 1: as published. Left of it, the prediction is too short."
    svg = Svg(880, top + row * len(rows) + 62, "Predicted divided by published training steps", words)
    svg.head("Predicted divided by published training steps", words, 14)

    def x(ratio: float) -> float:
        return left + wide * math.log(ratio / low) / math.log(high / low)

    bottom = top + row * len(rows)
    svg.rect(x(0.5), top - 8, x(2.0) - x(0.5), bottom - top + 8, "#9ad6ae", extra='fill-opacity=".25"')
    svg.text(x(0.5) + 8, top + 4, "within a factor of 2", size=11)
    for mark in (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0):
        svg.path(f"M{x(mark):.1f} {top - 8}V{bottom}", 'stroke="currentColor" stroke-opacity=".35"')
        svg.text(x(mark) - 8, bottom + 18, f"{mark:g}", size=11)
    for number, (name, ratios) in enumerate(rows.items()):
        y = top + row * (number + 0.5)
        svg.text(14, y + 4, f"{name} ({len(ratios)})", size=12)
        for ratio in ratios:
            svg.raw(
                f'<circle cx="{x(ratio):.1f}" cy="{y:.1f}" r="6" fill="{EXECUTORS[name]}" stroke="currentColor" '
                f'stroke-opacity=".7"/>'
            )
    svg.text(
        14,
        bottom + 44,
        "Data: recshard bench published. Sparse: the optimizer runs as separate operators.",
        size=11,
    )
    return str(svg)


def what_if() -> Any:
    """MLPerf's DLRM-DCNv2 on 2 to 128 GPUs of two kinds."""
    load = rs.planner.mlperf_dlrm_dcnv2_workload(pipeline="sparse_dist")
    counts, kinds = [2, 8, 16, 32, 64, 128], ["a100", "h100"]
    tables = rs.planner.mlperf_dlrm_dcnv2_tables()
    swept = rs.sweep(tables, load, topology=kinds, world_size=counts, global_batch_size=65_536)
    return views.pareto(swept, note="MLPerf's DLRM-DCNv2; published figures, no machine was measured.").svg


def capstone() -> Any:
    """The baselines of notebook 14."""
    file = rs.planner.read_tables(FOLDER.parent / "examples" / "capstone.yaml")
    load = file.workload(batch_size=2048, optimizer="exact_row_wise_adagrad")
    hosts = rs.Topology.preset("h100x16")
    by_hand = {
        table.name: rs.ParameterConstraints(["row_wise"])
        if table.weight_bytes > hosts.free_memory_bytes() / 2
        else rs.ParameterConstraints(["table_wise"], ranks=[i % 16])
        for i, table in enumerate(file.tables)
    }
    plans = {"baseline": by_hand, "row_wise": "row_wise", "column_wise": "column_wise"}
    compared = rs.compare_plans(file.tables, hosts, plans, load)
    return views.side_by_side(compared, note="Predicted: 40 tables on 2 x 8 H100s.").svg


if __name__ == "__main__":
    save(waiting(), "11_planner.svg")
    save(trust(), "12_trust.svg")
    save(what_if(), "13_what_if.svg")
    save(capstone(), "14_capstone.svg")
