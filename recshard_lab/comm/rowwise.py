"""INT8 by rows: ``x ~ code * scale + offset`` with ``offset = min``, ``scale = (max - min) / 255`` of each row.

The layout is that of fbgemm's FusedRowwise8bit: ``[n, w] float32  ->  [n, w + 8] uint8``, the last eight bytes scale
and offset. On the CPU its operator encodes if it is installed; torch gives the same bits. fbgemm adds 1e-8 to
max - min before it divides, which would erase rows of small gradients. Such rows are first multiplied by a power of
two, which is exact, or encoded by torch. Choosing needs the rows' extremes on the host, so torch encodes on a GPU.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from math import ceil, log2

import torch
from torch import Tensor

PARAMETER_BYTES = 8
_HUGE = torch.finfo(torch.float32).max / 4
_UNTOUCHED = 0.25  # from here on, max - min + 1e-8 == max - min in float32
_TINY = 2.0**-100


def encode_rows(rows: Tensor) -> Tensor:
    """``[n, w]`` float32 of at most a quarter of the largest float32 -> ``[n, w + 8]`` uint8."""
    if rows.numel() == 0:
        return rows.new_empty(rows.shape[0], rows.shape[1] + PARAMETER_BYTES, dtype=torch.uint8)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    spread = high - low
    exponent = _exponent(low, high, spread) if rows.device.type == "cpu" and _has_fbgemm() else None
    if exponent is None:
        return _by_torch(rows, low, spread)
    if exponent == 0:
        return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows)
    encoded: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows * 2.0**exponent)
    encoded[:, rows.shape[1] :] = torch.cat([spread / 255, low], 1).view(torch.uint8)
    return encoded


def decode_rows(encoded: Tensor, width: int) -> Tensor:
    """``[n, w + 8]`` uint8 -> ``[n, w]`` float32; rows whose scale is NaN are NaN."""
    if encoded.numel() == 0 or width == 0:
        return torch.empty(encoded.shape[0], width, device=encoded.device)
    if _has_fbgemm() and (encoded.device.type == "cpu" or (width % 4 == 0 and encoded.storage_offset() % 4 == 0)):
        return torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(encoded.contiguous())
    scale, offset = encoded[:, width:].clone(memory_format=torch.contiguous_format).view(torch.float32).split(1, 1)
    return torch.addcmul(offset, encoded[:, :width].float(), scale)


def _by_torch(rows: Tensor, low: Tensor, spread: Tensor) -> Tensor:
    finite = spread.isfinite()
    inverse = torch.where(spread > 0, 255 / spread, 0.0).clamp(max=torch.finfo(torch.float32).max)
    codes = ((rows - low) * inverse).round_()
    codes = torch.where(finite, codes, 0.0).clamp_(0, 255).to(torch.uint8)
    parameters = torch.where(finite, torch.cat([spread / 255, low], 1), torch.nan)
    return torch.cat([codes, parameters.contiguous().view(torch.uint8)], 1)


def _exponent(low: Tensor, high: Tensor, spread: Tensor) -> int | None:
    """The power of two by which all rows must be multiplied for fbgemm; None if torch must encode them."""
    largest = max(float(high.max()), -float(low.min()))
    smallest = float(torch.where(spread > 0, spread, torch.inf).min())
    if not largest <= _HUGE or smallest < _TINY:  # NaN too
        return None
    if smallest >= _UNTOUCHED:
        return 0
    exponent = ceil(log2(_UNTOUCHED / smallest))
    return exponent if largest * 2.0**exponent <= _HUGE else None


@cache
def _has_fbgemm() -> bool:
    if find_spec("fbgemm_gpu") is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of parts that this build lacks
            import_module("fbgemm_gpu")
    except Exception:  # a build for another torch raises anything from its loader; torch gives the same bits
        return False
    return True
