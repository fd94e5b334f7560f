"""Planted clicks: learnable up to a known best, the same wherever they are asked for, Zipf distributed; their bags."""

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from recshard_lab import mlperf
from recshard_lab.data import MultiHot, SyntheticClicks, build_dataset


def test_a_sample_is_the_same_alone_in_a_range_and_in_any_order() -> None:
    data = SyntheticClicks(1000, rows=[7, 100_000], seed=5)
    whole = data.batch(range(1000))
    some = np.array([999, 3, 3, 500])
    batch = data.batch(some)
    assert torch.equal(batch.labels, whole.labels[some])
    assert torch.equal(batch.dense_features, whole.dense_features[some])
    for key in data.features:
        assert torch.equal(batch.sparse_features[key].values(), whole.sparse_features[key].values()[some])
    assert not torch.equal(
        SyntheticClicks(1000, rows=[7, 100_000], seed=6).batch(some).dense_features, batch.dense_features
    )


def test_ids_follow_the_zipf_law_that_was_asked_for() -> None:
    ids = SyntheticClicks(200_000, rows=[1000, 3], zipf=1.2).ids(range(200_000))
    assert ids.min() == 0
    assert (ids.max(0) == [999, 2]).all()
    counts = np.bincount(ids[:, 0], minlength=1000)
    ranks = np.arange(10, 200)
    slope = np.polyfit(np.log(ranks + 1.5), np.log(counts[ranks]), 1)[0]  # a cell's middle: the density is integrated
    assert slope == pytest.approx(-1.2, abs=0.05)


def test_the_best_is_what_scikit_learn_says_of_the_planted_chances() -> None:
    data = SyntheticClicks(20_000, rows=[50, 500, 5000])
    chance, labels = data.probability(range(20_000)), data.labels(range(20_000))
    best = data.best(range(20_000))
    assert best.auc == pytest.approx(roc_auc_score(labels, chance))
    assert best.log_loss == pytest.approx(log_loss(labels, chance))
    for low in (0.1, 0.3, 0.6):  # the chances are true: of the samples said to click so often, so many do
        mine = (chance >= low) & (chance < low + 0.1)
        assert labels[mine].mean() == pytest.approx(chance[mine].mean(), abs=0.03)


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_bags_begin_with_the_samples_own_id_and_are_a_function_of_it(distribution: str) -> None:
    data = SyntheticClicks(500, memory_bytes=1 << 22)
    batch = data.batch(range(500))
    wide = MultiHot(rows=data.rows, distribution=distribution)(batch)
    assert wide.sparse_features.length_per_key() == [500 * size for size in mlperf.MULTI_HOT_SIZES]
    for key, rows, size in zip(data.features, data.rows, mlperf.MULTI_HOT_SIZES, strict=True):
        bags = wide.sparse_features[key].values().view(500, size)
        own = batch.sparse_features[key].values()
        assert torch.equal(bags[:, 0], own)
        assert 0 <= int(bags.min()) <= int(bags.max()) < rows
        alike = own == own[0]
        assert (bags[alike] == bags[0]).all()
    drawn = wide.sparse_features["cat_20"].values().view(500, 100)[:, 1:]
    assert len(torch.unique(drawn)) > (100 if distribution == "uniform" else 3)
    again = MultiHot(rows=data.rows, distribution=distribution)(data.batch(np.array([17])))
    assert torch.equal(again.sparse_features["cat_20"].values()[1:], drawn[17])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "config must be a mapping with a name, one of criteo, movielens"),
        ({"name": "criteoo"}, "no dataset is named 'criteoo'; there are: criteo"),
        ({"name": "synthetic-criteo", "row": 1}, "has no setting 'row'; it has: click_rate"),
        ({"name": "criteo"}, "needs the setting 'path'"),
        ({"name": "synthetic-criteo", "num_samples": -1}, "must be from 0"),
        ({"name": "synthetic-criteo", "zipf": 11}, "zipf must be from 0 to 10"),
    ],
)
def test_a_config_that_cannot_be_is_refused(config: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_dataset(config)
