"""Sharders: the modules to shard, and their settings."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import GenericAlias
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from recshard_lab.comm import (
    CommOp,
    CommType,
    QCommsConfig,
    Registry,
    ShardingEnv,
    agreed,
    broadcast_object,
    codecs_for,
    get_qcomm_codecs_registry,
    refuse_differences,
)
from recshard_lab.distributed.discover import module_facts, plan_facts, refuse_unshardable, sharder_facts
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedManagedCollisionEmbeddingBagCollection,
    ShardedManagedCollisionEmbeddingCollection,
    create_route_groups,
    unsharded_weights,
)
from recshard_lab.distributed.state.forms import StateForm
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.distributed.step.layout import CollectionOptions
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    BaseManagedCollisionEmbeddingCollection,
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    FusedCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    HashZchManagedCollisionModule,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    OptimizerSpec,
    dtype_to_data_type,
)
from recshard_lab.embedding.dynamic.collections import DynamicCollection
from recshard_lab.embedding.inputs import OutOfRange, policy_of_bounds_check_mode
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig, RowOwners
from recshard_lab.embedding.optimizers import spec_of_parameter
from recshard_lab.planner import Workload
from recshard_lab.planner.model.codecs import WIRE_FORMATS
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    Found,
    ParameterSharding,
    ParameterShardingGenerator,
    PlanError,
    ShardingPlan,
    apply_to_all,
    configs_of,
    construct_module_sharding_plan,
    scheme_names,
    sharder_of,
)

M = TypeVar("M", bound=nn.Module)


class ModuleSharder(ABC, Generic[M]):
    """Shards modules of one type; TorchRec's name.

    `DistributedModelParallel` calls `shard` for each module of this type that its plan names, and uses the module that
    it returns. A subclass may override `sharding_types` and `compute_kernels`, which restrict the planner, and
    `shardable_parameters`, which names what it plans.

    If the returned module, or a part of it, is a `ShardedCollection`, it is trained and saved as those of the library.
    If it has ``sharded_parameter_names(prefix)``, as TorchRec's ``ShardedModule`` has, the parameters with these names
    are not replicated, and `save_checkpoint` and ``full_state_dict`` refuse the model. All other parameters are dense.

    Args:
        qcomm_codecs_registry: message formats, for `shard` to use.
    """

    module_type: ClassVar[type[nn.Module]]

    def __init__(self, qcomm_codecs_registry: Registry | None = None) -> None:
        self.qcomm_codecs_registry = qcomm_codecs_registry

    @abstractmethod
    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The module to use in place of ``module``. All ranks call it; it may be collective.

        Args:
            module: the unsharded module.
            params: parameter name -> sharding, from the plan.
            env: the ranks.
            device: of this rank.
            module_fqn: path of the module in the model.
        """

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Parameters that a plan may name. The planner plans those with two axes as tables. Default: all."""
        return dict(module.named_parameters())

    def tables(self, module: M) -> Sequence[BaseEmbeddingConfig]:
        """The tables of an unsharded module. Default: one for each of `shardable_parameters` with two axes."""
        return [
            EmbeddingBagConfig(weight.shape[0], weight.shape[1], name, dtype_to_data_type(weight.dtype), [name])
            for name, weight in self.shardable_parameters(module).items()
            if weight.dim() == 2
        ]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Schemes that a plan may use for this module type. Default: all registered schemes."""
        return list(scheme_names())

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that a plan may use with a scheme, best first."""
        known = EmbeddingComputeKernel
        return [str(kernel) for kernel in (known.FUSED, known.FUSED_UVM, known.FUSED_UVM_CACHING, known.DENSE)]


class CollectionSharder(ModuleSharder[nn.Module]):
    """Shards one type of collection.

    Args:
        fused_params: the optimizer fused into backward: ``optimizer``, ``learning_rate``, ``eps``, ``weight_decay``.
            ``apply_optimizer_in_backward`` on a table's parameter takes precedence. Default: plain SGD with a learning
            rate of 0.01. ``"output_dtype"`` is the number format of outputs, of their gradients, and of both on the
            wire: ``torch.float16``, ``torch.bfloat16``, or a name such as ``"bf16"``. Sums are FP32, and tables keep
            their format. A planner of yours predicts it with ``Workload(codecs="bf16")``. ``"output_dtensor": True``
            makes ``form="dtensor"`` the default of `DistributedModelParallel.state_dict`.
            The optimizer of a fused collection cannot be set.
        qcomm_codecs_registry: message formats of rows and gradients, from `get_qcomm_codecs_registry`. Default: that of
            ``output_dtype``.
        use_index_dedup: of sequences, whether a rank sends each distinct id of a shard's feature once per batch. Its
            row returns once and is copied to every place of the id. In backward the gradients of these places are added
            before they travel. Outputs and weights are those without it, up to the order of additions. It pays where
            ids repeat: bytes shrink with the share of distinct ids, for one sort of the local ids.
        backend: kernel for every table ("fbgemm", "native", ...). Default: the fastest that supports each table.
        out_of_range: the out-of-range policy: ``"error"``, ``"clamp"`` or ``"ignore"``, as in `EmbeddingBagCollection`.
            Default: that of the unsharded module. ``fused_params["bounds_check_mode"]`` FATAL means ``"error"``.
        batch_tables: whether tables with the same kernel and optimizer share one lookup; False uses one lookup per
            table, to measure the benefit of fewer launches.

    Raises:
        ValueError: an unsupported key in ``fused_params``, an unknown message type in the registry, an unsupported
            ``bounds_check_mode``, ``output_dtype`` or ``output_dtensor``, ``use_index_dedup`` for collections that are
            not static sequences, or an optimizer for a fused collection.

    >>> EmbeddingCollectionSharder(use_index_dedup=True).use_index_dedup
    True
    """

    sharded_type: ClassVar[type[ShardedCollection]]
    __class_getitem__: Any = classmethod(GenericAlias)  # TorchRec's BaseEmbeddingSharder[M] is generic
    can_dedup: ClassVar[bool] = False  # whether it supports `use_index_dedup`
    always_dedups: ClassVar[bool] = False  # its default, for TorchRec's set_ec_index_dedup

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        use_index_dedup: bool = False,
        *,
        backend: str | None = None,
        out_of_range: str | None = None,
        batch_tables: bool = True,
    ) -> None:
        if fused_params is not None and not isinstance(fused_params, Mapping):
            raise ValueError(f"fused_params must be a mapping or None, got {fused_params!r}")
        if not isinstance(backend, str | None):
            raise ValueError(f"backend must be the name of a kernel or None, got {backend!r}")
        self.fused_params = dict(fused_params or {})
        self.output_dtype = output_dtype_named(self.fused_params.pop("output_dtype", None))
        output_dtensor = self.fused_params.pop("output_dtensor", False)
        flags = {"output_dtensor": output_dtensor, "use_index_dedup": use_index_dedup, "batch_tables": batch_tables}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be True or False, got {value!r:.80}. Fix: pass {name}=True or False")
        if use_index_dedup and not self.can_dedup:
            raise ValueError(f"use_index_dedup=True does not apply to {type(self).__name__}. Fix: omit it")
        self.use_index_dedup = self.can_dedup and (use_index_dedup or CollectionSharder.always_dedups)
        self.state_form: StateForm = "dtensor" if output_dtensor else "sharded_tensor"
        self.qcomm_codecs_registry = qcomm_codecs_registry
        for op in CommOp:
            codecs_for(op, qcomm_codecs_registry)
        self.backend, self.batch_tables = backend, batch_tables
        mode = self.fused_params.pop("bounds_check_mode", None)
        self.out_of_range = out_of_range if mode is None else policy_of_bounds_check_mode(mode)
        if self.out_of_range is not None:
            OutOfRange(self.out_of_range)  # checks its name
        if out_of_range not in (None, self.out_of_range):
            raise ValueError(
                f"bounds_check_mode={mode} means out_of_range={self.out_of_range!r}, but out_of_range="
                f"{out_of_range!r}. Fix: remove bounds_check_mode from fused_params"
            )
        self.spec = OptimizerSpec.from_fused_params(self.fused_params)
        if issubclass(self.module_type, FusedCollection):
            self._refuse_optimizer()

    def _refuse_optimizer(self) -> None:
        if self.fused_params:
            raise ValueError(
                f"fused_params={self.fused_params}, but a fused collection has an optimizer. Fix: omit fused_params, "
                f"or shard a plain collection"
            )

    @property
    def codecs(self) -> Registry | None:
        """Message formats of rows and gradients: the registry's, or those of ``output_dtype``."""
        if self.qcomm_codecs_registry is not None or self.output_dtype is None:
            return self.qcomm_codecs_registry
        wire = {torch.float16: CommType.FP16, torch.bfloat16: CommType.BF16}[self.output_dtype]
        return get_qcomm_codecs_registry(QCommsConfig(wire, wire))

    @property
    def wire_formats(self) -> tuple[str, str]:
        """The names of these formats, as of ``Workload(codecs=)``."""
        pooled, sequence = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
        own = codecs_for(pooled if self.sharded_type.pooled else sequence, self.codecs)
        return str(own.forward.comm_type), str(own.backward.comm_type)

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        """The tables of an unsharded collection."""
        return configs_of(module) or []

    def stored_tables(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv
    ) -> Sequence[BaseEmbeddingConfig]:
        """The tables as ranks store them under a plan."""
        return self.tables(module)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that a plan may use with a scheme, best first; only "fused" if the collection has an optimizer."""
        if issubclass(self.module_type, FusedCollection | BaseManagedCollisionEmbeddingCollection):
            return [str(EmbeddingComputeKernel.FUSED)]
        return super().compute_kernels(sharding_type, compute_device_type)

    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        """Table name -> the optimizer that steps it.

        Raises:
            ValueError: a fused collection that was trained, whose states would be lost, or a second optimizer for it.
            PlanError: a table of a fused collection on another kernel.
        """
        if not isinstance(module, FusedCollection):
            weights = unsharded_weights(module)
            return {name: spec_of_parameter(parameter) or self.spec for name, parameter in weights.items()}
        self._refuse_optimizer()
        for table, states in module.optimizer_states().items():
            if isinstance(module, DynamicCollection) and module.table(table).size:
                raise ValueError(
                    f"dynamic table {table!r} has rows, which would be lost. Fix: shard the collection before the "
                    f"first step, and load a checkpoint into the sharded model"
                )
            if params[table].compute_kernel != EmbeddingComputeKernel.FUSED:
                raise PlanError(
                    f"table {table!r} of a {type(module).__name__} has compute_kernel "
                    f"{str(params[table].compute_kernel)!r}, but its optimizer runs in backward. Fix: use 'fused'"
                )
            stepped = [name for name, state in states.items() if bool(state.any())]
            if stepped:
                raise ValueError(
                    f"table {table!r} was trained, and its optimizer state {stepped} would be lost. Fix: shard the "
                    f"{type(module).__name__} before the first step, and load a checkpoint into the sharded model"
                )
        return dict.fromkeys(module.optimizer_states(), module.optimizer_spec)

    def build(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedCollection:
        """The sharded collection, with zero weights, and frozen where the unsharded one is."""
        inner = module.embedding_module if isinstance(module, BaseManagedCollisionEmbeddingCollection) else module
        options = CollectionOptions(
            weighted=bool(getattr(inner, "is_weighted", bool)()),
            backend=self.backend,
            codecs=self.codecs,
            out_of_range=self.out_of_range or str(getattr(module, "out_of_range", "error")),
            batch_tables=self.batch_tables,
            need_indices=bool(getattr(inner, "need_indices", bool)()),
            use_index_dedup=self.use_index_dedup,
            output_dtype=self.output_dtype,
            state_form=self.state_form,
            returns_rows=bool(getattr(module, "return_remapped_features", False)),
        )
        tables, optimizers = self.stored_tables(module, params, env), self.optimizers(inner, params)
        sharded = self.sharded_type(tables, params, optimizers, env, device, options)
        sharded.unsharded_module_type = self.module_type
        if not isinstance(inner, FusedCollection):  # whose parameters have requires_grad=False, and learn
            for name, weight in unsharded_weights(inner).items():
                if not weight.requires_grad:
                    sharded.table_shards()[name].requires_grad_(False)
        return sharded

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """Shards one collection, with rank 0's weights. Collective.

        Args:
            module: the unsharded collection, which is not changed. On ``meta``, each rank draws its shards' weights.
            params: table name -> sharding, from `construct_module_sharding_plan` or ``plan.plan[path]``.
            env: the ranks. Default: the default process group, or this process alone.
            device: device of the shards. Default: the module's, or the CPU for ``meta``.
            module_fqn: accepted as in TorchRec; names do not depend on it.

        Raises:
            PlanError: an invalid plan for these tables and ranks.
            ValueError: two tables have one parameter, or a subclass with another forward.

        >>> from recshard_lab import EmbeddingBagConfig, table_wise
        >>> from recshard_lab.sharding import construct_module_sharding_plan
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> ebc = EmbeddingBagCollection([table])
        >>> plan = construct_module_sharding_plan(ebc, {"t": table_wise(rank=0)})
        >>> sharded = EmbeddingBagCollectionSharder().shard(ebc, plan)
        >>> torch.equal(sharded.state_dict()["embedding_bags.t.weight"], ebc.embedding_bags["t"].weight)
        True
        """
        env = env if env is not None else ShardingEnv.default()

        def read() -> tuple[Found, torch.device, ShardingPlan, dict[str, dict[str, Any]]]:
            weights = unsharded_weights(module)
            first = next((w.device for w in weights.values() if not w.is_meta), torch.device("cpu"))
            target = first if device is None else torch.device(device)
            found = Found([""], module, self, list(self.tables(module)), module)
            refuse_unshardable([found])
            plan = ShardingPlan({"": EmbeddingModuleShardingPlan(params)})
            plan = plan.resolved({"": found.tables}, env.world_size, env.local_world_size)
            settings = {"arguments": {"device type": target.type}, "sharders": sharder_facts(self)}
            return found, target, plan, {"plan": plan_facts(plan), "model": module_facts(found), **settings}

        found, target, plan, facts = agreed(env, read)
        refuse_differences(env, facts, PlanError)
        return build_collections([found], plan, env, target, env)[""]

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> its unsharded parameter."""
        return unsharded_weights(module)


