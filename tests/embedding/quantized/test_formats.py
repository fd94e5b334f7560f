"""Bytes of served rows: what they decode to, how far rounding goes, and that fbgemm reads the same numbers."""

from __future__ import annotations

import pytest
import torch

from recshard_lab.embedding import DataType, EmbeddingBagConfig
from recshard_lab.embedding.quantized.formats import CODE_BITS, FLOATS, most_error, pack, row_bytes, served_type, unpack

coded = pytest.mark.parametrize("kind", CODE_BITS, ids=lambda kind: kind.value)


def rows(seed: int = 0, dim: int = 8) -> torch.Tensor:
    """Rows of very different size and offset, zeros and constants."""
    torch.manual_seed(seed)
    spread = torch.randn(200, dim) * torch.logspace(-7, 3, 200).unsqueeze(1)
    shifted = torch.randn(200, dim) * 1e-3 + torch.linspace(-50, 50, 200).unsqueeze(1)
    constant = torch.tensor([0.0, 1.0, -0.1, 3.14159, 1e-6, -1e-7, 1000.5]).unsqueeze(1).expand(-1, dim)
    return torch.cat([spread, shifted, constant])


@coded
def test_no_number_is_off_by_more_than_half_a_step(kind: DataType) -> None:
    given = rows()
    packed = pack(given, kind)
    found, bound = unpack(packed, kind), most_error(packed, kind)
    assert bound is not None
    slack = given.abs().amax(1) * 2e-7 + 1e-9  # fp32 arithmetic
    assert bool(((found - given).abs().amax(1) <= bound + slack).all())
    # and a step is not larger than the row needs: its range, and what fp16 loses of the bias
    spread, size = given.amax(1) - given.amin(1), given.abs().amax(1)
    step = (spread + size * 2**-9 + 1e-7) / (2 ** CODE_BITS[kind] - 1)
    assert bool((2 * bound <= step * 1.003 + 2**-23).all())


@coded
def test_constants_and_zeros_are_kept(kind: DataType) -> None:
    given = rows()[-7:]
    found = unpack(pack(given, kind), kind)
    assert torch.equal(found[:2], given[:2])
    top = 2 ** CODE_BITS[kind] - 1
    assert bool(((found - given).abs() <= given.abs() * 2**-9 / top + 2**-24).all())


@coded
def test_the_codes_are_those_of_the_formula(kind: DataType) -> None:
    bits = CODE_BITS[kind]
    codes = torch.arange(2**bits).repeat(8 // bits)[None, :]  # 0 and the top are among them
    packed = pack(codes * 0.25 - 3.0, kind)
    assert packed[0, :4].view(torch.float16).tolist() == [0.25, -3.0]
    spelled = sum(codes.view(-1, 8 // bits)[:, place] << (bits * place) for place in range(8 // bits))
    assert packed[0, 4:].tolist() == spelled.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", FLOATS, ids=lambda kind: kind.value)
def test_floats_are_rounded_to_nearest(kind: DataType) -> None:
    given = rows()[rows().abs().amax(1) < 28]
    found = unpack(pack(given, kind), kind)
    bits = {DataType.FP32: 24, DataType.FP16: 11, DataType.BF16: 8, DataType.FP8: 4}[kind]
    smallest = {DataType.FP32: 0.0, DataType.FP16: 2.0**-25, DataType.BF16: 0.0, DataType.FP8: 2.0**-14}[kind]
    assert bool(((found - given).abs() <= given.abs() * 2.0**-bits + smallest).all())
    assert most_error(pack(given, kind), kind) is None
    assert found.dtype is torch.float32


def test_names_of_formats() -> None:
    assert served_type(torch.qint8) is served_type(torch.quint8) is served_type("int8") is DataType.INT8
    assert served_type(torch.quint4x2) is DataType.INT4
    assert served_type(torch.quint2x4) is DataType.INT2
    assert served_type(torch.float8_e4m3fn) is DataType.FP8
    assert served_type(DataType.BF16) is served_type(torch.bfloat16) is DataType.BF16
    for wrong in ("int3", torch.int64, DataType.FP64, 8):
        with pytest.raises(ValueError, match=r"is not a number format of served tables. Fix: use one of FP32"):
            served_type(wrong)  # type: ignore[arg-type]


def test_what_a_format_cannot_store_is_refused() -> None:
    for kind, dim in ((DataType.INT4, 5), (DataType.INT2, 6)):
        with pytest.raises(ValueError, match=rf"{dim} columns: {kind.value} stores .* Fix: use INT8"):
            row_bytes(EmbeddingBagConfig(9, dim, "t", kind))
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="table 't' has weights that are not finite"):
            pack(torch.tensor([[1.0, number]]), DataType.FP32, "t")
    for kind, most in ((DataType.FP8, 28.0), (DataType.FP16, 65504.0), (DataType.INT8, 65504.0)):
        assert bool(unpack(pack(torch.tensor([[most, -most]]), kind), kind).isfinite().all())
        with pytest.raises(ValueError, match=rf"{kind.value} stores numbers up to {most:,.0f}. Fix: use FP32"):
            pack(torch.tensor([[0.0, -most * 1.01]]), kind)


@pytest.mark.parametrize("kind", [*FLOATS, *CODE_BITS], ids=lambda kind: kind.value)
def test_no_rows_are_no_bytes(kind: DataType) -> None:
    assert unpack(pack(torch.empty(0, 8), kind), kind).shape == (0, 8)
    assert pack(rows()[-7:-1], kind).shape[1] == row_bytes(EmbeddingBagConfig(9, 8, "t", kind))
