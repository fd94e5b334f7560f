"""Every optimizer inside backward, under every scheme and backend: weights and states are the unsharded ones."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig, ShardingPlan
from recshard_lab.embedding import EmbOptimType
from recshard_lab.embedding.kernels import available, kernel_named
from recshard_lab.embedding.optimizers import OptimizerSpec
from recshard_lab.optim import apply_optimizer_in_backward
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.jobs import batch_of
from tests.distributed.optimizer_jobs import collection_of, merged, plan_at, train_dense, train_fused, train_sharded
from tests.embedding.lookups import can
from tests.grid import worlds

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=worlds(2, 4))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two ranks, and four on two virtual nodes."""
    with recshard_lab.launch(request.param) as launched:
        yield launched


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


@pytest.mark.parametrize("optimizer", list(EmbOptimType))
def test_every_optimizer_under_every_scheme_is_the_unsharded_one(ranks: Any, optimizer: EmbOptimType) -> None:
    params = fused_params(optimizer)
    for backend in {b for scheme in scheme_names() for b in backends_for(params, scheme)}:
        schemes = [scheme for scheme in scheme_names() if backend in backends_for(params, scheme)]
        plans = {scheme: cases.plan_of(cases.TABLES, [scheme], ranks.world_size) for scheme in schemes}
        check(ranks, params, plans, [backend])


@pytest.mark.parametrize("optimizer", list(EmbOptimType))
@pytest.mark.parametrize(
    "settings",
    [
        {"weight_decay": 0.1},
        {"gradient_clipping": True, "max_gradient": 0.5, "check_gradients": True},
    ],
    ids=["decay", "clipped"],
)
def test_decay_and_clipping_are_the_unsharded_ones_in_a_mixed_plan(
    ranks: Any, optimizer: EmbOptimType, settings: dict[str, Any]
) -> None:
    if optimizer is EmbOptimType.PARTIAL_ROWWISE_ADAM and "weight_decay" in settings:
        settings = {**settings, "weight_decay_mode": "DECOUPLE"}
    mixed = cases.plan_of(cases.TABLES, ["column_wise", "row_wise", "data_parallel", "table_wise"], ranks.world_size)
    check(ranks, fused_params(optimizer, **settings), {"mixed": mixed}, [None])


def per_table(plan: str, steps: list[list[Any]]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Runs on every rank: four tables with four optimizers, of which one follows a schedule."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    collection = collection_of(cases.TABLES)
    for (kind, kwargs), bag in zip(PER_TABLE, collection.embedding_bags.values(), strict=True):
        apply_optimizer_in_backward(kind, [bag.weight], kwargs)
    dmp = DistributedModelParallel(collection, plan=plan_at("", plan))
    for ranks_bags in steps:
        out = dmp(batch_of(ranks_bags[rank])).values()
        (out.square().sum() * world).backward()
    return dmp.full_state_dict(), [group["lr"] for group in dmp.fused_optimizer.param_groups]


PER_TABLE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.05, "eps": 0.01, "weight_decay": 0.1}),
    (recshard_lab.optim.LAMB, {"lr": 0.02, "eps": 0.01}),
    (torch.optim.SGD, {"lr": 0.03, "weight_decay": 0.1}),
    (recshard_lab.optim.RowWiseAdagrad, {"lr": 0.04, "eps": 0.01}),
]


def test_each_table_steps_by_the_optimizer_applied_to_it(ranks: Any) -> None:
    plan = cases.plan_of(cases.TABLES, ["column_wise", "row_wise"], ranks.world_size)
    steps = cases.random_steps(4, cases.TABLES, ranks.world_size, steps=3, samples=4)
    results = ranks.run(per_table, plan.to_json(), steps)
    assert {rate for _, rates in results for rate in rates} == {0.02, 0.03, 0.04, 0.05}
    found = results[0][0]
    truth: dict[str, torch.Tensor] = {}
    for (kind, kwargs), config in zip(PER_TABLE, cases.TABLES, strict=True):
        truth |= {config["name"]: alone(kind, kwargs, config, steps)}
    for name, weight in truth.items():
        close(found[f"embedding_bags.{name}.weight"], weight, name)


def alone(kind: Any, kwargs: dict[str, Any], config: dict[str, Any], steps: list[list[Any]]) -> torch.Tensor:
    """One of the tables trained by itself, densely."""
    from recshard_lab.embedding.optimizers import spec_from_optimizer
    from tests.distributed.jobs import join
    from tests.embedding.lookups import dense_twin

    collection = EmbeddingBagCollection([EmbeddingBagConfig(**config)])
    start = collection_of(cases.TABLES).state_dict()
    collection.load_state_dict({name: start[name] for name in collection.state_dict()})
    optimizer = dense_twin(spec_from_optimizer(kind, kwargs), list(collection.parameters()))
    for ranks_bags in steps:
        collection(batch_of(join(ranks_bags))).values().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return collection.embedding_bags[config["name"]].weight.detach()


def test_the_comparison_can_fail(ranks: Any) -> None:
    plans = {"row_wise": cases.plan_of(cases.TABLES, ["row_wise"], ranks.world_size)}
    steps = cases.random_steps(3, cases.TABLES, ranks.world_size, steps=4, samples=5)
    params = fused_params(EmbOptimType.ADAM)
    truth = train_fused(cases.TABLES, steps, {**params, "beta2": 0.998})
    by_rank = ranks.run(train_sharded, cases.TABLES, steps, [(params, plans["row_wise"].to_json(), None)])
    whole = merged([outcomes[0] for outcomes in by_rank])
    with pytest.raises(AssertionError, match=r"momentum2: 0\.\d"):
        close(whole.states["users"]["momentum2"], truth.states["users"]["momentum2"], "momentum2")


def goes_on(plan: str, steps: list[list[Any]]) -> list[float]:
    """Runs on every rank: largest difference between training on, and training on from a loaded state."""
    rank = torch.distributed.get_rank()
    sharder = recshard_lab.distributed.EmbeddingBagCollectionSharder(
        fused_params=fused_params(EmbOptimType.PARTIAL_ROWWISE_ADAM)
    )
    first, second = (
        DistributedModelParallel(collection_of(cases.TABLES), plan=plan_at("", plan), sharders=[sharder])
        for _ in range(2)
    )

    def train(dmp: DistributedModelParallel, batches: list[list[Any]]) -> None:
        for bags in batches:
            dmp(batch_of(bags[rank])).values().square().sum().backward()

    train(first, steps[:3])
    second.load_state_dict(first.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    train(first, steps[3:])
    train(second, steps[3:])
    one, two = first.full_state_dict(), second.full_state_dict()
    return [float((one[name] - two[name]).abs().max()) for name in one]


@pytest.mark.parametrize("scheme", ["row_wise", "column_wise", "data_parallel"])
def test_training_goes_on_from_a_saved_state_with_its_count_of_steps(ranks: Any, scheme: str) -> None:
    plan = cases.plan_of(cases.TABLES, [scheme], ranks.world_size)
    steps = cases.random_steps(6, cases.TABLES, ranks.world_size, steps=5, samples=4)
    for differences in ranks.run(goes_on, plan.to_json(), steps):
        assert max(differences) == 0.0
