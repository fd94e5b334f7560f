"""``str()`` of the sparse classes: every value, in TorchRec's form. ``repr()`` draws the first values instead.

Shape letters: B samples, F features, N values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from recshard_lab.sparse.jagged_tensor import JaggedTensor
    from recshard_lab.sparse.keyed_jagged_tensor import KeyedJaggedTensor
    from recshard_lab.sparse.keyed_tensor import KeyedTensor


def has_values(*tensors: Tensor | None) -> bool:
    """Whether the numbers can be read: no tensor is on ``meta`` or stands for another in a trace."""
    return all(type(tensor) is Tensor and not tensor.is_meta for tensor in tensors if tensor is not None)


def jagged_text(jagged: JaggedTensor) -> str:
    """All bags of a JaggedTensor."""
    values, weights = _bags(jagged)
    if weights is None:
        return _block("JaggedTensor", [f"    {values}"])
    return _block("JaggedTensor", [f'    "values": {values}', f'    "weights": {weights}'])


def keyed_jagged_text(kjt: KeyedJaggedTensor) -> str:
    """All bags of a KeyedJaggedTensor, by feature."""
    entries = []
    for key, place in kjt.index_per_key().items():
        values, weights = _bags(kjt._feature(place))
        if weights is None:
            entries.append(f'    "{key}": {values}')
        else:
            entries.append(f'    "{key}": {{\n        "values": {values},\n        "weights": {weights}\n    }}')
    return _block("KeyedJaggedTensor", entries)


def keyed_text(kt: KeyedTensor) -> str:
    """All columns of a KeyedTensor, by key."""
    return _block("KeyedTensor", [f'    "{key}": {part.tolist()}' for key, part in kt.to_dict().items()])


def _bags(jagged: JaggedTensor) -> tuple[list[object], list[object] | None]:
    weights = jagged.to_dense_weights()
    return _lists(jagged.to_dense()), None if weights is None else _lists(weights)


def _lists(bags: Iterable[Tensor]) -> list[object]:
    return [bag.tolist() for bag in bags]


def _block(name: str, entries: list[str]) -> str:
    return f"{name}({{\n" + ",\n".join(entries) + "\n})\n" if entries else f"{name}()\n"
