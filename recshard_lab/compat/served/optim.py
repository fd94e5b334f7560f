"""``torchrec.optim``."""

_KEYED = "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper"
_WARMUP = "WarmupOptimizer WarmupPolicy WarmupStage"
_CLIPPING = "GradientClipping GradientClippingOptimizer"
_FUSED = "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule"
_STEPPING = "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD"

SERVED: dict[str, dict[str, str]] = {
    "torchrec.optim": {
        "optim": f"{_STEPPING} {_KEYED} {_WARMUP} {_CLIPPING} FusedOptimizer FusedOptimizerModule RowWiseAdagrad "
        "apply_optimizer_in_backward",
    },
    "torchrec.optim.apply_optimizer_in_backward": {"optim": "apply_optimizer_in_backward"},
    "torchrec.optim.clipping": {"optim": _CLIPPING},
    "torchrec.optim.fused": {"optim": _FUSED},
    "torchrec.optim.keyed": {"optim": _KEYED},
    "torchrec.optim.optimizers": {"optim": f"{_STEPPING} in_backward_optimizer_filter"},
    "torchrec.optim.rowwise_adagrad": {"optim": "RowWiseAdagrad", "compat.optim.rowwise_adagrad": "adagrad"},
    "torchrec.optim.warmup": {"optim": _WARMUP},
}
