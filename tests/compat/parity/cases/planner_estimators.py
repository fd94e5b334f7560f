"""Costs of shards, and statistics of caches."""

from enum import Enum
from typing import Any

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingOffloadStats,
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    calculate_pipeline_io_cost,
    calculate_shard_storages,
)
from torchrec.distributed.planner.types import SharderData, Topology
from torchrec.distributed.planner.utils import build_sharder_data
from torchrec.distributed.types import CacheParams
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.types import DataType

from tests.compat.parity.case import case, raised
from tests.compat.parity.planner_models import bags, enumerated, limits, listed, perf, sequences, sharders, store

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
def costs_of_pooling_factors_and_batches() -> Any:
    module = bags((1001, 256), features=2)
    return [
        costs(module, scheme, pooling_factors=[2.0, 3.0], num_poolings=[2.0, 1.0], batch_sizes=[10, 20])
        for scheme in SCHEMES
    ] + [costs(sequences((101, 32)), "row_wise", pooling_factors=[7.5])]


@case(*BOTH)
def costs_of_weighted_ids() -> Any:
    return [
        costs(bags((1001, 256), is_weighted=True)),
        costs(bags((1001, 256)), is_weighted=True),
        costs(sequences((100, 32)), is_weighted=True),
        costs(sequences((100, 32)), "row_wise", is_weighted=True),
        costs(bags((100, 32), is_weighted=True), "data_parallel", "dense"),
    ]


@case(*BOTH)
def costs_of_several_nodes() -> Any:
    topologies = Topology(8, "cuda", local_world_size=2), Topology(8, "cuda"), Topology(6, "cuda", local_world_size=3)
    return [costs(bags((999, 256)), scheme, topology=topology) for topology in topologies for scheme in SCHEMES[1:]]


@case(*BOTH)
def costs_of_replicas() -> Any:
    topologies = Topology(1, "cuda"), Topology(4, "cuda"), Topology(4, "cuda", local_world_size=2), Topology(4, "cpu")
    return [costs(bags((999, 64)), "data_parallel", "dense", topology) for topology in topologies]


@case(*BOTH)
def factors_of_the_topology_scale_backward() -> Any:
    topology = Topology(
        4,
        "cuda",
        bwd_compute_multiplier=5,
        weighted_feature_bwd_compute_multiplier=7,
        uneven_sharding_perf_multiplier=2.0,
    )
    return [costs(bags((1001, 256), is_weighted=flag), topology=topology) for flag in (False, True)]


@case(*BOTH)
def bandwidths_of_the_topology_scale_costs() -> Any:
    topology = Topology(4, "cuda", 1, 2, 3, 2, None, 1e6, 1e5, 1e3, 1e4, 2e5, 1e5)
    return [
        costs(bags((999, 128)), scheme, kernel, topology)
        for scheme in ("table_wise", "table_row_wise")
        for kernel in ("fused", "fused_uvm", "fused_uvm_caching")
    ]


@case(*BOTH)
def costs_of_number_formats() -> Any:
    halves = bags((1001, 256))
    for table in halves.embedding_bag_configs():
        table.data_type = DataType.FP16
    half = type(halves)(tables=halves.embedding_bag_configs(), device=torch.device("meta"))
    return [costs(half, scheme) for scheme in ("table_wise", "row_wise")]


@case(*BOTH)
def costs_of_coded_messages() -> Any:
    found = []
    for formats in ((CommType.FP16, CommType.BF16), (CommType.FP16, CommType.FP32)):
        registry = get_qcomm_codecs_registry(QCommsConfig(*formats))
        found += [costs(bags((1001, 256)), scheme, qcomm_codecs_registry=registry) for scheme in SCHEMES[:2]]
    return found


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


