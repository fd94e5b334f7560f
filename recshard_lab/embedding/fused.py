"""Optimizers that step during backward, so that gradients are freed early."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from recshard_lab.arguments import device_named, names_wrong_arguments
from recshard_lab.embedding.collections import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    PooledTables,
    SequenceTables,
    TableCollection,
    reset_weight,
    trained_dtype,
)
from recshard_lab.embedding.configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recshard_lab.embedding.inputs import check_weights, fit_features, joined_samples, put_back, to_most_bags
from recshard_lab.embedding.kernels import KernelInput, KernelSpec, LookupKernel, ShardSpec, choose_kernel
from recshard_lab.embedding.optimizers import EmbOptimType, OptimizerSpec, spec_from_optimizer
from recshard_lab.embedding.scaled_loss import StepsInBackward, scaled_loss_error, watch, watch_hidden, watch_scalers
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recshard_lab.optim.keyed import FusedCollectionOptimizer


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


# The base of fused collections: a lookup kernel whose weights are the parameters, stepped inside backward.
#
# Shape letters: N ids, D columns.


OnStep = Callable[[Tensor, Sequence[int]], None]


class FusedCollection(TableCollection):
    """Tables on one kernel. The parameters are the kernel's memory, with ``requires_grad=False``."""

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None,
        device: torch.device | str | None,
        location: Any,
        backend: str | None,
        out_of_range: str,
        **options: bool,
    ) -> None:
        place: torch.device = device_named(device or "cpu")
        check_location(location, place)
        super().__init__(tables, out_of_range, **options)
        self._optimizer_type, self._optimizer_kwargs = optimizer_type, dict(optimizer_kwargs or {})
        self._spec = _spec_of(optimizer_type, optimizer_kwargs)
        self._optimizer: FusedCollectionOptimizer | None = None
        self._kernel = self._make_kernel(place, backend)
        self.add_module(self.tables_name, nn.ModuleDict({table.name: nn.Module() for table in tables}))
        self._hold_weights()
        #: called before each step with its ids ``[N]`` by feature, and their number in each
        self.on_step: OnStep | None = None
        # autograd calls our backward only if an input requires a gradient
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        watch_scalers()
        if not self._tables[0].dynamic:  # dynamic rows are computed when ids occur, or are in a tier that is kept
            self.reset_parameters()

    def _make_kernel(self, device: torch.device, backend: str | None) -> LookupKernel:
        """The kernel of all tables."""
        shards = [
            ShardSpec(table.name, self._first_rows(table), table.embedding_dim, table.data_type, table.embedding_dim)
            for table in self._tables
        ]
        features = [number for number, table in enumerate(self._tables) for _ in table.feature_names]
        spec = KernelSpec(shards, features, self._spec, self.pooled, device, self._is_weighted)
        return self._build(spec, choose_kernel(spec, backend))

    def _first_rows(self, table: Any) -> int:
        """Rows of a table in the kernel."""
        trained_dtype(table)  # refuses what cannot be trained
        rows: int = table.num_embeddings
        return rows

    def _build(self, spec: KernelSpec, chosen: type[LookupKernel]) -> LookupKernel:
        return chosen(spec)

    def _hold_weights(self) -> None:
        """Makes the kernel's weights the parameters."""
        holders = self.get_submodule(self.tables_name)
        for table, weight in zip(self._tables, self._kernel.weights(), strict=True):
            holders.get_submodule(table.name).weight = nn.Parameter(weight, requires_grad=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes the copied kernel's weights the parameters: copies and unpickled parameters have separate memory."""
        super().__setstate__(state)
        watch_scalers()
        self.on_step = self._optimizer = None  # they belong to the original
        self._hold_weights()

    def _look_up(self, weights: Tensor | None, ids: Tensor, offsets: Tensor, counts: list[int]) -> Tensor:
        """The rows of `LookupKernel.forward`. Backward through them steps the tables."""
        if self.training and not torch.is_grad_enabled():
            watch_hidden()
        train = self.training and torch.is_grad_enabled()
        looked: Tensor = _Lookup.apply(self._anchor, weights, ids, offsets, counts, self._kernel, train, self.on_step)
        return looked

    def reset_parameters(self) -> None:
        """Draws every table anew, as `EmbeddingBagCollection.reset_parameters`. Optimizer states stay."""
        for table, weight in zip(self._tables, self._kernel.weights(), strict=True):
            reset_weight(weight, table)

    def set_learning_rate(self, lr: float) -> None:
        """Sets the step size from the next backward on."""
        self._kernel.set_learning_rate(lr)
        self._spec = replace(self._spec, learning_rate=lr)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Table -> state name, as fbgemm names it -> the tensor itself, to read and to write in place."""
        states = self._kernel.optimizer_states()
        return {table.name: state for table, state in zip(self._tables, states, strict=True)}

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
        from recshard_lab.optim.keyed import FusedCollectionOptimizer

        if self._optimizer is None:
            self._optimizer = FusedCollectionOptimizer(self)
        return self._optimizer

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        """The optimizer with its current learning rate."""
        return self._spec

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
        train: bool,
        on_step: OnStep | None,
    ) -> Tensor:
        out, kept = kernel.forward(KernelInput(ids, offsets, weights, counts), train)
        ctx.saved, ctx.kernel = _Recorded(kept, kernel.shards[0].table), kernel
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
        return None, ctx.kernel.backward(saved.kept, grad), *[None] * 6


def _spec_of(optimizer: type[torch.optim.Optimizer] | EmbOptimType, kwargs: Mapping[str, Any] | None) -> OptimizerSpec:
    if isinstance(optimizer, type):
        return spec_from_optimizer(optimizer, kwargs)
    given = dict(kwargs or {})
    if "lr" in given:
        given["learning_rate"] = given.pop("lr")
    return OptimizerSpec.from_fused_params({"optimizer": optimizer, **given})


# Unsharded collections on a lookup kernel: all tables in one lookup, the optimizer inside backward.
#
# Shape letters: B batch, F features, each of one table, N ids, D columns.


@names_wrong_arguments
class FusedEmbeddingBagCollection(FusedCollection, PooledTables):
    """`EmbeddingBagCollection` whose backward steps the touched rows itself: no gradient, no ``optimizer.step()``.

    Outputs, keys and state dict are those of `EmbeddingBagCollection`. The parameters have ``requires_grad=False``, so
    that a torch optimizer of the rest of the model skips them.

    Args:
        tables: the tables.
        optimizer_type: ``torch.optim.SGD``, ``torch.optim.Adagrad``, `RowWiseAdagrad`, or an `EmbOptimType`.
        optimizer_kwargs: ``lr`` (or ``learning_rate``), ``eps``, ``weight_decay``.
        is_weighted: as of `EmbeddingBagCollection`; weights that require gradients get them.
        device: where tables and optimizer states are stored.
        location: fbgemm's ``EmbeddingLocation``: HOST on a CPU, DEVICE on a GPU. Default: that of the device.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.
        out_of_range: as of `EmbeddingBagCollection`.

    Raises:
        ValueError: an optimizer or argument without a fused equal, a backend that refuses, tables that do not fit
            together, or another location.

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
        location: Any = None,
        backend: str | None = None,
        out_of_range: str = "error",
    ) -> None:
        super().__init__(
            tables, optimizer_type, optimizer_kwargs, device, location, backend, out_of_range, is_weighted=is_weighted
        )
        self._means = [table.pooling is PoolingType.MEAN for table in tables for _ in table.feature_names]
        self._sums = not any(self._means)
        columns = [number for number, dim in enumerate(self._dims) for _ in range(dim)]
        self._columns = torch.tensor(columns, device=self.device)  # the feature of each
        self._fewest_rows = min(table.num_embeddings for table in tables)

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up one batch; backward through the result steps the tables.

        Args:
            features: has every feature of the tables; others are not read. A variable batch must have
                ``inverse_indices``, as for `EmbeddingBagCollection`.

        Returns:
            ``[B, sum of D]``.

        Raises:
            ValueError: a feature, the weights or inverse indices are missing, or an id is out of range.
        """
        whole = self._whole(features)
        if whole is not None:
            pooled = self._look_up(None, *whole)
            return KeyedTensor(self._keys, self._dims, pooled)
        fitted = fit_features(features, self._tables, self._policy)
        bags = [bag for _, bag, _ in fitted]
        weights = None
        if self._is_weighted:
            weights = torch.cat([check_weights(bag.weights_or_none(), self._feature_names) for bag in bags])
        lengths = to_most_bags([bag.lengths() for bag in bags])
        ids = torch.cat([bag.values() for bag in bags])
        offsets = nn.functional.pad(torch.cat(lengths).cumsum(0), (1, 0))
        pooled = self._look_up(weights, ids, offsets, [bag.values().shape[0] for bag in bags])
        pooled = self._mean(pooled, to_most_bags([bag.lengths() for bag, _, _ in fitted]))
        pooled = joined_samples(pooled, features, self._feature_names, self._dims)
        return KeyedTensor(self._keys, self._dims, pooled)

    def _whole(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, list[int]] | None:
        """Ids, offsets and ids of each feature of a batch that the kernel takes as it is, else None.

        Most batches are so: keys in the tables' order, sums of plain bags, all ids in the smallest table.
        """
        if self._is_weighted or not self._sums or torch.compiler.is_compiling():
            return None
        if features.keys() != self._feature_names or features.variable_stride_per_key():
            return None
        ids = features.values()
        if features.inverse_indices_or_none() is not None or ids.dim() != 1:
            return None
        counts = self._counts(features) if ids.dtype in (torch.int32, torch.int64) else None
        return None if counts is None else (ids, features.offsets(), counts)

    def _counts(self, features: KeyedJaggedTensor) -> list[int] | None:
        """Ids of each feature of a batch in the tables' order, or None if one may be out of range."""
        ids, offsets = features.values(), features.offsets()
        if ids.is_meta or ids.numel() == 0:
            return None
        starts = offsets[:: features.stride()]
        low, high, *edges = torch.cat([torch.stack(ids.aminmax()).to(offsets.dtype), starts]).tolist()  # one wait
        if low < 0 or high >= self._fewest_rows:
            return None
        return [end - start for start, end in pairwise(edges)]

    def _mean(self, pooled: Tensor, lengths: list[Tensor]) -> Tensor:
        """Divides the columns of MEAN tables by the number of ids."""
        if self._sums:
            return pooled
        divisors = [
            length.clamp(min=1) if mean else torch.ones_like(length)
            for mean, length in zip(self._means, lengths, strict=True)
        ]
        return pooled / torch.stack(divisors, dim=1).index_select(1, self._columns)


