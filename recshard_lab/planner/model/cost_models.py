"""The cost models by name."""

from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.torchrec_cost import TorchRecCostModel
from recshard_lab.sharding.plan.types import nearest

COST_MODELS: dict[str, type[CostModel]] = {model.name: model for model in (CostModel, TorchRecCostModel)}


def cost_model_named(name: str) -> type[CostModel]:
    """The cost model of that name.

    Raises:
        ValueError: there is none.

    >>> cost_model_named("torchrec").waits
    False
    """
    if not isinstance(name, str) or name not in COST_MODELS:
        raise ValueError(
            f"cost_model {name!r} does not exist{nearest(str(name), COST_MODELS)}; known: {', '.join(COST_MODELS)}"
        )
    return COST_MODELS[name]
