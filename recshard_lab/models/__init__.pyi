# The names of this package, with their types; `__init__.py` loads each when it is first used.

from .crossnet import CrossNet as CrossNet
from .crossnet import LowRankCrossNet as LowRankCrossNet
from .crossnet import LowRankMixtureCrossNet as LowRankMixtureCrossNet
from .crossnet import VectorCrossNet as VectorCrossNet
from .deepfm import DeepFM as DeepFM
from .deepfm import DeepFMNN as DeepFMNN
from .deepfm import FactorizationMachine as FactorizationMachine
from .deepfm import SimpleDeepFMNN as SimpleDeepFMNN
from .dlrm import DLRM as DLRM
from .dlrm import DLRM_DCN as DLRM_DCN
from .dlrm import DenseArch as DenseArch
from .dlrm import DLRMTrain as DLRMTrain
from .dlrm import InteractionDCNArch as InteractionDCNArch
from .dlrm import OverArch as OverArch
from .dlrm import SparseArch as SparseArch
from .feature_processors import (
    FeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection,
)
from .feature_processors import FeatureProcessor as FeatureProcessor
from .feature_processors import FeatureProcessorDictWrapper as FeatureProcessorDictWrapper
from .feature_processors import FeatureProcessorsCollection as FeatureProcessorsCollection
from .feature_processors import PositionWeightedModule as PositionWeightedModule
from .feature_processors import PositionWeightedModuleCollection as PositionWeightedModuleCollection
from .feature_processors import PositionWeightedProcessor as PositionWeightedProcessor
from .feature_processors import apply_feature_processors_to_kjt as apply_feature_processors_to_kjt
from .layers import MLP as MLP
from .layers import InteractionArch as InteractionArch
from .layers import Perceptron as Perceptron
from .layers import SwishLayerNorm as SwishLayerNorm
from .registry import ModelKind as ModelKind
from .registry import build_model as build_model
from .registry import model_named as model_named
from .registry import model_names as model_names
from .registry import register_model as register_model
from .registry import settings_as_dict as settings_as_dict
from .registry import settings_of as settings_of
from .registry import train_task as train_task
from .sasrec import SASRec as SASRec
from .two_tower import StreamingFrequency as StreamingFrequency
from .two_tower import TwoTower as TwoTower
from .two_tower import TwoTowerTrainTask as TwoTowerTrainTask
