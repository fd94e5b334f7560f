"""Training as TorchRec's pipelines are called: ``pipeline.progress(iterator)`` takes one batch through one step.

The stages of a step run one after the other: results are those of the plain loop, and nothing overlaps yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class TrainPipeline(ABC):
    """One step a call."""

    @abstractmethod
    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Takes the next batch through one step and gives the model's output.

        Raises:
            StopIteration: there is no further batch.
        """


class TrainPipelineBase(TrainPipeline):
    """Copies a batch to the device, runs the model, and where it is training, backward and the optimizer.

    Args:
        model: called with a batch, gives ``(losses, output)``.
        optimizer: of what backward does not step; a `CombinedOptimizer` or any torch optimizer.
        device: where batches go.
        custom_model_fwd: called with the batch instead of the model.

    >>> class Square(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.w = nn.Parameter(torch.tensor(3.0))
    ...     def forward(self, batch):
    ...         loss = (self.w * batch) ** 2
    ...         return loss, loss.detach()
    >>> model = Square()
    >>> pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.25), torch.device("cpu"))
    >>> pipeline.progress(iter([torch.tensor(1.0)])), model.w.item()
    (tensor(9.), 1.5)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = custom_model_fwd if custom_model_fwd is not None else model

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        batch = next(dataloader_iter).to(self._device, non_blocking=True)
        if not self._model.training:
            return self._forward(batch)[1]
        self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        losses.sum().backward()
        self._optimizer.step()
        return output


class TrainPipelineSparseDist(TrainPipelineBase):
    """As `TrainPipelineBase`, under the name of the pipeline that sends the next batch's ids ahead.

    Args:
        model, optimizer, device, custom_model_fwd: as there.
        execute_all_batches: True; no batch is ever left behind in this pipeline.

    Raises:
        ValueError: ``execute_all_batches=False``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
    ) -> None:
        if not execute_all_batches:
            raise ValueError(
                "execute_all_batches=False would drop the batches that are under way when the data end, and here none "
                "is: leave it out"
            )
        super().__init__(model, optimizer, device, custom_model_fwd)


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """Runs the model on one batch a call, without gradients and without a step, whatever mode it is in."""

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        batch = next(dataloader_iter).to(self._device, non_blocking=True)
        with torch.no_grad():
            return self._forward(batch)[1]
