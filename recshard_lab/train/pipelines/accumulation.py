"""Gradient accumulation, under TorchRec's names: one step of the dense part for several batches.

What accumulates:

===============================  =====================================================================
the dense part                   gradients of ``num_steps`` batches add up, and travel once (DDP's
                                 ``no_sync``); then its optimizer steps. Nothing is divided: for the
                                 mean, divide the loss by ``num_steps``
tables on the dense kernel       the same, except that their gradients travel with every batch; so do
                                 those of the dense part under FSDP2
tables with a fused optimizer    **nothing** by default: their optimizer runs inside backward, once a
                                 batch, with that batch's gradient, as in TorchRec. To accumulate, call
                                 ``dmp.fused_optimizer.defer_steps()`` and pass
                                 ``CombinedOptimizer([dmp.fused_optimizer, dense])``: each row then
                                 steps once in ``num_steps`` batches, with its summed gradient
===============================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import GenericAlias
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recshard_lab.comm import ShardingEnv, all_reduce
from recshard_lab.train.pipelines.base import Pipeline, flag


@dataclass
class GradientAccumulationConfig:
    """When the dense part steps.

    Args:
        is_enabled: whether gradients accumulate. True if ``num_steps`` is above 1.
        num_steps: batches per step.
        num_warmup_steps: number of first batches whose gradients travel with the batch.

    Raises:
        ValueError: a number below 1.

    >>> GradientAccumulationConfig(num_steps=4).is_enabled
    True
    """

    is_enabled: bool = False
    num_steps: int = 1
    num_warmup_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_warmup_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer from 1, got {value!r:.80}")
        self.is_enabled = flag("is_enabled", self.is_enabled) or self.num_steps > 1


class _Sparing:
    """Receives a step after every batch, and passes on that of every ``num_steps`` batches."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self.optimizer, self.num_steps, self.done = optimizer, num_steps, 0
        self.fresh = True  # whether the next batch begins a new sum
        self.is_last = False  # whether the batch is the last of its sum

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.fresh:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self.fresh = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self.is_last or (self.done + 1) % self.num_steps == 0:
            self.flush(*args, **kwargs)

    def flush(self, *args: Any, **kwargs: Any) -> None:
        self.optimizer.step(*args, **kwargs)
        self.fresh = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


class GradientAccumulationWrapper:
    """A pipeline whose optimizer steps once for several batches. The table above lists what accumulates.

    If the data end in the middle of a step, the optimizer steps with the batches so far.

    Args:
        pipeline: any of the training pipelines.
        optimizer: the pipeline's optimizer.
        model: the pipeline's model.
        config: the number of batches per step.

    Raises:
        ValueError: ``pipeline`` is not a training pipeline, or has another optimizer or model.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        config: GradientAccumulationConfig,
    ) -> None:
        if not isinstance(pipeline, Pipeline):
            raise ValueError(f"pipeline must be one of this library's training pipelines, got {pipeline!r:.80}")
        if not isinstance(config, GradientAccumulationConfig):
            raise ValueError(f"config must be a GradientAccumulationConfig, got {config!r:.80}")
        if optimizer is not pipeline._optimizer or model is not pipeline._model:
            raise ValueError("optimizer and model must be those that the pipeline was made with")
        self._pipeline, self._config = pipeline, config
        self._replicated = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
        self._sparing = _Sparing(optimizer, config.num_steps)
        self._unsynced = False
        if config.is_enabled:
            pipeline._optimizer = self._sparing  # type: ignore[assignment]

    __class_getitem__: Any = classmethod(GenericAlias)

    @property
    def current_step(self) -> int:
        """The number of batches so far."""
        return self._sparing.done

    def set_step(self, step: int) -> None:
        """Sets the number of batches so far, for example after a checkpoint was loaded. Gradients stay.

        Raises:
            ValueError: a number below 0.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step must be an integer from 0, got {step!r:.80}")
        self._sparing.done = step

    @property
    def optimizer_wrapper(self) -> Any:
        """The optimizer that the pipeline steps after every batch. It steps yours when a sum is complete."""
        return self._sparing

    def progress(self, dataloader_iter: Iterator[Any], is_last_batch: bool | None = None) -> Any:
        """Trains on the next batch. The optimizer steps with the last of every ``num_steps``.

        Args:
            dataloader_iter: as of the pipeline.
            is_last_batch: True makes the optimizer step with this batch, however many it has accumulated.

        Raises:
            StopIteration: the data have ended. The optimizer has stepped with the accumulated gradients.
            StageError: as of the pipeline.
        """
        if not self._config.is_enabled:
            return self._pipeline.progress(dataloader_iter)
        done = self._sparing.done
        self._sparing.is_last = is_last = bool(is_last_batch)
        syncs = is_last or done < self._config.num_warmup_steps or (done + 1) % self._config.num_steps == 0
        try:
            with ExitStack() as stack:
                for part in self._replicated if not syncs else ():
                    stack.enter_context(part.no_sync())
                output = self._pipeline.progress(dataloader_iter)
        except StopIteration:
            self._flush()
            raise
        self._unsynced = not syncs
        self._sparing.done += 1
        return output

    def reset(self) -> None:
        """Makes the next batch the first of a step. Accumulated gradients are dropped."""
        self._sparing.done, self._sparing.fresh, self._unsynced = 0, True, False

    def _flush(self) -> None:
        """Steps with the gradients of fewer than ``num_steps`` batches."""
        left = self._sparing.done % self._config.num_steps
        if not left:
            return
        for part in self._replicated if self._unsynced else ():
            _average(part)
        self._sparing.flush()
        self._sparing.done += self._config.num_steps - left
        self._unsynced = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


def _average(replicated: DistributedDataParallel) -> None:
    """Averages the gradients of ``no_sync`` batches over the ranks, as DDP does.

    A parameter that no rank has used keeps its ``grad``.
    """
    left_out = set(getattr(replicated, "parameters_to_ignore", ()))
    dense = [p for name, p in replicated.module.named_parameters() if p.requires_grad and name not in left_out]
    env = ShardingEnv.from_process_group(replicated.process_group)
    grads = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in dense]
    used = grads[0].new_tensor([float(p.grad is not None) for p in dense])
    flat = torch.cat([*grads, used])
    all_reduce(flat.div_(env.world_size), env, "dense")
    *averaged, counts = flat.split([p.numel() for p in dense] + [len(dense)])
    for parameter, grad, count in zip(dense, averaged, counts.tolist(), strict=True):
        if count:
            parameter.grad = grad.view_as(parameter).clone()
