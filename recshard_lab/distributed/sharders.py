"""Which modules are sharded, and with what settings."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from recshard_lab.comm import (
    CommOp,
    Registry,
    ShardingEnv,
    agreed,
    broadcast_object,
    codecs_for,
    refuse_differences,
)
from recshard_lab.distributed.rank_facts import plan_facts, sharder_facts, table_facts, weight_facts
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    create_route_groups,
    unsharded_weights,
)
from recshard_lab.distributed.state.moves import Move, move
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FusedCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    OptimizerSpec,
)
from recshard_lab.embedding.optimizers import spec_of_parameter
from recshard_lab.embedding.out_of_range import OutOfRange, policy_of_bounds_check_mode
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    PlanError,
    ShardingPlan,
    scheme_names,
)

M = TypeVar("M", bound=nn.Module)


class ModuleSharder(Generic[M]):
    """What turns modules of one kind into sharded ones, under TorchRec's name.

    A subclass may override `sharding_types` and `compute_kernels`: the planner keeps to what they return.
    """

    module_type: ClassVar[type[nn.Module]]

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Schemes that a plan may use for this kind of module; every registered one."""
        return list(scheme_names())

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that a plan may use under a scheme, best first."""
        known = EmbeddingComputeKernel
        return [str(known.FUSED), str(known.FUSED_UVM), str(known.DENSE)]


class CollectionSharder(ModuleSharder[nn.Module]):
    """Turns one kind of collection into its sharded twin.

    Args:
        fused_params: the optimizer fused into backward: ``optimizer``, ``learning_rate``, ``eps``, ``weight_decay``.
            ``apply_optimizer_in_backward`` on a table's parameter takes precedence. Plain SGD with a learning rate of
            0.01 when neither is given.
        qcomm_codecs_registry: number formats of rows and gradients on the wire, from `get_qcomm_codecs_registry`.
        backend: kernel for every table ("fbgemm", "native", ...); None takes the fastest that can do each.
        out_of_range: what becomes of ids that are no rows: ``"error"``, ``"clamp"`` or ``"ignore"``, as of
            `EmbeddingBagCollection`; None does what the sharded module does. ``fused_params["bounds_check_mode"]``
            may say FATAL, which is ``"error"``.
        batch_tables: one lookup for all tables that the same kernel and optimizer can serve; False makes one a table,
            to see what fewer launches are worth.

    Raises:
        ValueError: a key in ``fused_params`` that nothing honours, or in the registry that is no kind of message; a
            ``bounds_check_mode`` without a twin.
    """

    module_type: ClassVar[type[nn.Module]]
    sharded_type: ClassVar[type[ShardedCollection]]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        *,
        backend: str | None = None,
        out_of_range: str | None = None,
        batch_tables: bool = True,
    ) -> None:
        if fused_params is not None and not isinstance(fused_params, Mapping):
            raise ValueError(f"fused_params must be a mapping or None, got {fused_params!r}")
        if not isinstance(backend, str | None):
            raise ValueError(f"backend must be a kernel's name or None, got {backend!r}")
        self.fused_params = dict(fused_params or {})
        self.qcomm_codecs_registry = qcomm_codecs_registry
        for op in CommOp:
            codecs_for(op, qcomm_codecs_registry)
        if not isinstance(batch_tables, bool):
            raise ValueError(f"batch_tables must be True or False, got {batch_tables!r:.80}")
        self.backend, self.batch_tables = backend, batch_tables
        self.out_of_range = _policy_of(self.fused_params.pop("bounds_check_mode", None), out_of_range)
        self.spec = OptimizerSpec.from_fused_params(self.fused_params)

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        """The tables of an unsharded collection."""
        raise NotImplementedError

    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        """Table name -> the optimizer that steps it."""
        weights = unsharded_weights(module)
        return {name: spec_of_parameter(parameter) or self.spec for name, parameter in weights.items()}

    def build(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedCollection:
        """The sharded twin; its weights are zeros until they are filled."""
        tables = self.tables(module)
        optimizers = self.optimizers(module, params)
        weighted = bool(getattr(module, "is_weighted", lambda: False)())
        return self.sharded_type(
            tables,
            params,
            optimizers,
            env,
            device,
            weighted=weighted,
            backend=self.backend,
            codecs=self.qcomm_codecs_registry,
            out_of_range=self.out_of_range or str(getattr(module, "out_of_range", "error")),
            batch_tables=self.batch_tables,
            need_indices=bool(getattr(module, "need_indices", lambda: False)()),
        )

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        """The sharded twin of one collection, with rank 0's weights. All ranks must call it.

        Args:
            module: the unsharded collection, which stays as it is. On ``meta``, weights are drawn, each rank its part.
            params: table name -> how it is cut, from `construct_module_sharding_plan` or ``plan.plan[path]``.
            env: the ranks; the default process group, or this process alone, when left out.
            device: where the rectangles live; the module's when left out, or the CPU for one on ``meta``.
            module_fqn: accepted as in TorchRec; names do not depend on it.

        Raises:
            PlanError: a plan that cannot be for these tables on these ranks.

        >>> from recshard_lab import EmbeddingBagConfig, table_wise, construct_module_sharding_plan
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
        >>> ebc = EmbeddingBagCollection([table])
        >>> plan = construct_module_sharding_plan(ebc, {"t": table_wise(rank=0)})
        >>> sharded = EmbeddingBagCollectionSharder().shard(ebc, plan)
        >>> torch.equal(sharded.state_dict()["embedding_bags.t.weight"], ebc.embedding_bags["t"].weight)
        True
        """
        env = env if env is not None else ShardingEnv.default()

        def read() -> tuple[torch.device, ShardingPlan, dict[str, dict[str, Any]]]:
            weights = unsharded_weights(module)
            first = next((w.device for w in weights.values() if not w.is_meta), torch.device("cpu"))
            place = first if device is None else torch.device(device)
            plan = ShardingPlan({"": EmbeddingModuleShardingPlan(params)})
            plan = plan.resolved({"": self.tables(module)}, env.world_size, env.local_world_size)
            model = table_facts("", self.tables(module)) | weight_facts("", weights, self.spec)
            settings = {"arguments": {"device type": place.type}, "sharders": sharder_facts(self)}
            return place, plan, {"plan": plan_facts(plan), "model": model, **settings}

        place, plan, facts = agreed(env, read)
        refuse_differences(env, facts, PlanError)
        create_route_groups(plan, env)
        sharded = agreed(env, lambda: self.build(module, plan.plan[""], env, place))
        with torch.no_grad():
            move(first_weights(sharded, module, env), env, place)
        return sharded

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> its unsharded parameter."""
        return unsharded_weights(module)


