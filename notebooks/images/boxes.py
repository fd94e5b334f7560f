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


MAP = {  # column, row, what you can do after it
    "01_shard_your_first_model": (0, 1, "cut a model over four ranks, prove that it learns the same"),
    "02_jagged_tensors": (1, 0, "read and build the batch that everything else eats"),
    "03_embedding_collections": (2, 0, "say why batched tables are fast, and pick an optimizer"),
    "05_ranks_and_hangs": (1, 1, "read a time line, find the rank that hangs"),
    "06_sharding_schemes": (2, 1, "choose a cut, draw your own, change it while it trains"),
    "11_the_planner": (3, 1, "plan for 128 GPUs you have not got, and know how sure that is"),
    "15_the_training_pipeline": (2, 2, "hide what can be hidden; tell measured from simulated"),
    "16_out_of_the_notebook": (3, 2, "train on a cluster, survive a kill, bring TorchRec code"),
    "17_dynamic_tables": (3, 0, "train on ids without a vocabulary, choose which rows stay in fast memory"),
    "18_serving": (0, 2, "make a model small, serve it, replace it under load"),
    "19_retrieval": (1, 2, "find 100 of many items for a user, rank them, serve both"),
}
FILLS = ["#9ad6ae", "#9cc4ee", "#f6bd83"]


def draw_map() -> str:
    """Which notebook leads where; seconds are those of TEACHING.md, which a test compares with reality."""
    told = (Path(__file__).parents[1] / "TEACHING.md").read_text()
    seconds = {name: re.search(rf"{name}\.ipynb\) \| (\d+) s \| (\d+) min", told) for name in MAP}
    words = "Begin at 01. Above: batches and tables. Middle: ranks and plans. Below: serving, speed, and leaving."
    svg = Svg(880, 462, "The notebooks", words)
    wide, high, gap_x, gap_y, top = 196.0, 112.0, 26.0, 22.0, 56.0
    svg.head("The notebooks", words, 14)

    def at(name: str) -> tuple[float, float]:
        return 14 + MAP[name][0] * (wide + gap_x), top + MAP[name][1] * (high + gap_y)

    for name, (_, row, can) in MAP.items():
        x, y = at(name)
        head, *rest = wrap(f"{name[:2]} {TITLES[name]}", 27)
        lines = [*rest, *wrap(f"then you can {can}", 31)]
        card(svg, x, y, wide, high, head, lines, FILLS[row])
        found = seconds[name]
        assert found, f"TEACHING.md has no times for {name}"
        times = f"{found[1]} s to run, {found[2]} min in class"
        svg.text(x + 10, y + high - 9, times, size=10, ink=LABEL_INK, extra='opacity=".85"')
    sides = [("02", "03"), ("03", "09"), ("01", "04"), ("04", "05"), ("05", "06"), ("07", "08"), ("10", "11")]
    place = {name[:2]: at(name) for name in MAP}
    for one, other in sides:
        (x, y), (to_x, _) = place[one], place[other]
        arrow(svg, (x + wide, y + high / 2), (to_x, y + high / 2))
    (x, y), (to_x, to_y) = place["01"], place["02"]
    arrow(svg, (x + wide / 2, y), (x + wide / 2, to_y + high / 2), (to_x, to_y + high / 2))
    (x, y), (_, to_y) = place["01"], place["10"]
    arrow(svg, (x + wide / 2, y + high), (x + wide / 2, to_y))
    (x, y), (to_x, to_y) = place["04"], place["07"]
    between = y + high + gap_y / 2
    arrow(svg, (x + wide / 2, y + high), (x + wide / 2, between), (to_x + wide / 2, between), (to_x + wide / 2, to_y))
    return standalone(str(svg)) + "\n"


TITLES = {
    "01_shard_your_first_model": "Shard your first model",
    "02_jagged_tensors": "Jagged tensors",
    "03_embedding_collections": "Embedding collections",
    "05_ranks_and_hangs": "Ranks and hangs",
    "06_sharding_schemes": "Sharding schemes",
    "11_the_planner": "The planner",
    "15_the_training_pipeline": "The training pipeline",
    "16_out_of_the_notebook": "Out of the notebook",
    "17_dynamic_tables": "Dynamic tables",
    "18_serving": "Serving",
    "19_retrieval": "Retrieval",
}


def draw_one_script() -> str:
    """How one script is started, and who reads what it leaves."""
    words = "However it is started, it computes the same; whoever reads its checkpoint, needs to know nothing of ranks."
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
    card(svg, 306, 56, 170, 50, "TorchRec's code", ["its import answered here"], "#d3bdea")
    arrow(svg, (391, 106), (391, 132))
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


Path(__file__).with_name("19_retrieval.svg").write_text(draw_retrieval())
Path(__file__).with_name("18_serving.svg").write_text(draw_serving())
Path(__file__).with_name("17_dynamic_tables.svg").write_text(draw_dynamic())
Path(__file__).with_name("16_one_script.svg").write_text(draw_one_script())
Path(__file__).with_name("00_map.svg").write_text(draw_map())
