"""Zero-collision hashing: modules, scores of eviction, ids of training ranks."""

from time import time
from typing import Any

import torch
from torchrec import JaggedTensor
from torchrec.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    HashZchOptEvictionModule,
    HashZchSingleTtlScorer,
    HashZchThresholdEvictionModule,
    get_eviction_module,
)
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule, TrainInputMapper

from tests.compat.parity.case import case, raised

V = "torchrec.modules.hash_mc_evictions"
Z = "torchrec.modules.hash_mc_modules"
CPU = torch.device("cpu")
SINGLE = HashZchEvictionConfig(features=["a", "b"], single_ttl=24)
PER_FEATURE = HashZchEvictionConfig(features=["a", "b"], per_feature_ttl=[10, 20])
TTL, BY_FEATURE, LRU = (
    HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
    HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION,
    HashZchEvictionPolicyName.LRU_EVICTION,
)
IDS = JaggedTensor(torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 2]))
COUNTED = JaggedTensor(torch.tensor([5, 6]), lengths=torch.tensor([1, 1]), weights=torch.tensor([1, 1]))


def module(rows: int = 8, **more: Any) -> Any:
    return HashZchManagedCollisionModule(zch_size=rows, device=CPU, total_num_buckets=1, **more)


def relative(scores: Any, threshold: int) -> Any:
    """Scores after the threshold, and whether that is the current hour."""
    return scores - threshold, abs(threshold - time() / 3600) < 2


@case(f"{V}.HashZchSingleTtlScorer", f"{V}.HashZchEvictionConfig")
def one_time_for_all_ids() -> Any:
    scorer = HashZchSingleTtlScorer(SINGLE)
    missing = HashZchSingleTtlScorer(HashZchEvictionConfig(features=["a"]))
    return [
        relative(scorer.gen_score(IDS, CPU), scorer.gen_threshold()),
        raised(lambda: missing.gen_score(IDS, CPU)),
    ]


@case(f"{V}.HashZchThresholdEvictionModule", f"{V}.HashZchOptEvictionModule", f"{V}.get_eviction_module")
def modules_of_policies() -> Any:
    return [
        relative(*HashZchThresholdEvictionModule(TTL, SINGLE)(IDS, CPU)),
        HashZchOptEvictionModule(LRU)(IDS, CPU),
        type(get_eviction_module(TTL, SINGLE)),
        relative(*get_eviction_module(BY_FEATURE, PER_FEATURE)(COUNTED, CPU)),
        raised(lambda: get_eviction_module(TTL, None)),
    ]


@case(f"{Z}.TrainInputMapper")
def ranks_of_ids() -> Any:
    ids = torch.tensor([0, 1, 2, 3, 4, 5, 26, 50, 99])
    found = []
    for size in (0, 100):
        for inside in (False, True):
            mapper = TrainInputMapper(
                input_hash_size=size,
                total_num_buckets=2,
                size_per_rank=torch.tensor([10, 20]),
                train_rank_offsets=torch.tensor([0, 10]),
                inference_dispatch_div_train_world_size=inside,
                name="t",
            )
            found += [mapper(ids), mapper(ids, torch.tensor([10]))]
    return found


@case(f"{Z}.HashZchManagedCollisionModule")
def facts_of_a_hash_module() -> Any:
    own = module()
    return {
        "output": own.output_size(),
        "buckets": own.buckets(),
        "probe": own.max_probe,
        "fallback": own.disable_fallback,
        "device": own.device,
        "evicted": own.evict() is None,
        "not equal": raised(lambda: HashZchManagedCollisionModule(zch_size=7, device=CPU, total_num_buckets=2))
        != "nothing",
    }