class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards `EmbeddingBagCollection`."""

    module_type, sharded_type = EmbeddingBagCollection, ShardedEmbeddingBagCollection


class EmbeddingCollectionSharder(CollectionSharder):
    """Shards `EmbeddingCollection`."""

    module_type, sharded_type, can_dedup = EmbeddingCollection, ShardedEmbeddingCollection, True


class FusedEmbeddingBagCollectionSharder(CollectionSharder):
    """Shards `FusedEmbeddingBagCollection`."""

    module_type, sharded_type = FusedEmbeddingBagCollection, ShardedEmbeddingBagCollection


class FusedEmbeddingCollectionSharder(CollectionSharder):
    """Shards `FusedEmbeddingCollection`."""

    module_type, sharded_type, can_dedup = FusedEmbeddingCollection, ShardedEmbeddingCollection, True


class DynamicEmbeddingBagCollectionSharder(CollectionSharder):
    """Shards `DynamicEmbeddingBagCollection`.

    Each shard grows by itself from its part of ``capacity`` to its part of ``max_capacity``. Parameters stay the same
    objects and get larger data. `DistributedModelParallel.state_dict`, checkpoints, dumps and resharding first give
    all shards of a table the size of the largest one, so they are collective. Loading gives a table the size that it
    has in the state.

    The planner's memory is that of the largest size. While a table grows, the memory of its kernel exists twice: that
    before, and that after.

    Once a table has its largest size, shards hold the same ids as an unsharded table: none differed after 57,800
    evictions from 32,768 rows that had grown from 4,096. Ids may differ where ``max_capacity`` is less than twice
    ``capacity``, because growth then places more ids in their second bucket.
    """

    module_type, sharded_type = DynamicEmbeddingBagCollection, ShardedEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(CollectionSharder):
    """Shards `DynamicEmbeddingCollection`, as `DynamicEmbeddingBagCollectionSharder` shards pooled tables."""

    module_type, sharded_type = DynamicEmbeddingCollection, ShardedEmbeddingCollection


class ManagedCollisionSharder(CollectionSharder):
    """Shards one type of managed collision collection, by row_wise, table_wise or column_wise.

    If a table's module has one bucket, each row shard becomes a bucket, and row shards have equal sizes. Otherwise row
    shards have whole buckets. `row_wise`, and a planner, make such shards.

    Rank 0's weights and owners of rows are those of the shards. Two trained collections are refused: one whose
    optimizer has states, which would be lost, and one bucket with owners that becomes several.

    Args:
        ebc_sharder: sharder of the collection inside, whose settings are used. Default: those of the other arguments.
        mc_sharder: None. TorchRec's sharder of the modules has no equal here.
        qcomm_codecs_registry: as in `CollectionSharder`.
        settings: ``fused_params``, ``backend``, ``out_of_range`` and ``batch_tables``, as in `CollectionSharder`.

    Raises:
        ValueError: as `CollectionSharder`, or an ``mc_sharder``.
    """

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: None = None,
        qcomm_codecs_registry: Registry | None = None,
        **settings: Any,
    ) -> None:
        if mc_sharder is not None or not isinstance(ebc_sharder, CollectionSharder | None):
            raise ValueError(
                f"ebc_sharder={ebc_sharder!r:.80} must be a CollectionSharder or None, and mc_sharder="
                f"{mc_sharder!r:.80} None. Fix: omit mc_sharder"
            )
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry, **settings)
        if ebc_sharder is not None:
            vars(self).update(vars(ebc_sharder), use_index_dedup=False)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All schemes but data_parallel: rows with owners have no replicas."""
        return [name for name in scheme_names() if name != "data_parallel"]

    def stored_tables(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv
    ) -> Sequence[BaseEmbeddingConfig]:
        """The tables as ranks store them under a plan.

        Raises:
            PlanError: row shards of other than whole buckets.
            ValueError: a setting that a sharded module cannot have, or a trained collection that is refused.
        """
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        modules, planned = module.managed_collision_collection.modules_by_table(), module.planned_configs()
        ShardingPlan({"": EmbeddingModuleShardingPlan(params)}).validate(planned, env.world_size)
        return [_managed(table, modules[table.name], params[table.name]) for table in planned]


