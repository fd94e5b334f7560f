"""Arithmetic on jagged segments: offsets from lengths, and segments in another order.

A jagged array is `values [N]` split into n consecutive segments by `lengths [n]`; `offsets [n + 1]` are their
boundaries. These two functions run in every training step, on CPU and CUDA.

Shape letters: N ids, n input segments, m output segments.
"""

import sys

import torch
from torch import Tensor

# Below this mean run length (in ids) copying slice by slice loses against one gather.
_IDS_PER_SLICE = 256

# Scattered segments on CPU: fbgemm's kernel takes half the time of the torch ops here. It is used when
# something else has imported fbgemm already; this switch turns it off.
USE_FBGEMM = True


def complete_cumsum(lengths: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Offsets of segments: the running sum of their lengths, with a zero in front.

    Args:
        lengths: `[n]` integers.
        dtype: of the result.

    Returns:
        `[n + 1]`; segment i is `values[offsets[i] : offsets[i + 1]]`.

    >>> complete_cumsum(torch.tensor([2, 0, 1]))
    tensor([0, 2, 2, 3])
    """
    offsets = torch.empty(lengths.numel() + 1, dtype=dtype, device=lengths.device)
    offsets[0] = offsets.new_zeros(())  # a number would be copied from the host, which a CUDA graph refuses
    torch.cumsum(lengths.reshape(-1), 0, dtype=dtype, out=offsets[1:])
    return offsets


def gather_segments(
    values: Tensor,
    lengths: Tensor,
    order: Tensor,
    weights: Tensor | None = None,
    *,
    output_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Puts segments in another order; segment i of the result is segment `order[i]` of the input.

    Args:
        values: `[N, ...]`.
        lengths: `[n]` integers that sum to N.
        order: `[m]` integers in `[0, n)`; repeats and omissions are fine.
        weights: `[N, ...]` that travel with the values, or None. Gradients flow through.
        output_size: ids in the result where the caller knows it; spares a wait for the device on CUDA.

    Returns:
        The values, lengths `[m]` and weights of the result.

    Raises:
        ValueError: on CPU, an entry of `order` outside `[0, n)`, a negative length, or lengths that do
            not sum to N.

    >>> gather_segments(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]), torch.tensor([2, 0]))[:2]
    (tensor([9, 7, 8]), tensor([1, 2]))
    """
    new_lengths = _select_lengths(lengths, order)
    starts = complete_cumsum(lengths)
    if values.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_sum(lengths, starts, values, weights)
        slices = _long_runs(starts, order)
        if slices is not None:
            return _join(values, slices), new_lengths, None if weights is None else _join(weights, slices)
        if _fbgemm_can(values, lengths, weights):
            total = int(new_lengths.sum()) if output_size is None else output_size
            permute = torch.ops.fbgemm.permute_1D_sparse_data
            _, new_values, new_weights = permute(order.to(torch.int32), lengths, values, weights, total)
            return new_values, new_lengths, new_weights
    new_starts = complete_cumsum(new_lengths)
    total = int(new_starts[-1]) if output_size is None else output_size
    shift = starts[:-1].index_select(0, order) - new_starts[:-1]
    index = torch.repeat_interleave(shift, new_lengths, output_size=total)
    index += torch.arange(total, device=index.device)
    return (
        values.index_select(0, index),
        new_lengths,
        None if weights is None else weights.index_select(0, index),
    )


def _select_lengths(lengths: Tensor, order: Tensor) -> Tensor:
    try:
        return lengths.index_select(0, order)
    except (IndexError, RuntimeError) as error:
        bad = ((order < 0) | (order >= lengths.numel())).nonzero().flatten()
        if not bad.numel():
            raise
        place = int(bad[0])
        raise ValueError(
            f"order[{place}] is {int(order[place])}, but there are {lengths.numel()} segments: "
            f"use numbers from 0 to {lengths.numel() - 1}"
        ) from error


def _check_sum(lengths: Tensor, starts: Tensor, values: Tensor, weights: Tensor | None) -> None:
    """A wrong sum would read beyond the values."""
    if int(starts[-1]) != values.shape[0] or (weights is not None and weights.shape[0] != values.shape[0]):
        given = "" if weights is None else f", weights {weights.shape[0]}"
        raise ValueError(f"lengths sum to {int(starts[-1])}, but values has {values.shape[0]}{given}")
    if lengths.numel() and int(lengths.min()) < 0:
        place = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths[{place}] is {int(lengths[place])}: an empty segment has length 0")


def _fbgemm_can(values: Tensor, lengths: Tensor, weights: Tensor | None) -> bool:
    """Whether fbgemm is loaded and its kernel takes these; it knows neither vectors nor gradients."""
    return (
        USE_FBGEMM
        and "fbgemm_gpu" in sys.modules
        and values.dim() == 1
        and values.dtype in (torch.int64, torch.int32, torch.float32)
        and not values.requires_grad
        and lengths.dtype in (torch.int64, torch.int32)
        and (weights is None or (weights.dim() == 1 and weights.dtype == torch.float32 and not weights.requires_grad))
    )


def _long_runs(starts: Tensor, order: Tensor) -> list[tuple[int, int]] | None:
    """Slices of the input that are copied whole, if consecutive segments make them long enough; else None."""
    if not order.numel():
        return None
    first = torch.ones_like(order, dtype=torch.bool)
    torch.ne(order[1:], order[:-1] + 1, out=first[1:])
    runs = int(first.sum())
    if runs > 1 and runs * _IDS_PER_SLICE > int(starts[-1]):
        return None
    begin = first.nonzero().flatten()
    end = torch.cat([begin[1:], begin.new_tensor([order.numel()])]) - 1
    lower = starts[order[begin]].tolist()
    upper = starts[order[end] + 1].tolist()
    return list(zip(lower, upper, strict=True))


def _join(tensor: Tensor, slices: list[tuple[int, int]]) -> Tensor:
    return torch.cat([tensor[lower:upper] for lower, upper in slices])
