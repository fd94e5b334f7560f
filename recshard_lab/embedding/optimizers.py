"""Optimizers that run inside backward, on the rows a batch touched and no others.

A rule is a formula on *coalesced* gradients: each touched row once, duplicates already summed, so that a
fused step equals the dense step exactly. Adding an optimizer is one function, one member of `EmbOptimType`
and one line in `_RULES`.

Shape letters: E rows, D columns of the whole table, d columns of the piece at hand, U touched rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor

from recshard_lab.embedding.rowwise_adagrad import RowWiseAdagrad as RowWiseAdagrad

State = Mapping[str, Tensor]
RowDims = int | Tensor  # D, or [U] where the rows come from tables of different widths


@unique
class EmbOptimType(Enum):
    """The fused optimizers, under fbgemm's names.

    >>> EmbOptimType("exact_sgd")
    <EmbOptimType.EXACT_SGD: 'exact_sgd'>
    """

    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class OptimizerSpec:
    """Which fused optimizer, with which numbers.

    Args:
        optimizer: the rule.
        learning_rate: step size.
        eps: added to the root of the accumulated squares (the Adagrads).
        weight_decay: L2 penalty, added to the gradient of *touched* rows as ``weight_decay * w``.

    Raises:
        ValueError: a negative or non-finite number, or an optimizer that is no `EmbOptimType`.

    >>> OptimizerSpec(EmbOptimType.EXACT_ROWWISE_ADAGRAD).state_shapes(1000, 64)
    {'momentum1': (1000,)}
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", optim_type(self.optimizer))
        for name in ("learning_rate", "eps", "weight_decay"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
        """Reads a ``fused_params`` dictionary (``optimizer``, ``learning_rate``, ``eps``, ``weight_decay``).

        Raises:
            ValueError: a key that no kernel here honours, by name.
        """
        given = dict(fused_params or {})
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"fused_params has {unknown}, which no kernel honours: use only {known}")
        return cls(**given)

    @classmethod
    def from_optimizer(
        cls, optimizer_class: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any] | None = None
    ) -> OptimizerSpec:
        """The fused optimizer that steps as a torch optimizer would, in which no argument is lost.

        Args:
            optimizer_class: ``torch.optim.SGD``, ``torch.optim.Adagrad`` or `RowWiseAdagrad`.
            optimizer_kwargs: its arguments; those left out take the class's own defaults.

        Raises:
            ValueError: an optimizer without a fused twin, or an argument that the twin does not have.

        >>> OptimizerSpec.from_optimizer(torch.optim.SGD, {"lr": 0.5}).learning_rate
        0.5
        """
        twin = _TWINS.get(optimizer_class)
        if twin is None:
            known = ", ".join(known.__name__ for known in _TWINS)
            raise ValueError(f"{optimizer_class.__name__} has no fused twin: choose one of {known}")
        signature = inspect.signature(optimizer_class).parameters
        defaults = {name: signature[name].default for name in signature if name != "params"}
        given = dict(optimizer_kwargs or {})
        unknown = sorted(set(given) - set(defaults))
        if unknown:
            raise ValueError(f"{optimizer_class.__name__} has no argument {unknown}: it takes {list(defaults)}")
        values = {**defaults, **given}
        honoured = {"lr", "eps"} if twin is not EmbOptimType.EXACT_ROWWISE_ADAGRAD else {"lr", "eps", "weight_decay"}
        for name in set(given) - honoured - {"foreach", "fused"}:  # these two do not change the numbers
            if given[name] != defaults[name]:
                raise ValueError(
                    f"{optimizer_class.__name__}({name}={given[name]!r}) cannot run inside backward on the touched "
                    f"rows alone: leave {name} out"
                )
        return cls(
            optimizer=twin,
            learning_rate=float(values["lr"]),
            eps=float(values.get("eps", cls.eps)),
            weight_decay=float(values["weight_decay"]),
        )

    @property
    def row_wise(self) -> bool:
        """Whether one number a row depends on all D columns, so that column shards must add their squares."""
        return _RULES[self.optimizer].row_wise

    def state_shapes(self, num_rows: int, num_cols: int) -> dict[str, tuple[int, ...]]:
        """Shape of each state tensor of a ``[num_rows, num_cols]`` piece; the first axis is its rows."""
        shapes = {"row": (num_rows,), "element": (num_rows, num_cols)}
        return {name: shapes[extent] for name, extent in _RULES[self.optimizer].state.items()}


def optim_type(value: EmbOptimType | str | Enum) -> EmbOptimType:
    """`EmbOptimType` from itself, its value, or a member of fbgemm's own enum.

    Raises:
        ValueError: an optimizer that is not supported, naming those that are.
    """
    if isinstance(value, EmbOptimType):
        return value
    text = value.value if isinstance(value, Enum) else value
    for member in EmbOptimType:
        if text == member.value:
            return member
    supported = ", ".join(member.value for member in EmbOptimType)
    raise ValueError(f"optimizer {value!r} is not supported: choose one of {supported}")


