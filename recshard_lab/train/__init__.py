"""Training: the loop, the metrics, and recipes that are known to work."""

from recshard_lab.train.averaging import WeightAverage as WeightAverage
from recshard_lab.train.loop import Evaluation as Evaluation
from recshard_lab.train.loop import Step as Step
from recshard_lab.train.loop import TrainResult as TrainResult
from recshard_lab.train.loop import batch_loss as batch_loss
from recshard_lab.train.loop import evaluate as evaluate
from recshard_lab.train.loop import train_epochs as train_epochs
from recshard_lab.train.metrics import auc as auc
from recshard_lab.train.metrics import log_loss as log_loss
from recshard_lab.train.metrics import normalized_entropy as normalized_entropy
from recshard_lab.train.pipeline import EvalPipelineSparseDist as EvalPipelineSparseDist
from recshard_lab.train.pipeline import TrainPipeline as TrainPipeline
from recshard_lab.train.pipeline import TrainPipelineBase as TrainPipelineBase
from recshard_lab.train.pipeline import TrainPipelineSparseDist as TrainPipelineSparseDist
from recshard_lab.train.recipes import MOVIELENS_100K as MOVIELENS_100K
from recshard_lab.train.recipes import Recipe as Recipe
from recshard_lab.train.recipes import dense_parameters as dense_parameters

__all__ = [
    "MOVIELENS_100K",
    "EvalPipelineSparseDist",
    "Evaluation",
    "Recipe",
    "Step",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainResult",
    "WeightAverage",
    "auc",
    "batch_loss",
    "dense_parameters",
    "evaluate",
    "log_loss",
    "normalized_entropy",
    "train_epochs",
]