@names_wrong_arguments
class FusedEmbeddingCollection(FusedCollection, SequenceTables):
    """`EmbeddingCollection` whose backward steps the touched rows itself: no gradient, no ``optimizer.step()``.

    Outputs, keys and state dict are those of `EmbeddingCollection`; parameters as of `FusedEmbeddingBagCollection`.

    Args:
        tables: the tables.
        optimizer_type: as of `FusedEmbeddingBagCollection`.
        optimizer_kwargs: its arguments.
        device: where tables and optimizer states are stored.
        need_indices: put the batch's ids into the outputs' weights.
        location: as of `FusedEmbeddingBagCollection`.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.
        out_of_range: as of `EmbeddingCollection`.

    Raises:
        ValueError: an optimizer or argument without a fused equal, a backend that refuses, tables that do not fit
            together, or another location.

    >>> table = EmbeddingConfig(
    ...     name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"], init_fn=nn.init.ones_
    ... )
    >>> fused = FusedEmbeddingCollection([table], torch.optim.SGD, {"lr": 0.25}, backend="native")
    >>> batch = KeyedJaggedTensor(["seen"], torch.tensor([0, 3, 3]), lengths=torch.tensor([1, 2]))
    >>> fused(batch)["seen"].values().sum().backward()
    >>> fused.state_dict()["embeddings.movies.weight"][:, 0].tolist()
    [0.75, 1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        need_indices: bool = False,
        location: Any = None,
        backend: str | None = None,
        out_of_range: str = "error",
    ) -> None:
        super().__init__(
            tables, optimizer_type, optimizer_kwargs, device, location, backend, out_of_range, need_indices=need_indices
        )

    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up one batch; backward through the results steps the tables.

        Args:
            features: has every feature of the tables; others, weights and inverse indices are not read.

        Returns:
            For each output key ``[N, D]`` rows with the lengths of its feature: ``[B]``, or ``[B_f]`` in a
            variable batch.

        Raises:
            ValueError: a feature is missing, or an id is out of range.
        """
        fitted = fit_features(features, self._tables, self._policy)
        ids = torch.cat([bag.values() for _, bag, _ in fitted])
        counts = [bag.values().shape[0] for _, bag, _ in fitted]
        offsets = torch.tensor([0, *accumulate(counts)]).to(ids.device, non_blocking=True)
        flat = self._look_up(None, ids, offsets, counts)
        parts = flat.split([count * dim for count, dim in zip(counts, self._dims, strict=True)])
        outputs = {}
        for name, part, dim, (bag, _, kept) in zip(self._keys, parts, self._dims, fitted, strict=True):
            rows = put_back(part.view(-1, dim), kept, bag.values().shape[0])
            outputs[name] = JaggedTensor._unchecked(rows, bag.values() if self._need_indices else None, bag.lengths())
        return outputs


