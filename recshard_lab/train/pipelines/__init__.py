"""Pipelines: the stages of training steps overlap, with the same results."""

from recshard_lab.train.pipelines.base import Pipeline as Pipeline
from recshard_lab.train.pipelines.base import TrainPipeline as TrainPipeline
from recshard_lab.train.pipelines.calls import PipelinedCall as PipelinedCall
from recshard_lab.train.pipelines.calls import PipelineReport as PipelineReport
from recshard_lab.train.pipelines.lanes import StageError as StageError
from recshard_lab.train.pipelines.semi_sync import TrainPipelineSemiSync as TrainPipelineSemiSync
from recshard_lab.train.pipelines.train import EvalPipelineSparseDist as EvalPipelineSparseDist
from recshard_lab.train.pipelines.train import PrefetchTrainPipelineSparseDist as PrefetchTrainPipelineSparseDist
from recshard_lab.train.pipelines.train import TrainPipelineBase as TrainPipelineBase
from recshard_lab.train.pipelines.train import TrainPipelineSparseDist as TrainPipelineSparseDist

__all__ = [
    "EvalPipelineSparseDist",
    "Pipeline",
    "PipelineReport",
    "PipelinedCall",
    "PrefetchTrainPipelineSparseDist",
    "StageError",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
]
