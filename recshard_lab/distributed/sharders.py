"""Which modules are sharded, and with what settings."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from recshard_lab.comm import CommOp, Registry, ShardingEnv, codecs_for
from recshard_lab.distributed.sharded_collections import (
    ShardedCollection,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    unsharded_weights,
)
from recshard_lab.embedding import (
    BaseEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingCollection,
    OptimizerSpec,
)
from recshard_lab.embedding.optimizers import spec_of_parameter
from recshard_lab.sharding import ParameterSharding


class CollectionSharder:
    """Turns one kind of collection into its sharded twin.

    Args:
        fused_params: the optimizer fused into backward: ``optimizer``, ``learning_rate``, ``eps``, ``weight_decay``.
            ``apply_optimizer_in_backward`` on a table's parameter takes precedence. Plain SGD with a learning rate of
            0.01 when neither is given.
        qcomm_codecs_registry: number formats of rows and gradients on the wire, from `get_qcomm_codecs_registry`.
        backend: kernel for every table ("fbgemm", "native", ...); None takes the fastest that can do each.

    Raises:
        ValueError: a key in ``fused_params`` that nothing honours, or in the registry that is no kind of message.
    """

    module_type: ClassVar[type[nn.Module]]
    sharded_type: ClassVar[type[ShardedCollection]]

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Registry | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        self.fused_params = dict(fused_params or {})
        self.qcomm_codecs_registry = qcomm_codecs_registry
        for op in CommOp:
            codecs_for(op, qcomm_codecs_registry)
        self.backend = backend
        self.spec = OptimizerSpec.from_fused_params(self.fused_params)

    def tables(self, module: nn.Module) -> Sequence[BaseEmbeddingConfig]:
        """The tables of an unsharded collection."""
        raise NotImplementedError

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
    ) -> ShardedCollection:
        """The sharded twin; its weights are zeros until they are filled."""
        tables = self.tables(module)
        weights = unsharded_weights(module)
        optimizers = {name: spec_of_parameter(parameter) or self.spec for name, parameter in weights.items()}
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
        )


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


def default_sharders() -> list[CollectionSharder]:
    """One sharder for every kind of collection."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
