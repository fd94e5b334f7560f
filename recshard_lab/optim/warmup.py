"""Learning-rate schedules in stages, saved with the optimizer and set through ``param_groups``.

The rate of a group is ``lr * multiplier(stage, iter) * stage.lr_scale``, where ``iter`` counts steps from 0 over all
stages and a stage lasts until ``iter`` exceeds its ``max_iters``. After the last stage the rate is ``lr``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, unique
from typing import Any

import torch

from recshard_lab.arguments import checks_arguments
from recshard_lab.optim.combined import OptimizerWrapper
from recshard_lab.optim.keyed import KeyedOptimizer


@unique
class WarmupPolicy(Enum):
    """How the multiplier runs within a stage (``v`` is the stage's ``value``, ``n`` its ``max_iters``).

    NONE 1 · LINEAR ``v + (1 - v) * iter / n`` · CONSTANT ``v`` · POLY ``(1 - iter / decay_iters) ** v`` · STEP
    ``v ** (iter // decay_iters)`` · INVSQRT ``1 / sqrt(iter)``, 1 at the very start · COSINE_ANNEALING_WARM_RESTARTS
    from 1 down to ``v`` in every ``sgdr_period`` steps (Loshchilov and Hutter 2017, periods of one length) ·
    INTERPOLATE in a straight line from ``v`` at ``start_interpolating_iters`` to ``end_value`` at ``n``.
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@checks_arguments
@dataclass
class WarmupStage:
    """One stage of a schedule.

    Args:
        policy: how the multiplier runs.
        max_iters: the last step of this stage, counted from the start of training.
        value: the policy's number.
        lr_scale: multiplies the rate all through the stage.
        decay_iters: POLY: steps to zero, ``max_iters`` if not positive. STEP: steps between two drops, 1 if not
            positive.
        sgdr_period: steps between two restarts of the cosine.
        start_interpolating_iters: INTERPOLATE: the step that has ``value``.
        end_value: INTERPOLATE: the multiplier at ``max_iters``.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def multiplier(self, iteration: int) -> float:
        """What the learning rate is multiplied by in a step.

        >>> WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.5).multiplier(5)
        0.75
        """
        return _CURVES[self.policy](self, iteration) * self.lr_scale


def _cosine(stage: WarmupStage, iteration: int) -> float:
    turn = math.pi * (iteration % stage.sgdr_period) / stage.sgdr_period
    return stage.value + (1.0 - stage.value) * 0.5 * (1.0 + math.cos(turn))


def _interpolate(stage: WarmupStage, iteration: int) -> float:
    assert stage.start_interpolating_iters is not None
    assert stage.end_value is not None
    passed = (iteration - stage.start_interpolating_iters) / (stage.max_iters - stage.start_interpolating_iters)
    return stage.value + (stage.end_value - stage.value) * passed


_CURVES = {
    WarmupPolicy.NONE: lambda stage, iteration: 1.0,
    WarmupPolicy.LINEAR: lambda stage, iteration: stage.value + (1.0 - stage.value) * iteration / stage.max_iters,
    WarmupPolicy.CONSTANT: lambda stage, iteration: stage.value,
    WarmupPolicy.POLY: lambda stage, iteration: (1.0 - iteration / stage.decay_iters) ** stage.value,
    WarmupPolicy.STEP: lambda stage, iteration: stage.value ** (iteration // stage.decay_iters),
    WarmupPolicy.INVSQRT: lambda stage, iteration: 1.0 / math.sqrt(max(1, iteration)),
    WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: _cosine,
    WarmupPolicy.INTERPOLATE: _interpolate,
}


@checks_arguments
class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rates of all groups of an optimizer after each of its steps.

    The rate of step 0 is set at once, so that tables stepped in backward have it before the first ``step()``. The
    place in the schedule is saved as the state ``{"warmup": tensor([iter, stage])}`` of a parameter that is none.

    Args:
        optimizer: whose groups follow the schedule; fused tables and a dense part in a `CombinedOptimizer`, say.
        stages: in order, ``max_iters`` rising.
        lr: the rate that the multipliers apply to.
        lr_param: its name in the param groups.
        param_name: the name under which the place in the schedule is saved.

    Raises:
        ValueError: stages that do not follow each other, or one whose numbers make no curve.

    >>> from recshard_lab.optim import KeyedOptimizerWrapper
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> inner = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    >>> warm = WarmupOptimizer(inner, [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.0)], lr=0.8)
    >>> rates = []
    >>> for _ in range(6):
    ...     rates.append(round(warm.param_groups[0]["lr"], 2)); warm.step()
    >>> rates
    [0.0, 0.2, 0.4, 0.6, 0.8, 0.8]
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        if param_name in optimizer.params:
            raise ValueError(f"the optimizer has a parameter {param_name!r} already: choose another param_name")
        self._stages = _checked(stages)
        self._lr, self._lr_param = lr, lr_param
        self._schedule = _Place(param_name, self._stages, optimizer.defaults["_save_param_groups"])
        super().__init__(optimizer, self._schedule)
        self._set_lr()

    def step(self, closure: Any = None) -> Any:
        """Steps the optimizer inside, then sets the rates of the step to come."""
        loss = super().step(closure)
        iteration, stage = self._schedule.place.tolist()
        if iteration + 1 > self._stages[stage].max_iters and stage + 1 < len(self._stages):
            stage += 1
        self._schedule.place.copy_(torch.tensor([iteration + 1, stage]))
        self._set_lr()
        return loss

    def _set_lr(self) -> None:
        iteration, stage = self._schedule.place.tolist()
        rate = self._lr * self._stages[stage].multiplier(iteration)
        for group in self.param_groups:
            group[self._lr_param] = rate

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_lr()

    def post_load_state_dict(self) -> None:
        super().post_load_state_dict()
        self._set_lr()


class _Place(KeyedOptimizer):
    """Where a schedule is, saved and loaded as the state of a parameter without numbers."""

    def __init__(self, name: str, stages: Sequence[WarmupStage], saves_param_groups: bool) -> None:
        parameter, self.place = torch.nn.Parameter(), torch.zeros(2, dtype=torch.long)  # iter, stage
        super().__init__({name: parameter}, {parameter: {"warmup": self.place}}, [])
        self._name, self._stages = name, stages
        self.save_param_groups(saves_param_groups)

    def step(self, closure: Any = None) -> Any:
        """A schedule has nothing to step."""

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().check_state_dict(state_dict)
        place = state_dict["state"][self._name]["warmup"].tolist()
        if place[0] < 0 or not 0 <= place[1] < len(self._stages):
            raise ValueError(
                f"state {self._name!r} is at (iter, stage) {tuple(place)}, but there are stages 0 to "
                f"{len(self._stages) - 1}: give the stages that it was saved with"
            )


def _checked(stages: Sequence[WarmupStage]) -> list[WarmupStage]:
    """The stages with their defaults filled in, and the endless one after them."""
    made: list[WarmupStage] = []
    start = 0
    for number, stage in enumerate(stages):
        if stage.max_iters <= start:
            raise ValueError(
                f"stage {number} ({stage.policy.name}) ends at step {stage.max_iters}, the one before at {start}: "
                f"max_iters counts from the start of training and must rise"
            )
        default = 1 if stage.policy is WarmupPolicy.STEP else stage.max_iters
        stage = replace(stage, decay_iters=stage.decay_iters if stage.decay_iters > 0 else default)
        if stage.policy is WarmupPolicy.POLY and stage.decay_iters < stage.max_iters:
            raise ValueError(
                f"stage {number} (POLY) reaches zero at step {stage.decay_iters} but lasts until {stage.max_iters}: "
                f"set decay_iters to at least max_iters"
            )
        if stage.policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS and stage.sgdr_period < 1:
            raise ValueError(f"stage {number}: sgdr_period must be a positive number of steps, got {stage.sgdr_period}")
        if stage.policy is WarmupPolicy.INTERPOLATE:
            first = stage.start_interpolating_iters
            if first is None or stage.end_value is None or first >= stage.max_iters:
                raise ValueError(
                    f"stage {number} (INTERPOLATE) needs end_value and a start_interpolating_iters below max_iters="
                    f"{stage.max_iters}, got {stage.end_value} and {first}"
                )
        made.append(stage)
        start = stage.max_iters
    return [*made, WarmupStage(WarmupPolicy.NONE, max_iters=1 << 63)]