@case(*BOTH, S + "EmbeddingOffloadStats")
def costs_of_prefetches() -> Any:
    stats = EmbeddingOffloadStats(0.3, 1000, torch.tensor([5.0, 3.0, 2.0, 0.0]), 1001)
    cache = CacheParams(load_factor=0.5, stats=stats)
    return [
        costs(bags((1001, 256)), scheme, "fused_uvm_caching", cache_params=cache)
        for scheme in ("table_wise", "row_wise", "column_wise")
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


@case(S + "EmbeddingStorageEstimator")
def pipelines_keep_several_batches() -> Any:
    topology, found = Topology(4, "cuda"), []
    for pipeline in ("NONE", "TRAIN_BASE", "TRAIN_SPARSE_DIST", "TRAIN_PREFETCH_SPARSE_DIST"):
        for kernel in ("fused", "fused_uvm_caching"):
            for peak in (False, True):
                estimator = EmbeddingStorageEstimator(
                    topology, None, getattr(PipelineType, pipeline), run_embedding_at_peak_memory=peak
                )
                made = EmbeddingEnumerator(topology, 64, limits("table_wise", kernel), estimator)
                found.append(
                    [pipeline, kernel, peak, store(made.enumerate(bags((99, 64)), sharders())[0].shards[0].storage)]
                )
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


@case(S + "calculate_pipeline_io_cost")
def buffers_of_pipelines() -> Any:
    kinds = ("NONE", "TRAIN_BASE", "TRAIN_SPARSE_DIST", "TRAIN_PREFETCH_SPARSE_DIST")
    return [
        [
            name,
            passes,
            peak,
            inference,
            calculate_pipeline_io_cost(101, 10_001, 1_000_003, getattr(PipelineType, name), passes, peak, inference),
        ]
        for name in kinds
        for passes in (None, 1, 3)
        for peak in (False, True)
        for inference in (False, True)
    ]


@case(S + "calculate_shard_storages")
def storages_of_given_shards() -> Any:
    data = SharderData(
        fused_params={}, qcomm_dtype_sizes={}, storage_usage_type=build_sharder_data(sharders()[0]).storage_usage_type
    )
    tensor, found = torch.empty(101, 64, device="meta"), []
    for scheme, kernel, sizes in (
        ("row_wise", "fused", [[51, 64], [50, 64]]),
        ("column_wise", "fused_uvm_caching", [[101, 32], [101, 32]]),
        ("table_wise", "fused_uvm", [[101, 64]]),
        ("data_parallel", "dense", [[101, 64], [101, 64]]),
    ):
        for pooled in (True, False):
            storages = calculate_shard_storages(
                data, scheme, tensor, "cuda", kernel, sizes, [8, 9], 2, 2, [2.0, 3.0], [1.0, 2.0], 0.3, pooled, 8.0, 4.0
            )
            found.append([scheme, pooled, [store(storage) for storage in storages]])
    return found


@case(S + "EmbeddingOffloadStats", "torchrec.distributed.types.CacheStatistics")
def miss_rates_of_caches() -> Any:
    stats = EmbeddingOffloadStats(
        cacheability=0.3, expected_lookups=1000, mrc_hist_counts=torch.tensor([5.0, 3.0, 2.0, 0.0]), height=1001
    )
    rates = [stats.expected_miss_rate(share) for share in (0.0, 0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 1.0)]
    bins = torch.tensor([0.0, 10.0, 20.0, 30.0])
    sizes = torch.tensor([0, 5, 10, 15, 20, 30])
    several = EmbeddingOffloadStats.estimate_cache_miss_rate(sizes, torch.tensor([2.0, 1.0, 1.0]), bins)
    refused = raised(lambda: EmbeddingOffloadStats(0.1, 1, torch.ones(2, 2), 9))
    return rates, [float(rate) for rate in several], stats.cacheability, stats.expected_lookups, refused


@case(S + "EmbeddingPerfEstimator")
def estimates_of_one_option() -> Any:
    topology = Topology(2, "cuda")
    one = enumerated(bags((99, 64)), limits("table_wise", "fused"), topology)[0]
    one.shards[0].perf = None
    EmbeddingPerfEstimator(topology, {}).estimate([one], {one.module_type_key: build_sharder_data(sharders()[0])})
    return perf(one.shards[0].perf)
