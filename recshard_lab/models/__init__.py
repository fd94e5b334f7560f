"""Models of the field, unaware of sharding."""

from recshard_lab.models.dlrm import DLRM as DLRM
from recshard_lab.models.layers import MLP as MLP
from recshard_lab.models.layers import InteractionArch as InteractionArch

__all__ = ["DLRM", "MLP", "InteractionArch"]
