"""The prose of notebook 09 is what its cells print, and its table of formats is what the codecs do."""

import pytest
import torch

from recshard_lab.comm import CommType, make_codec
from tests.notebooks.claims import stored

FORMATS = stored("09")
BYTES = {"fp32": "4 D", "fp16": "2 D", "bf16": "2 D", "int8": "D + 8"}
ERROR = {"fp32": "none", "fp16": "1/2048 of the value", "bf16": "1/256 of the value", "int8": "1/510 of the spread"}
BOUND = {"fp32": 0.0, "fp16": 1 / 2048, "bf16": 1 / 256, "int8": 1 / 510}


@pytest.mark.parametrize("name", BYTES)
def test_the_table_of_formats_has_the_bytes_and_the_bounds_of_the_codecs(name: str) -> None:
    assert f"| `{name}` | {BYTES[name]} | {ERROR[name]}" in FORMATS.prose("A *codec* encodes")
    codec, rows = make_codec(CommType(name)), torch.rand(100, 24)
    encoded = codec.encode(rows)
    assert encoded.numel() * encoded.element_size() == 100 * eval(BYTES[name].replace(" D", " * D"), {}, {"D": 24})
    size = rows.amax(1, keepdim=True) - rows.amin(1, keepdim=True) if name == "int8" else rows
    error = (codec.decode(encoded, 24) - rows).abs()
    assert bool((error <= BOUND[name] * size * (1 + 1e-4) + 1e-7).all())
    assert float(error.max()) >= 0.2 * BOUND[name]


def test_the_limits_of_fp16() -> None:
    prose = FORMATS.prose("2. Small gradients need a scale"), FORMATS.prose("At the other end")
    assert "FP16 has no numbers below about 6e-8." in prose[0]
    assert 5.9e-8 < torch.finfo(torch.float16).smallest_normal / 1024 < 6.0e-8
    assert "a number above 65,504 does not fit into FP16" in prose[1]
    assert torch.finfo(torch.float16).max == 65_504
    cell = FORMATS.cell("of a typical gradient")
    plain, scaled, bf16 = (float(line.split("error:")[1].split("%")[0]) for line in cell.output.splitlines())
    assert scaled < bf16 < 1 < plain


def test_formats_change_the_auc_less_than_other_weights() -> None:
    verdict = FORMATS.cell("Largest change by a format")
    assert verdict.number(after="Largest change by a format:") < verdict.number(after="By other initial weights:")
    assert "Formats change less than other weights." in verdict.output
