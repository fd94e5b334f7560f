"""Exchanges of shards between ranks and between nodes: also of tables that are on several of them."""

import numpy as np
import pytest

from recshard_lab.embedding import EmbeddingBagConfig
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.search.moves import exchange
from recshard_lab.planner.search.options import options_of
from recshard_lab.planner.search.problem import Problem
from recshard_lab.planner.search.state import State
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ParameterConstraints, Topology


def lopsided(ranks: int, local: int, scheme: str, used: list[list[int]]) -> tuple[Problem, State]:
    """Four tables whose shards are on these ranks; the first two have twice as many rows and ids as the others."""
    sizes = [100_000, 100_000, 10_000, 10_000]
    tables = [EmbeddingBagConfig(rows, 64, name=f"t{n}", feature_names=[f"f{n}"]) for n, rows in enumerate(sizes)]
    workload = Workload(1024, {"f0": 40.0, "f1": 40.0, "f2": 2.0, "f3": 2.0})
    model = CostModel(tables, Topology(ranks, "cuda", local_world_size=local), workload)
    only = {table.name: ParameterConstraints(sharding_types=[scheme]) for table in tables}
    problem = Problem(model, options_of(model, tables, only))
    state = problem.start()
    for table, wanted in enumerate(used):
        at = next(at for at, one in enumerate(problem.options[table]) if len(one.of) == len(wanted))
        problem.put(state, table, problem.made(table, at, wanted))
    return problem, state


@pytest.mark.parametrize(
    ("ranks", "local", "scheme", "used"),
    [
        (4, 4, "row_wise", [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (4, 4, "column_wise", [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (8, 2, "row_wise", [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]),
    ],
)
def test_shards_of_tables_on_several_units_are_exchanged(
    ranks: int, local: int, scheme: str, used: list[list[int]]
) -> None:
    problem, state = lopsided(ranks, local, scheme, used)
    before = problem.step_ms(state)
    seen: list[float] = []
    exchange(problem, state, exchanged=lambda new: seen.append(problem.step_ms(new)))
    assert seen
    assert problem.step_ms(state) < 0.99 * before
    for put, wanted in zip(state.placed, used, strict=True):
        assert len(set(put.ranks.tolist())) == len(wanted)  # never two shards on a rank
    kept = state.copy()
    problem.add_up(kept)
    np.testing.assert_allclose(state.used, kept.used, rtol=1e-9, atol=1e-12)


def test_a_table_on_every_rank_stays() -> None:
    problem, state = lopsided(4, 4, "row_wise", [[0, 1, 2, 3]] * 4)
    before = [put.ranks.tolist() for put in state.placed if put]
    exchange(problem, state)
    assert [put.ranks.tolist() for put in state.placed if put] == before
