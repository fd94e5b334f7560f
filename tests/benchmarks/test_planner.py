"""The planner's benchmark: its models, its gaps, and misses that count."""

from __future__ import annotations

import math

import pytest

from benchmarks import planner
from benchmarks.planner import DRAWN, Gap, gap_figures, gap_of, random_model, shortened
from recshard_lab.planner import EmbeddingShardingPlanner
from recshard_lab.sharding import PlanError


def value(name: str, found: list[Gap]) -> float:
    return next(figure.value for figure in gap_figures(found) if figure.name.strip().endswith(name))


def test_random_models_have_2_to_128_ranks() -> None:
    drawn = {(len(tables), top.world_size) for tables, top, _ in map(random_model, range(200))}
    assert drawn == set(DRAWN)
    assert {ranks for _, ranks in drawn} == {2, 4, 8, 16, 32, 64, 128}


def test_medians_and_worst_are_of_all_models_that_any_solver_fits() -> None:
    found = [Gap(4, 1.0, 0.5), Gap(8, 3.0, 0.0), Gap(64, 9.0), Gap(128, refused=True)]
    assert (value("2 to 128 ranks, median", found), value("2 to 128 ranks, worst", found)) == (3.0, 9.0)
    assert (value("2 to 8 ranks, worst", found[:2]), value("16 to 128 ranks, median", found)) == (3.0, 9.0)
    assert gap_figures(found)[0].beside == {"models": 4, "refused": 1}


def test_a_model_that_only_the_exact_solver_fits_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = EmbeddingShardingPlanner.plan_tables

    def plan_tables(self: EmbeddingShardingPlanner, *tables: object, **options: object) -> object:
        if self.solver == "greedy":
            raise PlanError("table 't0' does not fit")
        return planned(self, *tables, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(EmbeddingShardingPlanner, "plan_tables", plan_tables)
    seed = next(seed for seed in range(100) if random_model(seed)[1].world_size == 2)
    missed = gap_of(seed, seconds=0.2)
    assert math.isinf(missed.bound)
    assert math.isinf(value("2 to 128 ranks, worst", [Gap(4, 1.0), missed]))


def test_a_shorter_plan_under_a_constraint_is_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shortened([(5, 2)]).value <= 1.0
    monkeypatch.setattr(planner, "scheme_names", list)
    assert shortened([(5, 2)]).value == 0.0
