"""Sharded towers. TorchRec runs them on a CPU without a device: its DistributedDataParallel refuses "cpu" as one.

A tower over sequences raises an IndexError there: tests/distributed/test_towers.py compares it with the unsharded one.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionContext,
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
    TowerLazyAwaitable,
)
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import LazyAwaitable, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.compat.parity.case import case, on_ranks, raised

MODULE = "torchrec.distributed.embedding_tower_sharding"
SHARDER, SHARDERS = f"{MODULE}.EmbeddingTowerSharder", f"{MODULE}.EmbeddingTowerCollectionSharder"
TOWER, TOWERS = f"{MODULE}.ShardedEmbeddingTower", f"{MODULE}.ShardedEmbeddingTowerCollection"
DDP_ORDER = "TorchRec joins the outputs in the order of the nodes, so they depend on the plan"


class Interaction(nn.Module):
    """A linear layer over a tower's rows."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        with torch.no_grad():
            self.linear.weight.copy_(torch.arange(width * out).view(out, width) % 5 / 8 - 0.2)
            self.linear.bias.copy_(torch.arange(out) / 4)

    def forward(self, rows: Any) -> torch.Tensor:
        return self.linear(rows.values())


def bags(*names: str, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[f"f_{name}"])
            for name in names
        ],
        is_weighted=weighted,
    )


def sequences(*names: str) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=[f"f_{name}"]) for name in names
        ]
    )


def one_tower() -> EmbeddingTower:
    return EmbeddingTower(bags("a", "b"), Interaction(8, 3))


def two_towers() -> EmbeddingTowerCollection:
    weighted = EmbeddingTower(bags("c", weighted=True), Interaction(4, 2))
    return EmbeddingTowerCollection([one_tower(), weighted])


def plain(rank: int) -> KeyedJaggedTensor:
    """Two samples, with the features in another order than the tables."""
    return KeyedJaggedTensor(
        keys=["f_b", "f_a"],
        values=torch.tensor([0, 3, 1, 2, 7] if rank == 0 else [6, 3, 0, 2, 1]),
        lengths=torch.tensor([1, 2, 0, 2]),
    )


def weighted(rank: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f_c"],
        values=torch.tensor([5, 1, 2]) + rank,
        weights=torch.tensor([0.5, 2.0, 1.0]),
        lengths=torch.tensor([1, 2]),
    )


def on_nodes(local: int) -> ShardingEnv:
    """All ranks, ``local`` of them on a node."""
    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    return ShardingEnv.from_process_group(dist.group.WORLD)


def sharded(module: Any, sharder: Any, local: int, **generators: Any) -> Any:
    """The module on two ranks, its tables on the dense kernel, with row r of each table r / 10."""
    env = on_nodes(local)
    plan = construct_module_sharding_plan(
        module, generators, sharder, local_size=local, world_size=2, device_type="cpu"
    )
    own = sharder.shard(module, plan, env, None)
    with torch.no_grad():
        for name, value in own.state_dict().items():
            if "embedding" not in name:
                continue
            shards = value.local_shards() if hasattr(value, "local_shards") else []
            for part in shards:
                row, rows = part.metadata.shard_offsets[0], part.metadata.shard_sizes[0]
                part.tensor.copy_((torch.arange(row, row + rows) / 10).unsqueeze(1).expand_as(part.tensor))
            if not hasattr(value, "local_shards"):
                value.copy_((torch.arange(len(value)) / 10).unsqueeze(1).expand_as(value))
    return own


def node(number: int) -> Any:
    return table_row_wise(host_index=number)