def _managed(table: ManagedEmbeddingConfig, module: Any, sharding: ParameterSharding) -> ManagedEmbeddingConfig:
    """A table as its ranks store it."""
    of_table = f"table {table.name!r}: "
    if not isinstance(module, RowOwners):
        raise ValueError(
            f"{of_table}a {type(module).__name__} cannot be sharded. Fix: use MCHManagedCollisionModule or "
            f"HashZchManagedCollisionModule"
        )
    row_shards = len({shard.rows for shard in sharding.shards})
    if module.size and table.least_equal_rows and row_shards > 1:
        raise ValueError(
            f"{of_table}{module.size:,} rows have owners in one bucket, and each of {row_shards} row shards would "
            f"become a bucket, in which ids have other rows. Fix: build the module with buckets={row_shards}, or use "
            f"table_wise or column_wise"
        )
    if isinstance(module, HashZchManagedCollisionModule) and module.disable_fallback:
        raise ValueError(
            f"{of_table}disable_fallback=True, and ids cannot leave the bags of other ranks. "
            f"Fix: disable_fallback=False"
        )
    if len(module.row_numbers) > 2:
        raise ValueError(
            f"{of_table}the eviction policy keeps {len(module.row_numbers)} numbers of a row, and shards have 2. "
            f"Fix: keep at most 2"
        )
    if not table.least_equal_rows:
        return replace(table, module=module)
    return replace(table, module=module, partitions=row_shards, least_equal_rows=0)


