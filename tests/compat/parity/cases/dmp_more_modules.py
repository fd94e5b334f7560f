"""Feature processors whose positions are computed before the forward; caches of plans."""

from typing import Any

import torch
from torchrec.distributed.types import CacheParams, CacheStatistics, ParameterSharding
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.compat.parity.case import case, raised

CACHE = "torchrec.distributed.types.CacheParams"


def bags() -> JaggedTensor:
    return JaggedTensor(torch.tensor([7, 3, 9, 1]), lengths=torch.tensor([3, 0, 1]), weights=torch.zeros(4))


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["f", "g"], torch.tensor([7, 3, 9, 1, 2]), torch.zeros(5), lengths=torch.tensor([2, 1, 0, 2])
    )


class Known(CacheStatistics):
    expected_lookups = 3.0
    cacheability = 0.5

    def expected_miss_rate(self, clf: float) -> float:
        return 1 - clf


@case(CACHE, "torchrec.distributed.types.CacheStatistics")
def a_cache_with_statistics() -> Any:
    params = CacheParams(load_factor=0.25, prefetch_pipeline=True, stats=Known())
    entry = ParameterSharding("row_wise", "fused_uvm_caching", [0], cache_params=params)
    assert entry.cache_params is not None
    return [
        params.load_factor,
        params.prefetch_pipeline,
        params.stats.expected_miss_rate(0.25),
        entry.cache_params.load_factor,
        entry.cache_params.stats.cacheability,
        hash(params) == hash(CacheParams(load_factor=0.25, prefetch_pipeline=True)),
        params == CacheParams(load_factor=0.5),
    ]


@case(CACHE)
def fields_of_a_cache_are_assigned() -> Any:
    params, statistics = CacheParams(load_factor=0.25), Known()
    params.load_factor, params.prefetch_pipeline, params.stats = 0.5, True, statistics
    params.reserved_memory = None
    same = CacheParams(load_factor=0.5, prefetch_pipeline=True, stats=statistics)
    return [params.load_factor, params.reserved_memory, params == same, hash(params) == hash(same)]


@case(CACHE, differs="refused by name: caches here have no such settings; they are settings of fbgemm's kernels")
def settings_of_fbgemm_caches() -> Any:
    return [
        raised(lambda name=name, value=value: CacheParams(**{name: value}))
        for name, value in {"reserved_memory": 0.5, "multipass_prefetch_config": object()}.items()
    ]
