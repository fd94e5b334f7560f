"""Refuses torch's GradScaler for tables that step inside backward.

A scaler multiplies the loss, and divides the gradients later, in ``scaler.step``. By then backward has stepped the
tables with the multiplied gradient. So ``GradScaler.scale`` also searches the graph of the loss for lookups of such
tables, and gives them an error, which their backward raises. Other losses are scaled as before.

A reentrant ``torch.utils.checkpoint`` has its lookups in no graph: backward runs them again. They get the error there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor


class StepsInBackward:
    """A lookup whose backward steps tables: ``saved`` of a node of autograd, or ``steps_in_backward`` of a leaf.

    Attributes:
        table: the name of a table, for the error.
        failed: an error that backward raises in place of the step.
    """

    __slots__ = ("__weakref__", "failed", "table")
    table: str
    failed: Exception | None

    def refuse(self, scale: float) -> None:
        """The loss was multiplied by ``scale``."""
        self.failed = self.failed or scaled_loss_error(f"table {self.table!r}", scale)


class _Thread(threading.local):
    scale: float | None = None  # of the loss whose backward runs a checkpoint again


class _Watch:
    waiting: ClassVar[WeakSet[StepsInBackward]] = WeakSet()  # their backward has not run
    hidden = False  # whether a lookup was not recorded in training mode: it may be in a checkpoint
    wrapped = False
    thread = _Thread()


def watch_scalers() -> None:
    """Has every GradScaler of this process search the losses that it scales. Further calls do nothing."""
    if not _Watch.wrapped:
        _Watch.wrapped = True
        scalers: list[Any] = [torch.amp.GradScaler]
        for scaler in scalers:
            _wrap(scaler)
            scalers += scaler.__subclasses__()
        torch.amp.GradScaler.__init_subclass__ = classmethod(_wrap)  # type: ignore[assignment]


def watch(lookup: StepsInBackward) -> None:
    """Lets scalers find a lookup until its backward has run."""
    _Watch.waiting.add(lookup)
    if _Watch.thread.scale is not None:
        lookup.refuse(_Watch.thread.scale)


def watch_hidden() -> None:
    """A lookup in training mode ran without gradients, so a checkpoint may run it again in backward."""
    _Watch.hidden = True


def scaled_loss_error(stepped: str, scale: float) -> ValueError:
    """The error of what steps inside backward of a scaled loss."""
    return ValueError(
        f"GradScaler multiplied the loss by {scale:g}, and {stepped} steps inside backward, before scaler.step divides "
        f"gradients: its gradient is {scale:g} times too large. Fix: train without a GradScaler, under torch.autocast "
        f"with dtype=torch.bfloat16"
    )


def _wrap(scaler: Any) -> None:
    """Wraps the method ``scale`` of a class that defines it."""
    scale = vars(scaler).get("scale")
    if scale is None:
        return

    @wraps(scale)
    def scale_and_search(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _searched(scaled, self.get_scale) if (_Watch.waiting or _Watch.hidden) and self.is_enabled() else scaled

    scaler.scale = scale_and_search


def _searched(scaled: Any, scale: Callable[[], float]) -> Any:
    """Searches the graphs of what a scaler returned: a tensor, or an iterable, which may be read once only."""
    if isinstance(scaled, Tensor):
        _search(scaled, scale)
    elif isinstance(scaled, list | tuple):
        for part in scaled:
            _searched(part, scale)
    elif isinstance(scaled, Iterable):
        return (_searched(part, scale) for part in scaled)
    return scaled


def _search(loss: Tensor, scale: Callable[[], float]) -> None:
    left: list[Any] = [loss.grad_fn]
    seen = {None}
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        left.extend(child for child, _ in node.next_functions)
        for holder, name in ((node, "saved"), (getattr(node, "variable", None), "steps_in_backward")):
            found = getattr(holder, name, None)
            if isinstance(found, StepsInBackward) and found in _Watch.waiting:
                found.refuse(scale())
        if type(node).__name__ == "CheckpointFunctionBackward":
            node.run_function = _under(scale(), node.run_function)


def _under(scale: float, run: Callable[..., Any]) -> Callable[..., Any]:
    """Lookups that ``run`` records belong to a loss that was multiplied by ``scale``."""

    def run_under(*args: Any) -> Any:
        before, _Watch.thread.scale = _Watch.thread.scale, scale
        try:
            return run(*args)
        finally:
            _Watch.thread.scale = before

    return run_under
