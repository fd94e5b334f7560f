"""Training: the loop, the metrics, and recipes that are known to work."""

from recshard_lab.train.averaging import WeightAverage as WeightAverage
from recshard_lab.train.loop import Evaluation as Evaluation
from recshard_lab.train.loop import Step as Step
from recshard_lab.train.loop import TrainResult as TrainResult
from recshard_lab.train.loop import batch_loss as batch_loss
from recshard_lab.train.loop import evaluate as evaluate
from recshard_lab.train.loop import train_epochs as train_epochs
from recshard_lab.train.metrics import AUCMetric as AUCMetric
from recshard_lab.train.metrics import CalibrationMetric as CalibrationMetric
from recshard_lab.train.metrics import CTRMetric as CTRMetric
from recshard_lab.train.metrics import GAUCMetric as GAUCMetric
from recshard_lab.train.metrics import LogLossMetric as LogLossMetric
from recshard_lab.train.metrics import MetricsConfig as MetricsConfig
from recshard_lab.train.metrics import NDCGMetric as NDCGMetric
from recshard_lab.train.metrics import NEMetric as NEMetric
from recshard_lab.train.metrics import RecallSessionMetric as RecallSessionMetric
from recshard_lab.train.metrics import RecMetric as RecMetric
from recshard_lab.train.metrics import RecMetricModule as RecMetricModule
from recshard_lab.train.metrics import RecTaskInfo as RecTaskInfo
from recshard_lab.train.metrics import ThroughputMetric as ThroughputMetric
from recshard_lab.train.metrics import auc as auc
from recshard_lab.train.metrics import calibration as calibration
from recshard_lab.train.metrics import generate_metric_module as generate_metric_module
from recshard_lab.train.metrics import grouped_auc as grouped_auc
from recshard_lab.train.metrics import log_loss as log_loss
from recshard_lab.train.metrics import ndcg as ndcg
from recshard_lab.train.metrics import normalized_entropy as normalized_entropy
from recshard_lab.train.metrics import recall_at_k as recall_at_k
from recshard_lab.train.pipelines import EvalPipelineSparseDist as EvalPipelineSparseDist
from recshard_lab.train.pipelines import GradientAccumulationConfig as GradientAccumulationConfig
from recshard_lab.train.pipelines import GradientAccumulationWrapper as GradientAccumulationWrapper
from recshard_lab.train.pipelines import PipelineReport as PipelineReport
from recshard_lab.train.pipelines import PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist
from recshard_lab.train.pipelines import StageError as StageError
from recshard_lab.train.pipelines import TrainPipeline as TrainPipeline
from recshard_lab.train.pipelines import TrainPipelineBase as TrainPipelineBase
from recshard_lab.train.pipelines import TrainPipelineSemiSync as TrainPipelineSemiSync
from recshard_lab.train.pipelines import TrainPipelineSparseDist as TrainPipelineSparseDist
from recshard_lab.train.recipes import MOVIELENS_100K as MOVIELENS_100K
from recshard_lab.train.recipes import Recipe as Recipe
from recshard_lab.train.recipes import dense_parameters as dense_parameters

__all__ = [
    "MOVIELENS_100K",
    "AUCMetric",
    "CTRMetric",
    "CalibrationMetric",
    "EvalPipelineSparseDist",
    "Evaluation",
    "GAUCMetric",
    "GradientAccumulationConfig",
    "GradientAccumulationWrapper",
    "LogLossMetric",
    "MetricsConfig",
    "NDCGMetric",
    "NEMetric",
    "PipelineReport",
    "PrefetchTrainPipelineSparseDist",
    "RecMetric",
    "RecMetricModule",
    "RecTaskInfo",
    "RecallSessionMetric",
    "Recipe",
    "StageError",
    "Step",
    "ThroughputMetric",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainResult",
    "WeightAverage",
    "auc",
    "batch_loss",
    "calibration",
    "dense_parameters",
    "evaluate",
    "generate_metric_module",
    "grouped_auc",
    "log_loss",
    "ndcg",
    "normalized_entropy",
    "recall_at_k",
    "train_epochs",
]
