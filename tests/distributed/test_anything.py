"""Whatever is drawn from the registries: sharded is unsharded, and a move in mid-training changes nothing.

``RECSHARD_SOAK=5000`` draws that many examples for each world size instead of the few that every run repeats.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import recshard_lab
from recshard_lab import DataType, ParameterSharding, Shard, ShardingPlan
from recshard_lab.comm import CommType, make_codec
from recshard_lab.embedding.kernels import TORCH_DTYPES
from recshard_lab.sharding.schemes import scheme_names
from tests.distributed import cases
from tests.distributed.anything import NODES, Life, lives
from tests.distributed.anything_jobs import Told, live, truth_of
from tests.grid import examples, worlds

SOAK = int(os.environ.get("RECSHARD_SOAK", "0"))
EXAMPLES = {1: examples(8, 40), 2: examples(20, 50), 3: examples(10, 30), 4: examples(15, 40)}


@pytest.fixture(scope="module", params=worlds(*NODES))
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks on one virtual node or two, one set a world size."""
    with recshard_lab.launch(request.param, nodes=NODES[request.param]) as launched:
        yield launched


def close(found: torch.Tensor, truth: torch.Tensor, off: torch.Tensor, what: str) -> None:
    """Every number within what is allowed for it."""
    assert found.shape == truth.shape, what
    gap = (found.double() - truth).abs()
    beyond = ~(gap <= off)  # NaN is beyond
    worst = float((gap / off.clamp(min=1e-300)).nan_to_num(nan=torch.inf).max()) if gap.numel() else 0.0
    assert not beyond.any(), f"{what}: {int(beyond.sum())} of {gap.numel()} numbers, {worst:.3g} times what is allowed"


def check(life: Life, told: list[Told]) -> None:
    truth = truth_of(life)
    for own in told:
        assert own.changed == [], "the move changed these"
    assert sum(own.strays for own in told) == (0 if life.policy == "error" else truth.strays)
    for step, outputs in enumerate(truth.outputs):
        for number, (expected, off) in enumerate(outputs):
            found = torch.cat([own.outputs[step][number] for own in told])
            close(found, expected, off, f"output {number} of step {step}")
    for name, (expected, off) in truth.weights.items():
        for own in told:
            close(own.weights[name], expected, off, f"weights of {name}")
            assert torch.equal(own.weights[name], told[0].weights[name]), f"replicas of {name} differ"


def on_ranks(ranks: Any, life: Life) -> list[Told]:
    """What every rank tells; fresh ranks after an error, of which hypothesis provokes many while it shrinks."""
    try:
        told: list[Told] = ranks.run(live, life)
    except recshard_lab.RankError:
        ranks.restart()
        raise
    return told


@pytest.mark.timeout(0 if SOAK else 300)
def test_any_life_is_the_unsharded_one(ranks: Any) -> None:
    world = ranks.world_size

    @settings(
        max_examples=SOAK or EXAMPLES[world],
        derandomize=not SOAK,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
    )
    @given(life=lives(world))
    def is_unsharded(life: Life) -> None:
        check(life, on_ranks(ranks, life))

    is_unsharded()


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.gate), pytest.param(4, marks=pytest.mark.nightly)], indirect=True
)
@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@pytest.mark.parametrize(
    "data_type", [kind for kind in TORCH_DTYPES if kind is not DataType.FP32], ids=lambda kind: kind.value
)
def test_every_scheme_is_as_exact_as_its_tables(ranks: Any, data_type: DataType, sequence: bool) -> None:
    """FP64 to 1e-12; FP16 and BF16, which are rounded after each step, to an ulp or few of the row (`RELATIVE`)."""
    world = ranks.world_size
    tables = [{**own, "data_type": data_type} for own in (cases.sequence_tables() if sequence else cases.TABLES)]
    fused = [{"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.05, "eps": 0.01}] * len(tables)
    steps = cases.random_steps(5, tables, world, steps=3, samples=5)
    for scheme in scheme_names():
        entries = cases.plan_of(tables, [scheme], world).plan[cases.PATH]
        plan = ShardingPlan({"": entries}).to_json()
        nobody: list[list[Any]] = [[None] * world for _ in steps]
        life = Life(tables, fused, (plan, plan), steps, nobody, first=2, sequence=sequence, weighted=not sequence)
        check(life, on_ranks(ranks, life))


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_the_comparison_can_fail(ranks: Any) -> None:
    world = ranks.world_size
    seen: dict[str, bool] = {}

    @settings(max_examples=10, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(life=lives(world))
    def is_unsharded(life: Life) -> None:
        told = on_ranks(ranks, life)
        told[0].weights["t0"][-1, -1] += 0.05 * (1 + 20 * life.coded())
        with pytest.raises(AssertionError):
            check(life, told)
        seen["once"] = True

    is_unsharded()
    assert seen


@pytest.mark.parametrize("kind", list(CommType))
def test_the_codecs_bound_is_about_numbers_of_that_size(kind: CommType) -> None:
    from tests.distributed.anything_jobs import _unit

    assert 0 <= _unit(make_codec(kind), 1.0) <= 2.0**-7


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_sequences_with_hot_rows_may_stand_beside_a_wide_table(ranks: Any) -> None:
    """The collection's rows are FP64 then; those of the replicas are FP32."""
    world = ranks.world_size
    tables: list[dict[str, Any]] = [
        {"name": name, "num_embeddings": rows, "embedding_dim": 4, "feature_names": [name], "data_type": kind}
        for name, rows, kind in (("wide", 3, DataType.FP64), ("hot", 30, DataType.FP32))
    ]
    hot = [Shard(rank, (0, 9), (0, 4)) for rank in range(world)] + [Shard(world - 1, (9, 30), (0, 4))]
    entries = {"wide": ParameterSharding("table_wise", ranks=[0]), "hot": ParameterSharding("custom", shards=hot)}
    plan = ShardingPlan({"": entries}).to_json()  # type: ignore[dict-item]
    life = Life(
        tables,
        [{"optimizer": "exact_sgd", "learning_rate": 0.05}] * 2,
        (plan, plan),
        cases.random_steps(1, tables, world, steps=2, samples=6),
        [[None] * world for _ in range(2)],
        first=1,
        sequence=True,
    )
    check(life, on_ranks(ranks, life))
