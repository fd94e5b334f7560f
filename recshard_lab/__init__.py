"""Learn, explore and decide embedding sharding.

Each public name is imported from its room on first use. ``import recshard_lab`` imports no other package, not even
torch, and a rank never loads a widget.

>>> import recshard_lab
>>> "KeyedJaggedTensor" in dir(recshard_lab)
True
"""

import os as _os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__version__ = "0.2.0"

_ROOM_OF = {
    # sparse
    "JaggedTensor": "sparse",
    "KeyedJaggedTensor": "sparse",
    "KeyedTensor": "sparse",
    "validate_keyed_jagged_tensor": "sparse",
    # embedding
    "DataType": "embedding",
    "DynamicEmbeddingBagCollection": "embedding",
    "DynamicEmbeddingCollection": "embedding",
    "DynamicEmbeddingConfig": "embedding",
    "EmbOptimType": "embedding",
    "EmbeddingBagCollection": "embedding",
    "EmbeddingBagConfig": "embedding",
    "EmbeddingCollection": "embedding",
    "EmbeddingConfig": "embedding",
    "EmulatedCost": "embedding",
    "FusedEmbeddingBagCollection": "embedding",
    "FusedEmbeddingCollection": "embedding",
    "HashZchManagedCollisionModule": "embedding",
    "KTRegroupAsDict": "embedding",
    "MCHManagedCollisionModule": "embedding",
    "ManagedCollisionCollection": "embedding",
    "ManagedCollisionEmbeddingBagCollection": "embedding",
    "ManagedCollisionEmbeddingCollection": "embedding",
    "PoolingType": "embedding",
    "QuantEmbeddingBagCollection": "embedding",
    "QuantEmbeddingCollection": "embedding",
    "QuantizationReport": "embedding",
    "RowWiseAdagrad": "embedding",
    "Tier": "embedding",
    "VocabularyEmbeddingBagCollection": "embedding",
    "VocabularyEmbeddingCollection": "embedding",
    "WeightDecayMode": "embedding",
    "apply_optimizer_in_backward": "embedding",
    "export_static": "embedding",
    "fuse_embedding_optimizer": "embedding",
    "quantization_report": "embedding",
    "quantize_embeddings": "embedding",
    # optim
    "CombinedOptimizer": "optim",
    "GradientClipping": "optim",
    "GradientClippingOptimizer": "optim",
    "KeyedOptimizer": "optim",
    "KeyedOptimizerWrapper": "optim",
    "LAMB": "optim",
    "LarsSGD": "optim",
    "PartialRowWiseAdam": "optim",
    "PartialRowWiseLAMB": "optim",
    "WarmupOptimizer": "optim",
    "WarmupPolicy": "optim",
    "WarmupStage": "optim",
    # models
    "DLRM": "models",
    "DLRM_DCN": "models",
    "DeepFMNN": "models",
    "FeatureProcessedEmbeddingBagCollection": "models",
    "PositionWeightedModule": "models",
    "TwoTower": "models",
    "TwoTowerTrainTask": "models",
    "build_model": "models",
    "SimpleDeepFMNN": "models",
    # data
    "BatchLoader": "data",
    "ChurningClicks": "data",
    "CriteoClicks": "data",
    "MovieLens": "data",
    "MultiHot": "data",
    "SyntheticClicks": "data",
    "SyntheticRatings": "data",
    "build_dataset": "data",
    "preprocess_criteo": "data",
    # sharding
    "CacheParams": "sharding",
    "EmbeddingComputeKernel": "sharding",
    "EmbeddingModuleShardingPlan": "sharding",
    "ParameterConstraints": "sharding",
    "ParameterSharding": "sharding",
    "PlanError": "sharding",
    "RowShares": "sharding",
    "Shard": "sharding",
    "ShardingPlan": "sharding",
    "ShardingType": "sharding",
    "Topology": "sharding",
    "apply_to_all": "sharding",
    "column_wise": "sharding",
    "construct_module_sharding_plan": "sharding",
    "data_parallel": "sharding",
    "flex_shard": "sharding",
    "grid_shard": "sharding",
    "row_wise": "sharding",
    "table_column_wise": "sharding",
    "table_row_wise": "sharding",
    "table_wise": "sharding",
    "preset_table": "sharding",
    "tiling": "sharding",
    # planner
    "AccessProfile": "planner",
    "EmbeddingShardingPlanner": "planner",
    "Estimate": "planner",
    "compare_servers": "planner",
    "Workload": "planner",
    "Sweep": "planner",
    "estimate": "planner",
    "mlperf_dlrm_dcnv2_tables": "planner",
    "mlperf_dlrm_dcnv2_workload": "planner",
    "mlperf_example": "planner",
    "plan": "planner",
    "read_constraints": "planner",
    "read_source": "sources",
    "read_tables": "planner",
    "sweep": "planner",
    "tier_shares": "planner",
    # comm
    "CommType": "comm",
    "QCommsConfig": "comm",
    "codec_error": "comm",
    "get_qcomm_codecs_registry": "comm",
    # distributed
    "DMPCollection": "distributed",
    "DefaultDataParallelWrapper": "distributed",
    "DistributedModelParallel": "distributed",
    "EmbeddingBagCollectionSharder": "distributed",
    "EmbeddingCollectionSharder": "distributed",
    "ShardingEnv": "distributed",
    "CheckpointError": "distributed.state.checkpoint",
    "CheckpointSaveError": "distributed.state.checkpoint",
    "async_save_checkpoint": "distributed.state.checkpoint",
    "load_checkpoint": "distributed.state.checkpoint",
    "load_pretrained": "distributed.state.pretrained",
    "save_checkpoint": "distributed.state.checkpoint",
    # train.job
    "TrainConfig": "train.job",
    "export_run": "train.job",
    "read_config": "train.job",
    "run_training": "train.job",
    # calibration
    "Calibration": "calibration",
    "DeviceProfile": "sharding.hardware.device_profile",
    "calibrate": "calibration",
    # serving
    "shard_for_inference": "serving.inference",
    # launcher
    "LaunchError": "launcher",
    "RankError": "launcher",
    "Ranks": "launcher",
    "launch": "launcher",
    # lab
    "PlanCompare": "lab",
    "compare_plans": "lab",
    "export": "lab",
}

if "RECSHARD_TORCHREC" in _os.environ:  # the process that started this one serves TorchRec's names
    import_module("recshard_lab.compat.torchrec").install_as_parent()

__all__ = ["__version__", "load_ipython_extension", "unload_ipython_extension", *_ROOM_OF]


def __getattr__(name: str) -> Any:
    room = _ROOM_OF.get(name)
    if room is None:
        raise AttributeError(f"module 'recshard_lab' has no attribute {name!r}")
    value = getattr(import_module(f"recshard_lab.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """``%load_ext recshard_lab``: registers the magics and starts warming the ranks' forkserver."""
    from recshard_lab.lab.magics import load

    load(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """``%unload_ext recshard_lab``: stops the ranks and takes the magics away."""
    from recshard_lab.lab.magics import unload

    unload(shell)
