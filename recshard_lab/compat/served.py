"""TorchRec's names and their classes here.

Module of TorchRec -> {room here: names}. ``Theirs=Ours`` if the names differ. A room that starts with ``torch`` or
``typing`` is a module of torch or Python.
"""

from __future__ import annotations

from functools import lru_cache

_JAGGED = "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor KeyedTensor jt_is_equal kjt_is_equal"
_CONFIGS = "BaseEmbeddingConfig DataType EmbeddingBagConfig EmbeddingConfig PoolingType"
_COLLECTIONS = "EmbeddingBagCollection EmbeddingCollection"
_KEYED = "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper"
_WARMUP = "WarmupOptimizer WarmupPolicy WarmupStage"
_CLIPPING = "GradientClipping GradientClippingOptimizer"
_FUSED = "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule"
_STEPPING = "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD"
_PLAN = "EmbeddingModuleShardingPlan ParameterSharding ShardingPlan ShardingType"
_PIPELINES = (
    "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist"
)
_SPECS = {
    "torch.distributed._shard.metadata": "ShardMetadata",
    "torch.distributed._shard.sharding_spec": "EnumerableShardingSpec ShardingSpec",
    "torch.distributed._shard.sharded_tensor": "Shard ShardedTensor ShardedTensorMetadata",
}