# Replaces plain collections in a module by fused ones.


@names_wrong_arguments
def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer] | EmbOptimType,
    optimizer_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    *,
    backend: str | None = None,
) -> nn.Module:
    """Replaces every `EmbeddingBagCollection` and `EmbeddingCollection` of a module by a fused one.

    The fused collections have the same tables ``[E, D]``, weights and names in the state dict. The weights of one that
    was on ``meta`` are drawn. A collection used in two places is one fused collection in both. Make torch optimizers
    for the rest of the model afterwards.

    Args:
        model: a module with collections, or a collection; changed in place, unless it is a collection.
        optimizer_type: as of `FusedEmbeddingBagCollection`, for all tables.
        optimizer_kwargs: its arguments.
        device: of the fused collections. None keeps each collection's device, and takes the CPU for ``meta``.
        backend: the kernel's name; None chooses the preferred one that can serve the tables.

    Returns:
        ``model``, or the fused collection if ``model`` is a collection.

    Raises:
        ValueError: no collection to replace, a collection of a derived class, a table that is frozen or that has an
            optimizer in backward already, or tables that the fused collection refuses. ``model`` is unchanged then.

    >>> from recshard_lab.embedding import EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="movies", num_embeddings=4, embedding_dim=4, feature_names=["seen"])
    >>> model = nn.ModuleDict({"sparse": EmbeddingBagCollection([table]), "dense": nn.Linear(4, 1)})
    >>> names = list(model.state_dict())
    >>> model = fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.5}, torch.device("cpu"))
    >>> type(model["sparse"]).__name__, list(model.state_dict()) == names
    ('FusedEmbeddingBagCollection', True)
    """
    twins: dict[nn.Module, FusedCollection] = {}
    places = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
            continue
        places.append((path, module))
        if module in twins:
            continue
        _check(path, module)
        on_meta = module.device.type == "meta"
        there = device if device is not None else "cpu" if on_meta else module.device
        more: dict[str, Any] = {"device": there, "backend": backend, "out_of_range": module.out_of_range}
        twin: FusedCollection
        if isinstance(module, EmbeddingBagCollection):
            weighted = module.is_weighted()
            twin = FusedEmbeddingBagCollection(module._tables, optimizer_type, optimizer_kwargs, weighted, **more)
        else:
            more["need_indices"] = module.need_indices()
            twin = FusedEmbeddingCollection(module._tables, optimizer_type, optimizer_kwargs, **more)
        if not on_meta:
            twin.load_state_dict(module.state_dict())
        twins[module] = twin.train(module.training)
    if not places:
        raise ValueError(
            f"{type(model).__name__} has no EmbeddingBagCollection or EmbeddingCollection to fuse. Fix: pass the "
            f"module that has them, before it is sharded"
        )
    for path, module in places:
        if not path:
            return twins[module]
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, twins[module])
    return model


def _check(path: str, module: nn.Module) -> None:
    if type(module) not in (EmbeddingBagCollection, EmbeddingCollection):
        raise ValueError(
            f"module {path!r} is a {type(module).__name__}, and a fused collection would lose the behaviour of that "
            f"class. Fix: derive it from a fused collection"
        )
    for name, weight in module.named_parameters(prefix=path):
        if not weight.requires_grad:
            raise ValueError(
                f"{name} is frozen, and a fused table always learns. Fix: set requires_grad, or fuse the rest"
            )
        if getattr(weight, "_optimizer_classes", None):
            raise ValueError(f"{name} has an optimizer in backward already. Fix: fuse it without that optimizer")
