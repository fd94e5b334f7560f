"""Unsharded collections on a lookup kernel: all tables in one lookup, the optimizer inside backward.

Shape letters: B batch, L lanes (one table read by one feature), N ids, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.collections import check_pooling, empty_weight, reset_weight
from recshard_lab.embedding.configs import (
    EmbeddingBagConfig,
    PoolingType,
    check_tables,
    embedding_names_by_table,
)
from recshard_lab.embedding.inputs import check_weights, feature_of, to_most_bags, to_samples
from recshard_lab.embedding.kernels import LookupKernel, Slot, choose_kernel
from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec
from recshard_lab.embedding.out_of_range import OutOfRange
from recshard_lab.sparse import KeyedJaggedTensor, KeyedTensor


@names_wrong_arguments
class FusedEmbeddingBagCollection(nn.Module):
    """`EmbeddingBagCollection` whose backward steps the touched rows itself: no gradient, no ``optimizer.step()``.

    Outputs, keys and state dict are those of `EmbeddingBagCollection`. The parameters do not ask for gradients, so a
    torch optimizer over the rest of the model leaves them alone.

    Args:
        tables: the tables.
        optimizer_type: ``torch.optim.SGD``, ``torch.optim.Adagrad``, `RowWiseAdagrad`, or an `EmbOptimType`.
        optimizer_kwargs: ``lr`` (or ``learning_rate``), ``eps``, ``weight_decay``.
        is_weighted: as of `EmbeddingBagCollection`; the weights get gradients if they ask for them.
        device: where tables and optimizer states live.
        backend: kernel by name; None takes the preferred one that can do it.
        out_of_range: what becomes of ids that are no rows, as of `EmbeddingBagCollection`.

    Raises:
        ValueError: an optimizer or argument without a fused twin, a backend that refuses, tables that do not fit
            together.

    >>> table = EmbeddingBagConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> fused = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.5}, backend="native")
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3]), lengths=torch.tensor([2]))
    >>> fused(batch).values().sum().backward()
    >>> fused.state_dict()["embedding_bags.movies.weight"][:, 0].tolist()
    [0.5, 1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        backend: str | None = None,
        out_of_range: str = "error",
    ) -> None:
        super().__init__()
        self._policy = OutOfRange(out_of_range)
        check_tables(tables)
        check_pooling(tables)
        self._tables = list(tables)
        self._is_weighted = is_weighted
        self._keys = [name for names in embedding_names_by_table(tables) for name in names]
        self._lanes = [(table, feature) for table in tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table, _ in self._lanes]
        self._features = [feature for _, feature in self._lanes]
        self._sums = all(table.pooling is PoolingType.SUM for table in tables)
        self._fewest_rows = min(table.num_embeddings for table in tables)
        self._kernel = self._make_kernel(
            _spec_of(optimizer_type, optimizer_kwargs), torch.device(device or "cpu"), backend
        )
        self.embedding_bags = nn.ModuleDict({table.name: _Holder() for table in tables})
        self._hold_weights()
        # autograd calls our backward only if an input asks for a gradient
        self._anchor = torch.zeros(0, requires_grad=True)
        self.reset_parameters()

    def _hold_weights(self) -> None:
        """Makes the kernel's weights the parameters, in place of what stood there."""
        for table, weight in zip(self._tables, self._kernel.weights(), strict=True):
            self.embedding_bags[table.name].weight = nn.Parameter(weight, requires_grad=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled parameter has memory of its own: it is the copied kernel's again."""
        super().__setstate__(state)
        self._hold_weights()

    def _make_kernel(self, spec: OptimizerSpec, device: torch.device, backend: str | None) -> LookupKernel:
        for table in self._tables:
            empty_weight(table, "meta")  # refuses what cannot be trained
        slots = [
            Slot(table.name, table.num_embeddings, table.embedding_dim, table.data_type, table.embedding_dim)
            for table in self._tables
        ]
        lane_slots = [number for number, table in enumerate(self._tables) for _ in table.feature_names]
        kernel = choose_kernel(
            slots,
            spec,
            pooled=True,
            weighted=self._is_weighted,
            exchanges_row_norms=False,
            device=device,
            backend=backend,
        )
        return kernel(slots, lane_slots, spec, pooled=True, device=device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; backward through the result steps the tables.

        Args:
            features: has every feature of the tables; others are not read. A variable batch must have
                ``inverse_indices``, as for `EmbeddingBagCollection`.

        Returns:
            ``[B, sum of D]``.

        Raises:
            ValueError: a feature, the weights or inverse indices are missing, or an id is no row of its table.
        """
        whole = self._whole(features)
        if whole is not None:
            pooled = _Lookup.apply(self._anchor, None, *whole, self._kernel)
            return KeyedTensor(self._keys, self._dims, pooled)
        given = [feature_of(features, feature, table.name) for table, feature in self._lanes]
        bags = [
            self._policy.fit(bag, feature, table.name, table.num_embeddings)[0]
            for (table, feature), bag in zip(self._lanes, given, strict=True)
        ]
        weights = None
        if self._is_weighted:
            keys = [feature for _, feature in self._lanes]
            weights = torch.cat([check_weights(bag.weights_or_none(), keys) for bag in bags])
        lengths = to_most_bags([bag.lengths() for bag in bags])
        ids = torch.cat([bag.values() for bag in bags])
        offsets = nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        pooled = _Lookup.apply(self._anchor, weights, ids, offsets, self._kernel)
        pooled = self._mean(pooled, to_most_bags([bag.lengths() for bag in given]))
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            parts = zip(self._lanes, pooled.split(self._dims, dim=1), strict=True)
            pooled = torch.cat([to_samples(part, features, feature) for (_, feature), part in parts], dim=1)
        return KeyedTensor(self._keys, self._dims, pooled)

    def _whole(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor] | None:
        """A batch's own ids and offsets where they are the lanes' already: nothing to cut, to join or to look at one
        by one. Most batches are so: keys in the tables' order, sums of plain bags, all ids in the smallest table."""
        if self._is_weighted or not self._sums or torch.compiler.is_compiling():
            return None
        if features.keys() != self._features or features.variable_stride_per_key():
            return None
        ids = features.values()
        if features.inverse_indices_or_none() is not None or ids.dim() != 1 or ids.is_meta or ids.numel() == 0:
            return None
        if ids.dtype not in (torch.int32, torch.int64):
            return None
        low, high = torch.stack(ids.aminmax()).tolist()
        if low < 0 or high >= self._fewest_rows:
            return None
        return ids, features.offsets()

    def _mean(self, pooled: Tensor, lengths: list[Tensor]) -> Tensor:
        """Divides the columns of MEAN tables by the number of ids."""
        if self._sums:
            return pooled
        divisors = [
            length.clamp(min=1) if table.pooling is PoolingType.MEAN else torch.ones_like(length)
            for (table, _), length in zip(self._lanes, lengths, strict=True)
        ]
        widths = torch.tensor(self._dims, device=pooled.device)
        return pooled / torch.stack(divisors, dim=1).repeat_interleave(widths, dim=1)

    def reset_parameters(self) -> None:
        """Draws every table anew, as `EmbeddingBagCollection.reset_parameters`; optimizer states stay."""
        for table, weight in zip(self._tables, self._kernel.weights(), strict=True):
            reset_weight(weight, table)

    def set_learning_rate(self, lr: float) -> None:
        """The step size from the next backward on."""
        self._kernel.set_learning_rate(lr)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Table -> state name, as fbgemm names it -> the tensor itself, to read and to write in place."""
        states = self._kernel.optimizer_states()
        return {table.name: state for table, state in zip(self._tables, states, strict=True)}

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether batches must carry weights."""
        return self._is_weighted

    def out_of_range_count(self) -> int:
        """Ids met so far that were no rows of their table, under ``"clamp"`` and ``"ignore"``."""
        return self._policy.count()

    @property
    def backend(self) -> str:
        """The kernel in use."""
        return self._kernel.name

    @property
    def device(self) -> torch.device:
        """Where the tables live."""
        return self._kernel.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedEmbeddingBagCollection:
        """``.to()``, ``.half()`` and their like: refused where they would part the parameters from the kernel."""
        probe = torch.empty(0, dtype=self._kernel.weights()[0].dtype, device=self.device)
        for tensor in (probe, *self._kernel.weights()):
            result = fn(tensor)
            if result.device != tensor.device or result.dtype != tensor.dtype or result.data_ptr() != tensor.data_ptr():
                raise ValueError(
                    f"a fused collection cannot move after it is made (asked for {result.dtype} on {result.device}): "
                    f"build it with that device, and the tables with that data_type"
                )
        return self


class _Holder(nn.Module):
    """Gives a kernel's weight its name in the state dict."""

    weight: nn.Parameter


class _Lookup(torch.autograd.Function):
    """forward: the kernel's lookup. backward: the kernel's fused step, and the gradient of per-sample weights."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, weights: Tensor | None, ids: Tensor, offsets: Tensor, kernel: LookupKernel
    ) -> Tensor:
        out, ctx.saved = kernel.forward(ids, offsets, weights)
        ctx.kernel = kernel
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.saved is None:
            raise RuntimeError("backward ran twice through one fused lookup: it steps the tables, look up again")
        saved, ctx.saved = ctx.saved, None
        return None, ctx.kernel.backward(saved, grad), None, None, None


def _spec_of(optimizer: type[torch.optim.Optimizer] | EmbOptimType, kwargs: Mapping[str, Any] | None) -> OptimizerSpec:
    if isinstance(optimizer, type):
        return OptimizerSpec.from_optimizer(optimizer, kwargs)
    given = dict(kwargs or {})
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    return OptimizerSpec.from_fused_params({"optimizer": optimizer, **given})
