"""Every optimizer inside backward, under every scheme and backend: weights and states are the unsharded ones."""

from typing import Any

import torch

from recshard_lab import EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan
from recshard_lab.embedding import EmbOptimType
from recshard_lab.embedding.kernels import available, kernel_named
from recshard_lab.embedding.optimizers import OptimizerSpec, spec_from_optimizer
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import batch_of, join
from tests.distributed.optimizer_jobs import collection_of, merged, train_dense, train_fused, train_sharded
from tests.embedding.lookups import can, dense_twin
from tests.grid import NIGHT, on_ranks

TOLERANCE = 1e-5


def fused_params(optimizer: EmbOptimType, **settings: Any) -> dict[str, Any]:
    # a large eps: where gradients nearly cancel, Adam would blow their rounding up to whole steps
    params = {"optimizer": optimizer.value, "learning_rate": 0.1, "eps": 0.01, **settings}
    return params | ({"eta": 0.5} if optimizer is EmbOptimType.LARS_SGD else {})


def close(found: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    assert found.shape == truth.shape, what
    assert not found.isnan().any(), what
    error = float((found - truth).abs().max() / truth.abs().max().clamp(min=1e-3))
    assert error <= TOLERANCE, f"{what}: {error}"


def check(ranks: Any, params: dict[str, Any], plans: dict[str, ShardingPlan], backends: list[str | None]) -> None:
    """Trains once unsharded on a kernel, once densely, and under every plan and backend; compares."""
    steps = cases.random_steps(3, cases.TABLES, ranks.world_size, steps=4, samples=5)
    fused, dense = train_fused(cases.TABLES, steps, params), train_dense(cases.TABLES, steps, params)
    for name, truth in dense.weights.items():
        close(fused.weights[name], truth, f"unsharded {name}")
    runs = [(params, plan.to_json(), backend) for plan in plans.values() for backend in backends]
    names = [f"{scheme} on {backend}" for scheme in plans for backend in backends]
    by_rank = ranks.run(train_sharded, cases.TABLES, steps, runs)
    for run, outcomes in zip(names, zip(*by_rank, strict=True), strict=True):
        whole = merged(list(outcomes))
        for name, truth in dense.weights.items():
            close(whole.weights[name], truth, f"{run}: {name}")
            for part, state in fused.states[name].items():
                close(whole.states[name][part], state, f"{run}: {part} of {name}")


def backends_for(params: dict[str, Any], scheme: str) -> list[str | None]:
    """The backends that have this optimizer; one that needs whole rows is asked for schemes that keep them whole."""
    spec = OptimizerSpec.from_fused_params(params)
    return ["native"] + [
        name
        for name in available()
        if name != "native" and can(kernel_named(name), spec) and (scheme in WHOLE_ROWS or not spec.row_wise)
    ]


WHOLE_ROWS = {"table_wise", "row_wise", "table_row_wise", "data_parallel"}


@on_ranks(2, 4, optimizer=list(EmbOptimType))
def test_every_optimizer_under_every_scheme_is_the_unsharded_one(ranks: Any, optimizer: EmbOptimType) -> None:
    """On every backend; on two nodes by day on the native one, under the schemes that two ranks do not have."""
    params, full = fused_params(optimizer), NIGHT or ranks.world_size == 2
    names = scheme_names() if full else ["table_row_wise", "table_column_wise", "grid_shard"]
    for backend in {b for scheme in names for b in backends_for(params, scheme)} if full else ["native"]:
        schemes = [scheme for scheme in names if backend in backends_for(params, scheme)]
        plans = {scheme: cases.plan_of(cases.TABLES, [scheme], ranks.world_size) for scheme in schemes}
        check(ranks, params, plans, [backend])


def alone(kind: Any, kwargs: dict[str, Any], config: dict[str, Any], steps: list[list[Any]]) -> torch.Tensor:
    """One of the tables trained by itself, densely."""
    collection = EmbeddingBagCollection([EmbeddingBagConfig(**config)])
    start = collection_of(cases.TABLES).state_dict()
    collection.load_state_dict({name: start[name] for name in collection.state_dict()})
    optimizer = dense_twin(spec_from_optimizer(kind, kwargs), list(collection.parameters()))
    for ranks_bags in steps:
        collection(batch_of(join(ranks_bags))).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return collection.embedding_bags[config["name"]].weight.detach()