class ManagedCollisionEmbeddingBagCollectionSharder(ManagedCollisionSharder):
    """Shards `ManagedCollisionEmbeddingBagCollection`. See `ManagedCollisionSharder`."""

    module_type, sharded_type = ManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingBagCollection


class ManagedCollisionEmbeddingCollectionSharder(ManagedCollisionSharder):
    """Shards `ManagedCollisionEmbeddingCollection`. See `ManagedCollisionSharder`."""

    module_type, sharded_type = ManagedCollisionEmbeddingCollection, ShardedManagedCollisionEmbeddingCollection


def output_dtype_named(value: Any) -> torch.dtype | None:
    """The format of outputs from torch's dtype, a `DataType`, fbgemm's ``SparseType``, or a name. None for FP32.

    Raises:
        ValueError: not a floating-point format of 16 or 32 bits.

    >>> output_dtype_named("bf16"), output_dtype_named(torch.float32)
    (torch.bfloat16, None)
    """
    text = str(getattr(value, "value", value)).removeprefix("torch.").lower()
    known: dict[str, torch.dtype | None] = {"none": None, "fp32": None, "float32": None}
    known |= {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}
    if text not in known:
        raise ValueError(
            f"output_dtype={value!r:.80} is not supported. Supported: torch.float16, torch.bfloat16, torch.float32, or "
            f"their names 'fp16', 'bf16', 'fp32'. Fix: use one of them"
        )
    return known[text]


