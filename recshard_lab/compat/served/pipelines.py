"""``torchrec.distributed.train_pipeline``."""

_PIPELINES = (
    "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist"
)

SERVED: dict[str, dict[str, str]] = {
    "torchrec.distributed.train_pipeline": {"train": _PIPELINES},
    "torchrec.distributed.train_pipeline.train_pipelines": {"train": f"{_PIPELINES} TrainPipelineSemiSync"},
}
