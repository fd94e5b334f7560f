"""The cost models by name."""

from collections.abc import Callable
from typing import Any

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.torchrec_cost import TorchRecCostModel
from recshard_lab.sharding.plan.types import nearest

COST_MODELS: dict[str, type[CostModel]] = {model.name: model for model in (CostModel, TorchRecCostModel)}


def cost_model_named(cost_model: Any) -> Callable[..., CostModel]:
    """The cost model of this name; a class (or a function) with `CostModel`'s arguments is returned unchanged.

    Raises:
        ValueError: an unknown name, or an instance.

    >>> cost_model_named("torchrec").__name__
    'TorchRecCostModel'
    """
    if isinstance(cost_model, str) and cost_model in COST_MODELS:
        return COST_MODELS[cost_model]
    if not isinstance(cost_model, str) and callable(cost_model):
        return cost_model
    raise ValueError(
        f"cost_model {cost_model!r:.80} does not exist{nearest(str(cost_model)[:80], COST_MODELS)}; known: "
        f"{', '.join(COST_MODELS)}. Fix: use one of these names, or pass a subclass of CostModel"
    )
