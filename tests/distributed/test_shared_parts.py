"""Collections with two names, and tables with two owners, are refused by name where they would be sharded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.distributed import DMPCollection, shard, shard_modules
from recshard_lab.serving import shard_for_inference
from recshard_lab.sharding import construct_module_sharding_plan
from tests.distributed.jobs import attempted
from tests.distributed.test_frozen_tables import batch, built, values


class TwoTowers(nn.Module):
    """Two towers and the modules that they read. ``same`` is the module that both have."""

    def __init__(self, query: nn.Module, candidate: nn.Module) -> None:
        super().__init__()
        self.query, self.candidate = nn.Module(), nn.Module()
        self.query.tables, self.candidate.tables = query, candidate

    def forward(self, features: rs.KeyedJaggedTensor) -> torch.Tensor:
        return values(self.query.tables(features)) + values(self.candidate.tables(features))


def shared(kind: str) -> nn.Module:
    tables = built(kind)
    return TwoTowers(tables, tables)


def tied_collections() -> nn.Module:
    model: Any = TwoTowers(built("bags"), built("bags"))
    model.candidate.tables.embedding_bags["t"].weight = model.query.tables.embedding_bags["t"].weight
    return model


def tied_output() -> nn.Module:
    model: Any = nn.ModuleDict({"score": nn.Linear(8, 12, bias=False), "tables": built("sequences")})
    model["score"].weight = model["tables"].embeddings["u"].weight
    return model


def tied_module() -> nn.Module:
    """The module of one table is registered a second time."""
    tables: Any = built("bags")
    return nn.ModuleDict({"tables": tables, "one": tables.embedding_bags["t"]})


def tied_tables() -> Any:
    tables: Any = built("bags")
    tables.embedding_bags["u"].weight = tables.embedding_bags["t"].weight
    return tables


TWICE = "ValueError: {} 'query.tables{}' is also 'candidate.tables{}' in the model: sharding would replace it under one"
TIED = "ValueError: {!r} and {!r} are one tensor: sharding would split the table's"
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bags": (lambda: shared("bags"), TWICE.format("EmbeddingBagCollection", "", "")),
    "sequences": (lambda: shared("sequences"), TWICE.format("EmbeddingCollection", "", "")),
    "tied collections": (
        tied_collections,
        TIED.format("query.tables.embedding_bags.t.weight", "candidate.tables.embedding_bags.t.weight"),
    ),
    "tied output": (tied_output, TIED.format("score.weight", "tables.embeddings.u.weight")),
    "tied module": (tied_module, TIED.format("tables.embedding_bags.t.weight", "one.weight")),
    "tied tables": (tied_tables, TIED.format("embedding_bags.t.weight", "embedding_bags.u.weight")),
}


def refusals() -> dict[str, list[str]]:
    """The errors of every model, from each way to shard it."""
    world = torch.distributed.group.WORLD
    ways: list[Callable[[nn.Module], Any]] = [
        rs.DistributedModelParallel,
        lambda model: DMPCollection(model, "cpu", None, 2, 1, world),
    ]
    return {
        name: [attempted(lambda make=make, way=way: way(make())) for way in (ways if name == "bags" else ways[:1])]
        for name, (make, _) in MODELS.items()
    }


def test_every_rank_refuses_a_shared_collection_and_a_tied_table(two: Any) -> None:
    for errors in two.run(refusals):
        assert errors.keys() == MODELS.keys()
        for name, own in errors.items():
            for error in own:
                assert error.startswith(MODELS[name][1]), (name, error)
                assert "Fix: " in error


def test_a_model_is_refused_by_one_process_and_by_its_other_ways_to_shard() -> None:
    fresh = shared("bags")
    assert attempted(lambda: shard_modules(fresh)).startswith(MODELS["bags"][1])
    assert type(fresh.get_submodule("query.tables")) is rs.EmbeddingBagCollection  # nothing was replaced
    assert attempted(lambda: shard(tied_tables(), rs.row_wise())).startswith(MODELS["tied tables"][1])


def test_a_plan_without_the_shared_or_tied_collection_leaves_it_as_it_is() -> None:
    for make in (lambda: shared("bags"), tied_collections):
        model = nn.ModuleDict({"towers": make(), "other": built("bags")})
        plan = construct_module_sharding_plan(built("bags"), dict.fromkeys("tu", rs.row_wise()))
        sharded = rs.DistributedModelParallel(model, plan=rs.ShardingPlan({"other": plan}))
        towers: Any = sharded.module.get_submodule("towers")
        one, other = (tower.tables.embedding_bags["t"].weight for tower in (towers.query, towers.candidate))
        assert one is other


def test_inference_refuses_a_shared_collection_and_serves_a_tied_table() -> None:
    error = attempted(lambda: shard_for_inference(shared("bags"), devices=["cpu"]))
    assert error.startswith(MODELS["bags"][1])
    tied = tied_collections()
    truth = tied(batch())
    assert torch.allclose(shard_for_inference(tied, devices=["cpu", "cpu"])(batch()), truth)
