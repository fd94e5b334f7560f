"""Costs of shards, and statistics of caches."""

from enum import Enum
from typing import Any

import torch
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import CacheParams
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.compat.parity.case import case
from tests.compat.parity.planner_models import bags, enumerated, limits, listed, sequences, sharders, store

S = "torchrec.distributed.planner.shard_estimators."
BOTH = (S + "EmbeddingPerfEstimator", S + "EmbeddingStorageEstimator")
SCHEMES = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")


try:  # the type of argument that each library takes
    from torchrec.distributed.types import PipelineType
except ImportError:

    class PipelineType(Enum):  # type: ignore[no-redef]
        NONE = "none"
        TRAIN_BASE = "train_base"
        TRAIN_SPARSE_DIST = "train_sparse_dist"
        TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


def costs(module: Any, scheme: str = "table_wise", kernel: str = "fused", topology: Any = None, **more: Any) -> Any:
    sharder = {key: more.pop(key) for key in ("qcomm_codecs_registry", "fused_params") if key in more}
    return listed(enumerated(module, limits(scheme, kernel, **more), topology, **sharder))


@case(*BOTH)
def costs_of_weighted_ids() -> Any:
    return [
        costs(bags((1001, 256), is_weighted=True)),
        costs(bags((1001, 256)), is_weighted=True),
        costs(sequences((100, 32)), is_weighted=True),
        costs(sequences((100, 32)), "row_wise", is_weighted=True),
        costs(bags((100, 32), is_weighted=True), "data_parallel", "dense"),
    ]


@case(*BOTH, "torchrec.distributed.types.CacheParams")
def costs_of_caches() -> Any:
    return [
        costs(
            bags((1001, 256)),
            scheme,
            "fused_uvm_caching",
            cache_params=CacheParams(load_factor=share, prefetch_pipeline=ahead),
        )
        for scheme in ("table_wise", "row_wise")
        for share, ahead in ((0.5, False), (0.5, True), (0.05, False))
    ]


@case(S + "EmbeddingStorageEstimator")
def optimizers_in_backward_need_storage() -> Any:
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, RowWiseAdagrad):
        for scheme, kernel in (
            ("row_wise", "fused_uvm_caching"),
            ("table_wise", "fused_uvm"),
            ("column_wise", "fused"),
        ):
            module = bags((101, 256))
            apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
            found.append([store(o.shards[0].storage) for o in enumerated(module, limits(scheme, kernel))])
    return found


@case(*BOTH)
def inference_has_no_backward_and_no_buffers() -> Any:
    topology = Topology(4, "cuda")
    estimators = [
        EmbeddingPerfEstimator(topology=topology, constraints=None, is_inference=True),
        EmbeddingStorageEstimator(topology=topology, constraints=None, is_inference=True),
    ]
    made = EmbeddingEnumerator(topology, 64, limits("row_wise", "fused"), estimators)
    return listed(made.enumerate(bags((99, 64)), sharders()))
