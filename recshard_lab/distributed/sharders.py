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
from recshard_lab.embedding.out_of_range import OutOfRange, policy_of_bounds_check_mode
from recshard_lab.sharding import ParameterSharding


class CollectionSharder:
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
    ) -> None:
        self.fused_params = dict(fused_params or {})
        self.qcomm_codecs_registry = qcomm_codecs_registry
        for op in CommOp:
            codecs_for(op, qcomm_codecs_registry)
        self.backend = backend
        self.out_of_range = _policy_of(self.fused_params.pop("bounds_check_mode", None), out_of_range)
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
            out_of_range=self.out_of_range or str(getattr(module, "out_of_range", "error")),
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


def default_sharders() -> list[CollectionSharder]:
    """One sharder for every kind of collection."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
