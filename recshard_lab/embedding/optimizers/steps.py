"""Runs a rule on the touched rows of one shard: a whole step, or up to the squares that shards must exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from recshard_lab.embedding.optimizers.rules import RULES, Formula, RowDims, State, Touched, gather_rows, row_squares
from recshard_lab.embedding.optimizers.spec import OptimizerSpec
from recshard_lab.embedding.optimizers.types import WeightDecayMode


@torch.no_grad()
def step(
    spec: OptimizerSpec,
    weight: Tensor,
    state: State,
    rows: Tensor,
    grad: Tensor,
    totals: Sequence[Tensor] | None,
    full_dim: RowDims,
    iteration: int | Tensor = 1,
) -> None:
    """One optimizer step on the touched rows of one shard, in place.

    Args:
        spec: the rule and its settings.
        weight: the shard ``[num_rows, d]``; fp16 and bf16 are stepped in fp32 and rounded to nearest.
        state: the tensors of ``spec.state_shapes`` (without ``iter``, which the caller counts), stepped in place.
        rows: ``[U]`` int64, each row once.
        grad: ``[U, d]`` summed gradient. It is a buffer: its contents are lost.
        totals: for each of ``spec.row_norm_rounds`` the result of `partial_squares`, summed over all D columns of each
            row; None if this shard has all columns.
        full_dim: D, the columns of the whole table; ``[U]`` for rows of tables of different widths.
        iteration: the number of this step, from 1, for all rows or ``[U]``. The Adams and LAMBs read it.
    """
    if rows.numel() == 0:
        return
    touched = Touched(spec, weight, state, rows, grad, full_dim, iteration)
    formula = _formula(touched)
    own: Tensor | None = None
    try:
        for number in range(spec.row_norm_rounds + 1):
            given = own if own is None or totals is None else totals[number - 1].to(own.dtype)
            own = formula.send(given)  # type: ignore[arg-type]  # the first thing sent to a generator is None
    except StopIteration as done:
        update: Tensor = done.value
    weight.index_copy_(0, rows, update.add_(touched.values()).to(weight.dtype))


@torch.no_grad()
def partial_squares(
    spec: OptimizerSpec,
    weight: Tensor,
    state: State,
    rows: Tensor,
    grad: Tensor,
    totals: Sequence[Tensor],
    full_dim: RowDims,
    iteration: int | Tensor = 1,
) -> Tensor:
    """Squares ``[U]`` or ``[U, k]`` over this shard's columns, for the next round. Steps nothing.

    Args:
        totals: the sums of earlier rounds; the others as of `step`. The contents of ``grad`` are lost.
    """
    formula = _formula(Touched(spec, weight, state, rows, grad, full_dim, iteration))
    squares = next(formula)
    for total in totals:
        squares = formula.send(total.to(squares.dtype))
    formula.close()
    return squares


def _formula(at: Touched) -> Formula:
    """The rule with the settings of all rules: clipping and weight decay before and after it, a bound on rows."""
    spec, rule = at.spec, RULES[at.spec.optimizer]
    if spec.gradient_clipping:
        at.grad.clamp_(-spec.max_gradient, spec.max_gradient)
    if spec.weight_decay_mode is WeightDecayMode.L2:
        at.grad.add_(at.values(), alpha=spec.weight_decay)
    decay = spec.weight_decay_mode is WeightDecayMode.DECOUPLE and not rule.decays_inside
    return _bounded(at, decay) if spec.max_norm else _own(at, decay)


def _own(at: Touched, decay: bool) -> Formula:
    """The rule, with ``decay`` also ``w -= lr * weight_decay * w`` (Loshchilov and Hutter 2019)."""
    formula = RULES[at.spec.optimizer].formula(at)
    if not decay:
        return (yield from formula)
    update = yield from formula
    return update.add_(at.values(), alpha=-at.spec.learning_rate * at.spec.weight_decay)


def _bounded(at: Touched, decay: bool) -> Formula:
    """The rule, with rows longer than ``max_norm`` after the step scaled to that length.

    The rule writes its state before the last yield. Therefore it runs on a copy of its rows.
    """
    state = {name: at.read(name) for name in at.state}
    every = torch.arange(at.rows.numel(), device=at.rows.device)
    copy = replace(at, weight=at.values(), state=state, rows=every)
    update = (yield from _own(copy, decay)).add_(at.values())
    length = (yield row_squares(update)).sqrt()
    for name, value in state.items():
        at.write(name, value)
    return update.mul_((at.spec.max_norm / length).clamp_(max=1.0).unsqueeze(1)).sub_(at.values())


def add_rows_(weight: Tensor, rows: Tensor, update: Tensor) -> None:
    """``weight[rows] += update`` for distinct rows; half-precision weights are rounded once, from fp32.

    Gather, add and scatter take less time than ``index_add_``.
    """
    weight.index_copy_(0, rows, update.add_(gather_rows(weight, rows, update.dtype)).to(weight.dtype))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over rows and optimizer states of fp16 and bf16 weights are fp32; others keep their dtype."""
    return torch.promote_types(dtype, torch.float32)
