"""Steps of a pipeline against the clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

from recshard_lab.train.pipelines.base import Pipeline
from recshard_lab.train.stages import StageEvent


@dataclass(frozen=True)
class TimedSteps:
    """Timed steps of one rank.

    Attributes:
        ms: milliseconds per timed step.
        losses: loss of every step, in order, the untimed ones first.
        events: the stages of the steps; ``lab.views.timeline`` draws them.
    """

    ms: float
    losses: list[float]
    events: list[StageEvent]


def timed_steps(pipeline: Pipeline, batches: Sequence[Any], steps: int = 10, warm_up: int = 4) -> TimedSteps:
    """Runs a pipeline over the same batches again and again, and times its steps. All ranks must call it.

    Args:
        pipeline: its model returns ``(loss, (loss, ...))``, as `recshard_lab.models.DLRMTrain` does.
        batches: at least one.
        steps: number of timed steps, at least 1.
        warm_up: steps before them, in which the pipeline fills up.

    Raises:
        ValueError: no batch or no step. StageError: a stage of the pipeline failed.

    >>> import torch
    >>> from recshard_lab.train import TrainPipelineBase
    >>> class Square(torch.nn.Linear):
    ...     def forward(self, batch):
    ...         loss = super().forward(batch).square().mean()
    ...         return loss, (loss.detach(),)
    >>> model = Square(2, 1)
    >>> with TrainPipelineBase(model, torch.optim.SGD(model.parameters()), torch.device("cpu")) as pipeline:
    ...     found = timed_steps(pipeline, [torch.ones(4, 2)], steps=3, warm_up=2)
    >>> len(found.losses), found.ms > 0
    (5, True)
    """
    if not len(batches) or steps < 1:
        raise ValueError(
            f"timed_steps received {len(batches)} batches and steps={steps}: it needs at least 1 batch and 1 step. "
            f"Fix: pass a batch and steps=10"
        )
    source = cycle(batches)
    losses = [pipeline.progress(source)[0].item() for _ in range(warm_up)]
    begun = perf_counter()
    losses += [pipeline.progress(source)[0].item() for _ in range(steps)]
    return TimedSteps(1e3 * (perf_counter() - begun) / steps, losses, pipeline.events)
