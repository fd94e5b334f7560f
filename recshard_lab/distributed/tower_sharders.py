"""Sharders of towers: tables and interaction of a tower on one node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from recshard_lab.comm import ShardingEnv, agreed
from recshard_lab.distributed.sharded_collections import ShardedCollection, ShardedEmbeddingBagCollection
from recshard_lab.distributed.sharders import CollectionSharder, default_sharders, split_by_part
from recshard_lab.distributed.shared_parts import refuse_second_names, refuse_second_owners
from recshard_lab.distributed.towers import ShardedEmbeddingTower, ShardedEmbeddingTowerCollection
from recshard_lab.embedding import BaseEmbeddingConfig
from recshard_lab.embedding.tower import EmbeddingTower, EmbeddingTowerCollection, tower_input_params
from recshard_lab.sharding import ParameterSharding, PlanError, ShardingType

_Part = tuple[str, nn.Module, CollectionSharder]


class _TowerSharder(CollectionSharder):
    """Base of both sharders. Arguments as of `CollectionSharder`; they are those of the towers' collections."""

    sharded_type = ShardedEmbeddingBagCollection  # whose message formats the planner takes
    on_one_node = True  # the planner gives all tables of each part ranks of one node

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The schemes that place a table on the ranks of one node."""
        return [str(ShardingType.TABLE_ROW_WISE), str(ShardingType.TABLE_COLUMN_WISE)]

    def _towers(self, module: nn.Module) -> list[tuple[str, EmbeddingTower]]:
        """Path in ``module`` and tower."""
        raise NotImplementedError

    def embedding_sharder(self, module: EmbeddingTower) -> CollectionSharder:
        """The sharder of a tower's collection, with the settings of this one.

        Raises:
            ValueError: no sharder supports the tower's embeddings, or they have an optimizer beside ``fused_params``.
        """
        kind = type(module.embedding)
        sharder = next((own for own in default_sharders() if own.module_type is kind), None)
        if sharder is None:
            raise ValueError(
                f"no sharder supports the {kind.__name__} of a tower. Fix: use an EmbeddingBagCollection or an "
                f"EmbeddingCollection"
            )
        if self.fused_params and not sharder.sets_optimizer:
            raise ValueError(
                f"fused_params={self.fused_params}, but the {kind.__name__} of a tower has an optimizer. "
                f"Fix: omit fused_params"
            )
        vars(sharder).update(vars(self))
        return sharder

    def embedding_feature_names(self, module: EmbeddingTower) -> tuple[list[str], list[str]]:
        """The features that a tower reads without weights, and those that it reads with weights."""
        tables = self.embedding_sharder(module).tables(module.embedding)
        names = [name for table in tables for name in table.feature_names]
        return ([], names) if tower_input_params(module.embedding)[1] else (names, [])

    def parts(self, path: str, module: nn.Module) -> list[_Part]:
        """Path, module and sharder of each tower's collection."""
        return [
            (".".join(filter(None, (path, own, "embedding"))), tower.embedding, self.embedding_sharder(tower))
            for own, tower in self._towers(module)
        ]

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        """The tables of all towers."""
        return [table for _, part, sharder in self.parts("", module) for table in sharder.tables(part)]

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> its unsharded parameter."""
        found: dict[str, nn.Parameter] = {}
        for _, part, sharder in self.parts("", module):
            found |= sharder.shardable_parameters(part)
        return found

    def build(
        self, module: nn.Module, params: Mapping[str, ParameterSharding], env: ShardingEnv, device: torch.device
    ) -> ShardedCollection:
        """Not for towers: `parts` are built, then `joined`."""
        raise ValueError(f"a {type(module).__name__} has several parts. Fix: call shard(module, params, env, device)")

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Shards towers, with rank 0's weights. Collective. The interactions move to ``device``.

        Args:
            module: the unsharded module. Its collections are not changed.
            params: table name -> sharding.
            env: the ranks. Default: the default process group, or this process alone.
            device: device of tables and interactions. Default: the module's.
            module_fqn: accepted as in TorchRec; names do not depend on it.

        Raises:
            PlanError: an invalid plan, or one with the tables of a tower on several nodes.
        """
        env = env if env is not None else ShardingEnv.default()

        def read() -> list[_Part]:
            found = self.parts("", module)
            collections = {path: part for path, part, _ in found}
            refuse_second_names(module, collections)
            refuse_second_owners(module, collections)
            return found

        parts = agreed(env, read)
        tables = {path: sharder.tables(part) for path, part, sharder in parts}
        by_part = agreed(env, lambda: split_by_part(params, tables, ""))
        embeddings = {path: sharder.shard(part, by_part.get(path, {}), env, device) for path, part, sharder in parts}
        sharded = agreed(env, lambda: self._made(module, embeddings, env))
        if device is not None:
            for tower in sharded.parts:
                tower.interaction.to(device)
        sharded.start()
        return sharded

    def joined(self, module: nn.Module, dense_env: ShardingEnv) -> Any:
        """The sharded towers, of a module whose collections have been replaced by sharded ones.

        Raises:
            PlanError: shards of a tower on several nodes, or a tower that is not in the plan.
        """
        embeddings = {
            ".".join(filter(None, (own, "embedding"))): tower.embedding for own, tower in self._towers(module)
        }
        for path, embedding in embeddings.items():
            if not isinstance(embedding, ShardedCollection):
                raise PlanError(f"{path!r} of a tower collection is not in the plan. Fix: add the tables of all towers")
        return self._made(module, embeddings, dense_env)  # type: ignore[arg-type]

    def _made(self, module: nn.Module, embeddings: Mapping[str, ShardedCollection], dense_env: ShardingEnv) -> Any:
        """The sharded module, of its sharded collections by path in it."""
        raise NotImplementedError