class EmbeddingBagCollectionSharder(CollectionSharder):
    """Shards `EmbeddingBagCollection`."""

    module_type = EmbeddingBagCollection
    sharded_type = ShardedEmbeddingBagCollection

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        assert isinstance(module, EmbeddingBagCollection)
        return module.embedding_bag_configs()


class EmbeddingCollectionSharder(CollectionSharder):
    """Shards `EmbeddingCollection`."""

    module_type = EmbeddingCollection
    sharded_type = ShardedEmbeddingCollection

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        assert isinstance(module, EmbeddingCollection)
        return module.embedding_configs()


class FusedCollectionSharder(CollectionSharder):
    """Shards fused collections, which bring their optimizer with them: ``fused_params`` has none.

    Raises:
        ValueError: settings of an optimizer in ``fused_params``.
    """

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        *,
        backend: str | None = None,
        out_of_range: str | None = None,
        batch_tables: bool = True,
    ) -> None:
        super().__init__(
            fused_params, qcomm_codecs_registry, backend=backend, out_of_range=out_of_range, batch_tables=batch_tables
        )
        if self.fused_params:
            raise ValueError(
                f"a fused collection has its optimizer already, and fused_params says {self.fused_params}: leave it "
                f"out, or shard a plain collection"
            )

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The fused one: nobody else would step the rows."""
        return [str(EmbeddingComputeKernel.FUSED)]

    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        assert isinstance(module, FusedCollection)
        for table, states in module.optimizer_states().items():
            if params[table].compute_kernel != EmbeddingComputeKernel.FUSED:
                raise PlanError(
                    f"table {table!r} of a {type(module).__name__} has compute_kernel "
                    f"{str(params[table].compute_kernel)!r}, but its optimizer runs in backward: use 'fused'"
                )
            stepped = [name for name, state in states.items() if bool(state.any())]
            if stepped:
                raise ValueError(
                    f"table {table!r} has learned already, and its optimizer state {stepped} would be lost: shard the "
                    f"{type(module).__name__} before the first step, and load a checkpoint into the sharded model"
                )
        return dict.fromkeys(module.optimizer_states(), module.optimizer_spec)


class FusedEmbeddingBagCollectionSharder(FusedCollectionSharder):
    """Shards `FusedEmbeddingBagCollection`."""

    module_type = FusedEmbeddingBagCollection
    sharded_type = ShardedEmbeddingBagCollection

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        assert isinstance(module, FusedEmbeddingBagCollection)
        return module.embedding_bag_configs()


class FusedEmbeddingCollectionSharder(FusedCollectionSharder):
    """Shards `FusedEmbeddingCollection`."""

    module_type = FusedEmbeddingCollection
    sharded_type = ShardedEmbeddingCollection

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        assert isinstance(module, FusedEmbeddingCollection)
        return module.embedding_configs()


def _policy_of(bounds_check_mode: Any, out_of_range: str | None) -> str | None:
    """What both say; refuses what nobody knows and two that differ."""
    if out_of_range is not None:
        OutOfRange(out_of_range)
    if bounds_check_mode is None:
        return out_of_range
    meant = policy_of_bounds_check_mode(bounds_check_mode)
    if out_of_range not in (None, meant):
        raise ValueError(
            f"bounds_check_mode={bounds_check_mode} means out_of_range={meant!r}, but out_of_range={out_of_range!r} "
            f"was given: leave bounds_check_mode out of fused_params"
        )
    return meant


def first_weights(sharded: ShardedCollection, module: nn.Module, everyone: ShardingEnv) -> list[Move]:
    """Moves that fill a sharded collection from rank 0's unsharded weights.

    If these are on ``meta``, each rank draws its part, the same numbers under every plan. Then only the tables with an
    ``init_fn`` move, from the first replica to the others. All ranks (``everyone``) must call it.
    """
    whole = unsharded_weights(module)
    on_meta = any(weight.is_meta for weight in whole.values())
    on_meta, seed = broadcast_object((on_meta, torch.initial_seed()), sharded.env)
    if not on_meta:
        return sharded.scatter_moves(whole, source=0)
    agreed(everyone, lambda: [shards.reset_parameters(seed) for shards in sharded.table_shards().values()])
    drawn = [shards for shards in sharded.table_shards().values() if shards.config.init_fn is not None]
    return [copies for shards in drawn if (copies := shards.first_replica_move()) is not None]


def get_module_to_default_sharders() -> dict[type[nn.Module], CollectionSharder]:
    """Kind of module -> the sharder that `get_default_sharders` has for it."""
    return {sharder.module_type: sharder for sharder in default_sharders()}


def default_sharders() -> list[CollectionSharder]:
    """One sharder for every kind of collection."""
    return [
        EmbeddingBagCollectionSharder(),
        EmbeddingCollectionSharder(),
        FusedEmbeddingBagCollectionSharder(),
        FusedEmbeddingCollectionSharder(),
    ]


get_default_sharders = default_sharders
"""TorchRec's name for `default_sharders`."""
