"""The optimizers' formulas, each on the summed gradient of touched rows.

A rule is a generator. It turns the gradient ``[U, d]`` of some rows into the update to add to them. A formula may need
sums over all D columns of the table, which several shards may store. The rule then *yields* the squares summed over its
d columns, ``[U]`` or ``[U, k]``, and receives the sums over all D. It writes to the state only after its last yield, so
that a caller can run it up to a yield, and again.

Adding an optimizer is one such function, one member of `EmbOptimType` and one line in `RULES`.

Shape letters: E rows, D columns of the whole table, d columns of the shard, U touched rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum, IntEnum, unique
from typing import Any, TypeVar

import torch
from torch import Tensor

_E = TypeVar("_E", bound=Enum)

# The fused optimizers and their modes of weight decay, under fbgemm's names and values.


class EmbOptimType(Enum):
    """The fused optimizers, under fbgemm's names. fbgemm's approximate variants are aliases of the exact ones.

    >>> EmbOptimType("exact_sgd")
    <EmbOptimType.EXACT_SGD: 'exact_sgd'>
    >>> EmbOptimType.ROWWISE_ADAGRAD is EmbOptimType("row_wise_adagrad") is EmbOptimType.EXACT_ROWWISE_ADAGRAD
    True
    """

    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"
    SGD = EXACT_SGD
    ROWWISE_ADAGRAD = EXACT_ROWWISE_ADAGRAD

    @classmethod
    def _missing_(cls, value: object) -> EmbOptimType | None:
        return {"sgd": cls.EXACT_SGD, "row_wise_adagrad": cls.EXACT_ROWWISE_ADAGRAD}.get(str(value))

    def __str__(self) -> str:
        return self.value


@unique
class WeightDecayMode(IntEnum):
    """How ``weight_decay`` changes touched rows: through the gradient (L2) or beside it (DECOUPLE)."""

    NONE = 0
    L2 = 1
    DECOUPLE = 2

    @classmethod
    def _missing_(cls, value: object) -> WeightDecayMode | None:
        return cls.__members__.get(str(value).upper())


def optim_type(value: EmbOptimType | str | Enum) -> EmbOptimType:
    """`EmbOptimType` from itself, its value, or a member of fbgemm's own enum.

    Raises:
        ValueError: an unsupported optimizer; the message names the supported ones.
    """
    return _member(EmbOptimType, value, "optimizer")


def _member(kind: type[_E], value: Any, what: str) -> _E:
    try:
        if isinstance(value, bool):
            raise ValueError
        return kind(value.value if isinstance(value, Enum) else value)
    except ValueError:
        supported = ", ".join(member.value if isinstance(member.value, str) else member.name for member in kind)
        raise ValueError(f"{what} {value!r} is not supported. Fix: choose one of {supported}") from None


_LARGEST = torch.finfo(torch.float64).max
State = Mapping[str, Tensor]
RowDims = int | Tensor  # D, or [U] for rows of tables of different widths
Formula = Generator[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class RowStep:
    """The touched rows of one shard: the input of a rule."""

    spec: OptimizerSpec
    weight: Tensor  # [E, d]
    state: State
    rows: Tensor  # [U] int64, each once
    grad: Tensor  # [U, d] summed; a buffer
    full_dim: RowDims
    iteration: int | Tensor  # which step this is, from 1; [U] if tables have taken different numbers of steps
    gathered: Tensor | None = None

    def values(self) -> Tensor:
        """``[U, d]`` weights before the step, in the gradient's precision."""
        if self.gathered is None:
            self.gathered = gather_rows(self.weight, self.rows, self.grad.dtype)
        return self.gathered

    def read(self, name: str) -> Tensor:
        """A copy of these rows' state."""
        return self.state[name].index_select(0, self.rows)

    def write(self, name: str, value: Tensor) -> None:
        """Stores these rows' state."""
        self.state[name].index_copy_(0, self.rows, value)

    def first_moment(self) -> Tensor:
        """``m = beta1 * m + (1 - beta1) * g``, not stored yet."""
        return self.read("momentum1").lerp_(self.grad, 1.0 - self.spec.beta1)

    def unbiased(self, first: Tensor, second: Tensor) -> Tensor:
        """``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)``."""
        root = (_columns(second).sqrt() / self._bias(self.spec.beta2) ** 0.5).add_(self.spec.eps)
        return (first / root).div_(self._bias(self.spec.beta1))

    def _bias(self, beta: float) -> float | Tensor:
        if isinstance(self.iteration, int):
            return float(1.0 - beta**self.iteration)
        return _columns((1.0 - beta ** self.iteration.double()).to(self.grad.dtype))


