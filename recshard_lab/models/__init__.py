"""Recommendation models as published. Their code does not depend on sharding."""

from recshard_lab.models.crossnet import CrossNet as CrossNet
from recshard_lab.models.crossnet import LowRankCrossNet as LowRankCrossNet
from recshard_lab.models.crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from recshard_lab.models.crossnet import VectorCrossNet as VectorCrossNet
from recshard_lab.models.deepfm import DeepFM as DeepFM
from recshard_lab.models.deepfm import FactorizationMachine as FactorizationMachine
from recshard_lab.models.deepfm import SimpleDeepFMNN as SimpleDeepFMNN
from recshard_lab.models.deepfm_nn import DeepFMNN as DeepFMNN
from recshard_lab.models.dlrm import DLRM as DLRM
from recshard_lab.models.dlrm import DLRM_DCN as DLRM_DCN
from recshard_lab.models.dlrm import DenseArch as DenseArch
from recshard_lab.models.dlrm import DLRMTrain as DLRMTrain
from recshard_lab.models.dlrm import InteractionDCNArch as InteractionDCNArch
from recshard_lab.models.dlrm import OverArch as OverArch
from recshard_lab.models.dlrm import SparseArch as SparseArch
from recshard_lab.models.feature_processors import (
    FeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection,
)
from recshard_lab.models.feature_processors import FeatureProcessor as FeatureProcessor
from recshard_lab.models.feature_processors import FeatureProcessorDictWrapper as FeatureProcessorDictWrapper
from recshard_lab.models.feature_processors import FeatureProcessorsCollection as FeatureProcessorsCollection
from recshard_lab.models.feature_processors import PositionWeightedModule as PositionWeightedModule
from recshard_lab.models.feature_processors import PositionWeightedModuleCollection as PositionWeightedModuleCollection
from recshard_lab.models.feature_processors import PositionWeightedProcessor as PositionWeightedProcessor
from recshard_lab.models.feature_processors import apply_feature_processors_to_kjt as apply_feature_processors_to_kjt
from recshard_lab.models.layers import MLP as MLP
from recshard_lab.models.layers import InteractionArch as InteractionArch
from recshard_lab.models.layers import Perceptron as Perceptron
from recshard_lab.models.layers import SwishLayerNorm as SwishLayerNorm
from recshard_lab.models.registry import ModelKind as ModelKind
from recshard_lab.models.registry import build_model as build_model
from recshard_lab.models.registry import model_named as model_named
from recshard_lab.models.registry import model_names as model_names
from recshard_lab.models.registry import register_model as register_model
from recshard_lab.models.registry import settings_as_dict as settings_as_dict
from recshard_lab.models.registry import settings_of as settings_of
from recshard_lab.models.registry import train_task as train_task
from recshard_lab.models.sasrec import SASRec as SASRec
from recshard_lab.models.two_tower import StreamingFrequency as StreamingFrequency
from recshard_lab.models.two_tower import TwoTower as TwoTower
from recshard_lab.models.two_tower import TwoTowerTrainTask as TwoTowerTrainTask

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
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorDictWrapper",
    "FeatureProcessorsCollection",
    "InteractionArch",
    "InteractionDCNArch",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "ModelKind",
    "OverArch",
    "Perceptron",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "PositionWeightedProcessor",
    "SASRec",
    "SimpleDeepFMNN",
    "SparseArch",
    "StreamingFrequency",
    "SwishLayerNorm",
    "TwoTower",
    "TwoTowerTrainTask",
    "VectorCrossNet",
    "apply_feature_processors_to_kjt",
    "build_model",
    "model_named",
    "model_names",
    "register_model",
    "settings_as_dict",
    "settings_of",
    "train_task",
]
