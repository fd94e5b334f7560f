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
from tests.distributed.anything import NODES, Life, lives
from tests.distributed.anything_jobs import Told, live, truth_of
from tests.grid import examples, worlds

SOAK = int(os.environ.get("RECSHARD_SOAK", "0"))
EXAMPLES = {1: examples(3, 40), 2: examples(20, 50), 3: examples(6, 30), 4: examples(8, 40)}


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
