"""Tables, ranks and batches that planners are tested with."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner import CostModel, EmbeddingShardingPlanner, Workload
from recshard_lab.planner.search import greedy
from recshard_lab.planner.search.options import Option
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import ShardingPlan, Topology


def table(name: str, rows: int, cols: int, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=cols, feature_names=[f"{name}_id"], **more)


def best_plan(tables: Any, *given: Any, explain: bool = True, **options: Any) -> ShardingPlan:
    """The plan of a planner with these arguments."""
    return EmbeddingShardingPlanner(*given, **options).plan_tables(tables, explain=explain)


def placed_loads(model: CostModel, option: Option) -> Iterator[np.ndarray]:
    """``[K, W]`` what an option adds to each rank, for each placement of its shards."""
    ranks = model.topology.world_size
    for chosen in option.proposal.assignments or itertools.product(range(ranks), repeat=len(option.proposal.rects)):
        added = np.zeros((len(option.loads), ranks))
        for i, rank in enumerate(chosen):
            added[:, rank] += option.loads[:, i]
        yield added


def best_step(model: CostModel, options: Sequence[Sequence[Option]]) -> float:
    """Step time of the best of all placements of all options; infinite if none fits."""
    best = np.inf
    for placed in itertools.product(*([loads for o in own for loads in placed_loads(model, o)] for own in options)):
        loads = np.sum(placed, axis=0)
        if model.memory_total(loads).max() <= model.usable_bytes:
            best = min(best, float(model.phases(loads).max(axis=-1).sum()))
    return best


def searches(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Problems that planners have searched since this call."""
    searched: list[Problem] = []

    class Counted(Problem):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            searched.append(self)

    monkeypatch.setattr(greedy, "Problem", Counted)
    return searched


def random_tables(count: int, seed: int) -> tuple[list[EmbeddingBagConfig], Workload]:
    draw = random.Random(seed)
    tables = [table(f"t{i}", int(10 ** draw.uniform(3, 7.3)), draw.choice([32, 64, 128, 256])) for i in range(count)]
    return tables, Workload(pooling_factors={f"t{i}_id": draw.uniform(1, 50) for i in range(count)})


def random_problem(seed: int) -> tuple[list[EmbeddingBagConfig], Topology, Workload]:
    """Beyond the size up to which everything is tried; memory from ample to hardly enough."""
    draw = random.Random(seed)
    count, ranks = draw.choice([(8, 16), (12, 8), (26, 4), (26, 8), (40, 2)])
    tables = [table(f"t{i}", int(10 ** draw.uniform(3, 7.3)), draw.choice([32, 64, 128])) for i in range(count)]
    each = {f"t{i}_id": draw.uniform(1, 50) for i in range(count)}
    workload = Workload(
        draw.choice([128, 512, 2048]),
        draw.choice([1.0, 10.0, each]),
        optimizer=draw.choice(["exact_sgd", "exact_row_wise_adagrad"]),
        zipf_alpha=draw.choice([0.0, 1.05]),
    )
    fair = sum(config.weight_bytes for config in tables) / ranks
    cap = int(draw.choice([100, 3, 1.6]) * (1.1 * fair + 5e8))
    local = draw.choice([ranks, ranks, ranks // 2])
    device = draw.choice(["cpu", "cuda"])
    topology = Topology(ranks, device, hbm_cap=cap, ddr_cap=cap, local_world_size=local, cores_per_host=local)
    return tables, topology, workload
