"""Anatomy of a jagged batch: the bags a reader thinks of, and the flat tensors that hold them.

Above, samples by features with the ids of each bag. Below, `lengths`, `offsets` and `values` (and `weights`) as they
lie in memory, feature after feature, each bag joined to its slice of the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, Look, number
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.text_table import TextTable

if TYPE_CHECKING:
    from recshard_lab.sparse import KeyedJaggedTensor

MOST_CELLS = 26  # in one row of the picture
LEFT, CELL_HEIGHT = 76.0, 24.0

_FILLS = ("#9cc4ee", "#f6bd83", "#9ad6ae", "#d3bdea", "#f1d774", "#8fd6d6", "#f0a9b8", "#c9ced6")


@dataclass(frozen=True)
class _Bag:
    key: str
    sample: int
    ids: list[Any]
    weights: list[float] | None
    look: Look


@register_view("Jagged batch", place=7)
def jagged_anatomy(kjt: KeyedJaggedTensor, *, note: str = "", width: int = 860) -> View:
    """Bags and tensors of a batch; of a large one its first features and samples.

    Args:
        kjt: the batch, F features of B samples.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    >>> import torch
    >>> from recshard_lab.sparse import KeyedJaggedTensor
    >>> ids, lengths = torch.tensor([10, 11, 12, 3]), torch.tensor([2, 0, 1, 1])
    >>> jagged_anatomy(KeyedJaggedTensor(["movie", "genre"], ids, lengths=lengths)).summary
    'Bag b of feature f has lengths[f * 2 + b] ids: values from offsets[f * 2 + b] up to the next offset.'
    """
    keys, counts = list(kjt.keys()), list(kjt.stride_per_key())
    if not keys or not sum(counts):
        return message_view("jagged_anatomy", "Jagged batch", "The batch has no bag to show.")
    bags, whole = _bags(kjt, keys, counts)
    title = f"Jagged batch: {len(keys)} features, {sum(counts)} bags, {kjt.values().numel()} ids"
    if kjt.variable_stride_per_key():
        summary = "Features have bags of their own number: lengths and offsets count them feature after feature."
    else:
        stride = kjt.stride()
        summary = (
            f"Bag b of feature f has lengths[f * {stride} + b] ids: values from offsets[f * {stride} + b] up to the "
            f"next offset."
        )
    if not whole:
        samples = 1 + max(bag.sample for bag in bags)
        summary = f"Drawn: {len({bag.key for bag in bags})} of the features, their first {samples} samples. {summary}"

    def draw(uid: str) -> Svg:
        return _draw(bags, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(bags, title)

    return View("jagged_anatomy", title, summary, _numbers(bags), draw, plot)


def _bags(kjt: KeyedJaggedTensor, keys: list[str], counts: list[int]) -> tuple[list[_Bag], bool]:
    """The bags drawn, feature after feature, and whether they are all of them."""
    offsets = kjt.offsets().tolist()
    starts = [sum(counts[:f]) for f in range(len(keys))]
    features, samples = min(len(keys), len(_FILLS)), min(max(counts), MOST_CELLS)
    weights = kjt.weights_or_none()

    def spans(features: int, samples: int) -> list[tuple[int, int, int, int]]:
        return [
            (f, b, offsets[starts[f] + b], offsets[starts[f] + b + 1])
            for f in range(features)
            for b in range(min(samples, counts[f]))
        ]

    def too_many(features: int, samples: int) -> bool:
        found = spans(features, samples)
        return len(found) >= MOST_CELLS or sum(end - start for _, _, start, end in found) > MOST_CELLS

    while too_many(features, samples) and samples > 3:
        samples -= 1
    while too_many(features, samples) and features > 1:
        features -= 1
    while too_many(features, samples) and samples > 1:
        samples -= 1
    bags = []
    for f, b, start, end in spans(features, samples):
        end = min(end, start + MOST_CELLS)  # of one bag that is wider than the picture
        bag_weights = None if weights is None else weights[start:end].tolist()
        bags.append(_Bag(keys[f], b, kjt.values()[start:end].tolist(), bag_weights, Look(keys[f], _FILLS[f], "plain")))
    return bags, len(bags) == sum(counts) and sum(len(bag.ids) for bag in bags) == kjt.values().numel()


def _draw(bags: list[_Bag], title: str, summary: str, note: str, width: int, uid: str) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    y = svg.head(title, summary, MARGIN) + 14
    y = _draw_bags(svg, bags, y, width) + 22
    ids = [(bag, place) for bag in bags for place in range(len(bag.ids))]
    each = min(34.0, (width - LEFT - MARGIN) / max(len(bags) + 1, len(ids), 1))
    centre = (width - LEFT - MARGIN) / 2 + LEFT
    bags_left, values_left = centre - each * len(bags) / 2, centre - each * len(ids) / 2
    y = _draw_features(svg, bags, bags_left, each, y)
    for place, bag in enumerate(bags):
        words = f"lengths[{place}] = {len(bag.ids)}\n{bag.key}, sample {bag.sample}"
        _cell(svg, bags_left + place * each, y, each, str(len(bag.ids)), bag.look, words)
    _row_name(svg, y, "lengths")
    offsets_y = y + CELL_HEIGHT + 6
    for place in range(len(bags) + 1):
        total = sum(len(bag.ids) for bag in bags[:place])
        words = fit([str(total)], each - 3, 10)
        svg.text(bags_left + place * each, offsets_y + 12, words, anchor="middle", size=10)
        svg.line(bags_left + place * each, y + CELL_HEIGHT, bags_left + place * each, y + CELL_HEIGHT + 6)
    _row_name(svg, offsets_y - 5, "offsets")
    values_y = offsets_y + 58
    _draw_joins(svg, bags, bags_left, values_left, each, offsets_y + 18, values_y)
    for place, (bag, i) in enumerate(ids):
        words = f"values[{place}] = {bag.ids[i]}\n{bag.key}, sample {bag.sample}"
        _cell(svg, values_left + place * each, values_y, each, str(bag.ids[i]), bag.look, words)
    _row_name(svg, values_y, "values")
    y = values_y + CELL_HEIGHT
    if any(bag.weights is not None for bag in bags):
        y += 8
        for place, (bag, i) in enumerate(ids):
            assert bag.weights is not None
            words = number(bag.weights[i], 2)
            _cell(svg, values_left + place * each, y, each, words, bag.look, f"weights[{place}] = {words}")
        _row_name(svg, y, "weights")
        y += CELL_HEIGHT
    if note:
        svg.text(MARGIN, y + 18, note, soft=True)
        y += 14
    svg.height = y + 14
    return svg


def _draw_bags(svg: Svg, bags: list[_Bag], y: float, width: float) -> float:
    """Features by samples with the ids of each bag; returns the y below."""
    keys = list(dict.fromkeys(bag.key for bag in bags))
    samples = 1 + max(bag.sample for bag in bags)
    each = min(150.0, (width - LEFT - MARGIN) / samples)
    for sample in range(samples):
        svg.text(LEFT + (sample + 0.5) * each, y + 8, f"sample {sample}", anchor="middle", size=10, soft=True)
    for row, key in enumerate(keys):
        top = y + 14 + row * (CELL_HEIGHT + 4)
        svg.text(LEFT - 10, top + 16, fit([key], LEFT - 14, 11), anchor="end", bold=True)
        for bag in bags:
            if bag.key != key:
                continue
            told = " ".join(map(str, bag.ids)) or "empty"
            _cell(svg, LEFT + bag.sample * each + 2, top, each - 4, told, bag.look if bag.ids else None, told)
    return y + 14 + len(keys) * (CELL_HEIGHT + 4)


def _draw_features(svg: Svg, bags: list[_Bag], left: float, each: float, y: float) -> float:
    """The name of every feature over its bags; returns the y below."""
    for key in dict.fromkeys(bag.key for bag in bags):
        places = [place for place, bag in enumerate(bags) if bag.key == key]
        first, wide = left + places[0] * each, len(places) * each
        svg.text(first + wide / 2, y + 8, fit([key], wide, 11), anchor="middle", bold=True)
    return y + 14


def _draw_joins(
    svg: Svg, bags: list[_Bag], bags_left: float, values_left: float, each: float, top: float, bottom: float
) -> None:
    """From every bag to its slice of the values; nothing from an empty one."""
    start = 0
    for place, bag in enumerate(bags):
        end = start + len(bag.ids)
        if bag.ids:
            a, b = bags_left + place * each + 3, bags_left + (place + 1) * each - 3
            c, d = values_left + start * each + 1, values_left + end * each - 1
            middle = (top + bottom) / 2
            shape = (
                f"M{a:.1f} {top:.1f}C{a:.1f} {middle:.1f} {c:.1f} {middle:.1f} {c:.1f} {bottom:.1f}"
                f"H{d:.1f}C{d:.1f} {middle:.1f} {b:.1f} {middle:.1f} {b:.1f} {top:.1f}Z"
            )
            svg.path(shape, f'fill="{bag.look.fill}" fill-opacity=".35" stroke="none"')
        start = end


def _cell(svg: Svg, x: float, y: float, wide: float, words: str, look: Look | None, hover: str) -> None:
    """A box with words in it; without a look, a dashed empty one."""
    if look is None:
        svg.rect(x, y, wide, CELL_HEIGHT, "none", hover, 'stroke="currentColor" stroke-dasharray="3 3" rx="2"')
        svg.text(x + wide / 2, y + 16, words, anchor="middle", size=10, soft=True)
        return
    svg.rect(x, y, wide, CELL_HEIGHT, look.fill, hover, f'stroke="{LABEL_INK}" stroke-width=".6" rx="2"')
    svg.text(x + wide / 2, y + 16, fit([words], wide - 3, 10), anchor="middle", size=10, ink=LABEL_INK)


def _row_name(svg: Svg, y: float, words: str) -> None:
    svg.text(LEFT - 10, y + 16, words, anchor="end", bold=True)


def _numbers(bags: list[_Bag]) -> TextTable:
    rows, start = [], 0
    for place, bag in enumerate(bags):
        told = " ".join(map(str, bag.ids))
        weights = [] if bag.weights is None else [" ".join(number(w) for w in bag.weights)]
        rows.append([str(place), bag.key, str(bag.sample), str(len(bag.ids)), str(start), told, *weights])
        start += len(bag.ids)
    heads = ["bag", "feature", "sample", "length", "offset", "values"]
    return TextTable(heads if bags[0].weights is None else [*heads, "weights"], rows)


def _plot(bags: list[_Bag], title: str) -> Any:
    import plotly.graph_objects as go

    traces, start = [], 0
    for key in dict.fromkeys(bag.key for bag in bags):
        own = [bag for bag in bags if bag.key == key]
        ids = [(bag, i) for bag in own for i in bag.ids]
        traces.append(
            go.Bar(
                name=key,
                x=list(range(start, start + len(ids))),
                y=[1] * len(ids),
                text=[str(i) for _, i in ids],
                textposition="inside",
                marker={"color": own[0].look.fill, "line": {"color": LABEL_INK, "width": 0.6}},
                customdata=[bag.sample for bag, _ in ids],
                hovertemplate=f"{key}, sample %{{customdata}}<br>values[%{{x}}] = %{{text}}<extra></extra>",
            )
        )
        start += len(ids)
    return figure(traces, title, height=240, bargap=0, yaxis={"visible": False}, xaxis={"title": {"text": "values"}})
