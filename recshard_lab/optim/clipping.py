"""Gradients of the dense part cut to size before a step, over all ranks if asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.optim.combined import OptimizerWrapper
from recshard_lab.optim.keyed import KeyedOptimizer


@unique
class GradientClipping(Enum):
    """NORM scales all gradients together, VALUE clamps each number, NONE leaves them alone."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


@names_wrong_arguments
class GradientClippingOptimizer(OptimizerWrapper):
    """Clips gradients, then steps.

    NORM is ``g *= min(1, max_gradient / (total + 1e-6))`` with the ``norm_type``-norm of all gradients as one vector
    (Pascanu et al. 2013), VALUE is ``g = clamp(g, -max_gradient, max_gradient)``.

    Args:
        optimizer: whose gradients are clipped. Tables stepped in backward have none: give them ``gradient_clipping``
            and ``max_gradient`` among their fused params instead.
        clipping: how.
        max_gradient: the largest total norm, or the largest number.
        norm_type: 2, 1, any p, or ``"inf"``.
        enable_global_grad_clip: add the norms of sharded parameters over the ranks that hold the other shards.
        param_to_pgs: sharded parameter -> the groups of ranks over which its shards lie; the others are replicated.
        track_grad_norm: note the total norm under VALUE and NONE as well.

    Raises:
        ValueError: a parameter that backward steps, a ``max_gradient`` that is not positive.

    >>> from recshard_lab.optim import KeyedOptimizerWrapper
    >>> weight = nn.Parameter(torch.zeros(2))
    >>> inner = KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.SGD(params, lr=1.0))
    >>> clipped = GradientClippingOptimizer(inner, GradientClipping.VALUE, max_gradient=0.5)
    >>> weight.grad = torch.tensor([3.0, -0.25]); clipped.step(); weight.tolist()
    [-0.5, 0.25]
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[nn.Parameter, Sequence[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        fused = optimizer.stepped_in_backward
        if fused and clipping is not GradientClipping.NONE:
            raise ValueError(
                f"{fused} are stepped in backward and have no gradient to clip: wrap the dense optimizer alone, and "
                f'give the tables fused_params {{"gradient_clipping": True, "max_gradient": ...}}'
            )
        if not max_gradient > 0:
            raise ValueError(f"max_gradient must be a positive number, got {max_gradient!r}")
        if not float(norm_type) > 0:
            raise ValueError(f"norm_type must be a positive number or 'inf', got {norm_type!r}")
        self._clipping, self._max_gradient, self._norm_type = clipping, float(max_gradient), float(norm_type)
        self._track = track_grad_norm
        groups = dict(param_to_pgs or {}) if enable_global_grad_clip else {}
        self._groups_of = {id(param): tuple(pgs) for param, pgs in groups.items() if pgs}
        self._total: Tensor | None = None

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the last step, before clipping; None before the first, or if not tracked."""
        return self._total

    def step(self, closure: Any = None) -> Any:
        """Evaluates the closure if there is one, clips, and steps."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_norm = self._clipping is GradientClipping.NORM
        if by_norm or self._track:
            self._total = self.compute_total_grad_norm()[0]
        if by_norm and self._total is not None:
            scale = (self._max_gradient / (self._total + 1e-6)).clamp(max=1.0)
            for grad in self._grads():
                grad.mul_(scale.to(grad.device))
        elif self._clipping is GradientClipping.VALUE:
            for grad in self._grads():
                grad.clamp_(-self._max_gradient, self._max_gradient)
        super().step()
        return loss

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients as one vector, sharded ones over their ranks, and the gradients here.

        With sharded parameters every rank of their groups must call it.
        """
        buckets: dict[tuple[Any, ...], list[Tensor]] = {}
        for param in self._parameters():
            bucket = buckets.setdefault(self._groups_of.get(id(param), ()), [])
            if param.grad is not None and param.grad.numel():
                bucket.append(_local(param.grad))
        # a rank whose shards have no gradient takes part all the same
        parts = [self._powered(grads, pgs) for pgs, grads in buckets.items()]
        grads = [grad for bucket in buckets.values() for grad in bucket]
        total = parts[0] if parts else torch.zeros(())
        for part in parts[1:]:
            part = part.to(total.device)
            total = torch.maximum(total, part) if self._infinite else total + part
        return (total if self._infinite else total ** (1.0 / self._norm_type)), grads

    def _powered(self, grads: list[Tensor], pgs: Sequence[Any]) -> Tensor:
        """Sum of ``|g|^p``, or the largest ``|g|``, over some gradients and the ranks of some groups."""
        device = next((p.device for p in self._parameters() if isinstance(p, Tensor)), torch.device("cpu"))
        total = torch.zeros((), device=device)
        if grads:
            norm = torch.nn.utils.get_total_norm(grads, self._norm_type).to(device)
            total = norm if self._infinite else norm**self._norm_type
        for pg in pgs:
            dist.all_reduce(total, op=dist.ReduceOp.MAX if self._infinite else dist.ReduceOp.SUM, group=pg)
        return total

    @property
    def _infinite(self) -> bool:
        return self._norm_type == float("inf")

    def _parameters(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    def _grads(self) -> list[Tensor]:
        return [_local(param.grad) for param in self._parameters() if param.grad is not None and param.grad.numel()]


def _local(grad: Any) -> Tensor:
    """The part of a distributed tensor that lies here."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local
