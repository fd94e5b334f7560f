"""Sharded managed collision: each rank decides which ids own the rows of its shards.

Ids are sent by their hash to the rank whose buckets they are in, as those of dynamic tables (`HashSplits`). A shard has
whole buckets. All ranks together decide as the unsharded module with the same buckets.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import Registry, ShardingEnv
from recshard_lab.distributed.awaitable import LazyDict, LazyKeyedTensor, eager
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    ShardedModuleContext,
)
from recshard_lab.distributed.sharders import (
    CollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    freeze_as,
)
from recshard_lab.distributed.state.moves import Move
from recshard_lab.distributed.state.table import ShardedTable, StateEntries
from recshard_lab.distributed.step.batch import LookupInput
from recshard_lab.distributed.step.executor import PendingRows
from recshard_lab.distributed.step.gradients import exchange_rows
from recshard_lab.embedding import (
    BaseManagedCollisionEmbeddingCollection,
    FusedCollection,
    HashZchManagedCollisionModule,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    OptimizerSpec,
)
from recshard_lab.embedding.managed_collision.modules import ManagedEmbeddingConfig, Owners, RowOwners, bucket_fault
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    scheme_names,
)
from recshard_lab.sparse import KeyedJaggedTensor


class OwnerEntries(StateEntries):
    """The entries of a state dict that say which id owns each row of a table, named as in an unsharded model."""

    def __init__(self, shards: ShardedTable) -> None:
        super().__init__({_STATE_NAMES[part.name]: part for part in shards.index_parts}, shards)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        table = self.of.config
        assert isinstance(table, ManagedEmbeddingConfig)
        for position, state in self.of.states.items():
            owners, first = Owners(state["raw_ids"], state["owned"]), self.of.sharding.shards[position].rows[0]
            problem = bucket_fault(owners, first, table.partitions, table.row_unit)
            if problem is not None:
                args[-1].append(f"table {table.name!r}: {problem}")


_STATE_NAMES = {
    "raw_ids": "_raw_ids",
    "owned": "_owned",
    "row_numbers": "_row_numbers",
    "current_iter": "_current_iter_tensor",
}


class _HasOwners(ShardedCollection):
    """A collection whose state dict also has the owners of rows. The sharder sets `return_remapped_features`."""

    _returns_rows = False

    @property
    def return_remapped_features(self) -> bool:
        """Whether a forward also returns the rows of ids."""
        return self._returns_rows

    @return_remapped_features.setter
    def return_remapped_features(self, value: bool) -> None:
        self._returns_rows = value
        self.executor.input_dist.keeps_places = value or not self.pooled

    def copy(self, device: torch.device | str) -> Self:
        """As of other collections, with the owners of rows."""
        twin = super().copy(device)
        twin.return_remapped_features = self._returns_rows
        return twin

    def place(self, shardings: Mapping[str, ParameterSharding]) -> None:
        """Replaces kernels and layout with those of these shardings. Weights and states are zero."""
        super().place(shardings)
        self.return_remapped_features = self._returns_rows

    def hold_tables(self, tables: nn.Module) -> None:
        """Replaces the modules of the tables, and those of their owners."""
        super().hold_tables(tables)
        owners = {
            name: OwnerEntries(child) for name, child in tables.named_children() if isinstance(child, ShardedTable)
        }
        self._managed_collision_collection = nn.Module()
        self._managed_collision_collection._managed_collision_modules = nn.ModuleDict(owners)

    def first_states(self, module: nn.Module, source: int) -> list[Move]:
        """Moves that fill the owners of rows from those of rank ``source``'s unsharded collection."""
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        modules, moves = module.managed_collision_collection.modules_by_table(), []
        for name, shards in self.table_shards().items():
            tensors = modules[name].tensors()  # type: ignore[operator]
            for part in shards.index_parts:
                sources = {0: part.matrix(tensors[part.name])} if self.env.rank == source else {}
                everywhere = part.shards([shards.whole_on(source)]), part.shards(shards.sharding.shards)
                moves.append(Move(part.dtype, *everywhere, sources, shards.matrices(part)))
        return moves

    def output_dist(self, ctx: ShardedModuleContext, output: PendingRows) -> tuple[Any, KeyedJaggedTensor | None]:
        """Issues the output exchange. Returns the output of the forward: rows, and the features' rows or None."""
        rows = super().output_dist(ctx, output)
        assert ctx.features is not None
        return rows, self._remapped(ctx.features, output.lookup_input)

    def _remapped(self, features: KeyedJaggedTensor, lookup_input: LookupInput) -> KeyedJaggedTensor | None:
        """The features of the tables with rows in place of ids, after their lookup was issued. Collective."""
        if not self._returns_rows:
            return None
        rows, total = lookup_input.rows, features.values().numel()
        if rows is None:  # the lookup failed, or this rank stores no shard
            rows = torch.zeros(lookup_input.ids.shape, dtype=torch.int64, device=self.device)
        found = exchange_rows(rows, total, lookup_input, self.layout, self.env)
        variable = features.variable_stride_per_key()
        remapped = KeyedJaggedTensor(
            features.keys(),
            found,
            features.weights_or_none(),
            features.lengths(),
            stride=None if variable else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
            inverse_indices=features.inverse_indices_or_none(),
        )
        keys = [feature for table in self.tables for feature in table.feature_names]
        return remapped.permute([features.keys().index(key) for key in keys])


