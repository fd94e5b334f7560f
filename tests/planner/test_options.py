"""What the planner chooses from: nothing that a scheme offers by its name is missing from the free search."""

import random

import numpy as np
import pytest

from recshard_lab.planner import CostModel, Workload
from recshard_lab.planner.search.options import Option, Placement, options_of
from recshard_lab.planner.workload import Array
from recshard_lab.sharding import ParameterConstraints, Topology, scheme_names
from tests.grid import examples, grid
from tests.planner.problems import table

TOPOLOGIES = [(8, 8), (8, 4), (12, 6), (6, 1), (1, 1)]  # ranks, ranks per node


def model_of(seed: int, ranks: int, local: int, optimizer: str = "exact_row_wise_adagrad") -> CostModel:
    draw = random.Random(seed)
    config = table("t", int(10 ** draw.uniform(0.5, 6)), draw.choice([4, 6, 12, 48, 96, 100, 128]))
    workload = Workload(draw.choice([16, 1024]), {"t_id": draw.uniform(1, 60)}, optimizer=optimizer)
    return CostModel([config], Topology(ranks, draw.choice(["cpu", "cuda"]), local_world_size=local), workload)


def options(model: CostModel, scheme: str | None = None) -> list[Option]:
    config = table("t", int(model.tables.rows[0]), int(model.tables.cols[0]))
    wish = {"t": ParameterConstraints(sharding_types=[scheme])} if scheme else {}
    return options_of(model, [config], wish)[0]


SCHEMES = [name for name in scheme_names() if name != "flex_shard"]


@pytest.mark.parametrize(*grid(scheme=SCHEMES, nodes=TOPOLOGIES, gate={"nodes": [(12, 6), (6, 1), (1, 1)]}))
def test_the_free_search_has_every_placement_of_every_scheme(scheme: str, nodes: tuple[int, int]) -> None:
    for seed in range(examples(6, 12)):
        model = model_of(seed, *nodes)
        free: dict[tuple[object, ...], list[tuple[tuple[int, ...], ...] | None]] = {}
        for option in options(model):
            free.setdefault((tuple(option.proposal.rects), option.route), []).append(option.proposal.assignments)
        try:
            named = options(model, scheme)
        except ValueError:  # it cannot split this table
            continue
        for option in named:
            lists = free[tuple(option.proposal.rects), option.route]
            mine = option.proposal.assignments
            assert None in lists or (mine and any(set(mine) <= set(other or ()) for other in lists)), option.proposal


@pytest.mark.parametrize(("ranks", "local"), TOPOLOGIES[:-1])
def test_replicas_of_some_rows_are_left_out_only_where_another_option_is_never_slower(ranks: int, local: int) -> None:
    dropped = 0
    for seed in range(examples(20, 40)):
        model = model_of(seed, ranks, local, "exact_sgd" if seed % 2 else "exact_row_wise_adagrad")
        try:
            named = options(model, "flex_shard")
        except ValueError:
            continue
        free = options(model)
        kept = {option.route for option in free if option.proposal.scheme == "flex_shard"}
        noise = np.random.default_rng(seed)
        for option in named:
            if option.route in kept:
                continue
            dropped += 1
            for _ in range(5):
                rest = noise.exponential(noise.choice([0.0, 0.1, 10.0]), (len(model.terms.own), ranks))
                ours, their_bytes = spent(model, option, rest)
                best = min(
                    (ms for ms, held in (spent(model, other, rest) for other in free) if held <= their_bytes),
                    default=np.inf,
                )
                assert best <= ours * (1 + 1e-9), (seed, option.route)
    assert dropped > 0


def spent(model: CostModel, option: Option, rest: Array) -> tuple[float, float]:
    """Milliseconds of a step, and bytes of the fullest rank, with `option` on its first ranks beside `rest`."""
    ranks = (option.proposal.assignments or [tuple(range(len(option.of)))])[0]
    found = model.terms.spent(Placement(option, ranks).loads(model.topology), model.topology.num_nodes) + rest
    return float(found[:-1].max(axis=1).sum()), float(found[-1].max())