def build_collections(
    found: Sequence[Found], plan: ShardingPlan, env: ShardingEnv, device: torch.device, everyone: ShardingEnv
) -> dict[str, ShardedCollection]:
    """Module path -> the sharded collection under a resolved plan, with rank 0's weights. Collective over ``everyone``.

    Args:
        found: collections that the plan names, with sharders of the library.
        plan: the plan.
        env: the ranks of a replica.
        device: device of the tables.
        everyone: the ranks of all replicas.
    """
    create_route_groups(plan, env)
    built = agreed(
        everyone, lambda: {one.path: one.sharder.build(one.module, plan.plan[one.path], env, device) for one in found}
    )
    moves = [own for one in found for own in first_weights(built[one.path], one.module, everyone)]
    agreed(everyone, lambda: move(moves, env, device))
    return built


def first_weights(sharded: ShardedCollection, module: nn.Module, everyone: ShardingEnv) -> list[Move]:
    """Moves that fill a sharded collection from rank 0's unsharded weights. Collective over ``everyone``.

    If these are on ``meta``, each rank draws the weights of its shards, with the same values under every plan. Then
    only tables with an ``init_fn`` move, from the first replica to the others.
    """
    if isinstance(module, DynamicCollection):
        return []  # rows are computed when ids occur
    whole = unsharded_weights(module)
    on_meta = any(weight.is_meta for weight in whole.values())
    on_meta, seed = broadcast_object((on_meta, torch.initial_seed()), sharded.env)
    if not on_meta:
        return sharded.first_moves(module, source=0)
    agreed(everyone, lambda: [shards.reset_parameters(seed) for shards in sharded.table_shards().values()])
    drawn = [shards for shards in sharded.table_shards().values() if shards.config.init_fn is not None]
    return [copies for shards in drawn for copies in shards.replica_moves(shards.parts()[0])]


