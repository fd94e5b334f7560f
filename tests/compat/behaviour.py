"""What TorchRec's users rely on, observed: runs under TorchRec, and under its names served by this library.

``python behaviour.py torchrec`` or ``python behaviour.py recshard_lab`` prints one JSON object.
"""

import json
import os
import sys
import tempfile
from typing import Any

if __name__ == "__main__" and sys.argv[1] == "recshard_lab":
    from recshard_lab.compat import install

    install(shadow=True)

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

RANKS, LOCAL = 4, 2


def collection(device: str = "cpu") -> Any:
    tables = [
        torchrec.EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=128, feature_names=[name])
        for name in "abcd"
    ]
    return torchrec.EmbeddingBagCollection(tables=tables, device=torch.device(device))


def plan_of(module: Any, device_type: str | None = "cpu", **kernel: str) -> Any:
    generators = {
        "a": row_wise(**kernel),
        "b": table_wise(rank=3),
        "c": column_wise(ranks=[0, 1]),
        "d": data_parallel(),
    }
    return construct_module_sharding_plan(
        module, generators, local_size=LOCAL, world_size=RANKS, device_type=device_type
    )


def kernels() -> dict[str, Any]:
    """Kernels of a plan whose generators name none, without and with an optimizer in backward, and with one named."""
    stepped = collection("meta")
    apply_optimizer_in_backward(torch.optim.SGD, [stepped.embedding_bags["a"].weight], {"lr": 0.1})
    return {
        "plain": {name: entry.compute_kernel for name, entry in plan_of(collection("meta")).items()},
        "in backward": {name: entry.compute_kernel for name, entry in plan_of(stepped).items()},
        "named": plan_of(collection("meta"), compute_kernel="fused")["a"].compute_kernel,
    }


def placements(device_type: str) -> dict[str, Any]:
    """Where each table's shards are placed."""
    plan = plan_of(collection("meta"), device_type)
    return {
        name: None if entry.sharding_spec is None else [str(shard.placement) for shard in entry.sharding_spec.shards]
        for name, entry in plan.items()
    }


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.over = collection(), nn.Linear(4 * 128, 1)


def unwrapped() -> dict[str, Any]:
    """`dmp.module` of a model on one rank of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        model = Model()
        dmp = DistributedModelParallel(model, device=torch.device("cpu"))
        same = {"module is the model": dmp.module is model, "its layer": type(dmp.module.over).__name__}
        dist.destroy_process_group()
    return same


def optimizer_of(layer: nn.Module) -> Any:
    return KeyedOptimizerWrapper(dict(layer.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


def gradients() -> dict[str, Any]:
    """Gradients after `init_state`, and after `zero_grad` with its default."""
    layer = nn.Linear(2, 1)
    optimizer = optimizer_of(layer)
    optimizer.init_state()
    found: dict[str, Any] = {"after init_state": [parameter.grad.tolist() for parameter in layer.parameters()]}
    found["states"] = sorted(optimizer.state_dict()["state"])
    combined = CombinedOptimizer([("dense", optimizer)])
    layer(torch.ones(1, 2)).sum().backward()
    combined.zero_grad()
    found["after zero_grad"] = [parameter.grad for parameter in layer.parameters()]
    return found


def positions() -> dict[str, Any]:
    """Arguments by position."""
    topology = Topology(RANKS, "cuda", 1 << 34, 1 << 36)
    limits = ParameterConstraints(["row_wise"], ["fused"], None, [2.0], [1.0], [64], False, None)
    parts = (None,) * 6  # enumerator to stats
    planner = EmbeddingShardingPlanner(topology, 64, *parts, dict.fromkeys("abcd", limits), False)
    module = collection("meta")
    sharder = torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder()
    plan = planner.plan(module, [sharder])
    return {name: [entry.sharding_type, entry.compute_kernel] for name, entry in plan.plan[""].items()}


def observed() -> dict[str, Any]:
    return {
        "kernels": kernels(),
        "on cpu": placements("cpu"),
        "on cuda": placements("cuda"),
        "unwrapped": unwrapped(),
        "gradients": gradients(),
        "positions": positions(),
    }


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    torch.set_num_threads(1)
    print("OBSERVED " + json.dumps(observed()))
