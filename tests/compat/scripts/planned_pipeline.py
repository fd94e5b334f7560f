"""DLRM for TorchRec: the planner places its tables, and a pipeline overlaps the exchange of ids."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

ROWS = {"film": 60, "user": 40, "genre": 12}
DIM, DENSE = 8, 4


def spread(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.linspace(-0.4, 0.5, weight.shape[-1]).expand_as(weight))


def batches(rank: int, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(count):
        ids = [torch.randint(0, rows, (16,), generator=generator) for rows in ROWS.values()]
        lengths = torch.ones(16 * len(ROWS), dtype=torch.int64)
        yield Batch(
            dense_features=torch.rand(16, DENSE, generator=generator),
            sparse_features=KeyedJaggedTensor(keys=list(ROWS), values=torch.cat(ids), lengths=lengths),
            labels=torch.randint(0, 2, (16,), generator=generator).float(),
        )


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend="gloo")
    device = torch.device("cpu")
    tables = []
    for name, rows in ROWS.items():
        tables.append(EmbeddingBagConfig(rows, DIM, name=f"t_{name}", feature_names=[name], init_fn=spread))
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        dense_in_features=DENSE,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
        dense_device=device,
    )
    for parameter in dlrm.parameters():
        if not parameter.is_meta:
            spread(parameter)
    model = DLRMTrain(dlrm)
    apply_optimizer_in_backward(
        RowWiseAdagrad, dlrm.sparse_arch.embedding_bag_collection.parameters(), {"lr": 0.1, "eps": 1e-3}
    )
    sharders = [EmbeddingBagCollectionSharder()]
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=["table_wise"]) for name in ROWS}
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device="cpu"), constraints=constraints
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    )
    pipeline, source = TrainPipelineSparseDist(sharded, optimizer, device), batches(rank, 5)
    while True:
        try:
            loss, _, _ = pipeline.progress(source)
        except StopIteration:
            break
        print(f"rank {rank} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