def gather_rows(weight: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``weight[rows]`` in another precision. On CPU by bags of one row, because ``embedding_bag`` prefetches."""
    if weight.dtype == dtype and weight.device.type == "cpu" and rows.numel():
        return torch.embedding_bag(
            weight, rows, torch.arange(rows.numel() + 1, device=rows.device), False, 0, False, None, True
        )[0]
    return weight.index_select(0, rows).to(dtype)


def row_squares(grad: Tensor) -> Tensor:
    """``[U, d] -> [U]``: squares summed over the columns."""
    return torch.linalg.vector_norm(grad, dim=1).square_()


def _columns(numbers: Tensor) -> Tensor:
    """``[U]`` as ``[U, 1]``; ``[U, d]`` as it is."""
    return numbers if numbers.dim() == 2 else numbers.unsqueeze(1)


def _sgd(at: RowStep) -> Formula:
    """``w -= lr * g``."""
    yield from ()
    return at.grad.mul_(-at.spec.learning_rate)


def _adagrad(at: RowStep) -> Formula:
    """``s += g^2;  w -= lr * g / (sqrt(s) + eps)`` element by element (Duchi et al. 2011)."""
    yield from ()
    total = at.read("momentum1").addcmul_(at.grad, at.grad)
    at.write("momentum1", total)
    return at.grad.mul_(-at.spec.learning_rate).div_(total.sqrt_().add_(at.spec.eps))


def _rowwise_adagrad(at: RowStep) -> Formula:
    """``s[r] += mean over the row of g^2;  w[r] -= lr * g / (sqrt(s[r]) + eps)``: one number a row, not D."""
    squares = yield row_squares(at.grad)
    total = at.read("momentum1").add_(squares / at.full_dim)
    at.write("momentum1", total)
    return at.grad.mul_((-at.spec.learning_rate / (total.sqrt_().add_(at.spec.eps))).unsqueeze(1))


def _adam(at: RowStep) -> Formula:
    """``w -= lr * m^ / (sqrt(v^) + eps)`` with unbiased ``m^ = m / (1 - beta1^t)``, ``v^`` alike (Kingma, Ba 2015)."""
    second = yield from _second_moment(at)
    first = at.first_moment()
    at.write("momentum1", first)
    at.write("momentum2", second)
    return at.unbiased(first, second).mul_(-at.spec.learning_rate)


def _lamb(at: RowStep) -> Formula:
    """``r = m^ / (sqrt(v^) + eps) + decay * w;  w -= lr * |w| / |r| * r`` row by row (You et al. 2020).

    The ratio is 1 where either norm is zero, so that a row of zeros can learn.
    """
    second = yield from _second_moment(at)
    first, values = at.first_moment(), at.values()
    direction = at.unbiased(first, second).add_(values, alpha=at.spec.weight_decay)
    norms = (yield torch.stack([row_squares(values), row_squares(direction)], 1)).sqrt()
    weight, length = norms.unbind(1)
    ratio = torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight))
    at.write("momentum1", first)
    at.write("momentum2", second)
    return direction.mul_((-at.spec.learning_rate * ratio).unsqueeze(1))


def _second_moment(at: RowStep) -> Formula:
    """``v = beta2 * v + (1 - beta2) * g^2``, not stored yet; of partial row-wise rules ``[U]``, with the row's mean."""
    beta, before = at.spec.beta2, at.read("momentum2")
    if before.dim() == 2:
        return before.mul_(beta).addcmul_(at.grad, at.grad, value=1.0 - beta)
    squares = yield row_squares(at.grad)
    return before.lerp_(squares / at.full_dim, 1.0 - beta)


def _lars_sgd(at: RowStep) -> Formula:
    """``m = momentum * m + lr * eta * |w| / (|g| + decay * |w|) * (g + decay * w);  w -= m`` row by row.

    You et al. 2017. The trust ratio ``eta * |w| / ...`` is 1 where either norm is zero.
    """
    spec, values = at.spec, at.values()
    norms = (yield torch.stack([row_squares(values), row_squares(at.grad)], 1)).sqrt()
    weight, grad = norms.unbind(1)
    ratio = spec.eta * weight / (grad + spec.weight_decay * weight)
    rate = spec.learning_rate * torch.where((weight > 0) & (grad > 0), ratio, torch.ones_like(ratio))
    step = at.grad.add_(values, alpha=spec.weight_decay).mul_(rate.unsqueeze(1))
    momentum = at.read("momentum1").mul_(spec.momentum).add_(step)
    at.write("momentum1", momentum)
    return momentum.neg_()


@dataclass(frozen=True)
class Rule:
    """A formula and its requirements.

    Attributes:
        formula: the generator.
        state: fbgemm's name -> "element", "row" (one number a row) or "table" (``iter``, the steps taken).
        rounds: number of yields.
        settings: of `OptimizerSpec`, those that not every rule reads.
        decays_inside: decoupled weight decay is part of the formula.
        l2: L2 is the default mode of ``weight_decay``.
    """

    formula: Callable[[RowStep], Formula]
    state: Mapping[str, str]
    rounds: int = 0
    settings: frozenset[str] = frozenset()
    decays_inside: bool = False
    l2: bool = False


_BETAS = frozenset({"beta1", "beta2"})
_ELEMENTS = {"momentum1": "element", "momentum2": "element", "iter": "table"}
_MIXED = {"momentum1": "element", "momentum2": "row", "iter": "table"}

RULES = {
    EmbOptimType.EXACT_SGD: Rule(_sgd, {}, l2=True),
    EmbOptimType.EXACT_ADAGRAD: Rule(_adagrad, {"momentum1": "element"}, l2=True),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: Rule(_rowwise_adagrad, {"momentum1": "row"}, 1, l2=True),
    EmbOptimType.ADAM: Rule(_adam, _ELEMENTS, 0, _BETAS),
    EmbOptimType.PARTIAL_ROWWISE_ADAM: Rule(_adam, _MIXED, 1, _BETAS),
    EmbOptimType.LAMB: Rule(_lamb, _ELEMENTS, 1, _BETAS, decays_inside=True),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: Rule(_lamb, _MIXED, 2, _BETAS, decays_inside=True),
    EmbOptimType.LARS_SGD: Rule(_lars_sgd, {"momentum1": "element"}, 1, frozenset({"momentum", "eta"}), True),
}


def number_from_0(name: str, value: Any, below_1: bool = False) -> Any:
    """``value``, if it is a finite number from 0, or from 0 to below 1."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= _LARGEST or (below_1 and value >= 1):
        raise ValueError(
            f"{name} must be a {'number from 0 to below 1' if below_1 else 'finite number >= 0'}, got {value!r}"
        )
    return value


# The fused optimizer of a table and its settings. A setting that the optimizer does not read is refused here.


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused optimizer and its settings.

    A step changes only the rows that a batch touched: momentum and weights of other rows do not decay. The gradients
    of a row's duplicates are summed first.

    Args:
        optimizer: the formula.
        learning_rate: step size.
        eps: added to the root of the accumulated squares (all but SGD and LARS).
        weight_decay: pulls touched rows towards zero.
        weight_decay_mode: L2 adds ``weight_decay * w`` to the gradient, DECOUPLE adds ``-lr * weight_decay * w`` to
            the update. Default: L2 for SGD and the Adagrads; DECOUPLE for the Adams (as AdamW), and for both LAMBs and
            LARS, where it is the decay inside their formula.
        beta1, beta2: decay rates of the moments of the Adams and LAMBs.
        momentum: decay rate of LARS's momentum.
        eta: LARS's trust coefficient.
        gradient_clipping: clamp each number of a row's summed gradient to ``[-max_gradient, max_gradient]``, before
            anything else, as ``torch.nn.utils.clip_grad_value_`` does (fbgemm clamps the gradient of each bag).
        max_gradient: the bound of ``gradient_clipping``.
        max_norm: scale a row down to this length if the step made it longer; 0: never.
        check_gradients: raise on NaN and infinite gradients before a weight changes, naming table and row. The host
            then waits for the device once per group of tables of one width.

    Raises:
        ValueError: a negative or non-finite number, a setting that this optimizer does not read, an unsupported
            optimizer or mode of decay.

    >>> OptimizerSpec(EmbOptimType.EXACT_ROWWISE_ADAGRAD).state_shapes(1000, 64)
    {'momentum1': (1000,)}
    """

    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    weight_decay_mode: WeightDecayMode | None = None
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    eta: float = 0.001
    gradient_clipping: bool = False
    max_gradient: float = 1.0
    max_norm: float = 0.0
    check_gradients: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", optim_type(self.optimizer))
        for name in ("learning_rate", "eps", "weight_decay", "eta", "max_gradient", "max_norm"):
            object.__setattr__(self, name, float(number_from_0(name, getattr(self, name))))
        for name in ("beta1", "beta2", "momentum"):
            number_from_0(name, getattr(self, name), below_1=True)
        for name in ("gradient_clipping", "check_gradients"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        self._refuse_unread({f.name for f in fields(self) if getattr(self, f.name) != f.default})
        object.__setattr__(self, "weight_decay_mode", self._mode())

    def _refuse_unread(self, given: Iterable[str]) -> None:
        """Raises ValueError for settings that the formula does not have."""
        for name in given:
            having = [str(kind) for kind, rule in RULES.items() if name in rule.settings]
            if having and name not in RULES[self.optimizer].settings:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not read by {self.optimizer}. Fix: leave it out, or use "
                    f"{having}"
                )
        if self.max_gradient != 1.0 and not self.gradient_clipping:
            raise ValueError(f"max_gradient={self.max_gradient!r} has no effect. Fix: add gradient_clipping=True")

    def _mode(self) -> WeightDecayMode | None:
        mode = self.weight_decay_mode
        given = mode if mode is None else _member(WeightDecayMode, mode, "weight_decay_mode")
        if not self.weight_decay:
            return None
        if given is WeightDecayMode.NONE:
            raise ValueError(
                f"weight_decay={self.weight_decay!r} with weight_decay_mode NONE has no effect. Fix: use L2 or "
                f"DECOUPLE, or leave weight_decay out"
            )
        rule = RULES[self.optimizer]
        if given is WeightDecayMode.L2 and rule.decays_inside:
            raise ValueError(
                f"{self.optimizer} has weight decay inside its formula, not L2. Fix: leave weight_decay_mode out"
            )
        return given or (WeightDecayMode.L2 if rule.l2 else WeightDecayMode.DECOUPLE)

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
        """Reads a ``fused_params`` dictionary of this class's arguments.

        Raises:
            ValueError: a key that is not an argument, by name.

        >>> OptimizerSpec.from_fused_params({"optimizer": EmbOptimType.ADAM, "beta1": 0.8}).beta1
        0.8
        """
        given = dict(fused_params or {})
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"fused_params has unknown keys {unknown}. Fix: use only {known}")
        spec = cls(**given)
        spec._refuse_unread(given)  # also at its default: a setting in fused_params is meant to have an effect
        return spec

    @property
    def extras(self) -> tuple[str, ...]:
        """The settings in use that are not part of every formula, for kernels that lack some.

        >>> OptimizerSpec(weight_decay=0.1, check_gradients=True).extras
        ('weight_decay', 'check_gradients')
        """
        return tuple(
            name for name in ("weight_decay", "gradient_clipping", "max_norm", "check_gradients") if getattr(self, name)
        )

    @property
    def row_norm_rounds(self) -> int:
        """How many sums over all D columns of a row a step needs. Column shards must exchange each."""
        return RULES[self.optimizer].rounds + bool(self.max_norm)

    @property
    def row_wise(self) -> bool:
        """Whether a step needs sums over all D columns of a row."""
        return self.row_norm_rounds > 0

    def state_shapes(self, num_rows: int, num_cols: int) -> dict[str, tuple[int, ...]]:
        """Shape of each state tensor of a ``[num_rows, num_cols]`` shard; the first axis is its rows.

        The Adams and LAMBs also have ``iter``, ``[1]`` int64: the backward passes of the table, including those whose
        batch has none of its ids.
        """
        shapes = {"row": (num_rows,), "element": (num_rows, num_cols), "table": (1,)}
        return {name: shapes[extent] for name, extent in RULES[self.optimizer].state.items()}


