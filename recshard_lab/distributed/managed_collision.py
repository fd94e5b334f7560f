"""Sharded managed collision: each rank decides which ids own the rows of its shards.

Ids are sent by their hash to the rank whose buckets they are in, as those of dynamic tables (`HashSplits`). A shard has
whole buckets. All ranks together decide as the unsharded module with the same buckets.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.comm import Registry, ShardingEnv
from recshard_lab.distributed.awaitable import LazyDict, LazyKeyedTensor
from recshard_lab.distributed.eager import eager
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
)
from recshard_lab.distributed.sharders import (
    CollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)
from recshard_lab.embedding import (
    BaseManagedCollisionEmbeddingCollection,
    FusedCollection,
    HashZchManagedCollisionModule,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    OptimizerSpec,
)
from recshard_lab.embedding.managed_collision.kernel import ManagedEmbeddingConfig
from recshard_lab.embedding.managed_collision.modules import RowOwners
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    PlanError,
    ShardingPlan,
    scheme_names,
)
from recshard_lab.sparse import KeyedJaggedTensor


class ShardedManagedCollisionEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """A sharded `ManagedCollisionEmbeddingBagCollection`, with the same state dict names of the tables.

    The owners of rows move and are saved with the optimizer states: they are in `dmp.fused_optimizer.state_dict` and
    in checkpoints.
    """

    tables_name = "_embedding_module.embedding_bags"

    @eager
    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> tuple[LazyKeyedTensor, None]:  # type: ignore[override]
        """Local batch -> ``[B, sum of D]``, and None."""
        return self.compute_and_output_dist(self._routed(features)), None


class ShardedManagedCollisionEmbeddingCollection(ShardedEmbeddingCollection):
    """A sharded `ManagedCollisionEmbeddingCollection`. See `ShardedManagedCollisionEmbeddingBagCollection`."""

    tables_name = "_embedding_module.embeddings"

    @eager
    @names_wrong_arguments
    def forward(self, features: KeyedJaggedTensor) -> tuple[LazyDict, None]:  # type: ignore[override]
        """Local batch -> a jagged ``[N, D]`` for each key, and None."""
        return self.compute_and_output_dist(self._routed(features)), None


class ManagedCollisionSharder(CollectionSharder):
    """Shards one type of managed collision collection, by row_wise, table_wise or column_wise.

    If a table's module has one bucket, each row shard becomes a bucket. Otherwise row shards have whole buckets:
    ``row_wise(num_buckets=...)``.

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
            ValueError: a setting that a sharded module cannot have, or a module with owners, which would be lost.
        """
        assert isinstance(module, BaseManagedCollisionEmbeddingCollection)
        if module.return_remapped_features:
            raise ValueError(
                "return_remapped_features=True, and rows of a sharded table are known on the ranks that store them "
                "alone. Fix: return_remapped_features=False"
            )
        modules = module.managed_collision_collection.modules_by_table()
        tables = [_managed(table, modules[table.name], params[table.name]) for table in self.tables(module)]
        ShardingPlan({"": EmbeddingModuleShardingPlan(params)}).validate(tables, env.world_size)
        inner = module.embedding_module
        return self.sharded_type(
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


def _managed(table: Any, module: Any, sharding: ParameterSharding) -> ManagedEmbeddingConfig:
    """A table as its ranks store it."""
    of_table = f"table {table.name!r}: "
    if not isinstance(module, RowOwners):
        raise ValueError(
            f"{of_table}a {type(module).__name__} cannot be sharded. Fix: use MCHManagedCollisionModule or "
            f"HashZchManagedCollisionModule"
        )
    if module.size:
        raise ValueError(
            f"{of_table}{module.size:,} rows have owners, which would be lost. Fix: shard the collection before the "
            f"first step, and load a checkpoint into the sharded model"
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
    ranges = len({shard.rows for shard in sharding.shards})
    buckets = ranges if module.buckets() == 1 else module.buckets()
    if table.num_embeddings % buckets:
        raise PlanError(
            f"{of_table}{table.num_embeddings:,} rows do not divide into {buckets} equal buckets. "
            f"Fix: make num_embeddings a multiple of {buckets}"
        )
    return ManagedEmbeddingConfig.of(table, module, buckets)


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