class ShardedManagedCollisionEmbeddingBagCollection(_HasOwners, ShardedEmbeddingBagCollection):
    """A sharded `ManagedCollisionEmbeddingBagCollection`, with the same state dict names.

    The state dict has the owners of rows, as of the unsharded collection. They move with their rows.
    """

    tables_name = "_embedding_module.embedding_bags"

    @eager
    @names_wrong_arguments
    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> tuple[LazyKeyedTensor, KeyedJaggedTensor | None]:
        """Local batch -> ``[B, sum of D]``, and with ``return_remapped_features`` its rows, as of the unsharded one."""
        lookup_input = self._routed(features)
        return self._output(self._begun(lookup_input)), self._remapped(features, lookup_input)


class ShardedManagedCollisionEmbeddingCollection(_HasOwners, ShardedEmbeddingCollection):
    """A sharded `ManagedCollisionEmbeddingCollection`. See `ShardedManagedCollisionEmbeddingBagCollection`."""

    tables_name = "_embedding_module.embeddings"

    @eager
    @names_wrong_arguments
    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor
    ) -> tuple[LazyDict, KeyedJaggedTensor | None]:
        """Local batch -> a jagged ``[N, D]`` for each key, and its rows as of pooled collections."""
        lookup_input = self._routed(features)
        return self._output(self._begun(lookup_input)), self._remapped(features, lookup_input)


