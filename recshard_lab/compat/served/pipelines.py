"""``torchrec.distributed.train_pipeline``."""

_PIPELINES = (
    "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist"
)
_ADAPTERS = "TrainPipelineFusedSparseDist TrainPipelinePT2"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed.train_pipeline": {
        "train": f"{_PIPELINES} GradientAccumulationConfig GradientAccumulationWrapper",
        "compat.distributed.pipelines": f"{_ADAPTERS} DataLoadingThread StageOut TorchCompileConfig",
        "compat.distributed.stages": "SparseDataDistUtil StagedTrainPipeline",
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {
        "train": f"{_PIPELINES} TrainPipelineSemiSync",
        "compat.distributed.pipelines": f"{_ADAPTERS} TorchCompileConfig",
        "compat.distributed.stages": "StagedTrainPipeline",
    },
    "torchrec.distributed.train_pipeline.utils": {"compat.distributed.pipelines": "DataLoadingThread"},
    "torchrec.distributed.train_pipeline.pipeline_stage": {
        "compat.distributed.pipelines": "StageOut",
        "compat.distributed.stages": "PipelineStage SparseDataDistUtil",
    },
    "torchrec.distributed.train_pipeline.gradient_accumulation": {
        "train": "GradientAccumulationConfig GradientAccumulationWrapper",
    },
}
