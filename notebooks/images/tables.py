"""Draws the pictures of notebooks 01 to 04: ``python notebooks/images/tables.py``, or by draw.py."""

from pathlib import Path
from typing import Any

import torch

import recshard_lab as rs
from recshard_lab.lab import compare_lookups, random_batch, views
from recshard_lab.lab.draw.svg import Svg, standalone
from recshard_lab.lab.draw.theme import LABEL_INK

WIDE, HIGH = 160.0, 34.0  # of a box
ROWS = {"user": 943, "movie": 1682, "age": 7, "gender": 2, "occupation": 21, "genres": 19}  # MovieLens 100K


def save(picture: Any, name: str) -> None:
    Path(__file__).with_name(name).write_text(standalone(str(getattr(picture, "svg", picture))) + "\n")


def draw_placement() -> Any:
    """The plan of notebook 01."""
    tables = [rs.EmbeddingBagConfig(rows, 16, name=name, feature_names=[name]) for name, rows in ROWS.items()]
    plan = rs.plan(tables, rs.Topology(4), movie="row_wise")
    return views.placement(plan, tables, note="Tables of MovieLens 100K.")


def draw_jagged() -> Any:
    ids, lengths = torch.tensor([10, 11, 12, 40, 41, 42, 3, 5, 5, 7, 1]), torch.tensor([2, 1, 0, 3, 1, 1, 2, 1])
    return views.jagged_anatomy(rs.KeyedJaggedTensor(["film", "genre"], ids, lengths=lengths), note="Made by hand.")


def draw_lookups() -> Any:
    """The time of a step of the same tables in two ways, measured now."""
    torch.set_num_threads(1)
    counts, lines = [1, 2, 4, 8, 16, 26], {}
    for count in counts:
        tables = [rs.EmbeddingBagConfig(20_000, 32, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(count)]
        found = compare_lookups(tables, random_batch(tables, rs.Workload(64, 2.0)), repeats=50)
        for way, phases in found.ms.items():
            lines.setdefault(way, ([], []))
            lines[way][0].append(count)
            lines[way][1].append(sum(phases.values()))
    note = "64 samples, 2 ids per bag, tables of 20,000 x 32, one CPU thread; measured when this was drawn."
    words = f"At 26 tables, separate modules take {found.ratio:.1f} times as long."
    return views.curves(lines, x_label="tables", y_label="ms per step", summary=words, note=note)


def box(svg: Svg, x: float, y: float, text: str, fill: str) -> None:
    svg.rect(x, y, WIDE, HIGH, fill, extra='rx="7" stroke="currentColor" stroke-opacity=".55"')
    svg.text(x + 10, y + 21, text, size=11, ink=LABEL_INK)


def line(svg: Svg, x: float, y: float, to_x: float, to_y: float) -> None:
    svg.path(f"M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}", 'fill="none" stroke="currentColor" stroke-opacity=".7"')


def draw_sequences() -> Svg:
    """One history in SASRec: rows, states, scores."""
    words = "Each place sees the films up to it. Its state scores the next film above a random one."
    svg = Svg(880, 316, "One history in a sequence model", words)
    svg.head("One history in a sequence model", words, 14)
    films = ["Toy Story", "Heat", "Casino", "Fargo", "the held-out film"]
    kinds = [("history", "#9cc4ee", 62), ("rows of the table", "#9ad6ae", 124), ("states", "#f6bd83", 206)]
    kinds.append(("highest scores", "#d3bdea", 268))
    for label, _, y in kinds:
        svg.text(14, y + 21, label, size=11)
    for place, film in enumerate(films[:-1]):
        x = 118 + place * (WIDE + 26)
        texts = [film, f"row of {film}", f"state {place + 1}", films[place + 1]]
        for text, (_, fill, y) in zip(texts, kinds, strict=True):
            box(svg, x, y, text, fill)
        middle = x + WIDE / 2
        for top, bottom in ((62 + HIGH, 124), (206 + HIGH, 268)):
            line(svg, middle, top, middle, bottom)
        for earlier in range(place + 1):
            line(svg, 118 + earlier * (WIDE + 26) + WIDE / 2, 124 + HIGH, middle, 206)
    return svg


if __name__ == "__main__":
    save(draw_placement(), "01_placement.svg")
    save(draw_jagged(), "02_jagged.svg")
    save(draw_lookups(), "03_batched.svg")
    save(draw_sequences(), "04_sequences.svg")
