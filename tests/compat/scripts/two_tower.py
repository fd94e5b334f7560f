"""Retrieval for TorchRec: two towers, in-batch negatives, and the sharder's fused optimizer."""

import os

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.mlp import MLP
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

ROWS, DIM, BATCH = 50, 16, 8


def spread(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.copy_(torch.sin(torch.arange(weight.numel()) * 0.7).view_as(weight) / 3)


class TwoTower(nn.Module):
    def __init__(self, tables: torchrec.EmbeddingBagCollection, layers: list[int]) -> None:
        super().__init__()
        self.tables = tables
        self.query, self.candidate = MLP(in_size=DIM, layer_sizes=layers), MLP(in_size=DIM, layer_sizes=layers)
        for tower in (self.query, self.candidate):
            for parameter in tower.parameters():
                spread(parameter)

    def forward(self, kjt: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.tables(kjt)
        scores = self.query(pooled["user"]) @ self.candidate(pooled["film"]).T
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def table(name: str, rows: int = ROWS) -> torchrec.EmbeddingBagConfig:
    return torchrec.EmbeddingBagConfig(
        name=f"t_{name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name], init_fn=spread
    )


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    tables = torchrec.EmbeddingBagCollection(tables=[table("user"), table("film", 2 * ROWS)], device="meta")
    model = TwoTower(tables, [16, 8])
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-3}
    sharders = [EmbeddingBagCollectionSharder(fused_params=fused)]
    limits = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints={"t_user": limits, "t_film": limits},
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.002))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(5):
        ids = torch.randint(0, ROWS, (2 * BATCH,), generator=generator)
        kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(
            keys=["user", "film"], values=ids, lengths=torch.ones(2 * BATCH, dtype=torch.int64)
        )
        optimizer.zero_grad()
        loss = sharded(kjt.to(device))
        loss.backward()
        optimizer.step()
        print(f"rank {rank} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
