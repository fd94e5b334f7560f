"""Clipping by the norm of all gradients, and accumulation: 2 ranks train as the unsharded model does."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from recshard_lab.distributed import DMPCollection, EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from recshard_lab.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
)
from recshard_lab.sharding import (
    EmbeddingModuleShardingPlan,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    flex_shard,
    row_wise,
    table_wise,
)
from tests.distributed import cases
from tests.distributed.jobs import Case, attempted, sharded_model
from tests.distributed.jobs import batch_of as batch_of_bags

FEATURES = ["a", "b", "c", "d"]
PLANS = {
    "mixed": {"a": row_wise(), "b": column_wise([0, 1]), "c": data_parallel()},
    "one rank": {"a": table_wise(0), "b": table_wise(0), "c": table_wise(0)},
    "hot rows": {"a": flex_shard(hot_rows=3), "b": flex_shard(hot_rows=5), "c": table_wise(1)},
    "routes": {"a": row_wise(route="reduce_scatter"), "b": row_wise(route="distinct_rows"), "c": data_parallel()},
}
RULES = {
    "exact_sgd": lambda params: torch.optim.SGD(params, lr=0.3),
    "exact_row_wise_adagrad": lambda params: RowWiseAdagrad(params, lr=0.3, eps=0.01),
    "exact_adagrad": lambda params: torch.optim.Adagrad(params, lr=0.3, eps=0.01),
}
STEPS, MAX_NORM = 4, 0.1


class Model(nn.Module):
    """Three pooled tables, of which one has two features, a sequence table, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        names = [("a", ["a", "d"]), ("b", ["b"]), ("c", ["c"])]
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(9, 8, name=name, feature_names=features) for name, features in names]
        )
        self.sequences = EmbeddingCollection([EmbeddingConfig(7, 4, name="s", feature_names=["a"])])
        self.over = nn.Linear(36, 2)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows = self.sequences(batch)["a"].values()
        row = torch.cat([self.ebc(batch).values().sum(0), rows.sum(0) * rows.shape[0]])
        out = self.over(row / row.detach().norm().clamp(min=1))
        return out.square().sum(), out


def batch_of(number: int, rank: int) -> KeyedJaggedTensor:
    """Ids that repeat; the batches of ranks differ in size, and one is empty."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    samples = 0 if (number, rank) == (1, 0) else 2 + rank
    lengths = torch.randint(5, (4 * samples,), generator=generator)
    return KeyedJaggedTensor(FEATURES, torch.randint(7, (int(lengths.sum()),), generator=generator), lengths=lengths)


def tables_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if "embedding" in name]


def unsharded(
    rule: str, max_norm: float | None, norm_type: float, batches: int = 1
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Weights after each step and the norms of its gradient: all batches in one process."""
    model, found, norms = Model(), [], []
    optimizers = [RULES[rule](tables_of(model)), torch.optim.SGD(model.over.parameters(), lr=0.1)]
    for step in range(STEPS):
        model.zero_grad()
        for number in range(batches):
            for rank in range(2):
                (model(batch_of(step * batches + number, rank))[0] / 2).backward()
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)))
        for optimizer in optimizers:
            optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found, norms


def build(plan: str, rule: str, kernel: str, backend: str | None) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model()
    pooled = construct_module_sharding_plan(model.ebc, PLANS[plan], world_size=2)
    sequences = construct_module_sharding_plan(
        model.sequences, {"s": table_wise(0) if plan == "one rank" else row_wise()}, world_size=2
    )
    fused = {"optimizer": rule, "learning_rate": 0.3} | ({} if rule == "exact_sgd" else {"eps": 0.01})
    sharders = [
        EmbeddingBagCollectionSharder(fused_params=fused, backend=backend),
        EmbeddingCollectionSharder(fused_params=fused, backend=backend, use_index_dedup=rule != "exact_sgd"),
    ]
    on_kernel = [
        EmbeddingModuleShardingPlan({name: replace(own, compute_kernel=kernel) for name, own in plan.items()})
        for plan in (pooled, sequences)
    ]
    plans = ShardingPlan(dict(zip(("ebc", "sequences"), on_kernel, strict=True)))
    dmp = DistributedModelParallel(model, plan=plans, sharders=sharders)
    named = dict(dmp.named_parameters())
    over = {name: parameter for name, parameter in named.items() if name.startswith("over")}
    parts: list[Any] = [dmp.fused_optimizer, KeyedOptimizerWrapper(over, lambda p: torch.optim.SGD(p, lr=0.1))]
    if kernel == "dense":
        tables = {name: parameter for name, parameter in named.items() if "embedding" in name}
        parts += [KeyedOptimizerWrapper(tables, RULES[rule])] if tables else []  # a rank may store no shard
    return dmp, CombinedOptimizer(parts)


