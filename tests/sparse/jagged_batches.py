"""Random jagged batches as plain Python lists: rows[f][b] is the list of ids of feature f, sample b."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from recshard_lab.sparse import KeyedJaggedTensor

Rows = list[list[list[int]]]
Weights = list[list[list[float]]]


@dataclass(frozen=True)
class Batch:
    keys: list[str]
    rows: Rows
    weights: Weights | None
    stride: int
    values_dtype: torch.dtype
    lengths_dtype: torch.dtype
    by_offsets: bool
    variable: bool = False
    inverse: list[list[int]] | None = None  # of a variable batch: which bag each sample has, inverse[f][b]

    def flat(self) -> Tensor:
        return torch.tensor([i for row in self.rows for bag in row for i in bag], dtype=self.values_dtype)

    def flat_weights(self) -> Tensor | None:
        if self.weights is None:
            return None
        return torch.tensor([w for row in self.weights for bag in row for w in bag], dtype=torch.float64)

    def lengths(self) -> Tensor:
        return torch.tensor([len(bag) for row in self.rows for bag in row], dtype=self.lengths_dtype)

    def offsets(self) -> Tensor:
        ends = [0]
        for row in self.rows:
            for bag in row:
                ends.append(ends[-1] + len(bag))
        return torch.tensor(ends, dtype=self.lengths_dtype)

    def inverse_indices(self) -> tuple[list[str], Tensor] | None:
        if self.inverse is None:
            return None
        return self.keys, torch.tensor(self.inverse, dtype=torch.int64).reshape(len(self.keys), self.stride)

    def kjt(self) -> KeyedJaggedTensor:
        cuts = {"offsets": self.offsets()} if self.by_offsets else {"lengths": self.lengths()}
        return KeyedJaggedTensor(self.keys, self.flat(), self.flat_weights(), **cuts, **self.cut())

    def cut(self) -> dict[str, Any]:
        """The arguments with the number of bags of each feature."""
        strides = [[len(row)] for row in self.rows] if self.variable else None
        return {"stride": self.stride, "stride_per_key_per_rank": strides, "inverse_indices": self.inverse_indices()}


@st.composite
def batches(
    draw: st.DrawFn, weighted: bool | None = None, stride: int | None = None, variable: bool | None = None
) -> Batch:
    num_features = draw(st.integers(0, 5))
    stride = draw(st.integers(0, 4)) if stride is None else stride
    variable = draw(st.booleans()) if variable is None else variable
    size = draw(st.sampled_from([0, 1, 6]))
    bag = st.lists(st.integers(0, 2**31 - 1), max_size=size)
    counts = [draw(st.integers(0, 4)) if variable else stride for _ in range(num_features)]
    rows = [[draw(bag) for _ in range(count)] for count in counts]
    inverse = None
    if variable and all(counts) and draw(st.booleans()):
        inverse = [draw(st.lists(st.integers(0, n - 1), min_size=stride, max_size=stride)) for n in counts]
    weights = None
    if draw(st.booleans()) if weighted is None else weighted:
        weights = [[[(i % 97) / 7 for i in bag] for bag in row] for row in rows]
    dtypes = st.sampled_from([torch.int32, torch.int64])
    keys = [f"f{f}" for f in range(num_features)]
    cuts = draw(dtypes), draw(dtypes), draw(st.booleans())
    return Batch(keys, rows, weights, stride, *cuts, variable, inverse)


def rows_of(kjt: KeyedJaggedTensor) -> Rows:
    """The bags again, read from values and lengths alone."""
    ids, lengths, rows = iter(kjt.values().tolist()), iter(kjt.lengths().flatten().tolist()), []
    for count in kjt.stride_per_key():
        rows.append([[next(ids) for _ in range(next(lengths))] for _ in range(count)])
    assert next(ids, None) is None
    assert next(lengths, None) is None
    return rows


def weights_of(kjt: KeyedJaggedTensor) -> Weights | None:
    """The weights in their bags, or None."""
    if kjt.weights_or_none() is None:
        return None
    flat, lengths = iter(kjt.weights().tolist()), iter(kjt.lengths().flatten().tolist())
    return [[[next(flat) for _ in range(next(lengths))] for _ in range(count)] for count in kjt.stride_per_key()]


def assert_holds(kjt: KeyedJaggedTensor, keys: list[str], rows: Rows, weights: Weights | None, stride: int) -> None:
    """All accessors of a KeyedJaggedTensor agree with the lists."""
    assert kjt.keys() == keys
    assert kjt.stride() == stride
    assert kjt.stride_per_key() == [len(row) for row in rows]
    assert kjt.lengths_offset_per_key() == [sum(map(len, rows[:f])) for f in range(len(keys) + 1)]
    assert rows_of(kjt) == rows
    assert weights_of(kjt) == weights
    counts = [sum(map(len, row)) for row in rows]
    assert kjt.length_per_key() == counts
    assert kjt.offset_per_key() == [sum(counts[:f]) for f in range(len(keys) + 1)]
    assert kjt.offsets()[-1].item() == sum(counts)
    assert torch.equal(kjt.offsets().diff().flatten(), kjt.lengths().flatten().to(kjt.offsets().dtype))
