"""The base of fused collections: a lookup kernel whose weights are the parameters, stepped inside backward.

Shape letters: N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named
from recshard_lab.embedding.collections import empty_weight, reset_weight
from recshard_lab.embedding.configs import BaseEmbeddingConfig, check_tables
from recshard_lab.embedding.kernels import LookupKernel, Slot, choose_kernel
from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.embedding.scaled_loss import StepsInBackward, watch, watch_hidden, watch_scalers

if TYPE_CHECKING:
    from recshard_lab.optim.fused import FusedCollectionOptimizer

OnStep = Callable[[Tensor, Sequence[int]], None]


class FusedCollection(nn.Module):
    """Tables on one kernel. The parameters are the kernel's memory, with ``requires_grad=False``."""

    tables_name: ClassVar[str]
    pooled: ClassVar[bool]

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None,
        weighted: bool,
        device: torch.device | str | None,
        backend: str | None,
        out_of_range: str,
    ) -> None:
        super().__init__()
        self._policy = OutOfRange(out_of_range)
        check_tables(tables)
        self._on = list(tables)
        self._features = [feature for table in tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in tables for _ in table.feature_names]
        self._optimizer_type, self._optimizer_kwargs = optimizer_type, dict(optimizer_kwargs or {})
        self._spec = _spec_of(optimizer_type, optimizer_kwargs)
        self._optimizer: FusedCollectionOptimizer | None = None
        self._kernel = self._make_kernel(weighted, device_named(device or "cpu"), backend)
        self.add_module(self.tables_name, nn.ModuleDict({table.name: _Holder() for table in tables}))
        self._hold_weights()
        #: called before each step with its ids ``[N]`` by feature, and their number in each
        self.on_step: OnStep | None = None
        # autograd calls our backward only if an input requires a gradient
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        watch_scalers()
        self._draw_first()

    def _hold_weights(self) -> None:
        """Makes the kernel's weights the parameters."""
        holders = self.get_submodule(self.tables_name)
        for table, weight in zip(self._on, self._kernel.weights(), strict=True):
            holders.get_submodule(table.name).weight = nn.Parameter(weight, requires_grad=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the copied kernel's weights the parameters: copies and unpickled parameters have separate memory."""
        super().__setstate__(state)
        watch_scalers()
        self.on_step = self._optimizer = None  # they belong to the original
        self._hold_weights()

    def _make_kernel(self, weighted: bool, device: torch.device, backend: str | None) -> LookupKernel:
        for table in self._on:
            empty_weight(table, "meta")  # refuses what cannot be trained
        slots = [
            Slot(table.name, table.num_embeddings, table.embedding_dim, table.data_type, table.embedding_dim)
            for table in self._on
        ]
        feature_slots = [number for number, table in enumerate(self._on) for _ in table.feature_names]
        kernel = choose_kernel(
            slots,
            self._spec,
            pooled=self.pooled,
            weighted=weighted,
            exchanges_row_norms=False,
            device=device,
            backend=backend,
        )
        return kernel(slots, feature_slots, self._spec, pooled=self.pooled, device=device)

    def _look_up(self, weights: Tensor | None, ids: Tensor, offsets: Tensor, counts: list[int]) -> Tensor:
        """The rows of `LookupKernel.forward`. Backward through them steps the tables."""
        if self.training and not torch.is_grad_enabled():
            watch_hidden()
        looked: Tensor = _Lookup.apply(self._anchor, weights, ids, offsets, counts, self._kernel, self.on_step)
        return looked

    def _draw_first(self) -> None:
        """The weights of a new collection."""
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every table anew, as `EmbeddingBagCollection.reset_parameters`. Optimizer states stay."""
        for table, weight in zip(self._on, self._kernel.weights(), strict=True):
            reset_weight(weight, table)

    def set_learning_rate(self, lr: float) -> None:
        """Sets the step size from the next backward on."""
        self._kernel.set_learning_rate(lr)
        self._spec = replace(self._spec, learning_rate=lr)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Table -> state name, as fbgemm names it -> the tensor itself, to read and to write in place."""
        states = self._kernel.optimizer_states()
        return {table.name: state for table, state in zip(self._on, states, strict=True)}

    def optimizer_tensors(self) -> list[Tensor]:
        """The tensors of `optimizer_states`, for measured memory."""
        return [tensor for state in self._kernel.optimizer_states() for tensor in state.values()]

    def optimizer_type(self) -> type[torch.optim.Optimizer] | EmbOptimType:
        """The ``optimizer_type`` argument."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The ``optimizer_kwargs`` argument."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> FusedCollectionOptimizer:
        """The optimizer of the tables, for learning-rate schedulers and state dicts by name.

        >>> from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection
        >>> table = EmbeddingBagConfig(name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"])
        >>> fused = FusedEmbeddingBagCollection([table], torch.optim.Adagrad, {"lr": 0.5})
        >>> list(fused.fused_optimizer().state_dict()["state"]["movies.weight"])
        ['movies.weight.momentum_1']
        """
        from recshard_lab.optim.fused import FusedCollectionOptimizer

        if self._optimizer is None:
            self._optimizer = FusedCollectionOptimizer(self)
        return self._optimizer

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer with its current learning rate."""
        return self._spec

    def out_of_range_count(self) -> int:
        """Out-of-range ids so far, under ``"clamp"`` and ``"ignore"``."""
        return self._policy.count()

    @property
    def out_of_range(self) -> str:
        """The out-of-range policy."""
        return self._policy.policy

    @property
    def backend(self) -> str:
        """The kernel in use."""
        return self._kernel.name

    @property
    def device(self) -> torch.device:
        """The device of the tables."""
        return self._kernel.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``.to()``, ``.half()`` and the like: refused if they would move the parameters away from the kernel."""
        probe = torch.empty(0, dtype=self._kernel.weights()[0].dtype, device=self.device)
        for tensor in (probe, *self._kernel.weights()):
            result = fn(tensor)
            if result.device != tensor.device or result.dtype != tensor.dtype or result.data_ptr() != tensor.data_ptr():
                raise ValueError(
                    f"a fused collection cannot move after it is made (asked for {result.dtype} on {result.device}): "
                    f"build it with that device, and the tables with that data_type"
                )
        return self


def check_location(location: Any, device: torch.device) -> None:
    """Raises ValueError unless the tables are stored there: HOST on a CPU, DEVICE on a GPU.

    Args:
        location: fbgemm's ``EmbeddingLocation``; None is the right one for `device`.
        device: of the tables.
    """
    name = getattr(location, "name", str(location))
    stored = "HOST" if device.type in ("cpu", "meta") else "DEVICE"
    if location is not None and name != stored:
        raise ValueError(
            f"location={name} is not supported: an unsharded fused collection on {device} stores its tables in the "
            f"memory of that device ({stored}). Fix: leave location out, or shard the collection with "
            f"compute_kernel='fused_uvm_caching' for tables larger than the GPU's memory"
        )


class _Holder(nn.Module):
    """A kernel's weight under its name in the state dict."""

    weight: nn.Parameter


class _Recorded(StepsInBackward):
    """What backward needs."""

    def __init__(self, kept: Any, table: str) -> None:
        self.kept, self.table = kept, table
        self.failed: Exception | None = None


class _Lookup(torch.autograd.Function):
    """forward: the kernel's lookup. backward: the kernel's fused step, and the gradient of per-sample weights."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        ids: Tensor,
        offsets: Tensor,
        counts: list[int],
        kernel: LookupKernel,
        on_step: OnStep | None,
    ) -> Tensor:
        out, kept = kernel.forward(ids, offsets, weights, counts)
        ctx.saved, ctx.kernel = _Recorded(kept, kernel.slots[0].table), kernel
        watch(ctx.saved)
        ctx.on_step = None if on_step is None else partial(on_step, ids, counts)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise RuntimeError(
                "backward ran twice through one fused lookup, and the first run stepped the tables. Fix: look up again"
            )
        saved, ctx.saved = ctx.saved, None
        if saved.failed is not None:
            raise saved.failed
        if ctx.on_step is not None:
            ctx.on_step()
            ctx.on_step = None
        return None, ctx.kernel.backward(saved.kept, grad), None, None, None, None, None


def _spec_of(optimizer: type[torch.optim.Optimizer] | EmbOptimType, kwargs: Mapping[str, Any] | None) -> OptimizerSpec:
    if isinstance(optimizer, type):
        return OptimizerSpec.from_optimizer(optimizer, kwargs)
    given = dict(kwargs or {})
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    return OptimizerSpec.from_fused_params({"optimizer": optimizer, **given})
