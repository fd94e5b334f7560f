"""Draws the map of the notebooks and the ways out of them: ``python notebooks/images/boxes.py``, or by draw.py."""

import math
import re
from pathlib import Path
from textwrap import wrap

from recshard_lab.lab.draw.svg import Svg, standalone
from recshard_lab.lab.draw.theme import LABEL_INK


def card(svg: Svg, x: float, y: float, width: float, height: float, head: str, lines: list[str], fill: str) -> None:
    """A box with a bold line and others below it."""
    svg.rect(x, y, width, height, fill, extra='rx="7" stroke="currentColor" stroke-opacity=".55"')
    svg.text(x + 10, y + 19, head, bold=True, ink=LABEL_INK)
    for number, line in enumerate(lines):
        svg.text(x + 10, y + 37 + 14 * number, line, size=10.5, ink=LABEL_INK)


def arrow(svg: Svg, *points: tuple[float, float]) -> None:
    """A line through the points with a head at its end."""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    svg.path(path, 'fill="none" stroke="currentColor" stroke-width="1.6" stroke-opacity=".8"')
    (x0, y0), (x, y) = points[-2:]
    long = math.hypot(x - x0, y - y0)
    u, v = (x - x0) / long, (y - y0) / long
    wings = [(x - 8 * u + 4.5 * v, y - 8 * v - 4.5 * u), (x - 8 * u - 4.5 * v, y - 8 * v + 4.5 * u)]
    svg.path("M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in [(x, y), *wings]) + "Z", 'fill="currentColor"')


CHAPTERS = {  # chapter -> its question, and what you can do after each of its notebooks
    "I Tables": (
        "What is in a batch, and in a table?",
        {
            "01": "split a model over four ranks and prove that it learns the same",
            "02": "read and build a batch with any number of ids per sample",
            "03": "explain why one fused lookup is fast, and pick an optimizer",
            "04": "keep the order of ids, for models of sequences",
        },
    ),
    "II Shards": (
        "How is a table split, and what does it send?",
        {
            "05": "read a time line and find the rank that hangs",
            "06": "choose a scheme, draw your own, switch it while it trains",
            "07": "measure skew and replicate the hot rows",
            "08": "predict the memory of each rank and make a plan fit",
            "09": "send fewer bytes, and know what accuracy that costs",
            "10": "send less between nodes with two hops",
        },
    ),
    "III Plans": (
        "Which plan is best, and how sure is that?",
        {
            "11": "let the planner choose, and ask it why",
            "12": "calibrate predictions and state their error",
            "13": "simulate machines that you do not have",
            "14": "plan a model on your own and defend the plan",
        },
    ),
    "IV Train and serve": (
        "How does it run, from the first step to an answer?",
        {
            "15": "overlap communication with computation",
            "16": "run it with torchrun and resume after a kill",
            "17": "train on ids without a vocabulary",
            "18": "make a model small and serve it",
            "19": "find the best of many items for a user",
            "20": "run TorchRec code here",
        },
    ),
}
FILLS = ["#9ad6ae", "#9cc4ee", "#f6bd83", "#d3bdea"]


def rows_of_the_page() -> dict[str, tuple[str, str, str]]:
    """Number -> title, minutes in class and what comes before, as the table in TEACHING.md has them."""
    page = (Path(__file__).parents[1] / "TEACHING.md").read_text()
    rows = re.findall(r"^\| \[(\d\d) (.+?)\]\(\S+\) \| \S+ s \| (\d+) min \|[^|]*\| ?(.*?) ?\|$", page, re.MULTILINE)
    return {number: (title, minutes, before) for number, title, minutes, before in rows}


def draw_map() -> str:
    """The notebooks by chapter: what you can do after each, its minutes in class, and what it needs.

    It is narrow, so that it can be read at a width of 400 pixels.
    """
    words = "Begin at 01 and go down, or jump: each card names the lessons that it builds on."
    wide, high, gap, left, top, head = 228.0, 78.0, 7.0, 8.0, 62.0, 42.0
    counts = [math.ceil(len(lessons) / 2) for _, lessons in CHAPTERS.values()]
    height = top + sum(head + rows * (high + gap) + 14 for rows in counts)
    svg = Svg(2 * wide + gap + 2 * left, height, "Twenty lessons in four chapters", words)
    svg.text(left, 20, "Twenty lessons in four chapters", size=15, bold=True)
    for line, text in enumerate(wrap(words, 62)):
        svg.text(left, 37 + 15 * line, text, size=12)
    known, y = rows_of_the_page(), top
    for fill, (chapter, (question, lessons)) in zip(FILLS, CHAPTERS.items(), strict=True):
        svg.text(left, y + 16, chapter, size=14, bold=True)
        svg.text(left, y + 33, question, size=12)
        y += head
        for number, (lesson, can) in enumerate(lessons.items()):
            x = left + (number % 2) * (wide + gap)
            title, minutes, before = known[lesson]
            box = y + number // 2 * (high + gap)
            svg.rect(x, box, wide, high, fill, extra='rx="7" stroke="currentColor" stroke-opacity=".55"')
            svg.text(
                x + 9, box + 19, f"{lesson} {title}", size=13.5 if len(title) < 24 else 11, bold=True, ink=LABEL_INK
            )
            for line, text in enumerate(wrap(can, 34)):
                svg.text(x + 9, box + 36 + 14 * line, text, size=12, ink=LABEL_INK)
            needs = " ".join(dict.fromkeys(re.findall(r"\d\d", before)))
            svg.text(
                x + 9, box + high - 9, f"{minutes} min" + (f", after {needs}" if needs else ""), size=11, ink=LABEL_INK
            )
        y += math.ceil(len(lessons) / 2) * (high + gap) + 14
    return standalone(str(svg)) + "\n"


def draw_memory() -> str:
    """Four ranks under a cap that one of them breaks, and the move that makes the plan fit."""
    words = "Each rank stores its tables and needs buffers in a step. One table moves, and every rank fits."
    svg = Svg(880, 300, "Memory of four ranks", words)
    svg.head("Memory of four ranks", words, 14)
    ranks = [[("movies", 102), ("studios", 38)], [("users", 77)], [("actors", 64)], [("tags", 51)]]
    bottom, scale = 262.0, 1.15
    for number, tables in enumerate(ranks):
        x, y = 60 + 200 * number, bottom
        for place, (name, size) in enumerate([*tables, ("buffers", 15)]):
            y -= size * scale
            fill = FILLS[2] if name == "buffers" else FILLS[place]
            svg.rect(x, y, 120, size * scale, fill, extra='stroke="currentColor" stroke-opacity=".55"')
            svg.text(x + 8, y + size * scale / 2 + 4, name, size=11, ink=LABEL_INK)
        svg.text(x + 34, bottom + 20, f"rank {number}", bold=True)
    cap = bottom - 140 * scale
    svg.path(f"M40 {cap:.1f}L840 {cap:.1f}", 'stroke="#d9480f" stroke-width="1.8" stroke-dasharray="7 4" fill="none"')
    svg.text(700, cap - 7, "memory of a rank", size=11)
    arrow(svg, (180, bottom - 121 * scale), (720, bottom - 121 * scale), (720, bottom - 68 * scale))
    svg.text(400, bottom - 127 * scale, "one change", size=11)
    return standalone(str(svg)) + "\n"


def draw_nodes() -> str:
    """Direct and two-hop: which partial sums cross the link between two nodes."""
    words = "Two ranks of node 0 have partial sums for rank 2. Adding them first halves what crosses the link."
    svg = Svg(880, 262, "One hop or two", words)
    svg.head("One hop or two", words, 14)
    for left, title in ((14.0, "direct"), (452.0, "two-hop")):
        svg.text(left, 74, title, bold=True)
        for at, node in ((left, "node 0"), (left + 276, "node 1")):
            svg.rect(at, 84, 138, 162, "none", extra='rx="9" stroke="currentColor" stroke-opacity=".6"')
            svg.text(at + 10, 102, node, size=11)
        for number in range(2):
            y = 112 + 66 * number
            card(svg, left + 14, y, 110, 54, f"rank {number}", ["a partial sum"], FILLS[0])
            lines = [["needs the sum"], []][number]
            card(svg, left + 290, y, 110, 54, f"rank {number + 2}", lines, FILLS[1])
    arrow(svg, (138, 139), (304, 133))
    arrow(svg, (138, 205), (304, 150))
    svg.text(170, 222, "two messages cross", size=11)
    arrow(svg, (521, 178), (521, 166))
    arrow(svg, (576, 139), (742, 139))
    svg.text(606, 222, "one message crosses", size=11)
    return standalone(str(svg)) + "\n"


def draw_one_script() -> str:
    """How one script is started, and who reads what it leaves."""
    words = "However it is started, it computes the same numbers. Its checkpoint loads anywhere."
    svg = Svg(880, 318, "One script", words)
    svg.head("One script", words, 14)
    starts = [
        ("a notebook", "%recshard_launch -n 4"),
        ("alone", "python train.py"),
        ("torchrun", "torchrun --nproc-per-node 8 train.py"),
        ("Ray", 'launch(8, engine="ray")'),
    ]
    ends = [
        ("other ranks, another plan", "load_checkpoint(path, model)"),
        ("plain torch", "torch.load(path)"),
        ("serving", "quantize_embeddings(model)"),
    ]
    for number, (head, line) in enumerate(starts):
        y = 56 + 62 * number
        card(svg, 14, y, 236, 50, head, [line], FILLS[1])
        arrow(svg, (250, y + 25), (284, y + 25), (284, 178), (306, 178))
    script = ["the model, its data,", "a plan, join();", "or one run.yaml"]
    card(svg, 306, 132, 170, 92, "one script", script, FILLS[0])
    arrow(svg, (476, 178), (502, 178))
    card(svg, 502, 150, 122, 56, "a checkpoint", ["also after kill -9"], FILLS[2])
    for number, (head, line) in enumerate(ends):
        y = 72 + 80 * number
        card(svg, 672, y, 196, 50, head, [line], FILLS[1])
        arrow(svg, (624, 178), (648, 178), (648, y + 25), (672, y + 25))
    return standalone(str(svg)) + "\n"


def draw_dynamic() -> str:
    """What happens to an id of a batch in a dynamic table."""
    words = "An id of any value finds its slot, or gets one. A full table evicts the id with the lowest score."
    svg = Svg(880, 262, "One id in a dynamic table", words)
    svg.head("One id in a dynamic table", words, 14)
    card(svg, 14, 122, 150, 52, "an id of a batch", ["-7, or 10^15"], FILLS[1])
    card(svg, 206, 122, 172, 52, "the index", ["two buckets of 128 slots"], FILLS[0])
    ways = [
        ("it has a slot", "its row is read, its score changes"),
        ("a slot is free", "the id gets its initial row"),
        ("both buckets are full", "the lowest score loses its slot"),
    ]
    for number, (head, line) in enumerate(ways):
        y = 56 + 66 * number
        card(svg, 424, y, 218, 52, head, [line], FILLS[1])
        arrow(svg, (378, 148), (401, 148), (401, y + 26), (424, y + 26))
    arrow(svg, (164, 148), (206, 148))
    card(svg, 688, 188, 178, 52, "a slower tier, or lost", ["the row of the evicted id"], FILLS[2])
    arrow(svg, (642, 214), (688, 214))
    arrow(svg, (777, 188), (777, 148), (642, 148))
    svg.text(700, 140, "it comes back", size=10.5)
    return standalone(str(svg)) + "\n"


def draw_serving() -> str:
    """From a trained model to answers."""
    words = "A trained model becomes small. It is split over devices, or exported to a bundle for the server."
    svg = Svg(880, 262, "From a trained model to answers", words)
    svg.head("From a trained model to answers", words, 14)
    card(svg, 14, 122, 150, 52, "a trained model", ["rows in fp32"], FILLS[1])
    card(svg, 206, 122, 158, 52, "quantized", ["rows in INT8, INT4 ..."], FILLS[0])
    arrow(svg, (164, 148), (206, 148))
    ways = [("split over devices", "by the plans of training"), ("a bundle, v1", "torch.export and weights")]
    for number, (head, line) in enumerate(ways):
        y = 72 + 100 * number
        card(svg, 412, y, 186, 52, head, [line], FILLS[1])
        arrow(svg, (364, 148), (388, 148), (388, y + 26), (412, y + 26))
    card(svg, 660, 172, 206, 52, "recshard serve", ["JSON or tensors, in batches"], FILLS[2])
    arrow(svg, (598, 198), (660, 198))
    card(svg, 660, 72, 206, 52, "a newer bundle, v2", ["replaces v1, no request lost"], FILLS[1])
    arrow(svg, (763, 124), (763, 172))
    return standalone(str(svg)) + "\n"


def draw_retrieval() -> str:
    """From a user to the best items."""
    words = "An index finds few of many items by their vectors. A ranking model scores only these."
    svg = Svg(880, 250, "Retrieve, then rank", words)
    svg.head("Retrieve, then rank", words, 14)
    card(svg, 14, 72, 150, 52, "a user", ["id, age, occupation"], FILLS[1])
    card(svg, 206, 72, 150, 52, "user tower", ["a vector"], FILLS[0])
    card(svg, 398, 72, 168, 52, "the index", ["the 100 nearest vectors"], FILLS[2])
    card(svg, 608, 72, 118, 52, "ranking model", ["100 scores"], FILLS[0])
    card(svg, 766, 72, 100, 52, "the answer", ["the best ten"], FILLS[1])
    for start, end in [(164, 206), (356, 398), (566, 608), (726, 766)]:
        arrow(svg, (start, 98), (end, 98))
    card(svg, 14, 172, 150, 52, "all items", ["millions"], FILLS[1])
    card(svg, 206, 172, 150, 52, "item tower", ["once for each item"], FILLS[0])
    arrow(svg, (164, 198), (206, 198))
    arrow(svg, (356, 198), (482, 198), (482, 124))
    return standalone(str(svg)) + "\n"


def draw_torchrec() -> str:
    """How a TorchRec script reaches this library."""
    words = "The script stays as it is. Its import is answered by classes of this library, which train on any ranks."
    svg = Svg(880, 250, "A TorchRec script on your laptop", words)
    svg.head("A TorchRec script on your laptop", words, 14)
    card(svg, 14, 72, 190, 52, "train.py", ["import torchrec"], "#d3bdea")
    card(svg, 252, 72, 200, 52, "compat.install()", ["answers the import"], FILLS[0])
    card(svg, 500, 72, 172, 52, "recshard_lab", ["the same names"], FILLS[2])
    card(svg, 720, 72, 146, 52, "2 ranks", ["CPU, no GPU"], FILLS[1])
    for start, end in [(204, 252), (452, 500), (672, 720)]:
        arrow(svg, (start, 98), (end, 98))
    card(svg, 14, 172, 190, 52, "a plan of TorchRec", ["ShardingPlan"], "#d3bdea")
    card(svg, 500, 172, 172, 52, "a plan here", ["ShardingPlan"], FILLS[2])
    arrow(svg, (204, 188), (500, 188))
    arrow(svg, (500, 210), (204, 210))
    svg.text(272, 181, "compat.from_torchrec(plan)", size=10.5)
    svg.text(272, 227, "compat.to_torchrec(plan)", size=10.5)
    return standalone(str(svg)) + "\n"


Path(__file__).with_name("20_coming_from_torchrec.svg").write_text(draw_torchrec())
Path(__file__).with_name("19_retrieval.svg").write_text(draw_retrieval())
Path(__file__).with_name("18_serving.svg").write_text(draw_serving())
Path(__file__).with_name("17_dynamic_tables.svg").write_text(draw_dynamic())
Path(__file__).with_name("08_memory.svg").write_text(draw_memory())
Path(__file__).with_name("10_nodes.svg").write_text(draw_nodes())
Path(__file__).with_name("16_one_script.svg").write_text(draw_one_script())
Path(__file__).with_name("00_map.svg").write_text(draw_map())
