"""Models of the field, unaware of sharding."""

from recshard_lab.models.dlrm import DLRM as DLRM
from recshard_lab.models.dlrm import DenseArch as DenseArch
from recshard_lab.models.dlrm import OverArch as OverArch
from recshard_lab.models.dlrm import SparseArch as SparseArch
from recshard_lab.models.dlrm_train import DLRMTrain as DLRMTrain
from recshard_lab.models.layers import MLP as MLP
from recshard_lab.models.layers import InteractionArch as InteractionArch
from recshard_lab.models.layers import Perceptron as Perceptron
from recshard_lab.models.layers import SwishLayerNorm as SwishLayerNorm

__all__ = [
    "DLRM",
    "MLP",
    "DLRMTrain",
    "DenseArch",
    "InteractionArch",
    "OverArch",
    "Perceptron",
    "SparseArch",
    "SwishLayerNorm",
]
