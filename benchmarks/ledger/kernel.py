"""The lookup kernel ``ledger``: a CPU kernel behind device tensors, counted as fbgemm's CUDA kernel is.

One operator forward, one backward with the optimizer inside. It works on CPU tensors too, so that ranks without the
device can be counted the same way.

``ledger_fbgemm`` is this library's own fbgemm backend with fbgemm's operator alone replaced: it also counts what the
backend does around that operator on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.apparatus.operators import as_one_operator
from benchmarks.ledger.counts import allocating, note_operator
from benchmarks.ledger.device import NAME, LedgerTensor, unwrap, wrap
from recshard_lab.embedding.kernels import (
    KernelInput,
    KernelSpec,
    LookupKernel,
    RowNorms,
    available,
    choose_kernel,
    kernel_named,
)
from recshard_lab.embedding.kernels.base import CPU
from recshard_lab.embedding.kernels.fbgemm import FbgemmKernel
from recshard_lab.embedding.optimizers import OptimizerSpec

FORWARD, BACKWARD = "lookup_forward", "lookup_backward"


class LedgerKernel(LookupKernel):
    """`LookupKernel` that hands the work to the CPU kernel preferred for it."""

    name = NAME

    @classmethod
    def preference(cls, spec: KernelSpec) -> int:
        """First on its device, last elsewhere."""
        return 100 if spec.device.type == NAME else -100

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        if spec.device.type not in (NAME, "cpu"):
            return f"it runs on {NAME} and cpu, not on {spec.device.type}"
        reasons = []
        for name in available():
            if name != NAME:
                reason = kernel_named(name).refuses(spec._replace(device=CPU))
                if reason is None:
                    return None
                reasons.append(reason)
        return "; ".join(reasons)

    def _allocate(self) -> None:
        split = any(shard.num_cols != shard.full_dim for shard in self.shards)
        norms = self.optimizer is not None and self.optimizer.row_wise and split
        spec = self.spec._replace(device=CPU, joins_norms=norms)
        self._inner = choose_kernel(spec._replace(weighted=self.pooled))(spec)
        self._on_device = self.device.type == NAME
        self._hold()

    def _hold(self) -> None:
        """The inner kernel's weights and states as tensors of the device, the same every time."""
        weights, states = self._inner.weights(), self._inner.optimizer_states()
        if self._on_device:
            self._weights = [wrap(own.detach(), "weights") for own in weights]
            self._states = [{name: wrap(state.detach(), "state") for name, state in own.items()} for own in states]
        else:
            self._weights, self._states = weights, states

    def set_learning_rate(self, lr: float) -> None:
        self._inner.set_learning_rate(lr)

    def forward(self, batch: KernelInput, train: bool) -> tuple[Tensor, Any]:
        own = self._unwrapped(batch)
        with as_one_operator(FORWARD):
            out, saved = self._inner.forward(own, train)
        if not self._on_device:
            return out, saved
        note_operator(FORWARD, True)
        with allocating("activations"):
            return wrap(out.detach()), (saved, own)

    def remember(self, batch: KernelInput, train: bool = True) -> Any:
        """Keeps the batch: fbgemm's backward takes ids and offsets, so that nothing runs before it."""
        own = self._unwrapped(batch)
        with as_one_operator(FORWARD):
            saved = self._inner.remember(own, train)
        if self._on_device:
            note_operator(FORWARD, True)
            return saved, own
        return saved

    def backward(self, saved: Any, grad: Tensor, row_norms: RowNorms | None = None) -> Tensor | None:
        if self._on_device:
            self._refuse_host(grad)
            saved = saved[0]
            note_operator(BACKWARD, True)
        self._pass_grads(inwards=True)
        with as_one_operator(BACKWARD) as counting_again:

            def norms(rows: list[Tensor], squares: list[Tensor]) -> list[Tensor]:
                assert row_norms is not None
                with counting_again():
                    found = row_norms([self._to_device(own) for own in rows], [self._to_device(own) for own in squares])
                return [unwrap(own) for own in found]

            of_weights = self._inner.backward(saved, unwrap(grad), None if row_norms is None else norms)
        self._pass_grads(inwards=False)
        return None if of_weights is None else self._to_device(of_weights)

    def touched_rows(self, ids: Tensor, shard: int) -> Tensor:
        return self._to_device(self._inner.touched_rows(unwrap(ids), shard))

    def _to_device(self, own: Tensor) -> Tensor:
        return wrap(own) if self._on_device else own

    def _pass_grads(self, inwards: bool) -> None:
        """A dense kernel's ``.grad``, to the inner kernel's weights and back."""
        if self.optimizer is not None or not self._on_device:
            return
        for outer, inner in zip(self._weights, self._inner.weights(), strict=True):
            if inwards:
                inner.grad = None if outer.grad is None else unwrap(outer.grad)
            elif inner.grad is None:
                outer.grad = None
            elif outer.grad is None or unwrap(outer.grad) is not inner.grad:
                outer.grad = wrap(inner.grad)

    def _unwrapped(self, batch: KernelInput) -> KernelInput:
        if self._on_device:
            self._refuse_host(*batch[:3])
        weights = None if batch.weights is None else unwrap(batch.weights.detach())
        return KernelInput(unwrap(batch.ids.detach()), unwrap(batch.offsets.detach()), weights, batch.counts)

    def _refuse_host(self, *tensors: Tensor | None) -> None:
        for own in tensors:
            if own is not None and not isinstance(own, LedgerTensor):
                raise RuntimeError(f"the lookup kernel on {self.device} got a tensor on {own.device}")

    def counters(self) -> list[dict[str, float]]:
        return self._inner.counters()


