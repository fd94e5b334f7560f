"""Jagged batches as text: ``repr()`` has the first bags of each feature, ``str()`` every value, in TorchRec's form.

Only the values that are shown are read, so a large batch prints as fast as a small one. A notebook shows a picture,
which `recshard_lab.lab` draws of the same parts.

Shape letters: B samples, F features, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

_COLUMNS = 100
_LINES = 20
_BAG_COLUMNS = 70


class Bag(NamedTuple):
    """One sample's ids of one feature: the first as text, with their weights, and the number of all."""

    ids: list[str]
    weights: list[str] | None
    num_ids: int

    @property
    def hidden(self) -> int:
        """Ids that are not shown."""
        return self.num_ids - len(self.ids)

    def __str__(self) -> str:
        shown = self.ids if self.weights is None else list(map(":".join, zip(self.ids, self.weights, strict=True)))
        return "[" + " ".join(shown + [f"+{self.hidden}"] * (self.hidden > 0)) + "]"


class Shown(NamedTuple):
    """What is shown of a batch: its keys, or one None of a JaggedTensor; bags of each key; the first bags of some."""

    name: str
    keys: Sequence[str | None]
    counts: list[int]
    bags: list[list[Bag]]
    size: str

    @property
    def num_samples(self) -> int:
        """The most bags of a key."""
        return max(self.counts, default=0)


def html(batch: Any) -> str | None:
    """The picture of a batch in a notebook, for which the lab is loaded. None, so text, if it has nothing to draw."""
    picture: str | None = import_module("recshard_lab.lab.draw.jagged").html_of(batch)
    return picture


def shown(jagged: Any, features: int, samples: int | None = None, ids: int | None = None) -> Shown | None:
    """The first bags of the first features. None if the batch has no numbers to read.

    Args:
        features, samples, ids: the most of each. Default: what fits a text of these numbers of samples.
    """
    if not has_numbers(*jagged._tensors().values()):
        return None
    keys = getattr(jagged, "_keys", [None])
    counts = jagged.stride_per_key() if hasattr(jagged, "stride_per_key") else [jagged.lengths().numel()]
    most, offsets, bags = max(counts, default=0), jagged.offsets(), []
    for first, count in list(zip(accumulate(counts, initial=0), counts, strict=False))[:features]:
        ends = offsets[first : first + min(count, samples or 24) + 1].tolist()
        bags.append([_bag(jagged, *span, ids or (8 if most <= 3 else 4)) for span in pairwise(ends)])
    return Shown(_name(jagged), keys, counts, bags, _size(keys, counts, jagged))


def jagged_text(jagged: Any) -> str:
    """``repr()`` of a JaggedTensor or a KeyedJaggedTensor."""
    batch = shown(jagged, _LINES)
    if batch is None:
        keys = f"{jagged._keys}, " if hasattr(jagged, "_keys") else ""
        return f"{_name(jagged)}({keys}values={_short(jagged._values)}, without numbers to show)"
    title = f"{batch.name}({batch.size})"
    if not batch.num_samples:
        return title
    labels = ["" if key is None else clip(key, 24) + "  " for key in batch.keys[: len(batch.bags)]]
    margin = max(map(len, labels))
    columns: list[list[str]] = []
    room = _COLUMNS - margin - 6
    for sample in range(max(map(len, batch.bags))):
        column = [str(bags[sample]) if sample < len(bags) else "" for bags in batch.bags]
        width = max(map(len, column))
        if columns and room < width:
            break
        room -= width + 1
        columns.append([cell.ljust(width) for cell in column])
    lines = [
        "  " + (label.ljust(margin) + " ".join(cells) + (" ..." if count > len(columns) else "")).rstrip()
        for label, count, cells in zip(labels, batch.counts, zip(*columns, strict=True), strict=False)
    ]
    note = shown_text(len(lines), len(batch.keys), len(columns), batch.num_samples)
    return "\n".join([title, *lines, *([f"  ({note})"] if note else [])])


def keyed_text(kt: Any) -> str:
    """``repr()`` of a KeyedTensor."""
    if not isinstance(kt._values, Tensor):
        return f"KeyedTensor({kt._keys}, values={_short(kt._values)})"
    lines = [f"KeyedTensor({keyed_size(kt)})"]
    for key, block in list(kt.to_dict().items())[:_LINES] if drawable(kt) else ():
        rows = " ".join(f"[{number_row(row, 4)}]" for row in block[:3].tolist())
        lines.append(f"  {clip(key, 24)} [{block.shape[1]}]  {rows}" + " ..." * (block.shape[0] > 3))
    hidden = len(kt._keys) + 1 - len(lines)
    return "\n".join(lines + [f"  (and {hidden} more keys)"] * (0 < hidden < len(kt._keys)))


