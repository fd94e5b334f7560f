"""Draws the pictures of docs/ and of the README: ``python docs/pictures.py``. A test draws them again and compares."""

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import recshard_lab as rs
from recshard_lab.lab import views
from recshard_lab.lab.charts import spec
from recshard_lab.lab.draw.svg import Svg, standalone
from recshard_lab.lab.draw.theme import LABEL_INK, LINES
from recshard_lab.lab.draw.view import View

ROOT = Path(__file__).parent
GREY, YELLOW = "#dfe3e8", "#f1d774"
MLPERF = "Predicted, not measured: MLPerf's DLRM-DCNv2, batch 65,536, on 8 H100."
RANKS = ("#9cc4ee", "#f6bd83", "#9ad6ae", "#d3bdea")


def box(svg: Svg, x: float, y: float, width: float, height: float, fill: str, *lines: str) -> None:
    """A box with a bold first line and others below it."""
    svg.rect(x, y, width, height, fill, extra='rx="6" stroke="currentColor" stroke-opacity=".55"')
    for number, line in enumerate(lines):
        svg.text(x + 9, y + 18 + 15 * number, line, bold=not number, ink=LABEL_INK)


def arrow(svg: Svg, x: float, y: float, to_x: float, to_y: float, words: str = "") -> None:
    """A line with a head at its end, and words above its middle."""
    svg.line(x, y, to_x, to_y, 'stroke-width="1.5"')
    long = math.hypot(to_x - x, to_y - y)
    u, v = (to_x - x) / long, (to_y - y) / long
    wings = [(to_x - 8 * u + 4 * v, to_y - 8 * v - 4 * u), (to_x - 8 * u - 4 * v, to_y - 8 * v + 4 * u)]
    svg.path("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in [(to_x, to_y), *wings]) + "Z", 'fill="currentColor"')
    svg.text((x + to_x) / 2, (y + to_y) / 2 - 5, words, anchor="middle", size=10)


def tiling() -> str:
    """One table under every scheme: its rectangles, in the colour of their rank."""
    rows, columns = 8, 8
    table = rs.EmbeddingBagConfig(rows, columns, name="movies", feature_names=["movie"])
    topology = rs.Topology(4, local_world_size=2)
    words = "One table of 8 rows x 8 columns on 4 ranks in 2 nodes. Every rectangle is a shard. Its number is its rank."
    svg = Svg(860, 408, "A plan is a tiling", words)
    svg.head("A plan is a tiling", words, 14)
    cell, size = 14.0, 14.0 * rows
    for number, name in enumerate(rs.sharding.scheme_names()):
        left, top = 30 + 211 * (number % 4), 74 + 172 * (number // 4)
        svg.text(left, top - 8, name, bold=True)
        shards = rs.sharding.schemes.scheme_named(name).default(table, topology).shards
        same: dict[tuple[tuple[int, int], tuple[int, int]], list[int]] = {}
        for shard in shards:
            same.setdefault((shard.rows, shard.cols), []).append(shard.rank)
        for ((r0, r1), (c0, c1)), ranks in same.items():
            fill = GREY if len(ranks) > 1 else RANKS[ranks[0]]
            x, y = left + cell * c0, top + cell * r0
            svg.rect(x, y, cell * (c1 - c0), cell * (r1 - r0), fill, extra='stroke="currentColor"')
            shown = f"ranks {min(ranks)}-{max(ranks)}" if len(ranks) > 1 else str(ranks[0])
            middle = x + cell * (c1 - c0) / 2, y + cell * (r1 - r0) / 2 + 4
            svg.text(*middle, shown, anchor="middle", ink=LABEL_INK)
        copies = max(len(ranks) for ranks in same.values())
        count = f"{len(shards)} shard{'s' * (len(shards) > 1)}" + (f", {copies} copies" * (copies > 1))
        svg.text(left, top + size + 16, count, soft=True)
    return standalone(str(svg))


def compare() -> str:
    """MLPerf's model under the planner's plan and under single schemes."""
    found = rs.compare_plans(
        rs.planner.mlperf_dlrm_dcnv2_tables(),
        rs.Topology.preset("h100x8"),
        {name: name for name in ("planner", "row_wise", "column_wise", "table_wise")},
        workload=rs.planner.mlperf_dlrm_dcnv2_workload(),
    )
    return standalone(views.side_by_side(found, note=MLPERF).svg)


@lru_cache
def mlperf() -> rs.planner.Estimate:
    """The planner's plan of MLPerf's model on 8 H100, estimated."""
    load = rs.planner.mlperf_dlrm_dcnv2_workload()
    return rs.plan(rs.planner.mlperf_dlrm_dcnv2_tables(), "h100x8", workload=load).estimate


def memory() -> str:
    """What fills the memory of a rank."""
    return standalone(views.memory(mlperf(), note=f"{MLPERF} Element-wise Adagrad.").svg)


def phases() -> str:
    """The six phases of a step on every rank."""
    return standalone(views.phases(mlperf(), note=MLPERF).svg)


def published() -> str:
    """Every published step beside its prediction."""
    from benchmarks.published import published_ms

    content = json.loads((ROOT.parent / "benchmarks" / "published.json").read_text())
    groups: dict[str, list[tuple[float, float, str, str]]] = {}
    for entry in content["points"]:
        name = entry["name"].partition(",")[0] + ("" if entry["executor"] == "fused" else ", sparse Adagrad")
        ms, ratio = published_ms(entry), content["recorded"][entry["name"]]
        groups.setdefault(name, []).append((ms, ms * ratio, f"{entry['name']}: {ratio:.2f}", ""))
    every = [value for rows in groups.values() for row in rows for value in row[:2]]
    ends = min(every), max(every)
    marks: list[spec.Mark] = [spec.Lines("equal", ends, ends, dash="6 3", legend=False)]
    for (name, rows), (colour, _, symbol) in zip(sorted(groups.items()), LINES, strict=False):
        marks += spec.points(name, rows, colour=colour, symbol=symbol, size=4.5)
    panel = spec.Panel(
        spec.log(every, "published ms per step"), spec.log(every, "predicted ms per step"), tuple(marks), height=300
    )
    caption = "On the dashed line a prediction equals the published step. No figure was fitted to these steps."
    chart = spec.Chart("Predicted beside published steps on GPUs", caption, ((panel,),))
    return standalone(View.of_chart("published", chart, [], 860).svg)


def launcher() -> str:
    """Processes of a notebook with four ranks."""
    words = "Ranks are processes that persist between cells. Each rank has its own pipe to the kernel."
    svg = Svg(860, 302, "The launcher", words)
    svg.head("The launcher", words, 14)
    box(svg, 14, 106, 180, 84, GREY, "Notebook kernel", "ranks = rs.launch(4)", "ranks.exec(...)", "ranks.pull(...)")
    box(svg, 290, 106, 150, 84, YELLOW, "Fork server", "has imported torch,", "forks a rank at each", "launch")
    arrow(svg, 194, 148, 290, 148, "start")
    for rank, fill in enumerate(RANKS):
        y = 52 + 49 * rank
        box(svg, 560, y, 190, 42, fill, f"Rank {rank}", "a process and a session")
        arrow(svg, 440, 148, 560, y + 21)
    svg.path("M104 190V274H655V241", 'fill="none" stroke="currentColor" stroke-dasharray="5 3"')
    svg.text(380, 268, "pipes: cells and variables in, printed lines and errors out", anchor="middle", size=10)
    svg.path("M750 73H790V220H750M750 122H790M750 171H790", 'fill="none" stroke="currentColor"')
    for number, line in enumerate(("collectives", "(Gloo, NCCL)")):
        svg.text(796, 144 + 13 * number, line, size=10)
    return standalone(str(svg))


def dynamic() -> str:
    """The life of an id in a dynamic table."""
    words = "An id gets a row when it is admitted. A full table evicts the row with the lowest score."
    svg = Svg(860, 222, "An id in a dynamic table", words)
    svg.head("An id in a dynamic table", words, 14)
    box(svg, 14, 76, 126, 52, GREY, "id 10**15", "any int64")
    box(svg, 232, 76, 150, 52, RANKS[0], "index", "buckets of 128 slots")
    box(svg, 486, 76, 150, 52, RANKS[0], "row", "weights, state, score")
    box(svg, 232, 160, 150, 52, GREY, "initial row", "from seed, table, id")
    box(svg, 726, 76, 120, 52, RANKS[1], "tier", "host, disk, Redis")
    arrow(svg, 140, 102, 232, 102, "look up")
    arrow(svg, 382, 102, 486, 102, "found")
    arrow(svg, 307, 128, 307, 160)
    svg.text(313, 148, "no row yet", size=10)
    svg.path("M382 186H561V136", 'fill="none" stroke="currentColor" stroke-width="1.5"')
    arrow(svg, 561, 150, 561, 128)
    svg.text(472, 181, "admitted: inserted", anchor="middle", size=10)
    arrow(svg, 636, 94, 726, 94, "evicted")
    arrow(svg, 726, 114, 636, 114)
    svg.text(681, 128, "used again", anchor="middle", size=10)
    return standalone(str(svg))


def pipeline() -> str:
    """What each pipeline does at the same time, for three batches."""
    words = "Boxes of one colour belong to one batch. Widths are chosen, not measured."
    svg = Svg(860, 376, "What overlaps in a training pipeline", words)
    svg.head("What overlaps in a training pipeline", words, 14)
    parts = {"load": 34.0, "input_dist": 60.0, "lookup": 46.0, "dense": 140.0}
    for number, (name, ahead) in enumerate(
        {"a plain loop": 0, "TrainPipelineBase": 1, "TrainPipelineSparseDist": 2, "TrainPipelineSemiSync": 3}.items()
    ):
        top = 66 + 80 * number
        svg.text(14, top, name, bold=True)
        before, within = list(parts.items())[:ahead], list(parts.items())[ahead:]
        step = max(sum(width for _, width in within), sum(width for _, width in before))
        for batch in range(3):
            start = 14 + sum(width for _, width in before) + step * batch
            _lane(svg, start - sum(width for _, width in before), top + 36, batch, before)
            _lane(svg, start, top + 10, batch, within)
    return standalone(str(svg))


def _lane(svg: Svg, x: float, y: float, batch: int, parts: list[tuple[str, float]]) -> None:
    for name, width in parts:
        svg.rect(x, y, width - 2, 22, RANKS[batch], extra='stroke="currentColor" stroke-opacity=".55"')
        svg.text(x + width / 2 - 1, y + 15, f"{name} {batch}", anchor="middle", size=9.5, ink=LABEL_INK)
        x += width


PICTURES: dict[str, Callable[[], str]] = {
    draw.__name__: draw for draw in (tiling, compare, memory, phases, published, launcher, dynamic, pipeline)
}
"""Name of a file in docs/images -> what draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (ROOT / "images" / f"{name}.svg").write_text(draw() + "\n")