class LedgerFbgemmKernel(FbgemmKernel):
    """The fbgemm backend on the device: everything around fbgemm's operator runs on the device and is counted."""

    name = f"{NAME}_fbgemm"

    @classmethod
    def preference(cls, spec: KernelSpec) -> int:
        """Never unasked."""
        return -200

    @classmethod
    def refuses(cls, spec: KernelSpec) -> str | None:
        if spec.device.type not in (NAME, "cpu"):
            return f"it runs on {NAME} and cpu, not on {spec.device.type}"
        return super().refuses(spec._replace(device=CPU))

    def _make_tbe(self, indices: list[int], lanes: list[int], optimizer: OptimizerSpec) -> Any:
        device, self.device = self.device, CPU
        try:
            tbe = super()._make_tbe(indices, lanes, optimizer)
        finally:
            self.device = device
        return _DeviceTbe(tbe) if device.type == NAME else tbe


class _DeviceTbe:
    """fbgemm's CPU module behind device tensors."""

    def __init__(self, tbe: Any) -> None:
        self.tbe = tbe

    def __call__(self, ids: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Any:
        anchor = wrap(torch.zeros(())).requires_grad_()
        return _Lookup.apply(anchor, per_sample_weights, self.tbe, ids, offsets)

    def split_embedding_weights(self) -> list[Tensor]:
        return [wrap(own.detach(), "weights") for own in self.tbe.split_embedding_weights()]

    def split_optimizer_states(self) -> list[Any]:
        return [tuple(wrap(state, "state") for state in own) for own in self.tbe.split_optimizer_states()]

    def set_learning_rate(self, lr: float) -> None:
        self.tbe.set_learning_rate(lr)


class _Lookup(torch.autograd.Function):
    """One operator forward, one backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, tbe: Any, ids: Tensor, offsets: Tensor) -> Tensor:
        note_operator(FORWARD, True)
        ctx.weights = None if weights is None else unwrap(weights.detach()).requires_grad_()
        with as_one_operator(FORWARD), torch.enable_grad():
            ctx.rows = tbe(unwrap(ids), unwrap(offsets), per_sample_weights=ctx.weights)
        with allocating("activations"):
            return wrap(ctx.rows.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        note_operator(BACKWARD, True)
        with as_one_operator(BACKWARD):
            torch.autograd.backward(ctx.rows, unwrap(grads[0]))
        of_weights = None if ctx.weights is None else wrap(ctx.weights.grad)
        return None, of_weights, None, None, None
