"""``torch.compile``, ``torch.autocast`` and TF32 around a sharded model act on the dense part alone. 2 ranks."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from recshard_lab.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise

NAMES = ["a", "b", "c", "d"]
STEPS = 4


class Model(nn.Module):
    """A bottom MLP beside pooled tables, and one above both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, name=n, feature_names=[n]) for n in NAMES])
        self.bottom = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8))
        self.over = nn.Sequential(nn.Linear(40, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bottom = self.bottom(dense)
        pooled = self.ebc(features).values()
        return self.over(torch.cat([bottom, pooled], 1)).float().square().mean(), pooled, bottom


def batch_of(step: int, rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(2 * step + rank)
    ids = torch.randint(9, (32,), generator=generator)
    return KeyedJaggedTensor(NAMES, ids, lengths=torch.full((16,), 2)), torch.rand(4, 3, generator=generator)


def compile_parts(model: Model) -> None:
    model.bottom, model.over = (torch.compile(part, backend="eager") for part in (model.bottom, model.over))


def build(compiled: str | None) -> tuple[DistributedModelParallel, Any]:
    model = Model()
    schemes = {"a": row_wise(), "b": column_wise([0, 1]), "c": data_parallel(), "d": table_wise(0)}
    plan = ShardingPlan({"ebc": construct_module_sharding_plan(model.ebc, schemes, world_size=2)})
    if compiled == "parts before":
        compile_parts(model)
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    dmp = DistributedModelParallel(model, plan=plan, sharders=[sharder])
    if compiled == "parts after":
        compile_parts(model)
    return dmp, torch.compile(dmp, backend="eager") if compiled == "model" else dmp


def trained(compiled: str | None, autocast: str | None, precision: str = "highest") -> Any:
    """Dtypes of the collection and the bottom MLP, weights, and Dynamo's counters. Runs on every rank."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    rank, before = torch.distributed.get_rank(), torch.get_float32_matmul_precision()
    dmp, run = build(compiled)
    optimizer = torch.optim.SGD(dmp.dense_parameters(), lr=0.1)
    torch.set_float32_matmul_precision(precision)
    try:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss, pooled, bottom = run(*batch_of(step, rank))
                if autocast == "backward too":
                    loss.backward()
            if autocast != "backward too":
                loss.backward()
            optimizer.step()
    finally:
        torch.set_float32_matmul_precision(before)
    stats, breaks = dict(counters["stats"]), list(counters["graph_break"])
    weights = {name.replace("_orig_mod.", ""): value for name, value in dmp.full_state_dict().items()}
    return (pooled.dtype, bottom.dtype), weights, (stats, breaks)


def unsharded(autocast: bool) -> dict[str, Tensor]:
    """Both batches in one process, plain torch."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = model(*batch_of(step, rank))[0]
            (loss / 2).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.gate
@pytest.mark.parametrize("autocast", ["forward", "backward too"])
def test_autocast_leaves_tables_alone_and_trains_as_the_unsharded_model(two: Any, autocast: str) -> None:
    truth = unsharded(True)
    for dtypes, weights, _ in two.run(trained, None, autocast):
        assert dtypes == (torch.float32, torch.bfloat16)
        torch.testing.assert_close(weights, truth, rtol=1e-4, atol=1e-5, check_device=False)


@pytest.mark.gate
@pytest.mark.parametrize("compiled", ["model", "parts before", "parts after"])
def test_compiled_models_train_as_the_eager_one(two: Any, compiled: str) -> None:
    truth = unsharded(False)
    for _, weights, (stats, breaks) in two.run(trained, compiled, None):
        torch.testing.assert_close(weights, truth, rtol=1e-4, atol=1e-5, check_device=False)
        # one graph before the collection and one behind it, in all steps
        assert stats["unique_graphs"] == 2
        ours = {name for name in PLACES if any(f"<function {name} at" in text for text in breaks)}
        assert ours == (PLACES if compiled == "model" else set())
        assert bool(breaks) == (compiled == "model")


#: where the graph of a compiled model breaks, apart from DistributedDataParallel's own breaks
PLACES = {"EmbeddingFusedOptimizer.push_learning_rates", "ShardedCollection.forward", "_WaitsAtFirstUse.__getattr__"}
