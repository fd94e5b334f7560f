"""Follow one id: from the rank that read it to every shard that holds its row, and the way its columns come home."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.plots import figure
from recshard_lab.lab.draw.rank_columns import MARGIN
from recshard_lab.lab.draw.svg import Svg, fit
from recshard_lab.lab.draw.theme import LABEL_INK, SCHEMES, as_sentence, bytes_text, count_text, look_of
from recshard_lab.lab.draw.view import View, message_view
from recshard_lab.lab.views.registry import register_view
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.text_table import TextTable

ID_BYTES, ELEMENT_BYTES = 4, 4  # as they travel: int32 and fp32
MOST_STOPS = 9  # shards drawn one by one
_WAYS = {
    "direct": "each piece goes home",
    "reduce_scatter": "pieces are added on the way",
    "two_hop": "added inside the node, then home",
    "distinct_rows": "each distinct row returns once",
}


@dataclass(frozen=True)
class Stop:
    """One shard that holds columns of the id's row.

    Attributes:
        rank: where it lies.
        rows, cols: the shard ``[r0, r1) x [c0, c1)``.
        local_row: of the shard.
        sent_bytes, back_bytes: what travels to it and home for this id alone; 0 where it is the home rank itself.
    """

    rank: int
    rows: tuple[int, int]
    cols: tuple[int, int]
    local_row: int
    sent_bytes: int
    back_bytes: int


@register_view("Follow one id", place=8)
def follow_id(
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    feature: str,
    id: int,
    *,
    home_rank: int = 0,
    topology: Topology | None = None,
    note: str = "",
    width: int = 860,
) -> View:
    """Where one id of one feature goes in forward, and what comes back.

    Args:
        plan: where the tables lie.
        tables: their configs.
        feature: whose id it is; a table's name does too.
        id: the row.
        home_rank: the rank whose batch holds the id.
        topology: the ranks; as many as the plan names when left out.
        note: a sentence under the picture.
        width: of the static picture, in pixels.

    Raises:
        ValueError: a feature that no table has, an id that is no row of its table, a rank that does not exist.
    """
    config = next((t for t in tables if feature in t.feature_names or t.name == feature), None)
    if config is None:
        names = ", ".join(name for table in tables for name in table.feature_names)
        raise ValueError(f"no table has a feature {feature!r}; they have: {names}")
    if not 0 <= id < config.num_embeddings:
        raise ValueError(f"id must be a row of {config.name!r}, 0 to {config.num_embeddings - 1:,}, got {id!r}")
    if config.name not in plan.tables():
        return message_view("follow_id", "Follow one id", f"The plan does not place table {config.name!r}.")
    ranks = topology.world_size if topology is not None else max(plan.world_size, home_rank + 1)
    if not 0 <= home_rank < ranks:
        raise ValueError(f"home_rank must be 0 to {ranks - 1}, got {home_rank!r}")
    local = topology.local_world_size if topology is not None else None
    sharding = plan.tables()[config.name].resolved(config, ranks, local)
    stops = _stops(sharding.shards, id, home_rank)
    away = [stop for stop in stops if stop.rank != home_rank]
    label = look_of(sharding.sharding_type, SCHEMES).label
    known = {feature, label, sharding.sharding_type}
    named = label if config.name in known else f"{config.name}, {label}"
    title = f"Follow id {id:,} of {feature} from rank {home_rank} ({named})"
    summary = _summary(stops, away, home_rank, sharding.route, config)
    numbers = TextTable(
        ("shard", "rank", "rows", "columns", "local row", "sent", "back"),
        [
            [
                str(i),
                str(stop.rank),
                f"{stop.rows[0]:,} to {stop.rows[1]:,}",
                f"{stop.cols[0]} to {stop.cols[1]}",
                f"{stop.local_row:,}",
                bytes_text(stop.sent_bytes),
                bytes_text(stop.back_bytes),
            ]
            for i, stop in enumerate(stops)
        ],
    )

    def draw(uid: str) -> Svg:
        return _draw(stops, config, feature, id, home_rank, sharding, title, summary, note, width, uid)

    def plot() -> Any:
        return _plot(stops, config, feature, id, home_rank, title)

    return View("follow_id", title, summary, numbers, draw, plot)


def _stops(shards: Sequence[Any], row: int, home: int) -> list[Stop]:
    """The shards that the id visits; of copies the one at home."""
    copies: dict[tuple[Any, Any], list[Any]] = {}
    for shard in shards:
        if shard.rows[0] <= row < shard.rows[1]:
            copies.setdefault((shard.cols, shard.rows), []).append(shard)
    found = []
    for (cols, rows), same in sorted(copies.items()):
        shard = next((one for one in same if one.rank == home), same[0])
        is_home = shard.rank == home
        back = 0 if is_home else ELEMENT_BYTES * (cols[1] - cols[0])
        found.append(Stop(shard.rank, rows, cols, row - rows[0], 0 if is_home else ID_BYTES, back))
    return found


def _summary(stops: list[Stop], away: list[Stop], home: int, route: str, config: BaseEmbeddingConfig) -> str:
    if not away:
        return f"Its row is placed on rank {home} itself: forward sends nothing."
    ranks = ", ".join(str(stop.rank) for stop in away)
    sent, back = sum(stop.sent_bytes for stop in away), sum(stop.back_bytes for stop in away)
    what = "its part of the row returns" if len(away) == 1 else "their parts of the row return"
    joined = f" {len(stops)} parts are joined to {config.embedding_dim} columns." if len(stops) > 1 else ""
    return (
        f"The id goes to rank{'s' if len(away) > 1 else ''} {ranks} ({bytes_text(sent)}), {what} ({bytes_text(back)})."
        f"{joined} Route {route}: {_WAYS.get(route, route)}."
    )


def _draw(
    stops: list[Stop],
    config: BaseEmbeddingConfig,
    feature: str,
    id: int,
    home: int,
    sharding: Any,
    title: str,
    summary: str,
    note: str,
    width: int,
    uid: str,
) -> Svg:
    svg = Svg(width, 0, title, summary, uid)
    top = svg.head(title, summary, MARGIN) + 16
    look = look_of(sharding.sharding_type, SCHEMES)
    shown = stops[:MOST_STOPS]
    wide = width >= 700
    box, pitch, side, gap = (62.0, 74.0, 160.0, 126.0) if wide else (62.0, 74.0, 106.0, 54.0)
    middle_x = MARGIN + side + gap
    middle_width = width - MARGIN - side - (104 if wide else gap) - middle_x
    height = pitch * len(shown) - 12
    centre = top + height / 2
    left_y = max(top, centre - box / 2)
    read = [f"{feature}: {id:,}", f"id {id:,}"]
    _box(svg, MARGIN, left_y, side, [[f"rank {home} reads"], read, ["input dist"]], "none")
    right_x = width - MARGIN - side
    shape = f"{config.embedding_dim} columns"
    bag = ["added into its bag", "into its bag"]
    _box(svg, right_x, left_y, side, [[f"home on rank {home}", f"home: rank {home}"], [shape], bag], "none")
    for i, stop in enumerate(shown):
        y = top + i * pitch
        here = stop.rank == home
        cols = f"{stop.cols[0]} to {stop.cols[1]}"
        words = [
            [f"rank {stop.rank}" + (" (home)" if here else "")],
            [f"rows {count_text(stop.rows[0])} to {count_text(stop.rows[1])}"],
            [f"columns {cols}, its row {stop.local_row:,}", f"cols {cols}, row {count_text(stop.local_row)}"],
        ]
        _box(svg, middle_x, y, middle_width, words, svg.fill(look), 70 if wide else 10)
        if wide:
            _tile(svg, middle_x + 10, y + 8, stop, config, id)
        _arrow(svg, MARGIN + side, left_y + box / 2, middle_x, y + box / 2, "stays" if here else f"{ID_BYTES} B")
        told = "stays" if here else f"{bytes_text(stop.back_bytes)}"
        _arrow(svg, middle_x + middle_width, y + box / 2, right_x, left_y + box / 2, told)
    y = top + max(height, left_y + box - top)
    if len(shown) < len(stops):
        svg.text(middle_x, y + 14, f"and {len(stops) - len(shown)} more pieces of its columns", soft=True)
        y += 16
    told = f"Small map: the table of {config.num_embeddings:,} rows, the shard filled, the id's row as a line."
    svg.text(MARGIN, y + 20, f"{told if wide else ''} {as_sentence(note)}".strip(), soft=True)
    svg.height = y + 30
    return svg


def _box(svg: Svg, x: float, y: float, wide: float, lines: list[list[str]], fill: str, indent: float = 10) -> None:
    """Three lines in a box, each the first of its wordings that there is room for."""
    ink = "currentColor" if fill == "none" else LABEL_INK
    edge = 'stroke="currentColor" stroke-opacity=".6"' if fill == "none" else f'stroke="{LABEL_INK}" stroke-width=".6"'
    svg.rect(x, y, wide, 62, fill, extra=f'rx="5" {edge}')
    halo = "" if fill == "none" else 'stroke="#fff" stroke-opacity=".55" stroke-width="3" paint-order="stroke"'
    for i, words in enumerate(lines):
        room = fit(words, wide - indent - 4, 10.5)
        svg.text(x + indent, y + 19 + 17 * i, room, size=10.5, ink=ink, bold=not i, extra=halo)


def _tile(svg: Svg, x: float, y: float, stop: Stop, config: BaseEmbeddingConfig, id: int) -> None:
    """The table as a rectangle, with the shard in it and the id's row."""
    wide, high = 46.0, 46.0
    svg.rect(x, y, wide, high, "#ffffff", extra=f'stroke="{LABEL_INK}" stroke-width=".8"')
    rows, cols = config.num_embeddings, config.embedding_dim
    left, top = x + wide * stop.cols[0] / cols, y + high * stop.rows[0] / rows
    shard_wide = wide * (stop.cols[1] - stop.cols[0]) / cols
    shard_high = max(1.0, high * (stop.rows[1] - stop.rows[0]) / rows)
    svg.rect(left, top, shard_wide, shard_high, "#8a94a1")
    row = y + high * (id + 0.5) / rows
    svg.path(f"M{x:.1f} {row:.1f}h{wide:.0f}", f'stroke="{LABEL_INK}" stroke-width="1.6"')


