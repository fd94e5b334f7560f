"""What TorchRec's managed collision modules do with planted ids. Runs under TorchRec, and under its names here.

python peer_facts.py > peer_facts.json
"""

import json
import sys
from typing import Any

import torch

ROWS, STEPS, IDS = 12, 24, 9


def batches(seed: int) -> list[torch.Tensor]:
    """Skewed ids whose range moves on."""
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(IDS, generator=rng).abs() * 6).long() * 1009 + 5 + step // 6 for step in range(STEPS)]


def policies(modules: Any) -> dict[str, Any]:
    often = modules.average_threshold_filter
    return {
        "lfu": modules.LFU_EvictionPolicy(),
        "lru": modules.LRU_EvictionPolicy(decay_exponent=1.0),
        "distance lfu": modules.DistanceLFU_EvictionPolicy(decay_exponent=2.0),
        "lfu of frequent ids": modules.LFU_EvictionPolicy(threshold_filtering_func=often),
        "distance lfu of frequent ids": modules.DistanceLFU_EvictionPolicy(threshold_filtering_func=often),
    }


def facts() -> dict[str, Any]:
    """For each policy and interval: the ids of each step that have a row, whether their rows differ, and open slots."""
    from torchrec.modules import mc_modules
    from torchrec.sparse.jagged_tensor import JaggedTensor

    found: dict[str, Any] = {}
    for interval in (1, 2, 3):
        for name, policy in policies(mc_modules).items():
            module = mc_modules.MCHManagedCollisionModule(
                zch_size=ROWS, device=torch.device("cpu"), eviction_policy=policy, eviction_interval=interval
            )
            steps = []
            for ids in batches(interval):
                lengths = torch.ones(len(ids), dtype=torch.int64)
                rows = module({"t": JaggedTensor(values=ids, lengths=lengths)})["t"].values()
                row_of = {int(one): int(row) for one, row in zip(ids, rows, strict=True) if row != ROWS - 1}
                reset = module.evict()
                steps.append(
                    {
                        "hits": sorted(row_of),
                        "apart": len(set(row_of.values())) == len(row_of),
                        "reset": 0 if reset is None else len(reset),
                        "open": int(module.open_slots()),
                    }
                )
            found[f"{name}, every {interval}"] = steps
    return found


if __name__ == "__main__":
    json.dump(facts(), sys.stdout, indent=None, separators=(",", ":"))
