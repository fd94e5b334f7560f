"""What cannot be packed: no bound above the best of all placements, and a better one than averages give."""

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recshard_lab.planner import CostModel, Workload
from recshard_lab.planner.search.anneal import Anneal
from recshard_lab.planner.search.bounds import mode_bounds, strong_bound
from recshard_lab.planner.search.greedy import Search
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.packing_bound import dual_feasible, packing_bound
from recshard_lab.planner.search.problem import Problem
from recshard_lab.sharding import ParameterConstraints, Topology
from tests.grid import examples
from tests.planner.problems import best_step, table


@given(st.lists(st.one_of(st.floats(0, 1), st.sampled_from([1 / 2, 1 / 3, 2 / 3, 1 / 4, 0.4, 0.6, 0.2])), min_size=1))
def test_no_function_fills_a_bin_with_what_fits_into_it(sizes: list[float]) -> None:
    fit = np.array([size for size, held in zip(sizes, itertools.accumulate(sizes), strict=True) if held <= 1])
    assert (dual_feasible(fit).sum(axis=1) <= 1 + 1e-9).all()


def whole_tables(seed: int) -> tuple[Problem, float]:
    """Four to six tables that are not cut, on three ranks; and the best step of all placements."""
    draw = random.Random(seed)
    tables = [
        table(f"t{i}", int(10 ** draw.uniform(3, 6)), draw.choice([16, 64, 128])) for i in range(draw.choice([4, 5, 6]))
    ]
    load = Workload(draw.choice([512, 4096]), {f"t{i}_id": draw.uniform(1, 30) for i in range(6)}).for_tables(tables)
    held = sum(config.weight_bytes for config in tables) + 10**8
    cap = int(held * draw.choice([0.45, 0.6, 10]))
    nodes = draw.choice([1, 3])
    top = Topology(3, "cuda", hbm_cap=cap, reserve_fraction=0, local_world_size=3 // nodes)
    only = {config.name: ParameterConstraints(sharding_types=["table_wise"]) for config in tables}
    model = CostModel(tables, top, load, only)
    options = options_of(model, tables, only)
    return Problem(model, options), best_step(model, options)


def test_packing_proves_no_more_than_the_best_of_all_placements_and_more_than_averages() -> None:
    better = fitting = 0
    for seed in range(examples(13, 40)):
        problem, best = whole_tables(seed)
        if not np.isfinite(best):
            continue
        fitting += 1
        search = Search(problem, passes=3)
        search.run()
        assert search.best_ms >= best * (1 - 1e-9)
        every = np.ones(len(problem.priced.cost), dtype=bool)
        bound = packing_bound(problem, every, search.bound_ms, search.best_ms * 1.2)
        assert search.bound_ms <= bound <= best * (1 + 1e-6), seed
        better += bound > search.bound_ms * 1.005
    assert fitting > 0.6 * examples(13, 40)
    assert better > examples(13, 40) / 8


def test_the_bound_is_the_same_on_a_slow_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, best = whole_tables(1)
    bound = strong_bound(problem, best * 1.01)
    assert bound > mode_bounds(problem.model, problem.priced)[0].ms * 1.005
    monkeypatch.setattr(time, "monotonic", itertools.count(0, 100).__next__)
    assert strong_bound(problem, best * 1.01) == bound


def test_annealed_plans_are_what_they_claim_and_the_same_every_time() -> None:
    for seed in range(10):
        problem, best = whole_tables(seed)
        search = Search(problem, passes=3)
        if not np.isfinite(best):
            continue
        plans = [Anneal(problem, search.starts(), copies=8).run(6) for _ in range(2)]
        for state in plans[0]:
            told = problem.step_ms(state)
            problem.add_up(state)
            assert problem.fits(state)
            assert told == problem.step_ms(state) or abs(told - problem.step_ms(state)) < 1e-9
            assert told >= best * (1 - 1e-9)
        ranks = [[[put.placement.ranks for put in state.placed if put] for state in plan] for plan in plans]
        assert ranks[0] == ranks[1]