def _arrow(svg: Svg, x0: float, y0: float, x1: float, y1: float, words: str) -> None:
    middle = (x0 + x1) / 2
    svg.path(
        f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1 - 7:.1f} {y1:.1f}",
        'fill="none" stroke="currentColor" stroke-width="1.3"',
    )
    svg.path(f"M{x1:.1f} {y1:.1f}l-8 -4v8z", 'fill="currentColor"')
    if x1 < svg.width / 2:  # at the shard, where arrows are apart; on the side where the arrow does not come from
        svg.text(x1 - 12, y1 + (13 if y1 > y0 + 1 else -6), words, anchor="end", size=10, soft=True)
    else:
        svg.text(x0 + 6, y0 + (13 if y1 < y0 - 1 else -6), words, size=10, soft=True)


def _plot(stops: list[Stop], config: BaseEmbeddingConfig, feature: str, id: int, home: int, title: str) -> Any:
    import plotly.graph_objects as go

    names = [f"rank {home}: {feature} {id:,}"]
    names += [f"rank {s.rank}: rows {s.rows[0]:,} to {s.rows[1]:,}, cols {s.cols[0]} to {s.cols[1]}" for s in stops]
    names.append(f"home on rank {home}: {config.embedding_dim} columns")
    count, last = len(stops), len(stops) + 1
    width = [float(stop.cols[1] - stop.cols[0]) for stop in stops]
    link = {
        "source": [0] * count + list(range(1, last)),
        "target": list(range(1, last)) + [last] * count,
        "value": width * 2,
        "label": [bytes_text(s.sent_bytes) for s in stops] + [bytes_text(s.back_bytes) for s in stops],
    }
    node = {"label": names, "color": "#9cc4ee", "line": {"color": LABEL_INK, "width": 0.6}}
    return figure([go.Sankey(node=node, link=link)], title, height=160 + 40 * count)