def planned_workload(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> Workload:
    """The planner's default workload, with the wire formats of the sharders.

    FP32 if these differ in a model, or if the cost model does not know one.
    """
    found = [sharder_of(child, sharders) for child in module.modules()]
    formats = {sharder.wire_formats for sharder in found if isinstance(sharder, CollectionSharder)}
    known = len(formats) == 1 and WIRE_FORMATS.keys() >= set(next(iter(formats)))
    return Workload(codecs=formats.pop()) if known else Workload()


def get_default_sharders() -> list[CollectionSharder]:
    """One sharder for every type of collection."""
    return [
        EmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
        DynamicEmbeddingBagCollectionSharder(),
        DynamicEmbeddingCollectionSharder(),
        ManagedCollisionEmbeddingBagCollectionSharder(),
        ManagedCollisionEmbeddingCollectionSharder(),
    ]


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Module type -> its default sharder."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}


def shard(
    module: nn.Module,
    plan: Mapping[str, ParameterSharding] | Mapping[str, ParameterShardingGenerator] | ParameterShardingGenerator,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    sharder: CollectionSharder | None = None,
) -> ShardedCollection:
    """Shards one embedding collection. Collective.

    Args:
        module: the collection, which is not changed.
        plan: table name -> sharding or generator (`row_wise()`), or one generator for every table.
        env: the ranks. Default: the default process group, or this process alone.
        device: device of the tables. Default: as in `CollectionSharder.shard`.
        sharder: the sharder. Default: that of this collection type.

    Raises:
        PlanError: an invalid plan.
        ValueError: no sharder supports the module.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, row_wise
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> shard(EmbeddingBagCollection([table]), row_wise()).shardings["t"].sharding_type
    'row_wise'
    """
    env = env if env is not None else ShardingEnv.default()

    def planned() -> tuple[CollectionSharder, Mapping[str, ParameterSharding]]:
        chosen = sharder or sharder_of(module, get_default_sharders())
        if chosen is None:
            kinds = ", ".join(s.module_type.__name__ for s in get_default_sharders())
            raise ValueError(
                f"no sharder supports {type(module).__name__}. Fix: pass sharder=, or a module of type {kinds}"
            )
        entries: Mapping[str, Any] = apply_to_all(module, plan) if callable(plan) else plan
        generators = {name: _always(entry) for name, entry in entries.items()}
        local = env.local_world_size
        return chosen, construct_module_sharding_plan(
            module, generators, chosen, local_size=local, world_size=env.world_size
        )

    chosen, params = agreed(env, planned)
    return chosen.shard(module, params, env, device)


def _always(entry: Any) -> ParameterShardingGenerator:
    """A generator that returns the sharding ``entry``, or ``entry`` itself if it is a generator."""
    if isinstance(entry, ParameterSharding):
        return lambda table, topology: entry.resolved(table, topology.world_size, topology.local_world_size)
    if not callable(entry):
        raise PlanError(
            f"a table's entry in the plan must be a ParameterSharding or a generator such as row_wise(), got {entry!r}"
        )
    return entry
