"""Jagged batches as HTML, with one row per sample. A notebook shows it in place of their text.

It has the first features, samples and ids, and the number of the others. Boxes have outlines and empty bags have text,
so that nothing depends on colour alone.
"""

from __future__ import annotations

from html import escape
from typing import Any

from torch import Tensor

from recshard_lab.sparse import KeyedTensor
from recshard_lab.sparse import text as words

# JupyterLab's variables, so that colours follow its themes
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

_ROWS = 24


def html_of(batch: Any) -> str | None:
    """The picture of a JaggedTensor, KeyedJaggedTensor or KeyedTensor. None if it has nothing to draw."""
    return _keyed_html(batch) if isinstance(batch, KeyedTensor) else _jagged_html(batch)


def _jagged_html(jagged: Any) -> str | None:
    features = min(len(getattr(jagged, "_keys", [None])), 8)
    batch = words.shown(jagged, 8, max(2, min(8, _ROWS // max(1, features))), 12)
    if batch is None or not batch.num_samples:
        return None
    bands = zip(batch.keys, batch.bags, batch.counts, strict=False)
    body = "".join(_band_html(key, bags, count) for key, bags, count in bands)
    feature = '<th scope="col">feature</th>' if batch.keys[0] is not None else ""
    nouns = f"{words.noun(jagged)}s"
    head = f'<thead><tr>{feature}<th scope="col">sample</th><th scope="col">{nouns}</th></tr></thead>'
    foot = _note(words.shown_text(len(batch.bags), len(batch.keys), max(map(len, batch.bags)), batch.num_samples))
    if jagged.weights_or_none() is not None:
        foot += '<p class="rsl-note">The small number in a box is the weight of its id.</p>'
    return _figure(batch.name, batch.size, head + body, foot)


def _band_html(key: str | None, bags: list[words.Bag], num_samples: int) -> str:
    rows = []
    more = num_samples - len(bags)
    for sample, bag in enumerate(bags):
        head = ""
        if sample == 0 and key is not None:
            span = len(bags) + (more > 0)
            head = f'<th scope="rowgroup" rowspan="{span}" class="rsl-key">{escape(words.clip(key, 32))}</th>'
        rows.append(f'<tr>{head}<th scope="row">{sample}</th><td>{_bag_html(bag)}</td></tr>')
    if not rows:
        head = f'<th scope="rowgroup" class="rsl-key">{escape(words.clip(key or "", 32))}</th>'
        rows.append(f'<tr>{head}<th scope="row"></th><td class="rsl-more">no bags</td></tr>')
    if more > 0:
        left = words.counted(more, "more sample")
        rows.append(f'<tr><th scope="row">…</th><td class="rsl-more">{left}</td></tr>')
    return f"<tbody>{''.join(rows)}</tbody>"


def _bag_html(bag: words.Bag) -> str:
    if not bag.num_ids:
        return '<span class="rsl-more">empty</span>'
    weights = bag.weights or [""] * len(bag.ids)
    boxes = [
        f'<span class="rsl-id">{escape(id_)}' + (f" <small>{escape(weight)}</small>" if weight else "") + "</span>"
        for id_, weight in zip(bag.ids, weights, strict=True)
    ]
    if bag.hidden:
        boxes.append(f'<span class="rsl-more">+{bag.hidden:,}</span>')
    return " ".join(boxes)


def _keyed_html(kt: KeyedTensor) -> str | None:
    if not isinstance(kt.values(), Tensor) or not words.drawable(kt):
        return None
    blocks = list(kt.to_dict().items())[:8]
    num_samples = kt.values().shape[0]
    samples = min(num_samples, 8)
    head = '<thead><tr><th scope="col">sample</th>' + "".join(
        f'<th scope="col" class="rsl-key">{escape(words.clip(key, 32))}<br/>'
        f"<small>{words.counted(block.shape[1], 'column')}</small></th>"
        for key, block in blocks
    )
    shown = [_aligned(block[:samples]) for _, block in blocks]
    rows = "".join(
        f'<tr><th scope="row">{sample}</th>'
        + "".join(f'<td class="rsl-num">{escape(block[sample])}</td>' for block in shown)
        + "</tr>"
        for sample in range(samples)
    )
    note = words.shown_text(len(blocks), len(kt.keys()), samples, num_samples).replace("feature", "key")
    table = f"{head}</tr></thead><tbody>{rows}</tbody>"
    return _figure("KeyedTensor", words.keyed_size(kt), table, _note(note))


def _aligned(block: Tensor) -> list[str]:
    """Each row's first numbers, all of one width."""
    rows = [[words.number(value) for value in row] for row in block[:, :4].tolist()]
    width = max((len(text) for row in rows for text in row), default=0)
    more = [f"+{block.shape[1] - 4}"] if block.shape[1] > 4 else []
    return [" ".join([*(text.rjust(width) for text in row), *more]) for row in rows]


def _note(sentence: str) -> str:
    return f'<p class="rsl-note">{escape(sentence[0].upper() + sentence[1:])}.</p>' if sentence else ""


def _figure(name: str, size: str, table: str, foot: str) -> str:
    caption = f"<caption><b>{name}</b> {escape(size)}</caption>"
    region = f'<div class="rsl-jagged" role="group" tabindex="0" aria-label="{name}, {escape(size)}">'
    return f"{STYLE}{region}<table>{caption}{table}</table>{foot}</div>"
