"""Jagged batches as text, with one line per feature, and as HTML, with one row per sample.

Both show the first features, samples and ids, and the number of the others. Only the values that are shown are
read, so a large batch prints as fast as a small one.

Shape letters: B samples, F features, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from recshard_lab.sparse.jagged_tensor import JaggedStorage
    from recshard_lab.sparse.keyed_tensor import KeyedTensor


# Colours of drawn batches: JupyterLab's variables, so that they follow its themes.
#
# Boxes have outlines and empty bags have text, so that nothing depends on colour alone.


STYLE = """<style>
.rsl-jagged { font-size: 13px; color: var(--jp-content-font-color1, #1f1f1f); overflow-x: auto; }
.rsl-jagged table { border-collapse: collapse; margin: 4px 0; font-size: 13px;
  border: 1px solid var(--jp-border-color1, #9e9e9e);
  background: var(--jp-layout-color0, #fff); color: inherit; }
.rsl-jagged caption { caption-side: top; text-align: left; padding: 0 0 6px; white-space: nowrap;
  color: inherit; font-style: normal; }
.rsl-jagged tr, .rsl-jagged tbody tr:nth-child(odd), .rsl-jagged tbody tr:hover { background: none; }
.rsl-jagged.rsl-jagged th, .rsl-jagged.rsl-jagged td { text-align: left; vertical-align: middle; padding: 3px 10px;
  white-space: nowrap; border: 0; color: inherit; max-width: none; }
.rsl-jagged thead th { font-weight: 600; border-bottom: 1px solid var(--jp-border-color1, #9e9e9e); }
.rsl-jagged tbody + tbody { border-top: 1px solid var(--jp-border-color1, #9e9e9e); }
.rsl-jagged.rsl-jagged th[scope="row"] { font-weight: 400; text-align: right; font-variant-numeric: tabular-nums;
  color: var(--jp-content-font-color2, #555); }
.rsl-jagged th.rsl-key { font-weight: 600; }
.rsl-jagged th[scope="rowgroup"] { vertical-align: top; border-right: 1px solid var(--jp-border-color2, #ccc);
  background: var(--jp-layout-color2, #eee); }
.rsl-jagged .rsl-id { display: inline-block; min-width: 1.2em; padding: 0 5px; text-align: center;
  font-family: var(--jp-code-font-family, monospace); line-height: 18px; border-radius: 3px;
  border: 1px solid var(--jp-brand-color1, #1565c0); background: var(--jp-layout-color1, #fff); }
.rsl-jagged .rsl-id small { font-size: 11px; color: var(--jp-content-font-color2, #555); }
.rsl-jagged .rsl-num { font-family: var(--jp-code-font-family, monospace); white-space: pre; }
.rsl-jagged tbody td:last-child { width: 100%; }
.rsl-jagged .rsl-more, .rsl-jagged .rsl-note { font-style: italic;
  color: var(--jp-content-font-color2, #555); }
.rsl-jagged .rsl-note { margin: 2px 0; }
</style>"""


_TEXT_COLUMNS = 100
_TEXT_LINES = 20
_HTML_ROWS = 24
_BAG_COLUMNS = 70


@dataclass(frozen=True)
class _Bag:
    """One sample's ids of one feature, as far as they are shown."""

    ids: list[str]
    weights: list[str] | None
    count: int

    @property
    def hidden(self) -> int:
        return self.count - len(self.ids)

    def text(self) -> str:
        shown = self.ids if self.weights is None else map(":".join, zip(self.ids, self.weights, strict=True))
        return "[" + " ".join([*shown, *([f"+{self.hidden}"] if self.hidden else [])]) + "]"


@dataclass(frozen=True)
class _Band:
    """One feature's first bags."""

    key: str | None
    bags: list[_Bag]


# -- text -------------------------------------------------------------------------------------------


def jagged_text(name: str, keys: Sequence[str | None], jagged: JaggedStorage) -> str:
    """`__repr__` of a JaggedTensor (one key, None) or a KeyedJaggedTensor."""
    if not _has_numbers(jagged._values, jagged._lengths, jagged._offsets, jagged._weights):
        return f"{name}({_keys_text(keys)}values={_short(jagged._values)}, without numbers to show)"
    counts = _num_bags(keys, jagged)
    num_samples = max(counts, default=0)
    title = f"{name}({_size_text(keys, counts, jagged)})"
    bands = _bands(keys[:_TEXT_LINES], jagged, counts, max_samples=24, max_ids=8 if num_samples <= 3 else 4)
    if not bands or not num_samples:
        return title
    labels = ["" if band.key is None else _clip(band.key, 24) + "  " for band in bands]
    margin = max(map(len, labels))
    columns: list[list[str]] = []
    room = _TEXT_COLUMNS - margin - 6
    for sample in range(max(len(band.bags) for band in bands)):
        column = [band.bags[sample].text() if sample < len(band.bags) else "" for band in bands]
        width = max(map(len, column))
        if columns and room < width:
            break
        room -= width + 1
        columns.append([cell.ljust(width) for cell in column])
    lines = [
        "  " + (label.ljust(margin) + " ".join(cells) + (" ..." if count > len(columns) else "")).rstrip()
        for label, count, cells in zip(labels, counts, zip(*columns, strict=True), strict=False)
    ]
    shown = _shown_text(len(bands), len(keys), len(columns), num_samples)
    return "\n".join([title, *lines, *([f"  ({shown})"] if shown else [])])


def keyed_text(kt: KeyedTensor) -> str:
    """`__repr__` of a KeyedTensor."""
    values = kt._values
    if not isinstance(values, Tensor):
        return f"KeyedTensor({_keys_text(kt._keys)}values={_short(values)})"
    title = f"KeyedTensor({_keyed_size_text(kt)})"
    if not _drawable(kt):
        return title
    lines = []
    for key, block in list(kt.to_dict().items())[:_TEXT_LINES]:
        rows = [_number_row(row.tolist(), 4) for row in block[:3]]
        tail = " ..." if block.shape[0] > 3 else ""
        lines.append(f"  {_clip(key, 24)} [{block.shape[1]}]  " + " ".join(f"[{row}]" for row in rows) + tail)
    hidden = len(kt._keys) - len(lines)
    return "\n".join([title, *lines, *([f"  (and {hidden} more keys)"] if hidden else [])])


# -- HTML -------------------------------------------------------------------------------------------


def jagged_html(name: str, keys: Sequence[str | None], jagged: JaggedStorage) -> str | None:
    """`_repr_html_` of a JaggedTensor or KeyedJaggedTensor; None, so text, where there is nothing to draw."""
    if not _has_numbers(jagged._values, jagged._lengths, jagged._offsets, jagged._weights):
        return None
    counts = _num_bags(keys, jagged)
    num_samples = max(counts, default=0)
    max_samples = max(2, min(8, _HTML_ROWS // max(1, min(len(keys), 8))))
    bands = _bands(keys[:8], jagged, counts, max_samples=max_samples, max_ids=12)
    if not bands or not num_samples:
        return None
    body = "".join(_band_html(band, count) for band, count in zip(bands, counts, strict=False))
    head = '<th scope="col">feature</th>' if bands[0].key is not None else ""
    head = f'<thead><tr>{head}<th scope="col">sample</th><th scope="col">{_noun(jagged)}s</th></tr></thead>'
    shown = _shown_text(len(bands), len(keys), max(len(band.bags) for band in bands), num_samples)
    foot = f'<p class="rsl-note">{escape(shown[0].upper() + shown[1:])}.</p>' if shown else ""
    if jagged._weights is not None:
        foot += '<p class="rsl-note">The small number in a box is the weight of its id.</p>'
    return _figure(name, _size_text(keys, counts, jagged), head + body, foot)


def _band_html(band: _Band, num_samples: int) -> str:
    rows = []
    more = num_samples - len(band.bags)
    for sample, bag in enumerate(band.bags):
        head = ""
        if sample == 0 and band.key is not None:
            span = len(band.bags) + (more > 0)
            head = f'<th scope="rowgroup" rowspan="{span}" class="rsl-key">{escape(_clip(band.key, 32))}</th>'
        rows.append(f'<tr>{head}<th scope="row">{sample}</th><td>{_bag_html(bag)}</td></tr>')
    if not rows:
        head = f'<th scope="rowgroup" class="rsl-key">{escape(_clip(band.key or "", 32))}</th>'
        rows.append(f'<tr>{head}<th scope="row"></th><td class="rsl-more">no bags</td></tr>')
    if more > 0:
        rows.append(f'<tr><th scope="row">…</th><td class="rsl-more">{_count(more, "more sample")}</td></tr>')
    return f"<tbody>{''.join(rows)}</tbody>"


def _bag_html(bag: _Bag) -> str:
    if not bag.count:
        return '<span class="rsl-more">empty</span>'
    weights = bag.weights or [""] * len(bag.ids)
    boxes = [
        f'<span class="rsl-id">{escape(id_)}' + (f" <small>{escape(weight)}</small>" if weight else "") + "</span>"
        for id_, weight in zip(bag.ids, weights, strict=True)
    ]
    if bag.hidden:
        boxes.append(f'<span class="rsl-more">+{bag.hidden:,}</span>')
    return " ".join(boxes)


def keyed_html(kt: KeyedTensor) -> str | None:
    """`_repr_html_` of a KeyedTensor; None (text instead) where there is nothing to draw."""
    if not isinstance(kt._values, Tensor) or not _drawable(kt):
        return None
    blocks = list(kt.to_dict().items())[:8]
    num_samples = kt._values.shape[0]
    samples = min(num_samples, 8)
    head = '<thead><tr><th scope="col">sample</th>' + "".join(
        f'<th scope="col" class="rsl-key">{escape(_clip(key, 32))}<br/>'
        f"<small>{_count(block.shape[1], 'column')}</small></th>"
        for key, block in blocks
    )
    shown = [_aligned(block[:samples]) for _, block in blocks]
    rows = "".join(
        f'<tr><th scope="row">{sample}</th>'
        + "".join(f'<td class="rsl-num">{escape(block[sample])}</td>' for block in shown)
        + "</tr>"
        for sample in range(samples)
    )
    note = _shown_text(len(blocks), len(kt._keys), samples, num_samples).replace("feature", "key")
    foot = f'<p class="rsl-note">{escape(note[0].upper() + note[1:])}.</p>' if note else ""
    table = f"{head}</tr></thead><tbody>{rows}</tbody>"
    return _figure("KeyedTensor", _keyed_size_text(kt), table, foot)


def _figure(name: str, size: str, table: str, foot: str) -> str:
    caption = f"<caption><b>{name}</b> {escape(size)}</caption>"
    region = f'<div class="rsl-jagged" role="group" tabindex="0" aria-label="{name}, {escape(size)}">'
    return f"{STYLE}{region}<table>{caption}{table}</table>{foot}</div>"


# -- reading what is shown --------------------------------------------------------------------------


def _bands(
    keys: Sequence[str | None], jagged: JaggedStorage, counts: Sequence[int], max_samples: int, max_ids: int
) -> list[_Band]:
    offsets = jagged.offsets()
    starts = [0, *accumulate(counts)]
    bands = []
    for key, first, count in zip(keys, starts, counts, strict=False):
        shown = min(count, max_samples)
        ends = offsets[first : first + shown + 1].tolist()
        bags = [_bag(jagged, lower, upper, max_ids) for lower, upper in pairwise(ends)]
        bands.append(_Band(key, bags))
    return bands


def _bag(jagged: JaggedStorage, lower: int, upper: int, max_ids: int) -> _Bag:
    last = min(upper, lower + max_ids)
    ids = [_number(value) for value in jagged._values[lower:last].tolist()]
    weights = None
    if jagged._weights is not None:
        weights = [_number(value) for value in jagged._weights[lower:last].tolist()]
    room = _BAG_COLUMNS
    for shown, text in enumerate(ids):
        room -= len(text) + 2 + (len(weights[shown]) if weights else 0)
        if shown and room < 0:
            return _Bag(ids[:shown], weights and weights[:shown], upper - lower)
    return _Bag(ids, weights, upper - lower)


def _num_bags(keys: Sequence[str | None], jagged: JaggedStorage) -> list[int]:
    """Bags of each key; a JaggedTensor is one key."""
    known: list[int] | None = None if not hasattr(jagged, "stride_per_key") else jagged.stride_per_key()
    return [jagged.lengths().numel()] * len(keys) if known is None else known


def _has_numbers(*tensors: Any) -> bool:
    """Whether these can be drawn: real tensors, not those of a compiler, a mapped tree or `meta`."""
    return all(tensor is None or (type(tensor) is Tensor and not tensor.is_meta) for tensor in tensors)


def _drawable(kt: KeyedTensor) -> bool:
    values = kt._values
    plain = _has_numbers(values.detach()) and values.dim() == 2 and kt._key_dim in (1, -1)
    return plain and len(set(kt._keys)) == len(kt._keys) and values.numel() > 0


# -- wording ----------------------------------------------------------------------------------------


def _size_text(keys: Sequence[str | None], counts: Sequence[int], jagged: JaggedStorage) -> str:
    size = _count(max(counts, default=0), "sample")
    if getattr(jagged, "_strides", None) is not None:  # a variable batch
        size = _count(max(counts, default=0), "bag")
        size = size if len(set(counts)) <= 1 else f"{min(counts):,} to {size}"
    if list(keys) != [None]:
        size = f"{_count(len(keys), 'feature')} x {size}"
    weighted = ", weighted" if jagged._weights is not None else ""
    return f"{size}, {_count(jagged._values.shape[0], _noun(jagged))}, {_kind(jagged._values)}{weighted}"


def _keyed_size_text(kt: KeyedTensor) -> str:
    shape = " x ".join(f"{size:,}" for size in kt._values.shape)
    return f"{_count(len(kt._keys), 'key')}, values {shape}, {_kind(kt._values)}"


def _noun(jagged: JaggedStorage) -> str:
    return "vector" if jagged._values.dim() > 1 else "id"


def _kind(tensor: Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f", {tensor.device}"
    return str(tensor.dtype).removeprefix("torch.") + where


def _shown_text(features: int, num_features: int, samples: int, num_samples: int) -> str:
    parts = []
    if features < num_features:
        parts.append(f"{features} of {_count(num_features, 'feature')}")
    if samples < num_samples:
        parts.append(f"{samples} of {_count(num_samples, 'sample')}")
    return f"showing {' and '.join(parts)}" if parts else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _number(value: Any) -> str:
    if isinstance(value, list):
        return f"({_number_row(value, 3)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(block: Tensor) -> list[str]:
    """Each row's first numbers, all of one width."""
    rows = [[_number(value) for value in row] for row in block[:, :4].tolist()]
    width = max((len(text) for row in rows for text in row), default=0)
    more = [f"+{block.shape[1] - 4}"] if block.shape[1] > 4 else []
    return [" ".join([*(text.rjust(width) for text in row), *more]) for row in rows]


def _number_row(values: list[Any], limit: int) -> str:
    more = [f"+{len(values) - limit}"] if len(values) > limit else []
    return " ".join([*map(_number, values[:limit]), *more])


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _keys_text(keys: Sequence[str | None]) -> str:
    return "" if list(keys) == [None] else f"{list(keys)}, "


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_kind(value)}{list(value.shape)}"
    return repr(value)