# Runs a rule on the touched rows of one shard: a whole step, or up to the squares that shards must exchange.


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
) -> Tensor:
    """One optimizer step on the touched rows of one shard, in place, or one round of row norms.

    Args:
        spec: the rule and its settings.
        weight: the shard ``[num_rows, d]``; fp16 and bf16 are stepped in fp32 and rounded to nearest.
        state: the tensors of ``spec.state_shapes`` (without ``iter``, which the caller counts), stepped in place.
        rows: ``[U]`` int64, each row once.
        grad: ``[U, d]`` summed gradient. It is a buffer: its contents are lost.
        totals: for each of ``spec.row_norm_rounds`` the squares of that round, summed over all D columns of each row;
            None if this shard has all columns. With fewer rounds nothing is stepped.
        full_dim: D, the columns of the whole table; ``[U]`` for rows of tables of different widths.
        iteration: the number of this step, from 1, for all rows or ``[U]``. The Adams and LAMBs read it.

    Returns:
        The rows ``[U, d]`` after the step; with fewer totals than rounds, the squares ``[U]`` or ``[U, k]`` over this
        shard's columns of the next round.
    """
    rounds = spec.row_norm_rounds if totals is None else len(totals)
    if rows.numel() == 0 and rounds == spec.row_norm_rounds:
        return grad
    touched = RowStep(spec, weight, state, rows, grad, full_dim, iteration)
    formula = _formula(touched)
    own: Any = None  # the first thing sent to a generator is None
    try:
        for number in range(rounds + 1):
            own = formula.send(own if own is None or totals is None else totals[number - 1].to(own.dtype))
    except StopIteration as done:
        after: Tensor = done.value.add_(touched.values())
        weight.index_copy_(0, rows, after.to(weight.dtype))
        return after
    formula.close()
    squares: Tensor = own
    return squares


def _formula(at: RowStep) -> Formula:
    """The rule with the settings of all rules: clipping and weight decay before and after it, a bound on rows."""
    spec, rule = at.spec, RULES[at.spec.optimizer]
    if spec.gradient_clipping:
        at.grad.clamp_(-spec.max_gradient, spec.max_gradient)
    if spec.weight_decay_mode is WeightDecayMode.L2:
        at.grad.add_(at.values(), alpha=spec.weight_decay)
    decay = spec.weight_decay_mode is WeightDecayMode.DECOUPLE and not rule.decays_inside
    return _bounded(at, decay) if spec.max_norm else _own(at, decay)


def _own(at: RowStep, decay: bool) -> Formula:
    """The rule, with ``decay`` also ``w -= lr * weight_decay * w`` (Loshchilov and Hutter 2019)."""
    update = yield from RULES[at.spec.optimizer].formula(at)
    return update.add_(at.values(), alpha=-at.spec.learning_rate * at.spec.weight_decay) if decay else update


def _bounded(at: RowStep, decay: bool) -> Formula:
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