def clipped(
    plan: str, rule: str, norm_type: float, kernel: str, backend: str | None, max_norm: float
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """The same on two ranks."""
    rank = torch.distributed.get_rank()
    dmp, inner = build(plan, rule, kernel, backend)
    optimizer = GradientClippingOptimizer(
        inner, GradientClipping.NORM, max_norm, norm_type, True, param_to_pgs=dmp.param_to_pgs()
    )
    found, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        dmp(batch_of(step, rank))[0].backward()
        optimizer.step()
        norms.append(float(optimizer.last_total_grad_norm))
        found.append({name: value.clone() for name, value in dmp.full_state_dict().items()})
    return found, norms


def same_steps(ranks: list[list[dict[str, Tensor]]], truth: list[dict[str, Tensor]]) -> None:
    """Weights of each rank after each step."""
    for found in ranks:
        torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.gate
@pytest.mark.parametrize(
    ("plan", "rule", "norm_type", "kernel", "backend"),
    [
        ("mixed", "exact_row_wise_adagrad", 2.0, "fused", None),
        ("mixed", "exact_sgd", 1.0, "fused", "native"),
        ("mixed", "exact_adagrad", float("inf"), "fused", "native"),
        ("one rank", "exact_sgd", 2.0, "fused", "fbgemm"),
        ("mixed", "exact_sgd", 2.0, "dense", None),
        ("one rank", "exact_sgd", 2.0, "dense", None),
        ("hot rows", "exact_row_wise_adagrad", 2.0, "fused", None),
        ("routes", "exact_row_wise_adagrad", 2.0, "fused", None),
    ],
)
def test_clipping_by_norm_is_that_of_the_unsharded_model(
    two: Any, plan: str, rule: str, norm_type: float, kernel: str, backend: str | None
) -> None:
    truth, norms = unsharded(rule, MAX_NORM, norm_type)
    assert max(norms) > 1.5 * MAX_NORM
    for found, own_norms in two.run(clipped, plan, rule, norm_type, kernel, backend, MAX_NORM):
        assert own_norms == pytest.approx(norms, rel=1e-4)
        same_steps([found], truth)


# ---- accumulation ----


def accumulated(plan: str, rule: str, kernel: str, batches: int) -> list[dict[str, Tensor]]:
    """Several batches a step on two ranks."""
    rank = torch.distributed.get_rank()
    dmp, optimizer = build(plan, rule, kernel, None)
    dmp.fused_optimizer.defer_steps()
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(batches):
            with dmp._dmp_wrapped_module.no_sync() if number < batches - 1 else nullcontext():  # type: ignore[operator]
                dmp(batch_of(step * batches + number, rank))[0].backward()
        optimizer.step()
        found.append({name: value.clone() for name, value in dmp.full_state_dict().items()})
    return found


@pytest.mark.parametrize(
    ("rule", "kernel"), [("exact_sgd", "dense"), ("exact_sgd", "fused"), ("exact_row_wise_adagrad", "fused")]
)
def test_accumulation_is_that_of_the_unsharded_model(two: Any, rule: str, kernel: str) -> None:
    truth, _ = unsharded(rule, None, 2.0, batches=3)
    same_steps(two.run(accumulated, "mixed", rule, kernel, 3), truth)


def accumulated_twice(case: Case) -> list[dict[str, Tensor]]:
    """Weights of fused tables with deferred steps, and of tables on the dense kernel. Runs on every rank."""
    rank, found = torch.distributed.get_rank(), []
    (path, tables) = next(iter(ShardingPlan.from_json(case.plan).plan.items()))
    dense = {name: replace(own, compute_kernel="dense") for name, own in tables.items()}
    on_dense = ShardingPlan({path: EmbeddingModuleShardingPlan(dense)}).to_json()
    for own in (case, replace(case, plan=on_dense, backend=None)):
        dmp, _ = sharded_model(own)
        if own is case:
            dmp.fused_optimizer.defer_steps()
        parameters = [p for name, p in dmp.named_parameters() if "embedding" in name] if own is not case else []
        spare = nn.Parameter(torch.zeros(1))  # a rank may store no shard
        optimizer = torch.optim.SGD([*parameters, spare], lr=case.learning_rate)
        for step, bags in enumerate(case.steps):
            _, logits, _ = dmp(batch_of_bags(bags[rank], case.weighted, case.inverses(step)[rank]))
            (0.05 * logits.square().sum()).backward()
            if step % 3 == 2:
                dmp.fused_optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
        found.append({name: weight.clone() for name, weight in dmp.full_state_dict().items()})
    return found


@pytest.mark.parametrize("kind", ["weighted", "variable", "dedup", "fbgemm", "distinct_rows"])
def test_every_kind_of_batch_accumulates_as_on_the_dense_kernel(two: Any, kind: str) -> None:
    tables = cases.sequence_tables() if kind == "dedup" else cases.TABLES
    columns = "row_wise" if kind == "fbgemm" else "column_wise"
    plan = cases.plan_of(tables, ["row_wise", "table_wise", columns, "data_parallel"], 2)
    plan = plan.with_route(kind) if kind == "distinct_rows" else plan
    case = Case(tables, plan.to_json(), cases.random_steps(3, tables, 2, steps=6, samples=4), find_unused=False)
    case = replace(case, weighted=kind == "weighted", dedup=kind == "dedup", sequence=kind == "dedup")
    case = replace(case, backend="fbgemm" if kind == "fbgemm" else None)
    if kind == "variable":
        case = replace(case, inverse=cases.random_inverses(7, case.steps))
    for fused, dense in two.run(accumulated_twice, case):
        torch.testing.assert_close(fused, dense)


def dropped() -> tuple[bool, int, int]:
    """Gradients that `zero_grad` drops do not step, and `reshard` refuses to lose any."""
    rank = torch.distributed.get_rank()
    dmp, optimizer = build("mixed", "exact_sgd", "fused", None)
    dmp.fused_optimizer.defer_steps()
    before = {name: value.clone() for name, value in dmp.full_state_dict().items()}
    dmp(batch_of(0, rank))[0].backward()
    waiting = dmp.fused_optimizer.deferred_batches
    with pytest.raises(
        ValueError, match=r"dmp.reshard would lose the gradients of 1 batches.*Fix: call the optimizer's step"
    ):
        dmp.reshard(dmp.plan)
    optimizer.zero_grad()
    optimizer.step()
    same = all(torch.equal(value, before[name]) for name, value in dmp.full_state_dict().items() if "embedding" in name)
    return same, waiting, dmp.fused_optimizer.deferred_batches


def test_gradients_are_dropped_by_zero_grad_only(two: Any) -> None:
    assert two.run(dropped) == [(True, 1, 0)] * 2


def refused() -> list[str]:
    """Errors of a norm over replicas, and of weights that require a gradient."""
    dmp = DMPCollection(Model(), "cpu", None, 2, 1, None)
    optimizer = GradientClippingOptimizer(dmp.fused_optimizer, GradientClipping.NORM)
    dmp(batch_of(0, torch.distributed.get_rank()))[0].backward()
    table = EmbeddingBagConfig(9, 4, name="t", feature_names=["a"])
    weighted = DistributedModelParallel(EmbeddingBagCollection([table], is_weighted=True))
    weighted.fused_optimizer.defer_steps()
    batch = batch_of_bags({"a": [[1], [2]]}, weighted=True)
    batch.weights().requires_grad_()
    return [attempted(optimizer.step), attempted(lambda: weighted(batch))]


def test_what_cannot_wait_for_a_step_is_refused(two: Any) -> None:
    for norm, weights in two.run(refused):
        assert "the tables have 2 replicas with different gradients" in norm
        assert "per-sample weights require a gradient, and the steps of the tables are defer" in weights
