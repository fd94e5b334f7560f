"""Models of the field, unaware of sharding."""

from recshard_lab.models.crossnet import CrossNet as CrossNet
from recshard_lab.models.crossnet import LowRankCrossNet as LowRankCrossNet
from recshard_lab.models.crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from recshard_lab.models.crossnet import VectorCrossNet as VectorCrossNet
from recshard_lab.models.deepfm import DeepFM as DeepFM
from recshard_lab.models.deepfm import FactorizationMachine as FactorizationMachine
from recshard_lab.models.deepfm import SimpleDeepFMNN as SimpleDeepFMNN
from recshard_lab.models.deepfm_nn import DeepFMNN as DeepFMNN
from recshard_lab.models.dlrm import DLRM as DLRM
from recshard_lab.models.dlrm import DenseArch as DenseArch
from recshard_lab.models.dlrm import OverArch as OverArch
from recshard_lab.models.dlrm import SparseArch as SparseArch
from recshard_lab.models.dlrm_dcn import DLRM_DCN as DLRM_DCN
from recshard_lab.models.dlrm_dcn import InteractionDCNArch as InteractionDCNArch
from recshard_lab.models.dlrm_train import DLRMTrain as DLRMTrain
from recshard_lab.models.layers import MLP as MLP
from recshard_lab.models.layers import InteractionArch as InteractionArch
from recshard_lab.models.layers import Perceptron as Perceptron
from recshard_lab.models.layers import SwishLayerNorm as SwishLayerNorm

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "MLP",
    "CrossNet",
    "DLRMTrain",
    "DeepFM",
    "DeepFMNN",
    "DenseArch",
    "FactorizationMachine",
    "InteractionArch",
    "InteractionDCNArch",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "OverArch",
    "Perceptron",
    "SimpleDeepFMNN",
    "SparseArch",
    "SwishLayerNorm",
    "VectorCrossNet",
]
