"""The demo: one AUC under every scheme, numbers measured beside predicted, a report that needs nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sklearn.metrics import roc_auc_score

from recshard_lab.data import RatingsDataset, SyntheticRatings
from recshard_lab.lab import demo, export
from recshard_lab.lab.comparison import SAME_AUC, SPLITS, Comparison, compare_schemes, plans_to_train
from recshard_lab.lab.experiment import moved_bytes
from recshard_lab.lab.theme import SCHEMES, look_of
from recshard_lab.sharding import scheme_names
from recshard_lab.train import MOVIELENS_100K, Recipe, evaluate

SMALL = Recipe(epochs=2, batch_size=256)


@pytest.fixture(scope="module")
def found() -> Comparison:
    ratings = SyntheticRatings(4000, num_users=150, num_movies=200, why="a test")
    return compare_schemes(ratings, 4, recipe=SMALL)


def test_every_registered_scheme_is_compared_with_the_unsharded_truth(found: Comparison) -> None:
    assert [run.name for run in found.runs] == ["unsharded", *scheme_names()]
    assert found.shape == "4 ranks on 2 virtual nodes"
    assert not found.left_out()


def test_what_cuts_alike_is_trained_once_and_said(found: Comparison) -> None:
    plans, same = plans_to_train(scheme_names(), SMALL.tables(found.ratings), 2)
    assert {*plans, *same} == set(scheme_names())
    # on one node the node-aware schemes cut as those they refine
    assert same == {"table_row_wise": "row_wise", "table_column_wise": "column_wise", "grid_shard": "row_wise"}
    said = replace(found, world_size=2, nodes=1, same=same).left_out()
    assert said[0] == "not trained again: table_row_wise, grid_shard, which on 2 ranks cut as row_wise does"


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


def test_counted_traffic_is_within_a_third_of_the_predicted(found: Comparison) -> None:
    for run in found.runs[1:]:
        assert run.predicted is not None
        measured = run.outcomes["random"].measured
        assert measured is not None
        predicted = moved_bytes(run.predicted.traffic_bytes)
        assert moved_bytes(measured.traffic_bytes) == pytest.approx(predicted, rel=1 / 3)


def test_the_report_opens_offline_and_names_the_source_of_its_numbers(found: Comparison, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    export(found, out)
    page = out.read_text()
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    assert "<script src" not in page
    assert len(page.encode()) <= 3_000_000
    assert found.ratings.source in page
    for run in found.runs:
        assert look_of(run.name, SCHEMES).label.lower() in page.lower()


def test_a_scheme_that_learns_something_else_fails_the_demo(found: Comparison) -> None:
    run = found.runs[1]
    worse = {split: replace(outcome, auc=outcome.auc - 0.01) for split, outcome in run.outcomes.items()}
    wrong = replace(found, runs=(found.runs[0], replace(run, outcomes=worse)))
    assert all(good for good, _ in found.verdicts())
    assert not any(good for good, _ in wrong.verdicts())


def test_the_table_fits_a_terminal_of_eighty_columns(found: Comparison) -> None:
    console = Console(width=80, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(demo.summary_table(found))
    text = console.export_text()
    assert "…" not in text
    assert len([line for line in text.splitlines() if "|" in line]) >= len(found.runs)
    console.file.close()


@pytest.mark.real_data
def test_the_printed_auc_is_scikit_learns(movielens: RatingsDataset) -> None:
    _, test = movielens.split("random", seed=0)
    result = evaluate(MOVIELENS_100K.model(movielens), test)
    assert result.auc == pytest.approx(roc_auc_score(test.label.numpy(), result.scores.numpy()), abs=1e-6)
