"""Codecs keep their bounds, the two ways to code INT8 give the same bits, and nothing overflows in silence."""

import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from recshard_lab import comm
from recshard_lab.comm.codecs import Bf16Codec, Fp16Codec, Int8Codec
from tests.refusals import not_refused

CODED = [comm.CommType.FP16, comm.CommType.BF16, comm.CommType.INT8]
BYTES = {comm.CommType.FP32: 4, comm.CommType.FP16: 2, comm.CommType.BF16: 2, comm.CommType.INT8: 1}


def tables_of_rows(**numbers: Any) -> st.SearchStrategy[torch.Tensor]:
    shapes = st.tuples(st.integers(0, 5), st.integers(1, 9))
    return arrays.arrays("float32", shapes, elements=st.floats(width=32, **numbers)).map(torch.from_numpy)


@pytest.mark.parametrize("kind", list(comm.CommType))
@given(rows=tables_of_rows())
def test_every_element_keeps_the_bound_of_its_codec_whatever_the_rows_hold(
    kind: comm.CommType, rows: torch.Tensor
) -> None:
    error = comm.codec_error(kind, rows)
    assert error.within, str(error)
    assert error.encoded_bytes == rows.numel() * BYTES[kind] + (8 * len(rows) if kind is comm.CommType.INT8 else 0)


@pytest.mark.parametrize("kind", CODED)
def test_the_bound_is_tight_and_a_worse_codec_would_break_it(kind: comm.CommType) -> None:
    rows = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    codec = comm.make_codec(kind)
    bound = codec.error_bound(rows)
    gap = (codec.decode(codec.encode(rows), 64).double() - rows.double()).abs()
    assert bool((gap <= bound).all())
    assert bool((gap > 0.9 * bound).any())
    formula = {
        comm.CommType.FP16: 2.0**-11 * rows.abs(),
        comm.CommType.BF16: 2.0**-8 * rows.abs(),
        comm.CommType.INT8: ((rows.amax(1, True) - rows.amin(1, True)) / 255 / 2).expand_as(rows),
    }[kind]
    torch.testing.assert_close(bound.float(), formula.clamp(min=2.0**-25), rtol=1e-3, atol=0.0)


@given(rows=tables_of_rows(allow_nan=False, allow_infinity=False), power=st.integers(-60, 20))
def test_fbgemm_and_torch_give_the_same_bits(rows: torch.Tensor, power: int) -> None:
    pytest.importorskip("fbgemm_gpu")
    rows = (rows.clamp(-4.0, 4.0) * 2.0**power).contiguous()
    by_either = comm.codecs.encode_rows(rows)
    if rows.numel():
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        assert torch.equal(by_either, comm.codecs._by_torch(rows, low, high - low))
    fast = comm.codecs.decode_rows(by_either, rows.shape[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm.codecs, "_has_fbgemm", lambda: False)
        slow = comm.codecs.decode_rows(by_either, rows.shape[1])
        assert torch.equal(by_either, comm.codecs.encode_rows(rows))
    torch.testing.assert_close(fast, slow, rtol=2.0**-22, atol=1e-37)


def test_layout_is_fbgemms() -> None:
    pytest.importorskip("fbgemm_gpu")
    rows = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(comm.codecs.encode_rows(rows), torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows))


def test_finite_values_saturate_are_counted_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    codec = Fp16Codec()
    rows = torch.tensor([[1e6, -1e6, 3.0, float("inf"), float("nan")]])
    with caplog.at_level(logging.WARNING, logger="recshard_lab"):
        decoded = codec.decode(codec.encode(rows), 5)
        codec.encode(rows)
    assert decoded[0, :4].tolist() == [65504.0, -65504.0, 3.0, float("inf")]
    assert decoded[0, 4].isnan()
    assert codec.saturated == 4
    assert len(caplog.records) == 1
    assert "fp16 codec: 2 values beyond 65504 (largest 1e+06)" in caplog.text
    assert Bf16Codec().decode(Bf16Codec().encode(rows[:, :3]), 3).isfinite().all()


def test_sums_of_saturated_parts_stay_finite() -> None:
    encoded = Fp16Codec().encode(torch.tensor([[9e4, -9e4]]), parts=4)
    assert (encoded + encoded + encoded + encoded).isfinite().all()


def test_a_row_that_int8_cannot_hold_arrives_as_nan_and_the_others_unharmed() -> None:
    rows = torch.tensor([[1.0, float("nan"), 2.0], [1.0, 2.0, 3.0], [0.0, float("inf"), 0.0]])
    codec = Int8Codec()
    decoded = codec.decode(codec.encode(rows), 3)
    assert decoded[[0, 2]].isnan().all()
    torch.testing.assert_close(decoded[1], rows[1], rtol=0.0, atol=2 / 255 / 2 * 1.001)


def test_a_loss_scale_lifts_small_gradients_out_of_the_subnormals() -> None:
    rows = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)) * 1e-7
    plain, scaled = (comm.codec_error(codec, rows) for codec in (comm.CommType.FP16, Fp16Codec(loss_scale=2.0**16)))
    assert "within its bound" in str(scaled)
    assert plain.within
    assert scaled.mean_abs < plain.mean_abs / 100


def test_a_configuration_that_means_nothing_is_refused_by_name() -> None:
    loss_scale = {"backward_precision": comm.CommType.INT8, "backward_loss_scale": 8.0}
    refusals: list[tuple[Any, str]] = [
        (lambda: comm.QCommsConfig(forward_precision="fp16"), "forward_precision must be one of CommType.FP32"),  # type: ignore[arg-type]
        (lambda: comm.QCommsConfig(**loss_scale), "backward_loss_scale=8.0"),  # type: ignore[arg-type]
        (lambda: comm.QCommsConfig(forward_loss_scale=2.0), "forward_loss_scale"),
        (lambda: comm.get_qcomm_codecs(comm.QCommsConfig(comm.CommType.FP16, forward_loss_scale=0.0)), "positive"),
        (lambda: comm.codec_error(comm.CommType.FP16, torch.arange(3)), "floating point"),
    ]
    assert not_refused(refusals) == []


def test_a_registry_with_a_stray_key_is_refused_where_it_is_given() -> None:
    from recshard_lab.distributed import EmbeddingBagCollectionSharder

    registry: dict[str, Any] = comm.get_qcomm_codecs_registry(comm.QCommsConfig(comm.CommType.FP16))
    EmbeddingBagCollectionSharder(None, registry)
    with pytest.raises(ValueError, match=r"'ALL_TO_ALL'.*POOLED_EMBEDDINGS_ALL_TO_ALL"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={"ALL_TO_ALL": registry.popitem()[1]})
    with pytest.raises(ValueError, match="must be QuantizedCommCodecs"):
        EmbeddingBagCollectionSharder(qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": "fp16"})  # type: ignore[dict-item]