def spec_of_parameter(parameter: Tensor) -> OptimizerSpec | None:
    """The optimizer that `apply_optimizer_in_backward` gave a parameter, as a fused one; None if it gave none.

    Raises:
        ValueError: several optimizers on one parameter, or one that cannot be fused.
    """
    classes = getattr(parameter, "_optimizer_classes", [])
    if not classes:
        return None
    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"a parameter has {len(classes)} optimizers in backward, {names}: apply only one")
    return OptimizerSpec.from_optimizer(classes[0], parameter._optimizer_kwargs[0])  # type: ignore[attr-defined]


@torch.no_grad()
def step(
    spec: OptimizerSpec,
    weight: Tensor,
    state: State,
    rows: Tensor,
    grad: Tensor,
    row_sumsq: Tensor | None,
    full_dim: RowDims,
) -> None:
    """One optimizer step on the touched rows of one piece, in place.

    Args:
        spec: which rule, with which numbers.
        weight: the piece ``[num_rows, d]``; fp16 and bf16 are stepped in fp32 and rounded to nearest.
        state: the tensors of ``spec.state_shapes``, stepped in place.
        rows: ``[U]`` int64, each row once.
        grad: ``[U, d]`` coalesced gradient. It is used as scratch: its contents are lost.
        row_sumsq: ``[U]`` squared gradient summed over all D columns of the row, weight decay included; None
            when this piece has them all. Read by row-wise rules only.
        full_dim: D, the columns of the whole table; ``[U]`` where rows of several tables are stepped at once.
    """
    if rows.numel() == 0:
        return
    decay_(spec, weight, rows, grad)
    _RULES[spec.optimizer].make_update(spec, state, rows, grad, row_sumsq, full_dim)
    add_rows_(weight, rows, grad)


def decay_(spec: OptimizerSpec, weight: Tensor, rows: Tensor, grad: Tensor) -> None:
    """``grad += weight_decay * weight[rows]``."""
    if spec.weight_decay:
        grad.add_(weight.index_select(0, rows), alpha=spec.weight_decay)


def add_rows_(weight: Tensor, rows: Tensor, update: Tensor) -> None:
    """``weight[rows] += update`` for distinct rows; half-precision weights are rounded once, from fp32.

    Gather, add and scatter are faster than ``index_add_``, and a gather by bags of one row is faster than
    ``index_select``: ``embedding_bag`` fetches rows ahead on CPU.
    """
    if weight.dtype == update.dtype and weight.device.type == "cpu":
        ends = torch.arange(rows.numel() + 1)
        current = torch.embedding_bag(weight, rows, ends, False, 0, False, None, True)[0]
    else:
        current = weight.index_select(0, rows)
    weight.index_copy_(0, rows, update.add_(current).to(weight.dtype))


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums over rows and optimizer states of fp16 and bf16 weights are fp32; others keep their dtype."""
    return torch.promote_types(dtype, torch.float32)


# ---- the rules: each turns grad [U, d] into the update to add, in place, and steps the state ----


def _sgd(
    spec: OptimizerSpec, state: State, rows: Tensor, grad: Tensor, row_sumsq: Tensor | None, full_dim: RowDims
) -> None:
    """``w -= lr * g``."""
    grad.mul_(-spec.learning_rate)


def _adagrad(
    spec: OptimizerSpec, state: State, rows: Tensor, grad: Tensor, row_sumsq: Tensor | None, full_dim: RowDims
) -> None:
    """``s += g^2;  w -= lr * g / (sqrt(s) + eps)`` element by element (Duchi et al. 2011)."""
    total = state["momentum1"].index_select(0, rows).addcmul_(grad, grad)
    state["momentum1"].index_copy_(0, rows, total)
    grad.mul_(-spec.learning_rate).div_(total.sqrt_().add_(spec.eps))


def _rowwise_adagrad(
    spec: OptimizerSpec, state: State, rows: Tensor, grad: Tensor, row_sumsq: Tensor | None, full_dim: RowDims
) -> None:
    """``s[r] += mean over the row of g^2;  w[r] -= lr * g / (sqrt(s[r]) + eps)``: one number a row, not D."""
    sumsq = row_squares(grad) if row_sumsq is None else row_sumsq
    total = state["momentum1"].index_select(0, rows).add_(sumsq.to(grad.dtype) / full_dim)
    state["momentum1"].index_copy_(0, rows, total)
    grad.mul_((-spec.learning_rate / (total.sqrt_().add_(spec.eps))).unsqueeze(1))


def row_squares(grad: Tensor) -> Tensor:
    """``[U, d] -> [U]``: the squared gradient summed over the columns."""
    return torch.linalg.vector_norm(grad, dim=1).square_()


_Update = Callable[[OptimizerSpec, State, Tensor, Tensor, Tensor | None, RowDims], None]


@dataclass(frozen=True)
class _Rule:
    make_update: _Update
    state: Mapping[str, str]  # name, as fbgemm names it -> "row" (one number a row) or "element"
    row_wise: bool = False


_RULES = {
    EmbOptimType.EXACT_SGD: _Rule(_sgd, {}),
    EmbOptimType.EXACT_ADAGRAD: _Rule(_adagrad, {"momentum1": "element"}),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _Rule(_rowwise_adagrad, {"momentum1": "row"}, row_wise=True),
}

_TWINS: dict[type[torch.optim.Optimizer], EmbOptimType] = {
    torch.optim.SGD: EmbOptimType.EXACT_SGD,
    torch.optim.Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowWiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
