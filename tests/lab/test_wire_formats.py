"""Wire formats: the errors drawn are those that each codec makes on the rows, against the bytes that it sends."""

from __future__ import annotations

import pytest
import torch

from recshard_lab.comm import CommType, make_codec
from recshard_lab.lab import views
from recshard_lab.lab.draw.theme import number
from recshard_lab.lab.views.wire_formats import codec_errors


@pytest.fixture
def rows() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(2))


def test_every_format_has_its_measured_error_and_bytes(rows: torch.Tensor) -> None:
    view = views.wire_formats(codec_errors(rows))
    assert [row[0] for row in view.numbers.rows] == [str(kind) for kind in CommType]
    for row, kind in zip(view.numbers.rows, CommType, strict=True):
        codec = make_codec(kind)
        encoded = codec.encode(rows)
        error = (codec.decode(encoded, 16) - rows).abs()
        sent = encoded.numel() * encoded.element_size()
        assert row[2] == f"{number(100 * sent / (64 * 16 * 4), 3)}%"
        assert row[3] == number(float(error.max()))
        assert row[4] == number(float(error.double().mean()))
        assert row[6] == "yes"
        assert f">{kind}</text>" in view.svg
    assert view.summary.startswith("int8 sends 37.5% of the bytes")


def test_saturated_values_are_named() -> None:
    found = codec_errors(torch.full((2, 4), 1e30))
    assert found["fp16"].saturated == 8
    assert "saturated by fp16" in views.wire_formats(found).summary
