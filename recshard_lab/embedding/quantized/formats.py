"""Number formats of served tables: rows to bytes and back, on any device.

The bytes are those that fbgemm's inference kernels read::

    FP32, FP16, BF16   the numbers
    FP8                1 sign, 4 exponent and 3 mantissa bits: the numbers times 16, as ``torch.float8_e4m3fn``
    INT8, INT4, INT2   scale fp16, bias fp16, then 1, 2 or 4 codes per byte, the first in the lowest bits

A code stands for ``code * scale + bias``. Each row has a separate scale and bias. The bias is rounded down to fp16 and
the scale up, so that ``bias`` to ``bias + (2**bits - 1) * scale`` contains the row: no number is off by more than
``scale / 2``. `most_error` returns that bound.

Shape letters: E rows, D columns, R bytes of a row, n some rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recshard_lab.embedding.configs import ROW_HEADER_BYTES as HEADER_BYTES
from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType

CODE_BITS: Mapping[DataType, int] = {DataType.INT8: 8, DataType.INT4: 4, DataType.INT2: 2}
"""The formats with codes, and bits of a code."""

FLOATS: Mapping[DataType, torch.dtype] = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.FP8: torch.float8_e4m3fn,
}
"""The formats without codes, and torch's dtype."""

FP8_EXPONENT_BITS, FP8_EXPONENT_BIAS = 4, 11
_FP8_SCALE = float(2 ** (FP8_EXPONENT_BIAS - 7))  # 7 is the bias of torch.float8_e4m3fn
_MOST = {
    DataType.FP16: torch.finfo(torch.float16).max,
    DataType.FP8: torch.finfo(torch.float8_e4m3fn).max / _FP8_SCALE,
    **dict.fromkeys(CODE_BITS, torch.finfo(torch.float16).max),
}

_NAMED: Mapping[torch.dtype, DataType] = (
    {dtype: kind for kind, dtype in FLOATS.items()}
    | dict.fromkeys((torch.qint8, torch.quint8, torch.int8, torch.uint8), DataType.INT8)
    | {torch.quint4x2: DataType.INT4, torch.quint2x4: DataType.INT2}
)


def served_type(dtype: torch.dtype | DataType | str) -> DataType:
    """The number format of a served table, from torch's dtype, a `DataType` or its name.

    Raises:
        ValueError: no table can be served in it.

    >>> served_type(torch.quint4x2), served_type("int8")
    (<DataType.INT4: 'INT4'>, <DataType.INT8: 'INT8'>)
    """
    kind = _NAMED.get(dtype, dtype) if isinstance(dtype, torch.dtype) else dtype
    if isinstance(kind, str):
        kind = DataType.__members__.get(kind.upper(), kind)
    if isinstance(kind, DataType) and (kind in CODE_BITS or kind in FLOATS):
        return kind
    names = ", ".join(known.value for known in (*FLOATS, *CODE_BITS))
    raise ValueError(f"dtype {dtype!r:.80} is not a number format of served tables. Fix: use one of {names}")


def row_bytes(table: BaseEmbeddingConfig) -> int:
    """Bytes R of a row, without padding.

    Raises:
        ValueError: no kernel reads such rows.

    >>> row_bytes(BaseEmbeddingConfig(10, 64, "movies", DataType.INT4))
    36
    """
    kind, dim = served_type(table.data_type), table.embedding_dim
    if kind in FLOATS:
        return dim * FLOATS[kind].itemsize
    per_byte = 8 // CODE_BITS[kind]
    if dim % per_byte:
        raise ValueError(
            f"table {table.name!r} has {dim} columns: {kind.value} stores {per_byte} columns per byte. "
            f"Fix: use INT8 for this table"
        )
    return HEADER_BYTES + dim // per_byte


def pack(rows: Tensor, kind: DataType, table: str = "") -> Tensor:
    """Rows ``[n, D]`` of any floating point -> ``[n, R]`` uint8.

    Args:
        table: its name, for errors.

    Raises:
        ValueError: weights that are not finite, or too large for the format.

    >>> pack(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), DataType.INT2).tolist()
    [[0, 60, 0, 0, 228]]
    """
    if not bool(rows.isfinite().all()):
        raise ValueError(f"table {table!r} has weights that are not finite. Fix: find the step that diverged")
    rows = rows.float()
    most = _MOST.get(kind)
    if most is not None and rows.numel() and float(rows.abs().max()) > most:
        raise ValueError(
            f"table {table!r} has weights up to {float(rows.abs().max()):.3g}: {kind.value} stores numbers up to "
            f"{most:,.0f}. Fix: use FP32 for this table"
        )
    if kind in FLOATS:
        wide = rows * _FP8_SCALE if kind is DataType.FP8 else rows
        return wide.to(FLOATS[kind]).contiguous().view(torch.uint8)
    bits = CODE_BITS[kind]
    top = 2**bits - 1
    bias = _half_below(rows.amin(1, keepdim=True))
    scale = _half_above((rows.amax(1, keepdim=True) - bias.float()) / top)
    step = torch.where(scale > 0, scale, 1).float()
    codes = ((rows - bias.float()) / step).round_().clamp_(0, top).to(torch.uint8)
    packed = _joined_codes(codes, bits)
    return torch.cat([torch.cat([scale, bias], 1).view(torch.uint8), packed], 1)


def unpack(packed: Tensor, kind: DataType) -> Tensor:
    """``[n, R]`` uint8 -> ``[n, D]`` fp32, what a lookup reads.

    >>> unpack(pack(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), DataType.INT2), DataType.INT2).tolist()
    [[0.0, 1.0, 2.0, 3.0]]
    """
    if kind in FLOATS:
        wide = _dense(packed).view(FLOATS[kind]).float()
        return wide / _FP8_SCALE if kind is DataType.FP8 else wide
    header = _dense(packed[:, :HEADER_BYTES]).view(torch.float16).float()
    codes, bits = packed[:, HEADER_BYTES:], CODE_BITS[kind]
    codes = _split_codes(codes, bits)
    return codes * header[:, :1] + header[:, 1:]