class EmbeddingTowerSharder(_TowerSharder):
    """Shards `EmbeddingTower` over the ranks of one node, where its interaction runs too.

    Ids travel to that node, and the interaction's output returns. So a tower pays where its output is narrower than its
    rows, and nodes are connected by a slow network. Outputs and weights are those of the unsharded tower.

    Args:
        fused_params, qcomm_codecs_registry, backend, out_of_range, batch_tables: as in `CollectionSharder`, for the
            tower's tables.

    >>> from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])
    >>> tower = EmbeddingTower(EmbeddingBagCollection([table]), nn.Identity())
    >>> EmbeddingTowerSharder().embedding_feature_names(tower)
    (['f'], [])
    """

    module_type = EmbeddingTower
    tower_type: ClassVar[type[ShardedEmbeddingTower]] = ShardedEmbeddingTower

    def _towers(self, module: nn.Module) -> list[tuple[str, EmbeddingTower]]:
        assert isinstance(module, EmbeddingTower)
        return [("", module)]

    def _made(
        self, module: nn.Module, embeddings: Mapping[str, ShardedCollection], dense_env: ShardingEnv
    ) -> ShardedEmbeddingTower:
        assert isinstance(module, EmbeddingTower)
        return self.tower_type(embeddings["embedding"], module.interaction, dense_env)


class EmbeddingTowerCollectionSharder(_TowerSharder):
    """Shards `EmbeddingTowerCollection`, each tower over the ranks of one node. See `EmbeddingTowerSharder`.

    Args:
        fused_params, qcomm_codecs_registry, backend, out_of_range, batch_tables: as in `CollectionSharder`, for the
            towers' tables.
    """

    module_type = EmbeddingTowerCollection
    towers_type: ClassVar[type[ShardedEmbeddingTowerCollection]] = ShardedEmbeddingTowerCollection

    def _towers(self, module: nn.Module) -> list[tuple[str, EmbeddingTower]]:
        assert isinstance(module, EmbeddingTowerCollection)
        return [(f"towers.{number}", tower) for number, tower in enumerate(module.towers)]  # type: ignore[misc]

    def _made(
        self, module: nn.Module, embeddings: Mapping[str, ShardedCollection], dense_env: ShardingEnv
    ) -> ShardedEmbeddingTowerCollection:
        towers = [
            ShardedEmbeddingTower(embeddings[f"{own}.embedding"], tower.interaction, dense_env)
            for own, tower in self._towers(module)
        ]
        return self.towers_type(towers, dense_env)
