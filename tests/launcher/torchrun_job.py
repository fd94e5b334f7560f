"""One script for torchrun, plain python and launched ranks: trains a small sharded model, gives its weights."""

from __future__ import annotations

import sys

import torch

import recshard_lab as rs
from recshard_lab.launcher import Place, join

TABLES = [
    rs.EmbeddingBagConfig(name="movies", num_embeddings=23, embedding_dim=8, feature_names=["movie"]),
    rs.EmbeddingBagConfig(name="users", num_embeddings=11, embedding_dim=8, feature_names=["user"]),
]
SCHEMES = {"movies": rs.row_wise(), "users": rs.table_wise(rank=1)}
BATCH = 6  # a rank


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = rs.EmbeddingBagCollection(TABLES)
        self.top = torch.nn.Linear(16, 1)

    def forward(self, features: rs.KeyedJaggedTensor) -> torch.Tensor:
        return self.top(self.bags(features).values())


def batch(place: Place, step: int) -> rs.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1000 * step + place.rank)
    lengths = torch.full((2 * BATCH,), 2)
    ids = [torch.randint(0, table.num_embeddings, (2 * BATCH,), generator=generator) for table in TABLES]
    return rs.KeyedJaggedTensor.from_lengths_sync(["movie", "user"], torch.cat(ids), lengths)


def main() -> tuple[tuple[int, int, int, int, int], dict[str, torch.Tensor]]:
    """(rank, world size, local rank, ranks a node, node) and the whole model's weights after three steps."""
    with join() as place:
        torch.manual_seed(0)
        model = Model()
        plan = rs.sharding.construct_module_sharding_plan(
            model.bags, SCHEMES, local_size=place.local_world_size, world_size=place.world_size, device_type="cpu"
        )
        sharded = rs.DistributedModelParallel(model, plan=rs.ShardingPlan({"bags": plan}))
        dense = torch.optim.SGD(sharded.dense_parameters(), lr=0.1)
        for step in range(3):
            dense.zero_grad()
            sharded(batch(place, step)).square().mean().backward()
            dense.step()
        where = (place.rank, place.world_size, place.local_rank, place.local_world_size, place.node)
        return where, sharded.full_state_dict()


if __name__ == "__main__":
    found = main()
    torch.save(found, f"{sys.argv[1]}/{found[0][0]}.pt")
