"""The fused optimizer of a table and its settings. A setting that the optimizer does not read is refused here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from recshard_lab.embedding.optimizers.rules import RULES
from recshard_lab.embedding.optimizers.types import EmbOptimType, WeightDecayMode, decay_mode, optim_type


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
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        for name in ("beta1", "beta2", "momentum"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise ValueError(f"{name} must be a number from 0 to below 1, got {value!r}")
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
        given = None if self.weight_decay_mode is None else decay_mode(self.weight_decay_mode)
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

    @classmethod
    def from_optimizer(
        cls, optimizer_class: type[torch.optim.Optimizer], optimizer_kwargs: Mapping[str, Any] | None = None
    ) -> OptimizerSpec:
        """The fused optimizer with the steps of a torch optimizer: see `spec_from_optimizer`.

        >>> OptimizerSpec.from_optimizer(torch.optim.SGD, {"lr": 0.5}).learning_rate
        0.5
        """
        from recshard_lab.embedding.optimizers.twins import spec_from_optimizer

        return spec_from_optimizer(optimizer_class, optimizer_kwargs)

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
    def weight_decay_inside(self) -> float:
        """The decay inside the formula; 0 if the formula has none."""
        return self.weight_decay if RULES[self.optimizer].decays_inside else 0.0

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
