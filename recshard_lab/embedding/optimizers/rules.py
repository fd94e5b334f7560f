"""The optimizers' formulas, each on the summed gradient of touched rows.

A rule is a generator. It turns the gradient ``[U, d]`` of some rows into the update to add to them. A formula may need
sums over all D columns of the table, which several shards may store. The rule then *yields* the squares summed over its
d columns, ``[U]`` or ``[U, k]``, and receives the sums over all D. It writes to the state only after its last yield, so
that a caller can run it up to a yield, and again.

Adding an optimizer is one such function, one member of `EmbOptimType` and one line in `RULES`.

Shape letters: E rows, D columns of the whole table, d columns of the shard, U touched rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recshard_lab.embedding.optimizers.types import EmbOptimType

if TYPE_CHECKING:
    from recshard_lab.embedding.optimizers.spec import OptimizerSpec

State = Mapping[str, Tensor]
RowDims = int | Tensor  # D, or [U] for rows of tables of different widths
Formula = Generator[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Touched:
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

    def second_moment(self) -> Tensor:
        """``v = beta2 * v + (1 - beta2) * g^2``, not stored yet."""
        beta = self.spec.beta2
        return self.read("momentum2").mul_(beta).addcmul_(self.grad, self.grad, value=1.0 - beta)

    def row_second_moment(self, squares: Tensor) -> Tensor:
        """``[U]``: the same of the mean over the row of ``g^2``, whose sum is ``squares``."""
        return self.read("momentum2").lerp_(squares / self.full_dim, 1.0 - self.spec.beta2)

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


def _sgd(at: Touched) -> Formula:
    """``w -= lr * g``."""
    yield from ()
    return at.grad.mul_(-at.spec.learning_rate)


def _adagrad(at: Touched) -> Formula:
    """``s += g^2;  w -= lr * g / (sqrt(s) + eps)`` element by element (Duchi et al. 2011)."""
    yield from ()
    total = at.read("momentum1").addcmul_(at.grad, at.grad)
    at.write("momentum1", total)
    return at.grad.mul_(-at.spec.learning_rate).div_(total.sqrt_().add_(at.spec.eps))


def _rowwise_adagrad(at: Touched) -> Formula:
    """``s[r] += mean over the row of g^2;  w[r] -= lr * g / (sqrt(s[r]) + eps)``: one number a row, not D."""
    squares = yield row_squares(at.grad)
    total = at.read("momentum1").add_(squares / at.full_dim)
    at.write("momentum1", total)
    return at.grad.mul_((-at.spec.learning_rate / (total.sqrt_().add_(at.spec.eps))).unsqueeze(1))


def _adam(at: Touched) -> Formula:
    """``w -= lr * m^ / (sqrt(v^) + eps)`` with unbiased ``m^ = m / (1 - beta1^t)``, ``v^`` alike (Kingma, Ba 2015)."""
    yield from ()
    return _store(at, at.first_moment(), at.second_moment()).mul_(-at.spec.learning_rate)


def _partial_rowwise_adam(at: Touched) -> Formula:
    """Adam whose second moment is one number a row, that of the row's mean square."""
    squares = yield row_squares(at.grad)
    return _store(at, at.first_moment(), at.row_second_moment(squares)).mul_(-at.spec.learning_rate)


def _lamb(at: Touched) -> Formula:
    """``r = m^ / (sqrt(v^) + eps) + decay * w;  w -= lr * |w| / |r| * r`` row by row (You et al. 2020).

    The ratio is 1 where either norm is zero, so that a row of zeros can learn.
    """
    return (yield from _trusted(at, at.second_moment()))


def _partial_rowwise_lamb(at: Touched) -> Formula:
    """LAMB whose second moment is one number a row."""
    squares = yield row_squares(at.grad)
    return (yield from _trusted(at, at.row_second_moment(squares)))


def _lars_sgd(at: Touched) -> Formula:
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


def _trusted(at: Touched, second: Tensor) -> Formula:
    """The end of both LAMBs."""
    first, values = at.first_moment(), at.values()
    direction = at.unbiased(first, second).add_(values, alpha=at.spec.weight_decay_inside)
    norms = (yield torch.stack([row_squares(values), row_squares(direction)], 1)).sqrt()
    weight, length = norms.unbind(1)
    ratio = torch.where((weight > 0) & (length > 0), weight / length, torch.ones_like(weight))
    at.write("momentum1", first)
    at.write("momentum2", second)
    return direction.mul_((-at.spec.learning_rate * ratio).unsqueeze(1))


def _store(at: Touched, first: Tensor, second: Tensor) -> Tensor:
    """Stores the moments and returns the direction of Adam."""
    at.write("momentum1", first)
    at.write("momentum2", second)
    return at.unbiased(first, second)


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

    formula: Callable[[Touched], Formula]
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
    EmbOptimType.PARTIAL_ROWWISE_ADAM: Rule(_partial_rowwise_adam, _MIXED, 1, _BETAS),
    EmbOptimType.LAMB: Rule(_lamb, _ELEMENTS, 1, _BETAS, decays_inside=True),
    EmbOptimType.PARTIAL_ROWWISE_LAMB: Rule(_partial_rowwise_lamb, _MIXED, 2, _BETAS, decays_inside=True),
    EmbOptimType.LARS_SGD: Rule(
        _lars_sgd, {"momentum1": "element"}, 1, frozenset({"momentum", "eta"}), decays_inside=True
    ),
}