def take_columns(packed: Tensor, kind: DataType, start: int, end: int) -> Tensor:
    """Columns ``[start, end)`` of packed rows: ``[n, R]`` -> ``[n, bytes of end - start columns]``.

    They keep the scale and bias of the whole row, so a lookup reads the same numbers.

    >>> rows = torch.arange(8.0).view(1, 8)
    >>> packed = pack(rows, DataType.INT4)
    >>> own = take_columns(packed, DataType.INT4, 3, 7)
    >>> torch.equal(unpack(own, DataType.INT4), unpack(packed, DataType.INT4)[:, 3:7])
    True
    """
    if kind in FLOATS:
        size = FLOATS[kind].itemsize
        return packed[:, start * size : end * size]
    header, codes, per_byte = packed[:, :HEADER_BYTES], packed[:, HEADER_BYTES:], 8 // CODE_BITS[kind]
    if start % per_byte == 0:
        own = codes[:, start // per_byte : -(-end // per_byte)]
    else:
        own = _joined_codes(_split_codes(codes, CODE_BITS[kind])[:, start:end], CODE_BITS[kind])
    return torch.cat([header, own], 1)


def most_error(packed: Tensor, kind: DataType) -> Tensor | None:
    """``[n]`` fp32: half the scale of each row, the most that rounding changes a number. None for formats without
    codes, whose error is relative to each number."""
    if kind in FLOATS:
        return None
    return _dense(packed[:, :2]).view(torch.float16).float().squeeze(1) / 2


def _joined_codes(codes: Tensor, bits: int) -> Tensor:
    """``[n, D]`` uint8, one code each -> ``[n, D * bits / 8]``, the first code in the lowest bits."""
    packed = codes[:, :: 8 // bits].clone()
    for place in range(1, 8 // bits):
        packed |= codes[:, place :: 8 // bits] << (bits * place)
    return packed


def _split_codes(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device)
    return ((codes.unsqueeze(2) >> shifts) & (2**bits - 1)).flatten(1)


def _dense(packed: Tensor) -> Tensor:
    """A copy with dense strides. ``contiguous`` keeps any stride of a single row, which may not divide by 2."""
    return packed.clone(memory_format=torch.contiguous_format)


def _half_below(numbers: Tensor) -> Tensor:
    """fp16, at most the numbers. Two subtractions: fp16 has 11 bits, below 6.1e-5 steps of 6.0e-8."""
    half = numbers.half()
    lower = (numbers - numbers.abs() * 2.0**-10 - 2.0**-24).half()
    return torch.where(half.float() > numbers, lower, half)


def _half_above(numbers: Tensor) -> Tensor:
    return -_half_below(-numbers)


# The bytes of all tables of a collection, in one tensor: kernels take one address and find every table by its start.
#
# Tables of one format and width are neighbours, so that their rows are the rows of one matrix.
#
# Shape letters: E rows of a table, R bytes of a row, P bytes of a row with padding, C rows of all tables of a class.


_TABLE_ALIGNMENT = 128  # the first table of a class starts on a cache line
_CUDA_ROW_ALIGNMENT = 16  # CUDA kernels load 16 bytes at a time


def row_alignment(device: torch.device) -> int:
    """Rows start at multiples of this many bytes."""
    return _CUDA_ROW_ALIGNMENT if device.type == "cuda" else 1


class Place(NamedTuple):
    """Where one table is stored.

    Attributes:
        table: its name, for errors.
        start: its first byte.
        rows: E.
        dim: columns.
        kind: its number format.
        row_bytes: R.
        stride: P.
        class_start: first byte of the tables of the same format and width, which are neighbours.
        class_rows: C.
    """

    table: str
    start: int
    rows: int
    dim: int
    kind: DataType
    row_bytes: int
    stride: int
    class_start: int
    class_rows: int


class PackedTables:
    """Tables in one tensor of bytes. All numbers are zero at first.

    Args:
        tables: their configs, in the order of `places`.
        device: ``"meta"`` allocates nothing.

    Raises:
        ValueError: a table that cannot be stored in its number format.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], device: torch.device) -> None:
        self.tables = list(tables)
        self.alignment = row_alignment(device)
        classes: dict[tuple[DataType, int], list[int]] = {}
        for number, table in enumerate(tables):
            classes.setdefault((table.data_type, table.embedding_dim), []).append(number)
        places: dict[int, Place] = {}
        end = 0
        for (kind, dim), members in classes.items():
            used = row_bytes(tables[members[0]])
            stride = -(-used // self.alignment) * self.alignment
            first = start = -(-end // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
            rows = sum(tables[number].num_embeddings for number in members)
            for number in members:
                name, own = tables[number].name, tables[number].num_embeddings
                places[number] = Place(name, start, own, dim, kind, used, stride, first, rows)
                start += own * stride
            end = start
        self.places = [places[number] for number in range(len(tables))]
        self.flat = torch.zeros(end, dtype=torch.uint8, device=device)

    def rows_of(self, number: int) -> Tensor:
        """``[E, R]``: a view of one table, without padding."""
        place = self.places[number]
        return rows_in(self.flat, place.start, place.rows, place)


def rows_in(flat: Tensor, start: int, rows: int, place: Place) -> Tensor:
    """``[rows, R]``: a view of rows like those of `place`, from byte ``start`` of ``flat``, which may be a view too."""
    return flat.narrow(0, start, rows * place.stride).view(rows, place.stride).narrow(1, 0, place.row_bytes)
