"""Optimizers that step during backward, so that gradients are freed early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.scaled_loss import StepsInBackward, scaled_loss_error, watch, watch_scalers


@names_wrong_arguments
def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
) -> None:
    """Attaches a separate optimizer to each parameter, which steps as soon as the parameter's gradient is complete.

    An unsharded module then needs no ``optimizer.step()``, and ``grad`` is None after backward. A module that is
    sharded later uses the same optimizer: its kernels step the touched rows in backward. torch's ``GradScaler.scale``
    raises for a loss of such a parameter: backward would step it with the multiplied gradient.

    Args:
        optimizer_class: any torch optimizer; for parameters that will be sharded one with a fused equal
            (``torch.optim.SGD``, ``torch.optim.Adagrad``, `RowWiseAdagrad`).
        params: parameters, on any device, ``meta`` included.
        optimizer_kwargs: the optimizer's arguments.

    Raises:
        ValueError: a parameter that has an optimizer in backward already.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.1})
    >>> weight.sum().backward(); weight.tolist(), weight.grad
    ([0.8999999761581421, 0.8999999761581421], None)
    """
    parameters = [params] if isinstance(params, Tensor) else list(params)
    for parameter in parameters:
        if not isinstance(parameter, Tensor) or not (parameter.requires_grad and parameter.is_leaf):
            what = "a tensor without gradient" if isinstance(parameter, Tensor) else repr(parameter)
            raise ValueError(f"params must be parameters that take a gradient, got {what}")
        present = getattr(parameter, "_optimizer_classes", None)
        if present:
            raise ValueError(
                f"a parameter of shape {list(parameter.shape)} has {present[0].__name__} in backward already. Fix: "
                f"apply one optimizer once, or build the module anew"
            )
    for parameter in parameters:
        optimizer = optimizer_class([parameter], **optimizer_kwargs)
        parameter._in_backward_optimizers = [optimizer]  # type: ignore[attr-defined]
        parameter._optimizer_classes = [optimizer_class]  # type: ignore[attr-defined]
        parameter._optimizer_kwargs = [dict(optimizer_kwargs)]  # type: ignore[attr-defined]
        parameter.register_post_accumulate_grad_hook(_step)
        parameter.steps_in_backward = _Attached(parameter.shape)  # type: ignore[attr-defined]
        watch(parameter.steps_in_backward)  # type: ignore[attr-defined]
    watch_scalers()


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of ``model.named_parameters()`` without an optimizer in backward, or with ``include`` those with one.

    >>> model = nn.Linear(2, 1)
    >>> apply_optimizer_in_backward(torch.optim.SGD, [model.bias], {"lr": 0.1})
    >>> [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    ['weight']
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


class _Attached(StepsInBackward):
    """Marks a parameter that has an optimizer in backward. ``scale`` raises the error: nothing of ours runs later."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = list(shape)

    def refuse(self, scale: float) -> None:
        raise scaled_loss_error(f"a parameter of shape {self.shape}", scale)


def _step(parameter: Tensor) -> None:
    for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    parameter.grad = None
