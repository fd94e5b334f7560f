"""``torchrec.distributed.train_pipeline``."""

_PIPELINES = (
    "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist"
)

SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed.train_pipeline": {
        "train": f"{_PIPELINES} GradientAccumulationConfig GradientAccumulationWrapper",
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {"train": f"{_PIPELINES} TrainPipelineSemiSync"},
    "torchrec.distributed.train_pipeline.gradient_accumulation": {
        "train": "GradientAccumulationConfig GradientAccumulationWrapper",
    },
}
