"""Clips gradients before a step: those of the dense part, of sharded tables, and of fused tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, unique
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm.wire import ProcessGroupWire
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
    (Pascanu et al. 2013), as in ``torch.nn.utils.clip_grad_norm_``: a NaN on any rank makes it NaN. VALUE is
    ``g = clamp(g, -max_gradient, max_gradient)``.

    Fused tables take part in NORM and in ``track_grad_norm``: this class calls their ``defer_steps``, so backward keeps
    their gradients and `step` steps them. Their norm is that of the unsharded tables: duplicates of a row are summed
    first, shards are added over ranks, and replicas count once. All ranks must call `step` alike.

    Args:
        optimizer: the optimizer whose gradients are clipped: ``CombinedOptimizer([dmp.fused_optimizer, dense])``.
        clipping: the rule.
        max_gradient: the largest total norm, or the largest number. 0 makes all gradients zero.
        norm_type: 2, 1, any p, or ``"inf"``.
        enable_global_grad_clip: add the norms of sharded parameters over the ranks that store the other shards.
        param_to_pgs: sharded parameter -> the groups of ranks that store its shards; all others are replicated. For
            tables on the dense kernel, pass ``dmp.param_to_pgs()``. Not required for DTensors (FSDP2).
        track_grad_norm: compute the total norm under VALUE and NONE as well.

    Attributes:
        last_total_grad_norm: norm of all gradients in the last step, before clipping; None before the first, or if not
            tracked.

    Raises:
        ValueError: VALUE with fused tables, or a negative ``max_gradient``.

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
        if fused and clipping is GradientClipping.VALUE:
            raise ValueError(
                f"clipping=VALUE does not support {fused}, whose kernels sum the gradient of a row when they step it. "
                f'Fix: wrap the dense optimizer alone, and pass fused_params {{"gradient_clipping": True, '
                f'"max_gradient": ...}}, which clamps that sum'
            )
        if not max_gradient >= 0:
            raise ValueError(f"max_gradient must be a number from 0, got {max_gradient!r}")
        if not float(norm_type) > 0:
            raise ValueError(f"norm_type must be a positive number or 'inf', got {norm_type!r}")
        self._clipping, self._max_gradient, self._norm_type = clipping, float(max_gradient), float(norm_type)
        self._track = track_grad_norm
        groups = (param_to_pgs or {}) if enable_global_grad_clip else {}
        self._groups_of: dict[Any, tuple[Any, ...]] = {param: tuple(pgs) for param, pgs in groups.items() if pgs}
        if fused and (clipping is GradientClipping.NORM or track_grad_norm):
            optimizer.defer_steps()
        self.last_total_grad_norm: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """Evaluates the closure if there is one, clips, and steps."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._clipping is GradientClipping.NORM:
            self.last_total_grad_norm = self.clip_grad_norm_()
        elif self._track:
            self.last_total_grad_norm = self.compute_total_grad_norm()[0]
        if self._clipping is GradientClipping.VALUE:
            for param in self._parameters():
                if param.grad is not None:
                    _local(param.grad).clamp_(-self._max_gradient, self._max_gradient)
        super().step()
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scales all gradients by NORM's rule, for any `clipping`. Collective as `compute_total_grad_norm`.

        Returns:
            The total norm before, 0-d.

        Raises:
            ValueError: fused tables under another rule: backward has stepped them already.
        """
        if self.stepped_in_backward and self._clipping is not GradientClipping.NORM:
            raise ValueError(
                f"clip_grad_norm_ cannot clip {self.stepped_in_backward}, which backward has stepped. Fix: pass "
                f"clipping=GradientClipping.NORM"
            )
        total, grads = self.compute_total_grad_norm()
        scale = (self._max_gradient / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(scale.to(grad.device))
        self.scale_fused_gradients(scale)
        return total

    @torch.no_grad()
    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients as one vector, and this rank's gradients except those of fused tables.

        Collective if parameters are sharded or tables are fused.
        """
        # also for groups of which this rank stores no shard, and for shards without a gradient
        buckets: dict[tuple[Any, ...], list[Tensor]] = {pgs: [] for pgs in self._groups_of.values()}
        for param in self._parameters():
            bucket = buckets.setdefault(self._groups_of.get(param) or _mesh_groups(param), [])
            if param.grad is not None and param.grad.numel():
                bucket.append(_local(param.grad))
        parts = [self._powered(grads, pgs) for pgs, grads in buckets.items()]
        parts += self.fused_norm_power(self._norm_type)
        grads = [grad for bucket in buckets.values() for grad in bucket]
        total = parts[0] if parts else torch.zeros(())
        for part in parts[1:]:
            part = part.to(total.device)
            total = torch.maximum(total, part) if self._infinite else total + part
        return (total if self._infinite else total ** (1.0 / self._norm_type)), grads

    def _powered(self, grads: list[Tensor], pgs: Sequence[Any]) -> Tensor:
        """Sum of ``|g|^p``, or the largest ``|g|``, over some gradients and the ranks of some groups."""
        device = next((p.device for p in self._parameters()), torch.device("cpu"))
        total = torch.zeros((), device=device)
        if grads:
            norm = torch.nn.utils.get_total_norm(grads, self._norm_type).to(device)
            total = norm if self._infinite else norm**self._norm_type
        for pg in pgs:
            ProcessGroupWire(pg).all_reduce(total, maximum=self._infinite).wait()
        return total

    @property
    def _infinite(self) -> bool:
        return self._norm_type == float("inf")

    def _parameters(self) -> list[Any]:
        """All parameters except fused tables."""
        return [param for group in self.param_groups for param in group["params"] if isinstance(param, Tensor)]


def _local(grad: Any) -> Tensor:
    """The local shard of a distributed tensor."""
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return local


def _mesh_groups(param: Any) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that store the other shards of a distributed tensor."""
    placements = getattr(param, "placements", ())
    return tuple(param.device_mesh.get_group(n) for n, placement in enumerate(placements) if placement.is_shard())
