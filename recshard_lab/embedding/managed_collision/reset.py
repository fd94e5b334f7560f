"""Resets rows of a table that have new owners: the weight, its gradient, and the optimizer state.

Shape letters: M rows, E rows of the table, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.embedding.dynamic.initial import initial_rows, stream_of

_waiting = WeakTensorKeyDictionary()  # parameter -> the rows whose state is reset before the next step


def first_rows(table: BaseEmbeddingConfig, ids: Tensor, columns: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """``[M, columns]`` the initial values of the rows of ids ``[M]``.

    They are what ``init_fn`` writes to these rows, or else a function of the table's name, the id and the column, so
    that they do not depend on ranks, rows or the order of ids.
    """
    if table.init_fn is not None:
        rows = torch.empty(len(ids), columns[1] - columns[0], dtype=dtype, device=ids.device)
        table.init_fn(rows)
        return rows
    ends = table.get_weight_init_min(), table.get_weight_init_max()
    return initial_rows(ids, stream_of(0, table.name), columns, ends).to(dtype)


@torch.no_grad()
def reset_rows(weight: Tensor, rows: Tensor, values: Tensor, states: Iterable[Tensor]) -> None:
    """Writes ``values [M, D]`` to rows ``[M]``, and 0 to their entries of the optimizer states with E entries."""
    weight[rows] = values
    for state in states:
        if state.dim() and state.shape[0] == len(weight):
            state[rows] = 0


def without_rows(grad: Tensor, rows: Tensor) -> Tensor:
    """A gradient that is 0 in these rows."""
    if not grad.is_sparse:
        grad[rows] = 0
        return grad
    grad = grad.coalesce()
    kept = ~torch.isin(grad.indices()[0], rows)
    return torch.sparse_coo_tensor(grad.indices()[:, kept], grad.values()[kept], grad.shape)


def reset_at_next_step(parameter: Tensor, rows: Tensor) -> None:
    """Resets these rows of a torch optimizer's states before it next steps the parameter.

    The optimizer is found when it steps, so that no code has to name it.
    """
    _hooked()
    _waiting[parameter] = torch.cat([_waiting[parameter], rows]).unique() if parameter in _waiting else rows


@cache
def _hooked() -> Any:
    return register_optimizer_step_pre_hook(_before_step)


@torch.no_grad()
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            rows = _waiting.pop(parameter, None) if len(_waiting) else None
            if rows is not None:
                _reset_states(parameter, rows, optimizer.state.get(parameter, {}), group)


def _reset_states(parameter: Tensor, rows: Tensor, states: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    for name, state in states.items():
        if isinstance(state, Tensor) and state.dim() and state.shape[0] == parameter.shape[0]:
            state[rows] = group.get("initial_accumulator_value", 0.0) if name == "sum" else 0.0
