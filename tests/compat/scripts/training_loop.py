"""A plain training loop for TorchRec: a plan by hand, an optimizer in backward, and one for the dense layers."""

import argparse
import os

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES = ["film", "user"]


def spread(weight: torch.Tensor) -> None:
    """Initial weights that do not depend on the ranks: each row has the same numbers."""
    with torch.no_grad():
        weight.copy_(torch.linspace(-0.5, 0.5, weight.shape[-1]).expand_as(weight))


class Ranker(torch.nn.Module):
    def __init__(self, tables: torchrec.EmbeddingBagCollection, dim: int) -> None:
        super().__init__()
        self.tables = tables
        self.over = torch.nn.Sequential(torch.nn.Linear(len(FEATURES) * dim, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        for parameter in self.over.parameters():
            spread(parameter)

    def forward(self, kjt: torchrec.KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.tables(kjt).values()).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(f"cuda:{rank}" if torch.cuda.is_available() else "cpu")

    configs = [
        torchrec.EmbeddingBagConfig(
            name=f"t_{name}",
            num_embeddings=args.rows * (number + 1),
            embedding_dim=args.dim,
            feature_names=[name],
            init_fn=spread,
        )
        for number, name in enumerate(FEATURES)
    ]
    ebc = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.Adagrad, ebc.parameters(), {"lr": 0.1, "eps": 1e-3})
    schemes = {"t_film": row_wise(), "t_user": table_wise(rank=1)}
    plan = construct_module_sharding_plan(
        ebc, schemes, sharder=EmbeddingBagCollectionSharder(), world_size=2, local_size=2, device_type=device.type
    )
    model = DistributedModelParallel(Ranker(ebc, args.dim), device=device, plan=ShardingPlan({"tables": plan}))
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.SGD(parameters, lr=0.2))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])

    generator = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        lengths = torch.randint(0, 4, (len(FEATURES) * 16,), generator=generator)
        ids = torch.randint(0, args.rows, (int(lengths.sum()),), generator=generator)
        labels = torch.randint(0, 2, (16,), generator=generator).float().to(device)
        optimizer.zero_grad()
        logits = model(torchrec.KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths).to(device))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        print(f"rank {rank} loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
