"""Frozen tables: a forward that records gradients refuses them on all ranks, and any other forward reads them."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import recshard_lab as rs
from recshard_lab.embedding import ManagedCollisionCollection, MCHManagedCollisionModule
from recshard_lab.embedding.managed_collision import DistanceLFU_EvictionPolicy
from recshard_lab.models import FeatureProcessedEmbeddingBagCollection, PositionWeightedModule
from recshard_lab.serving import shard_for_inference
from recshard_lab.sharding import construct_module_sharding_plan
from recshard_lab.train import TrainPipelineSparseDist
from tests.distributed.jobs import attempted

ROWS, DIM, LR = 12, 8, 0.5


def built(kind: str) -> nn.Module:
    """A collection with the tables ``t`` and ``u``."""
    torch.manual_seed(0)
    config: Any = rs.EmbeddingConfig if kind.endswith("sequences") else rs.EmbeddingBagConfig
    tables = [config(ROWS, DIM, name=name, feature_names=[f"of_{name}"]) for name in ("t", "u")]
    if kind == "dynamic":
        dynamic = [
            rs.DynamicEmbeddingConfig(table.name, DIM, 128, feature_names=table.feature_names) for table in tables
        ]
        return rs.DynamicEmbeddingBagCollection(dynamic, torch.optim.SGD, {"lr": LR})
    if kind == "managed":
        owners = {
            table.name: MCHManagedCollisionModule(ROWS, "cpu", DistanceLFU_EvictionPolicy(), 2, buckets=2)
            for table in tables
        }
        return rs.embedding.ManagedCollisionEmbeddingBagCollection(
            rs.EmbeddingBagCollection(tables), ManagedCollisionCollection(owners, tables)
        )
    if kind == "processed":
        bags = rs.EmbeddingBagCollection(tables, is_weighted=True)
        return FeatureProcessedEmbeddingBagCollection(bags, {"of_t": PositionWeightedModule(4)})
    if kind.startswith("fused"):
        return rs.FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": LR})
    return rs.EmbeddingCollection(tables) if kind == "sequences" else rs.EmbeddingBagCollection(tables)


def sharded(module: nn.Module, scheme: str = "row_wise", kernel: str | None = None) -> rs.DistributedModelParallel:
    path = "_embedding_bag_collection" if isinstance(module, FeatureProcessedEmbeddingBagCollection) else ""
    own = module.get_submodule(path)
    arguments = {"host_index": 0} if scheme == "table_row_wise" else {}
    generator = getattr(rs, scheme)(**arguments, **({"compute_kernel": kernel} if kernel else {}))
    plan = rs.ShardingPlan({path: construct_module_sharding_plan(own, dict.fromkeys("tu", generator))})
    sharders = None
    if isinstance(own, rs.EmbeddingBagCollection):
        sharders = [rs.distributed.EmbeddingBagCollectionSharder({"learning_rate": LR})]
    return rs.DistributedModelParallel(module, plan=plan, sharders=sharders)


def batch(number: int = 0) -> rs.KeyedJaggedTensor:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ids = torch.arange(6) * (rank + 1) + number
    return rs.KeyedJaggedTensor(["of_t", "of_u"], ids % ROWS, lengths=torch.tensor([1, 2, 3, 0]))


def values(output: Any) -> torch.Tensor:
    output = output[0] if isinstance(output, tuple) else output
    return output.values() if hasattr(output, "keys") and not isinstance(output, dict) else joined(output)


def joined(rows: Any) -> torch.Tensor:
    return torch.cat([rows[key].values() for key in sorted(rows)])


def refusal(model: nn.Module, number: int = 0) -> str:
    """The error of a training step."""
    return attempted(lambda: values(model(batch(number))).sum().backward())


def weights(model: Any) -> torch.Tensor:
    """All tables. A dynamic table has rows for the ids that it has met."""
    state = model.full_state_dict()
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith(".weight")])


def frozen(kind: str, scheme: str, kernel: str | None, when: str) -> tuple[list[str], bool, float]:
    """Errors in training and evaluation mode, whether weights are kept, and the distance of outputs of inference."""
    module = built(kind)
    truth = deepcopy(module)
    part = module if kind in ("dynamic", "fused bags", "processed") else module.get_submodule(TABLE_OF[kind])
    if when == "before":
        part.requires_grad_(False)
    model = sharded(module, scheme, kernel)
    if when == "after":
        for name, parameter in model.named_parameters():
            if ".t.weight" in name:
                parameter.requires_grad_(False)
    start = weights(model)
    errors = [refusal(model.train(training)) for training in (True, False)]
    with torch.no_grad():
        distance = float((values(model(batch())) - values(truth.eval()(batch()))).abs().max())
    return errors, torch.equal(start, weights(model)), distance


TABLE_OF = {
    "bags": "embedding_bags.t",
    "sequences": "embeddings.t",
    "managed": "_embedding_module.embedding_bags.t",
}
CASES = [
    ("bags", "row_wise", None, "before"),
    ("bags", "row_wise", "dense", "after"),
    ("bags", "data_parallel", None, "after"),
    ("bags", "table_row_wise", None, "before"),
    ("bags", "table_wise", None, "after"),
    ("bags", "column_wise", None, "before"),
    ("sequences", "row_wise", None, "after"),
    ("sequences", "table_wise", "dense", "before"),
    ("managed", "row_wise", None, "before"),
    ("managed", "row_wise", None, "after"),
    ("processed", "row_wise", None, "before"),
    ("processed", "data_parallel", None, "after"),
    ("fused bags", "table_wise", None, "after"),
    ("dynamic", "row_wise", None, "after"),
]


@pytest.mark.gate
@pytest.mark.parametrize(("kind", "scheme", "kernel", "when"), CASES)
def test_training_refuses_a_frozen_table_and_inference_reads_it(
    two: Any, kind: str, scheme: str, kernel: Any, when: str
) -> None:
    for errors, kept, distance in two.run(frozen, kind, scheme, kernel, when):
        assert kept
        assert distance < 1e-6
        for error in errors:
            assert error.startswith("ValueError: table 't' has requires_grad=False, and the forward records gradients")
            assert "Fix: call a frozen model under torch.no_grad()" in error


def frozen_on_rank_1() -> list[str]:
    """Errors while rank 1 alone has frozen a table, and afterwards."""
    model = sharded(built("bags"))
    table = model.get_parameter("module.embedding_bags.u.weight")
    table.requires_grad_(torch.distributed.get_rank() == 0)
    errors = [refusal(model)]
    table.requires_grad_(True)
    return [*errors, refusal(model)]


def test_a_table_that_is_frozen_on_one_rank_is_refused_on_all(two: Any) -> None:
    for apart, alike in two.run(frozen_on_rank_1):
        assert apart.startswith("ValueError: rank 1: table 'u' has requires_grad=False")
        assert alike == ""


def carried(bound: int | None) -> tuple[list[str], list[bool], float]:
    """Errors after a reshard, of a copy and of a served model; what was kept; the distance of a step once unfrozen."""
    model = sharded(built("bags").requires_grad_(False))
    start = weights(model)
    plan = construct_module_sharding_plan(built("bags"), {"t": rs.column_wise([0, 1]), "u": rs.table_wise(1)})
    model.reshard(rs.ShardingPlan({"": plan}), max_extra_bytes=bound)
    twin = model.copy("cpu")
    served = shard_for_inference(model)
    errors = [refusal(model), refusal(twin)]
    kept = [torch.equal(start, weights(one)) for one in (model, twin)]
    with torch.no_grad():
        kept.append(torch.equal(values(served(batch())), values(model(batch()))))
    model.requires_grad_(True)
    errors.append(refusal(model))
    truth = built("bags")
    for rank in range(2):
        ids = torch.arange(6) * (rank + 1) % ROWS
        both = rs.KeyedJaggedTensor(["of_t", "of_u"], ids, lengths=torch.tensor([1, 2, 3, 0]))
        (values(truth(both)).sum() / 2).backward()
    torch.optim.SGD(truth.parameters(), lr=LR).step()
    expected = torch.cat([own.detach().flatten() for own in truth.parameters()])
    return errors, kept, float((weights(model) - expected).abs().max())


@pytest.mark.parametrize("bound", [None, 64])
def test_a_table_stays_frozen_when_it_moves_and_learns_again_on_request(two: Any, bound: int | None) -> None:
    for errors, kept, distance in two.run(carried, bound):
        assert [error.partition(",")[0] for error in errors] == [
            *["ValueError: table 't' has requires_grad=False"] * 2,
            "",
        ]
        assert kept == [True] * 3
        assert distance < 1e-6


class Trained(nn.Module):
    """What a pipeline trains."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.tables, self.over = built(kind), nn.Linear(1, 1)

    def forward(self, features: rs.KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.over(values(self.tables(features)).sum().view(1))
        return out.sum(), out


def frozen_between_batches() -> tuple[str, bool]:
    """The error of a pipeline whose table is frozen after two batches, and whether the tables stayed."""
    model = rs.DistributedModelParallel(Trained("bags"))
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1)
    batches = iter([batch(number) for number in range(6)])
    with TrainPipelineSparseDist(model, optimizer, torch.device("cpu")) as pipeline:
        for _ in range(2):
            pipeline.progress(batches)
        model.get_parameter("module.tables.embedding_bags.t.weight").requires_grad_(False)
        start = weights(model)
        error = attempted(lambda: pipeline.progress(batches))
    return error, torch.equal(start, weights(model))


def test_a_pipeline_refuses_a_table_that_is_frozen_between_batches(two: Any) -> None:
    for error, kept in two.run(frozen_between_batches):
        assert "table 't' has requires_grad=False" in error
        assert kept


def test_one_process_refuses_a_frozen_table_and_serves_it() -> None:
    module = built("bags").requires_grad_(False)
    truth = values(module(batch()))
    served = shard_for_inference(module, devices=["cpu", "cpu"])
    assert torch.allclose(values(served(batch())), truth)
    model = sharded(module)
    start = weights(model)
    assert refusal(model).startswith("ValueError: table 't' has requires_grad=False")
    assert torch.equal(start, weights(model))
    with torch.inference_mode():
        assert torch.equal(values(model(batch())), truth)