def full_text(batch: Any) -> str:
    """``str()``: every value. A batch without numbers, such as one on the meta device, has its ``repr()``."""
    if not has_numbers(*batch._tensors().values()):
        return repr(batch)
    if hasattr(batch, "key_dim"):
        entries = [f'    "{key}": {part.tolist()}' for key, part in batch.to_dict().items()]
    elif hasattr(batch, "_keys"):
        entries = []
        for key, place in batch.index_per_key().items():
            values, weights = _lists(batch._feature(place))
            weighted = f'{{\n        "values": {values},\n        "weights": {weights}\n    }}'
            entries.append(f'    "{key}": {values if weights is None else weighted}')
    else:
        values, weights = _lists(batch)
        entries = [f"    {values}"] if weights is None else [f'    "values": {values}', f'    "weights": {weights}']
    return f"{_name(batch)}({{\n" + ",\n".join(entries) + "\n})\n" if entries else f"{_name(batch)}()\n"


def _lists(bags: Any) -> tuple[list[Any], list[Any] | None]:
    weights = bags.to_dense_weights()
    return [bag.tolist() for bag in bags.to_dense()], weights and [bag.tolist() for bag in weights]


def _bag(jagged: Any, lower: int, upper: int, most: int) -> Bag:
    span = slice(lower, min(upper, lower + most))
    ids = list(map(number, jagged._values[span].tolist()))
    weights = None if jagged._weights is None else list(map(number, jagged._weights[span].tolist()))
    ends = accumulate(len(text) + 2 + (len(weights[n]) if weights else 0) for n, text in enumerate(ids))
    fitting = max(1, sum(end <= _BAG_COLUMNS for end in ends))
    return Bag(ids[:fitting], weights and weights[:fitting], upper - lower)


def has_numbers(*tensors: Any) -> bool:
    """Whether these can be read: real tensors, not those of a compiler, a mapped tree or ``meta``."""
    return all(type(tensor) is Tensor and not tensor.is_meta for tensor in tensors)


def drawable(kt: Any) -> bool:
    """Whether a KeyedTensor has numbers in rows and columns, and each key once."""
    values = kt._values
    plain = has_numbers(values.detach()) and values.dim() == 2 and kt._key_dim in (1, -1)
    return plain and len(set(kt._keys)) == len(kt._keys) and values.numel() > 0


def _name(batch: Any) -> str:
    return "KeyedTensor" if hasattr(batch, "key_dim") else "Keyed" * hasattr(batch, "_keys") + "JaggedTensor"


def _size(keys: Sequence[str | None], counts: Sequence[int], jagged: Any) -> str:
    size = counted(max(counts, default=0), "sample")
    if getattr(jagged, "_strides", None) is not None:  # a variable batch
        size = counted(max(counts, default=0), "bag")
        size = size if len(set(counts)) <= 1 else f"{min(counts):,} to {size}"
    if list(keys) != [None]:
        size = f"{counted(len(keys), 'feature')} x {size}"
    weighted = ", weighted" if jagged._weights is not None else ""
    return f"{size}, {counted(jagged._values.shape[0], noun(jagged))}, {_kind(jagged._values)}{weighted}"


def keyed_size(kt: Any) -> str:
    """Keys, shape and type of a KeyedTensor."""
    shape = " x ".join(f"{size:,}" for size in kt._values.shape)
    return f"{counted(len(kt._keys), 'key')}, values {shape}, {_kind(kt._values)}"


def noun(jagged: Any) -> str:
    """What a value is."""
    return "vector" if jagged._values.dim() > 1 else "id"


def _kind(tensor: Tensor) -> str:
    where = "" if tensor.device.type == "cpu" else f", {tensor.device}"
    return str(tensor.dtype).removeprefix("torch.") + where


def shown_text(features: int, num_features: int, samples: int, num_samples: int) -> str:
    """How much is shown. Empty if all is."""
    pairs = ((features, num_features, "feature"), (samples, num_samples, "sample"))
    parts = [f"{some} of {counted(most, what)}" for some, most, what in pairs if some < most]
    return f"showing {' and '.join(parts)}" if parts else ""


def counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def number(value: Any) -> str:
    """A number, or the first ones of a vector."""
    if isinstance(value, list):
        return f"({number_row(value, 3)})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def number_row(values: list[Any], most: int) -> str:
    """The first numbers, and the number of the others."""
    return " ".join([*map(number, values[:most]), *([f"+{len(values) - most}"] if len(values) > most else [])])


def clip(text: str, most: int) -> str:
    """The text, shortened to this many characters."""
    return text if len(text) <= most else text[: most - 3] + "..."


def _short(value: Any) -> str:
    return f"{_kind(value)}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)