def learns(module: Any, *batches: KeyedJaggedTensor) -> list[torch.Tensor]:
    """Outputs before each step of SGD over tables and interactions, and after the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    outputs = []
    for _ in range(2):
        optimizer.zero_grad()
        out = module(*batches).wait()
        outputs.append(out)
        (out * out).mean().backward()
        optimizer.step()
    return [*outputs, module(*batches).wait()]


@case(SHARDER, TOWER)
def a_tower_on_one_node_learns() -> Any:
    def job(rank: int) -> Any:
        module = sharded(one_tower(), EmbeddingTowerSharder(), 2, a=node(0), b=node(0))
        return learns(module, plain(rank))

    return on_ranks(2, job)


@case(SHARDER, TOWER)
def a_tower_on_the_second_of_two_nodes() -> Any:
    def job(rank: int) -> Any:
        module = sharded(one_tower(), EmbeddingTowerSharder(), 1, a=node(1), b=node(1))
        return module(plain(rank)).wait()

    return on_ranks(2, job)


@case(SHARDER, TOWER)
def gradients_of_a_tower_on_the_second_node() -> Any:
    def job(rank: int) -> Any:
        module = sharded(one_tower(), EmbeddingTowerSharder(), 1, a=node(1), b=node(1))
        out = module(plain(rank)).wait()
        (out * out).mean().backward()
        found = {name: p.grad for name, p in sorted(module.named_parameters())}
        return found if rank == 1 else None

    return on_ranks(2, job)


@case(SHARDERS, TOWERS)
def towers_on_one_node_learn() -> Any:
    def job(rank: int) -> Any:
        module = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 2, a=node(0), b=node(0), c=node(0))
        return learns(module, plain(rank), weighted(rank))

    return on_ranks(2, job)


@case(SHARDERS, TOWERS)
def towers_on_two_nodes() -> Any:
    def job(rank: int) -> Any:
        module = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 1, a=node(0), b=node(0), c=node(1))
        out = module(plain(rank), weighted(rank)).wait()
        (out * out).mean().backward()
        own = f"towers.{rank}."
        return out, {name: p.grad for name, p in sorted(module.named_parameters()) if name.startswith(own)
                     and p.grad is not None}  # fmt: skip

    return on_ranks(2, job)


@case(SHARDERS, TOWERS, differs=DDP_ORDER)
def towers_on_two_nodes_in_the_other_order() -> Any:
    def job(rank: int) -> Any:
        module = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 1, a=node(1), b=node(1), c=node(0))
        return module(plain(rank), weighted(rank)).wait()

    return on_ranks(2, job)


@case(SHARDERS, TOWERS)
def the_sum_of_towers_does_not_depend_on_their_nodes() -> Any:
    def job(rank: int) -> Any:
        module = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 1, a=node(1), b=node(1), c=node(0))
        return module(plain(rank), weighted(rank)).wait().sum(1)

    return on_ranks(2, job)


@case(SHARDER, TOWER)
def a_tower_over_weighted_bags() -> Any:
    def job(rank: int) -> Any:
        tower = EmbeddingTower(bags("c", weighted=True), Interaction(4, 2))
        module = sharded(tower, EmbeddingTowerSharder(), 1, c=node(0))
        return module(weighted(rank)).wait()

    return on_ranks(2, job)


@case(SHARDERS, f"{MODULE}.TowerLazyAwaitable", f"{MODULE}.EmbeddingTowerCollectionContext")
def stages_of_towers() -> Any:
    def job(rank: int) -> Any:
        module = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 1, a=node(0), b=node(0), c=node(1))
        ctx = module.create_context()
        ids = module.input_dist(ctx, plain(rank), weighted(rank)).wait().wait()
        out = module.output_dist(ctx, module.compute(ctx, ids))
        return {
            "context": [isinstance(ctx, EmbeddingTowerCollectionContext), ctx.embedding_contexts],
            "awaitable": [isinstance(out, TowerLazyAwaitable), isinstance(out, LazyAwaitable)],
            "output": out.wait(),
        }

    return on_ranks(2, job)


@case(TOWER, TOWERS, f"{MODULE}.TowerLazyAwaitable")
def the_output_is_used_as_a_tensor() -> Any:
    def job(rank: int) -> Any:
        module = sharded(one_tower(), EmbeddingTowerSharder(), 2, a=node(0), b=node(0))
        out = module(plain(rank))
        return [isinstance(out, TowerLazyAwaitable), torch.cat([out, torch.ones(2, 1)], 1).sum(), out.shape, out + 1]

    return on_ranks(2, job)


@case(TOWER, TOWERS)
def classes_of_sharded_towers() -> Any:
    def job(rank: int) -> Any:
        alone = sharded(one_tower(), EmbeddingTowerSharder(), 2, a=node(0), b=node(0))
        several = sharded(two_towers(), EmbeddingTowerCollectionSharder(), 2, a=node(0), b=node(0), c=node(0))
        return [
            isinstance(alone, ShardedEmbeddingTower),
            isinstance(several, ShardedEmbeddingTowerCollection),
            sorted(alone.state_dict()),
            sorted(several.state_dict()),
            sorted(alone.sharded_parameter_names("m")),
            sorted(several.sharded_parameter_names()),
        ]

    return on_ranks(2, job)


@case(TOWER, differs="each rank has the names and values of the whole model, so rank 0 can save it")
def names_on_the_ranks_of_another_node() -> Any:
    def job(rank: int) -> Any:
        module = sharded(one_tower(), EmbeddingTowerSharder(), 1, a=node(1), b=node(1))
        return [sorted(module.state_dict()), sorted(name for name, _ in module.named_parameters())]

    return on_ranks(2, job)


@case(SHARDER, SHARDERS)
def schemes_and_module_types() -> Any:
    alone, several = EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder()
    return {
        "schemes": [sorted(own.sharding_types("cpu")) for own in (alone, several)],
        "types": [own.module_type is kind for own, kind in
                  ((alone, EmbeddingTower), (several, EmbeddingTowerCollection))],
    }  # fmt: skip


@case(SHARDER, SHARDERS)
def features_and_parameters_of_towers() -> Any:
    sharder = EmbeddingTowerSharder()
    return {
        "plain": sharder.embedding_feature_names(one_tower()),
        "weighted": sharder.embedding_feature_names(EmbeddingTower(bags("c", weighted=True), nn.Identity())),
        "sequences": sharder.embedding_feature_names(EmbeddingTower(sequences("d"), nn.Identity())),
        "one": list(sharder.shardable_parameters(one_tower())),
        "two": list(EmbeddingTowerCollectionSharder().shardable_parameters(two_towers())),
        "inner": sharder.embedding_sharder(one_tower()).module_type is EmbeddingBagCollection,
    }


@case(SHARDER, differs="an error of a user's call is a ValueError with the value and a fix")
def embeddings_without_a_sharder() -> Any:
    return raised(lambda: EmbeddingTowerSharder().embedding_sharder(EmbeddingTower(nn.Embedding(4, 4), nn.Identity())))


@case(SHARDER, SHARDERS, "torchrec.distributed.planner.enumerators.EmbeddingEnumerator")
def options_of_towers() -> Any:
    listed = EmbeddingEnumerator(Topology(4, "cpu", local_world_size=2), 16)
    options = listed.enumerate(
        nn.ModuleDict({"alone": one_tower(), "several": EmbeddingTowerCollection([
            EmbeddingTower(bags("x"), nn.Identity()), EmbeddingTower(sequences("y"), nn.Identity())])}),
        [EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder()],
    )  # fmt: skip
    return sorted(
        [one.name, one.path, str(one.dependency), one.sharding_type, one.partition_by, one.is_pooled, one.num_shards]
        for one in options
        if one.compute_kernel == "fused"
    )


@case(SHARDER, SHARDERS, "torchrec.distributed.planner.EmbeddingShardingPlanner")
def a_plan_keeps_a_tower_on_one_node() -> Any:
    model = nn.ModuleDict({"alone": one_tower(), "several": EmbeddingTowerCollection([
        EmbeddingTower(bags("x", "y"), nn.Identity()), EmbeddingTower(bags("z"), nn.Identity())])})  # fmt: skip
    found = {}
    for name, options in {"default": {}, "greedy": {"proposer": GreedyProposer()}}.items():
        planner = EmbeddingShardingPlanner(topology=Topology(4, "cpu", local_world_size=2), batch_size=16, **options)
        plan = planner.plan(model, [EmbeddingTowerSharder(), EmbeddingTowerCollectionSharder()]).plan
        nodes = {
            path: {table: sorted({rank // 2 for rank in own.ranks}) for table, own in tables.items()}
            for path, tables in plan.items()
        }
        several = nodes["several"]
        found[name] = [
            sorted(nodes),
            nodes["alone"]["a"] == nodes["alone"]["b"],
            several["x"] == several["y"],
            [len(own) for tables in nodes.values() for own in tables.values()],
        ]
    return found


@case(SHARDERS, "torchrec.distributed.sharding_plan.construct_module_sharding_plan")
def kernels_of_a_plan_by_hand() -> Any:
    found = []
    for steps in (False, True):
        module = two_towers()
        if steps:
            apply_optimizer_in_backward(torch.optim.SGD, module.towers[0].embedding.parameters(), {"lr": 0.1})
        plan = construct_module_sharding_plan(
            module,
            {name: table_row_wise(host_index=0) for name in "abc"},
            EmbeddingTowerCollectionSharder(),
            local_size=2,
            world_size=2,
            device_type="cpu",
        )
        found.append({name: [own.compute_kernel, own.sharding_type, own.ranks] for name, own in plan.items()})
    return found


@case(SHARDER, differs="any shards on one node run a tower; TorchRec takes two named schemes")
def other_schemes_on_one_node() -> Any:
    def job(rank: int) -> Any:
        made = []
        for generators in (
            {"a": row_wise(), "b": column_wise(ranks=[0, 1])},
            {"a": table_wise(rank=0), "b": row_wise()},
        ):
            made.append(raised(lambda own=generators: sharded(one_tower(), EmbeddingTowerSharder(), 2, **own)))
        return made

    return on_ranks(2, job)


@case(SHARDER, differs="an error of a user's call is a ValueError with the value and a fix")
def tables_of_a_tower_on_two_nodes() -> Any:
    def job(rank: int) -> Any:
        return raised(lambda: sharded(one_tower(), EmbeddingTowerSharder(), 1, a=node(0), b=node(1)))

    return on_ranks(2, job)
