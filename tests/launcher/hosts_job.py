"""A script for ranks on several hosts: trains a small sharded model, and writes what it saw after each step.

torchrun ... --module tests.launcher.hosts_job FOLDER STEPS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import time
from typing import Any

import psutil
import torch

import recshard_lab as rs
from recshard_lab.launcher import Place, join

LEARNING_RATE = 0.1
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


def entries(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The lines that a rank has written so far."""
    file = folder / f"{rank}.jsonl"
    return [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()] if file.exists() else []


def unsharded(steps: int, world_size: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Each rank's loss in each step, and the weights at the end, of a model that one process trains."""
    model = fresh_model()
    dense = torch.optim.SGD(model.top.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        places = [Place(rank, world_size, 0, 1, rank, torch.device("cpu")) for rank in range(world_size)]
        parts = [model(batch(place, step)).square().mean() for place in places]
        dense.zero_grad()
        torch.stack(parts).mean().backward()
        dense.step()
        losses.append([part.item() for part in parts])
    return losses, model.state_dict()


def fresh_model() -> Model:
    """The model before its first step. Its tables take their optimizer along, sharded or not."""
    torch.manual_seed(0)
    model = Model()
    rs.optim.apply_optimizer_in_backward(torch.optim.SGD, model.bags.parameters(), {"lr": LEARNING_RATE})
    return model


def main(folder: Path, steps: int) -> None:
    """Writes ``<rank>.jsonl``, a line a step, and ``<rank>.pt`` with the whole model's weights."""
    with join() as place, (folder / f"{place.rank}.jsonl").open("w", buffering=1) as log:

        def write(**entry: Any) -> None:
            print(json.dumps({"time": time(), **entry}), file=log)

        model = fresh_model()
        plan = rs.sharding.construct_module_sharding_plan(
            model.bags, SCHEMES, local_size=place.local_world_size, world_size=place.world_size, device_type="cpu"
        )
        sharded = rs.DistributedModelParallel(model, plan=rs.ShardingPlan({"bags": plan}))
        dense = torch.optim.SGD(sharded.dense_parameters(), lr=LEARNING_RATE)
        interfaces = {name: os.environ.get(name, "") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        listening = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        write(node=place.node, local_rank=place.local_rank, pid=os.getpid(), listening=listening, **interfaces)
        try:
            for step in range(steps):
                dense.zero_grad()
                loss = sharded(batch(place, step)).square().mean()
                loss.backward()
                dense.step()
                write(step=step, loss=loss.item())
        except BaseException as error:
            write(error=f"{type(error).__name__}: {error}")
            raise
        torch.save(sharded.full_state_dict(), folder / f"{place.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
