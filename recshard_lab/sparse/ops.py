"""Arithmetic on jagged segments: offsets from lengths, and segments in another order.

A jagged array is `values [N]` cut into n consecutive segments by `lengths [n]`; `offsets [n + 1]`
are where the cuts lie. These two functions run in every training step, on CPU and CUDA alike.

Shape letters: N ids, n input segments, m output segments.
"""

import torch
from torch import Tensor

# Below this mean run length (in ids) copying slice by slice loses against one gather.
_IDS_PER_SLICE = 256


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
    offsets[0] = 0
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
        ValueError: on CPU, an entry of `order` outside `[0, n)`.

    >>> gather_segments(torch.tensor([7, 8, 9]), torch.tensor([2, 0, 1]), torch.tensor([2, 0]))[:2]
    (tensor([9, 7, 8]), tensor([1, 2]))
    """
    new_lengths = _select_lengths(lengths, order)
    starts = complete_cumsum(lengths)
    if values.device.type == "cpu":
        slices = _long_runs(starts, order)
        if slices is not None:
            return _join(values, slices), new_lengths, None if weights is None else _join(weights, slices)
    new_starts = complete_cumsum(new_lengths)
    total = int(new_starts[-1]) if output_size is None else output_size
    shift = starts[:-1].index_select(0, order) - new_starts[:-1]
    index = torch.repeat_interleave(shift, new_lengths, output_size=total)
    index += torch.arange(total, device=index.device)
    new_weights = None if weights is None else weights.index_select(0, index)
    return values.index_select(0, index), new_lengths, new_weights


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


def _long_runs(starts: Tensor, order: Tensor) -> list[tuple[int, int]] | None:
    """Slices of the input that are copied whole, if consecutive segments make them long enough; else None."""
    if not order.numel():
        return None
    first = torch.cat([order.new_zeros(1, dtype=torch.bool), order[1:] != order[:-1] + 1])
    first[0] = True
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
