"""The demo: one AUC under every scheme, numbers measured beside predicted, a report that needs nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sklearn.metrics import roc_auc_score

from recshard_lab.data import RatingsDataset, SyntheticRatings
from recshard_lab.lab import export
from recshard_lab.lab.demo.training import (
    PLANNER,
    SAME_AUC,
    SPLITS,
    Comparison,
    Progress,
    Run,
    TimeLeft,
    compare_schemes,
    plans_to_train,
)
from recshard_lab.lab.draw.theme import SCHEMES, look_of
from recshard_lab.sharding import scheme_names
from recshard_lab.train import MOVIELENS_100K, Recipe, evaluate

pytestmark = pytest.mark.gate

SMALL = Recipe(epochs=1, batch_size=160)


PROGRESS: list[Progress] = []
OUTCOMES: list[tuple[str, str]] = []


@pytest.fixture(scope="module")
def found() -> Comparison:
    ratings = SyntheticRatings(1600, num_users=150, num_movies=200, why="a test")

    def on_outcome(run: Run, split: str) -> None:
        assert 0.0 < run.outcomes[split].auc < 1.0
        OUTCOMES.append((run.name, split))

    return compare_schemes(ratings, 4, recipe=SMALL, on_progress=PROGRESS.append, on_outcome=on_outcome)


@pytest.mark.nightly
def test_every_registered_scheme_and_the_planners_plan_are_compared_with_the_unsharded_model(found: Comparison) -> None:
    names = [run.name for run in found.runs]
    assert names[: 1 + len(scheme_names())] == ["unsharded", *scheme_names()]
    assert (PLANNER in names) != (PLANNER in found.same)
    assert sum(found.planned.values()) == len(found.recipe.tables(found.ratings))
    assert found.shape == "4 ranks on 2 virtual nodes"
    assert found.splits == [*SPLITS]
    assert not [note for note in found.notes() if "short run" in note]


def test_results_are_reported_as_they_come(found: Comparison) -> None:
    assert [(run.name, split) for split in SPLITS for run in found.runs] == OUTCOMES


def test_progress_grows_to_the_end_and_says_how_long_it_takes(found: Comparison) -> None:
    unmeasured, measured = PROGRESS[:2], PROGRESS[2:]
    assert [(progress.share, progress.left_s) for progress in unmeasured] == [(None, None)] * 2
    shares = [progress.share for progress in measured]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1], measured[-1].left_s) == (0.0, 1.0, 0.0)
    assert all(progress.left_s is not None and progress.left_s >= 0 for progress in measured)
    first, *actions = [f"{run.name}, {SPLITS[split]}" for split in SPLITS for run in found.runs]
    assert unmeasured[0].action == first
    assert [*dict.fromkeys(progress.action for progress in measured)][:-1] == actions


@pytest.mark.parametrize("slower_by", [1.0, 1.3, 2.0])
def test_the_time_left_is_right_to_30_percent_if_the_estimates_are_wrong_by_15(slower_by: float) -> None:
    """Jobs take `slower_by` times their estimate, each 15% less or more, and start 0.3 s before their first step."""
    estimates = [4.0, 6.0, 7.0, 5.0, 8.0]
    starting = 0.3
    seconds = [e * slower_by * own for e, own in zip(estimates, (1.0, 1.15, 0.85, 1.15, 0.85), strict=True)]
    now = 0.0
    left = TimeLeft(estimates, clock=lambda: now)
    for job, took in enumerate(seconds):
        left.at(job, 0.0)
        now += starting
        for step in range(100):
            remains = sum(seconds[job:]) + starting * (len(seconds) - job - 1) - took * step / 100
            predicted = left.at(job, step / 100)
            if now > 10.0 or slower_by <= 1.3:  # the first 10 s show that the machine is slower than measured
                assert predicted == pytest.approx(remains, rel=0.3), (job, step)
            now += took / 100


def test_plans_with_the_same_shards_are_trained_once_and_said(found: Comparison) -> None:
    plans, same = plans_to_train(scheme_names(), SMALL.tables(found.ratings), 2)
    assert {*plans, *same} == set(scheme_names())
    # on one node, schemes for several nodes give the shards of the schemes that they refine
    assert same == {"table_row_wise": "row_wise", "table_column_wise": "column_wise", "grid_shard": "row_wise"}
    notes = replace(found, world_size=2, nodes=1, same=same).notes()
    assert "Not trained again: table_row_wise, grid_shard. On 2 ranks, the shards are those of row_wise." in notes


def test_losses_and_auc_are_the_unsharded_ones_under_every_scheme(found: Comparison) -> None:
    for split in SPLITS:
        truth = found.runs[0].outcomes[split]
        for run in found.runs[1:]:
            torch.testing.assert_close(
                run.outcomes[split].losses, truth.losses, rtol=1e-3, atol=0
            )  # Adam magnifies rounding
            assert abs(run.outcomes[split].auc - truth.auc) <= SAME_AUC


def test_measured_weights_and_states_are_the_predicted_ones(found: Comparison) -> None:
    for run in found.runs[1:]:
        assert run.predicted is not None
        measured = run.outcomes["random"].measured
        assert measured is not None
        for name in ("weights", "optimizer_state"):
            place = run.predicted.memory_categories.index(name)
            assert measured.memory_bytes[:, place].tolist() == run.predicted.memory_bytes[:, place].tolist()


def test_the_report_opens_offline_and_names_the_source_of_its_numbers(found: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    export(found, out)
    page = out.read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert "<script src" not in page
    assert len(page.encode()) <= 3_000_000
    assert found.ratings.source in page
    assert "Random split: test AUCs differ by" in page
    for run in found.runs:
        assert look_of(run.name, SCHEMES).label.lower() in page.lower()


def test_a_scheme_that_learns_something_else_fails_the_demo(found: Comparison) -> None:
    run = found.runs[1]
    worse = {split: replace(outcome, auc=outcome.auc - 0.01) for split, outcome in run.outcomes.items()}
    wrong = replace(found, runs=(found.runs[0], replace(run, outcomes=worse)))
    assert all(good for good, _ in found.verdicts())
    assert not any(good for good, _ in wrong.verdicts())


@pytest.mark.real_data
def test_the_printed_auc_is_scikit_learns(movielens: RatingsDataset) -> None:
    _, test = movielens.split("random", seed=0)
    result = evaluate(MOVIELENS_100K.model(movielens), test)
    assert result.auc == pytest.approx(roc_auc_score(test.label.numpy(), result.scores.numpy()), abs=1e-6)
