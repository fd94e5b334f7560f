"""TorchRec's ``shard_modules``, which shards quantized collections too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recshard_lab import distributed
from recshard_lab.comm import ShardingEnv
from recshard_lab.embedding import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from recshard_lab.sharding import ShardingPlan


def shard_modules(
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | str | None = None,
    plan: ShardingPlan | None = None,
    sharders: Sequence[Any] | None = None,
    init_params: bool = False,
    planner: Any = None,
) -> nn.Module:
    """Shards every embedding collection of a model: over the ranks, or, if it is quantized, over devices.

    Args:
        module: the model. With float tables it is changed in place.
        env: the ranks. For a quantized model its ``world_size`` is the number of devices. Default: those of the plan.
        device: device of this rank. For a quantized model: "cuda" places shard k on GPU k, "cpu" on virtual devices.
        plan: the plan. Default: the planner's.
        sharders: sharders of the collections.
        init_params: whether to initialize dense weights on ``meta``.
        planner: makes the plan if there is none.

    Returns:
        The model. A quantized model on one device is returned as it is, on that device: its lookups are batched over
        tables already.

    Raises:
        PlanError: an invalid plan.
    """
    if plan is None and planner is not None:
        plan = planner.plan(module, list(sharders or []))
    if not any(isinstance(part, QuantEmbeddingBagCollection | QuantEmbeddingCollection) for part in module.modules()):
        return distributed.shard_modules(module, env, device, plan, sharders, init_params)
    place = torch.device(device or "cpu")
    modules = [] if plan is None else plan.plan.values()
    ranks = [rank for tables in modules for sharding in tables.values() for rank in sharding.ranks or ()]
    count = env.world_size if env is not None else max(ranks, default=0) + 1
    if count == 1:
        return module.to(place)
    from recshard_lab.serving import shard_for_inference

    devices = [torch.device("cuda", rank) if place.type == "cuda" else place for rank in range(count)]
    return shard_for_inference(module, plan, devices=devices)