class ManagedCollisionSharder(CollectionSharder):
    """Shards one type of managed collision collection, by row_wise, table_wise or column_wise.

    If a table's module has one bucket, each row shard becomes a bucket, and row shards have equal sizes. Otherwise row
    shards have whole buckets. `row_wise`, and a planner, make such shards.

    Rank 0's weights and owners of rows are those of the shards. Two trained collections are refused: one whose
    optimizer has states, which would be lost, and one bucket with owners that becomes several.

    Args:
        ebc_sharder: sharder of the collection inside, whose settings are used. Default: those of the other arguments.
        mc_sharder: None. TorchRec's sharder of the modules has no equal here.
        qcomm_codecs_registry, fused_params, backend, out_of_range, batch_tables: as in `CollectionSharder`.

    Raises:
        ValueError: as `CollectionSharder`, or an ``mc_sharder``.
    """

    module_type: ClassVar[type[nn.Module]]
    fused_sharder: ClassVar[type[CollectionSharder]]

    def __init__(
        self,
        ebc_sharder: CollectionSharder | None = None,
        mc_sharder: None = None,
        qcomm_codecs_registry: Registry | None = None,
        *,
        fused_params: Mapping[str, Any] | None = None,
        backend: str | None = None,
        out_of_range: str | None = None,
        batch_tables: bool = True,
    ) -> None:
        if mc_sharder is not None or not isinstance(ebc_sharder, CollectionSharder | None):
            raise ValueError(
                f"ebc_sharder={ebc_sharder!r:.80} must be a CollectionSharder or None, and mc_sharder="
                f"{mc_sharder!r:.80} None. Fix: omit mc_sharder"
            )
        super().__init__(
            fused_params, qcomm_codecs_registry, backend=backend, out_of_range=out_of_range, batch_tables=batch_tables
        )
        if ebc_sharder is not None:
            vars(self).update(vars(ebc_sharder))

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All schemes but data_parallel: rows with owners have no replicas."""
        return [name for name in scheme_names() if name != "data_parallel"]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Only the fused kernel, which has the optimizer states that are reset."""
        return [str(EmbeddingComputeKernel.FUSED)]

    def optimizers(self, module: nn.Module, params: Mapping[str, ParameterSharding]) -> dict[str, OptimizerSpec]:
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        inner = module.embedding_module
        if not isinstance(inner, FusedCollection):
            return super().optimizers(inner, params)
        if self.fused_params:
            raise ValueError(
                f"fused_params={self.fused_params}, but a fused collection has an optimizer. Fix: omit fused_params"
            )
        return self.fused_sharder().optimizers(inner, params)

    def build(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedCollection:
        """The sharded collection, with zero weights and rows without owners.

        Raises:
            PlanError: row shards of other than whole buckets.
            ValueError: a setting that a sharded module cannot have, or a trained collection that is refused.
        """
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        tables = stored_tables(module, params, env.world_size)
        inner = module.embedding_module
        sharded = self.sharded_type(
            tables,
            params,
            self.optimizers(module, params),
            env,
            device,
            weighted=bool(getattr(inner, "is_weighted", lambda: False)()),
            backend=self.backend,
            codecs=self.codecs,
            output_dtype=self.output_dtype,
            state_form=self.state_form,
            batch_tables=self.batch_tables,
            need_indices=bool(getattr(inner, "need_indices", lambda: False)()),
        )
        assert isinstance(sharded, _HasOwners)
        sharded.return_remapped_features = module.return_remapped_features
        freeze_as(sharded, inner)
        return sharded


def stored_tables(
    module: BaseManagedCollisionEmbeddingCollection, params: Mapping[str, ParameterSharding], world_size: int
) -> list[ManagedEmbeddingConfig]:
    """The tables as ranks store them under a plan.

    Raises:
        PlanError, ValueError: as `ManagedCollisionSharder.build`.
    """
    modules = module.managed_collision_collection.modules_by_table()
    planned = module.planned_configs()
    ShardingPlan({"": EmbeddingModuleShardingPlan(params)}).validate(planned, world_size)
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
    if module.numbers_per_row > 2:
        raise ValueError(
            f"{of_table}the eviction policy keeps {module.numbers_per_row} numbers of a row, and shards have 2. "
            f"Fix: keep at most 2"
        )
    if not table.least_equal_rows:
        return replace(table, module=module)
    return replace(table, module=module, partitions=row_shards, least_equal_rows=0)


class ManagedCollisionEmbeddingBagCollectionSharder(ManagedCollisionSharder):
    """Shards `ManagedCollisionEmbeddingBagCollection`. See `ManagedCollisionSharder`."""

    module_type = ManagedCollisionEmbeddingBagCollection
    sharded_type = ShardedManagedCollisionEmbeddingBagCollection
    fused_sharder = FusedEmbeddingBagCollectionSharder


class ManagedCollisionEmbeddingCollectionSharder(ManagedCollisionSharder):
    """Shards `ManagedCollisionEmbeddingCollection`. See `ManagedCollisionSharder`."""

    module_type = ManagedCollisionEmbeddingCollection
    sharded_type = ShardedManagedCollisionEmbeddingCollection
    fused_sharder = FusedEmbeddingCollectionSharder