SERVED: dict[str, dict[str, str]] = {
    "torchrec": {
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor Multistreamable Pipelineable",
        "embedding": f"DataType PoolingType EmbeddingBagConfig EmbeddingConfig EmbeddingBagCollectionInterface "
        f"{_COLLECTIONS}",
    },
    "torchrec.sparse": {"sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor"},
    "torchrec.sparse.jagged_tensor": {"sparse": f"{_JAGGED} regroup_kts"},
    "torchrec.streamable": {"sparse": "Multistreamable Pipelineable"},
    "torchrec.types": {"embedding": "DataType"},
    # ---- modules ----
    "torchrec.modules": {},
    "torchrec.modules.embedding_configs": {
        "embedding": f"{_CONFIGS} DATA_TYPE_NUM_BITS data_type_to_dtype dtype_to_data_type pooling_type_to_str "
        "EmbeddingTableConfig=BaseEmbeddingConfig QuantConfig",
        "sharding": "ShardingType",
    },
    "torchrec.modules.embedding_modules": {
        "embedding": f"{_COLLECTIONS} EmbeddingBagConfig EmbeddingConfig EmbeddingBagCollectionInterface "
        "EmbeddingCollectionInterface "
        "get_embedding_names_by_table=embedding_names_by_table",
        "sparse": "JaggedTensor KeyedJaggedTensor KeyedTensor",
    },
    "torchrec.modules.fused_embedding_modules": {
        "embedding": "FusedEmbeddingBagCollection FusedEmbeddingCollection fuse_embedding_optimizer",
    },
    "torchrec.modules.activation": {"models": "SwishLayerNorm"},
    "torchrec.modules.crossnet": {"models": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet"},
    "torchrec.modules.deepfm": {"models": "DeepFM FactorizationMachine"},
    "torchrec.modules.embedding_tower": {"models": "EmbeddingTower EmbeddingTowerCollection tower_input_params"},
    "torchrec.modules.feature_processor": {"models": "PositionWeightedProcessor"},
    "torchrec.modules.feature_processor_": {
        "models": "FeatureProcessor FeatureProcessorsCollection PositionWeightedModule "
        "PositionWeightedModuleCollection",
    },
    "torchrec.modules.fp_embedding_modules": {
        "models": "FeatureProcessedEmbeddingBagCollection FeatureProcessorDictWrapper",
    },
    "torchrec.modules.hash_mc_evictions": {"embedding": "HashZchEvictionConfig HashZchEvictionPolicyName"},
    "torchrec.modules.hash_mc_modules": {"embedding": "HashZchManagedCollisionModule"},
    "torchrec.modules.mc_embedding_modules": {
        "embedding": "ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingCollection "
        "BaseManagedCollisionEmbeddingCollection",
    },
    "torchrec.modules.mc_modules": {
        "embedding": "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
        "MCHEvictionPolicyMetadataInfo MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
        "average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter",
    },
    "torchrec.modules.mlp": {"models": "MLP Perceptron"},
    "torchrec.modules.regroup": {"embedding": "KTRegroupAsDict"},
    "torchrec.quant": {"embedding": "EmbeddingBagCollection=QuantEmbeddingBagCollection"},
    "torchrec.quant.embedding_modules": {
        "embedding": "DATA_TYPE_NUM_BITS EmbeddingBagCollection=QuantEmbeddingBagCollection "
        "EmbeddingCollection=QuantEmbeddingCollection",
    },
    # ---- distributed ----
    "torchrec.distributed": {
        "distributed": "Awaitable DMPCollection DistributedModelParallel ModuleSharder NoWait "
        "ShardedModule=ShardedCollection "
        "ShardingEnv",
        "sharding": "ParameterSharding",
        "train": "EvalPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist",
        "comm": "get_local_rank get_local_size",
    },
    "torchrec.distributed.types": {
        "sharding": f"{_PLAN} ComputeKernel=EmbeddingComputeKernel",
        "distributed": "Awaitable LazyAwaitable LazyNoWait ModuleSharder NoWait ShardedModule=ShardedCollection "
        "ShardingEnv ShardingStrategy",
        "comm": "CommOp QuantizedCommCodecs",
        "embedding": "DataType",
        **_SPECS,
    },
    "torchrec.distributed.embedding_types": {"sharding": "EmbeddingComputeKernel ShardingType"},
    "torchrec.distributed.embedding": {"distributed": "EmbeddingCollectionSharder ShardedEmbeddingCollection"},
    "torchrec.distributed.embeddingbag": {"distributed": "EmbeddingBagCollectionSharder ShardedEmbeddingBagCollection"},
    "torchrec.distributed.mc_embedding": {
        "distributed": "ManagedCollisionEmbeddingCollectionSharder ShardedManagedCollisionEmbeddingCollection",
    },
    "torchrec.distributed.mc_embeddingbag": {
        "distributed": "ManagedCollisionEmbeddingBagCollectionSharder ShardedManagedCollisionEmbeddingBagCollection",
    },
    "torchrec.distributed.fused_embeddingbag": {"distributed": "FusedEmbeddingBagCollectionSharder"},
    "torchrec.distributed.comm": {"comm": "get_local_rank get_local_size"},
    "torchrec.distributed.model_tracker": {"distributed": "ModelDeltaTracker TrackingMode"},
    "torchrec.distributed.model_tracker.model_delta_tracker": {
        "distributed": "ModelDeltaTracker ModelDeltaTrackerTrec=ModelDeltaTracker TrackingMode",
    },
    "torchrec.distributed.model_tracker.types": {"distributed": "TrackingMode"},
    "torchrec.distributed.shard": {"distributed": "shard shard_modules"},
    "torchrec.distributed.train_pipeline": {
        "train": f"{_PIPELINES} GradientAccumulationConfig GradientAccumulationWrapper",
    },
    "torchrec.distributed.train_pipeline.train_pipelines": {"train": f"{_PIPELINES} TrainPipelineSemiSync"},
    "torchrec.distributed.train_pipeline.gradient_accumulation": {
        "train": "GradientAccumulationConfig GradientAccumulationWrapper",
    },
    "torchrec.distributed.model_parallel": {
        "distributed": "DMPCollection DataParallelWrapper DefaultDataParallelWrapper DistributedModelParallel "
        "get_default_sharders"
    },
    "torchrec.distributed.sharding_plan": {
        "sharding": "apply_to_all ParameterShardingGenerator",
        "compat.sharding_plan": "column_wise construct_module_sharding_plan data_parallel grid_shard row_wise "
        "table_row_wise table_wise",
        "distributed": "get_default_sharders get_module_to_default_sharders",
    },
    "torchrec.distributed.fbgemm_qcomm_codec": {
        "comm": "CommType QCommsConfig get_qcomm_codecs get_qcomm_codecs_registry"
    },
    "torchrec.distributed.planner": {
        "compat.planner": "EmbeddingShardingPlanner",
        "sharding": "ParameterConstraints Topology",
    },
    "torchrec.distributed.planner.planners": {"compat.planner": "EmbeddingShardingPlanner"},
    "torchrec.distributed.planner.storage_reservations": {
        "planner": "FixedPercentageStorageReservation HeuristicalStorageReservation",
    },
    "torchrec.distributed.planner.types": {"sharding": "ParameterConstraints Topology PlannerError=PlanError"},
    # ---- optim ----
    "torchrec.optim": {
        "optim": f"{_STEPPING} {_KEYED} {_WARMUP} {_CLIPPING} FusedOptimizer FusedOptimizerModule RowWiseAdagrad "
        "apply_optimizer_in_backward",
    },
    "torchrec.optim.apply_optimizer_in_backward": {"optim": "apply_optimizer_in_backward"},
    "torchrec.optim.clipping": {"optim": _CLIPPING},
    "torchrec.optim.fused": {"optim": _FUSED},
    "torchrec.optim.keyed": {"optim": _KEYED},
    "torchrec.optim.optimizers": {"optim": f"{_STEPPING} in_backward_optimizer_filter"},
    "torchrec.optim.rowwise_adagrad": {"optim": "RowWiseAdagrad"},
    "torchrec.optim.warmup": {"optim": _WARMUP},
    # ---- models and data ----
    "torchrec.models": {},
    "torchrec.models.dlrm": {
        "models": "DLRM DLRMTrain DLRM_DCN DenseArch InteractionArch InteractionDCNArch OverArch SparseArch"
    },
    "torchrec.metrics": {},
    "torchrec.metrics.auc": {"train": "AUCMetric"},
    "torchrec.metrics.calibration": {"train": "CalibrationMetric"},
    "torchrec.metrics.ctr": {"train": "CTRMetric"},
    "torchrec.metrics.gauc": {"train": "GAUCMetric"},
    "torchrec.metrics.metric_module": {"train": "RecMetricModule generate_metric_module"},
    "torchrec.metrics.metrics_config": {
        "train.metrics": "DefaultMetricsConfig DefaultTaskInfo MetricsConfig RecMetricDef RecMetricEnum RecTaskInfo "
        "SessionMetricDef ThroughputDef",
    },
    "torchrec.metrics.ndcg": {"train": "NDCGMetric"},
    "torchrec.metrics.ne": {"train": "NEMetric"},
    "torchrec.metrics.rec_metric": {"train": "RecMetric"},
    "torchrec.metrics.recall_session": {"train": "RecallSessionMetric"},
    "torchrec.metrics.throughput": {"train": "ThroughputMetric"},
    "torchrec.models.deepfm": {
        "models.deepfm": "DenseArch FMInteractionArch OverArch SimpleDeepFMNN SparseArch",
    },
    "torchrec.datasets": {},
    "torchrec.datasets.criteo": {
        "data.criteo": "CAT_FEATURE_COUNT DAYS DEFAULT_CAT_NAMES DEFAULT_COLUMN_NAMES DEFAULT_INT_NAMES "
        "DEFAULT_LABEL_NAME INT_FEATURE_COUNT",
    },
    "torchrec.datasets.movielens": {
        "data.movielens_columns": "DEFAULT_MOVIES_COLUMN_NAMES DEFAULT_RATINGS_COLUMN_NAMES MOVIES_FILENAME "
        "RATINGS_FILENAME",
    },
    "torchrec.datasets.random": {"data": "RandomRecDataset"},
    "torchrec.datasets.utils": {"data": "Batch"},
}


def target_of(module: str, name: str) -> str | None:
    """The target of a name of TorchRec as ``module:name``; None if it is not served.

    >>> target_of("torchrec", "KeyedJaggedTensor")
    'recshard_lab.sparse:KeyedJaggedTensor'
    """
    return served_modules().get(module, {}).get(name)


@lru_cache(maxsize=1)
def served_modules() -> dict[str, dict[str, str]]:
    """Module -> name -> ``module:name``."""
    found: dict[str, dict[str, str]] = {}
    for module, rooms in SERVED.items():
        names = found.setdefault(module, {})
        for room, text in rooms.items():
            home = room if room.partition(".")[0] in ("torch", "typing") else f"recshard_lab.{room}"
            for entry in text.split():
                theirs, _, ours = entry.partition("=")
                names[theirs] = f"{home}:{ours or theirs}"
    return found
