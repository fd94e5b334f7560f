"""Trackers of the rows that a model looks up: modes, consumers, compaction, ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.model_tracker.types import DeltaTrackerConfig
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, on_ranks, raised

T = "torchrec.distributed.model_tracker"
SHAPES = {"movies": (8, 8, ["seen", "liked"]), "users": (6, 4, ["user"])}


class Model(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Linear(4, 1)

    def forward(self, features: Any) -> Any:
        return self.tables(features)


def built(sequence: bool = False, optimizer: Any = torch.optim.SGD, schemes: Any = None) -> Any:
    """A sharded model of two tables; row r of a table begins as r in all columns."""
    config, name = (EmbeddingConfig, "embeddings") if sequence else (EmbeddingBagConfig, "embedding_bags")
    shapes = {key: (rows, 4 if sequence else columns, features) for key, (rows, columns, features) in SHAPES.items()}
    configs = [
        config(name=key, num_embeddings=rows, embedding_dim=columns, feature_names=features)
        for key, (rows, columns, features) in shapes.items()
    ]
    tables: Any = (EmbeddingCollection if sequence else EmbeddingBagCollection)(tables=configs)
    for key, (rows, columns, _) in shapes.items():
        with torch.no_grad():
            getattr(tables, name)[key].weight.copy_(torch.arange(rows).float()[:, None].expand(rows, columns))
    apply_optimizer_in_backward(optimizer, tables.parameters(), {"lr": 0.5})
    sharder: Any = EmbeddingCollectionSharder() if sequence else EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    placed = dict(zip(SHAPES, schemes or (table_wise(rank=0), row_wise()), strict=True))
    module_plan = construct_module_sharding_plan(
        tables, placed, sharder=sharder, world_size=world, local_size=world, device_type="cpu"
    )
    return DistributedModelParallel(
        Model(tables),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"tables": module_plan}),
        sharders=[sharder],
    )


def batch(step: int) -> Any:
    draw = torch.Generator().manual_seed(10 * step + dist.get_rank())
    ids = torch.randint(0, 6, (12,), generator=draw)
    return KeyedJaggedTensor(["seen", "liked", "user"], ids, lengths=torch.tensor([2, 2, 1, 3, 2, 2]))


def train(model: Any, tracker: Any, steps: Any) -> None:
    for step in steps:
        found = model(batch(step))
        found = found.wait() if hasattr(found, "wait") else found
        parts = [found[key] for key in ("seen", "liked", "user")]
        sum(part.sum() if isinstance(part, torch.Tensor) else part.values().sum() for part in parts).backward()
        tracker.step()


def rows(found: Any) -> Any:
    """Names -> ids, and states if there are any."""
    return {
        name: own if isinstance(own, torch.Tensor) else [own.ids, own.states] for name, own in sorted(found.items())
    }


def tracked(job: Callable[[Any, Any], Any], world: int = 1, **more: Any) -> Any:
    """What a job returns on each rank, of a model and its tracker."""
    of_model = {key: more.pop(key) for key in ("sequence", "optimizer", "schemes") if key in more}

    def rank(number: int) -> Any:
        model = built(**of_model)
        return job(model, model.init_torchrec_delta_tracker(DeltaTrackerConfig(**more)))

    return on_ranks(world, rank)


def two_reads(model: Any, tracker: Any) -> Any:
    train(model, tracker, range(2))
    first = rows(tracker.get_unique())
    train(model, tracker, range(2, 4))
    return [first, rows(tracker.get_unique())]


@case(f"{T}.ModelDeltaTracker", f"{T}.model_delta_tracker.ModelDeltaTrackerTrec")
def ids_since_the_last_read() -> Any:
    return [tracked(two_reads), tracked(two_reads, 2)]


@case(f"{T}.ModelDeltaTracker")
def ids_of_other_plans() -> Any:
    split = (column_wise(ranks=[0, 1]), data_parallel())
    return [tracked(two_reads, 2, schemes=split), tracked(two_reads, 2, schemes=(row_wise(), table_wise(rank=1)))]


@case(f"{T}.ModelDeltaTracker")
def consumers_read_independently() -> Any:
    def job(model: Any, tracker: Any) -> Any:
        found = []
        train(model, tracker, range(1))
        found.append(rows(tracker.get_unique_ids("a")))
        train(model, tracker, range(1, 2))
        found += [rows(tracker.get_unique_ids("a")), rows(tracker.get_unique_ids("b"))]
        train(model, tracker, range(2, 4))
        found += [rows(tracker.get_unique_ids("b")), rows(tracker.get_unique_ids("a"))]
        return [*found, raised(lambda: tracker.get_unique_ids("c")) != "nothing"]

    return tracked(job, consumers=["a", "b"])


@case(
    f"{T}.ModelDeltaTracker",
    differs="clear(consumer) forgets what this consumer has not read; TorchRec returns it at the next read",
)
def a_consumer_that_forgets() -> Any:
    def job(model: Any, tracker: Any) -> Any:
        train(model, tracker, range(2))
        tracker.clear("a")
        train(model, tracker, range(2, 3))
        return [rows(tracker.get_unique_ids("a")), rows(tracker.get_unique_ids("b"))]

    return tracked(job, consumers=["a", "b"])


@case(f"{T}.ModelDeltaTracker")
def ids_that_are_recorded_by_hand() -> Any:
    def job(model: Any, tracker: Any) -> Any:
        tracker.record_ids(batch(0))
        tracker.step()
        return rows(tracker.get_unique())

    return tracked(job)


@case(f"{T}.ModelDeltaTracker")
def lookups_without_a_step() -> Any:
    def job(model: Any, tracker: Any) -> Any:
        model(batch(0))
        tracker.step()
        found = [rows(tracker.get_unique_ids())]
        model.eval()
        with torch.no_grad():
            model(batch(1))
        tracker.step()
        return [*found, rows(tracker.get_unique_ids())]

    return tracked(job)
