"""How often rows are used: counted, published, at other batch sizes, and what the planner makes of it."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from recshard_lab import EmbeddingBagConfig, KeyedJaggedTensor, Topology, Workload
from recshard_lab.lab.compare.measure import random_batch
from recshard_lab.lab.compare.question import Question
from recshard_lab.lab.compare.question_code import python_for
from recshard_lab.planner import AccessProfile
from recshard_lab.planner.workload import table_loads
from tests.planner.problems import best_plan
from tests.refusals import not_refused

ROWS = 5_000


def zipf(count: int, seed: int = 0, alpha: float = 1.0, rows: int = ROWS) -> np.ndarray:
    p = np.arange(1, rows + 1.0) ** -alpha
    return np.random.default_rng(seed).choice(rows, count, p=p / p.sum())


def tables(*names: str, rows: int = ROWS) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(rows, 16, name=name, feature_names=[f"{name}_f"]) for name in names]


def batch(per_feature: dict[str, np.ndarray], samples: int) -> KeyedJaggedTensor:
    """Bags of nearly equal length."""
    lengths = [np.diff(np.linspace(0, len(ids), samples + 1).astype(int)) for ids in per_feature.values()]
    return KeyedJaggedTensor(
        list(per_feature),
        torch.from_numpy(np.concatenate(list(per_feature.values()))),
        lengths=torch.from_numpy(np.concatenate(lengths).astype(np.int32)),
    )


def test_a_smaller_batch_has_as_many_distinct_ids_as_subsamples_have() -> None:
    ids, draw = zipf(20_000), np.random.default_rng(1)
    for share in (0.01, 0.1, 0.5, 1.0):
        count = int(share * len(ids))
        counted = np.mean([len(np.unique(draw.choice(ids, count, replace=False))) for _ in range(20)])
        assert AccessProfile.of_ids([ids]).distinct(count) == pytest.approx(counted, rel=0.02), share


def test_a_larger_batch_is_extrapolated_near_what_more_draws_have() -> None:
    for count in (20_000, 40_000):
        counted = len(np.unique(zipf(count, seed=2)))
        assert AccessProfile.of_ids([zipf(10_000)]).distinct(count, ROWS) == pytest.approx(counted, rel=0.15)


def test_no_batch_has_more_distinct_ids_than_rows_or_ids() -> None:
    profile = AccessProfile.of_ids([np.arange(100)])
    assert profile.distinct(1_000_000, num_embeddings=120) == 120
    assert profile.distinct(0.5) <= 0.5
    assert profile.distinct(0) == 0


def test_the_hot_row_curve_is_that_of_the_sorted_counts() -> None:
    ids = zipf(3_000)
    counts = np.sort(np.bincount(ids))[::-1]
    profile = AccessProfile.of_ids(np.array_split(ids, 7))
    for rows in (0, 1, 10, 500, ROWS):
        assert profile.hottest(rows) == pytest.approx(counts[:rows].sum() / 3_000)


def test_metas_histogram_gives_the_share_of_distinct_ids_that_was_published_with_it() -> None:
    meta = AccessProfile.meta_2021()
    assert meta.num_ids == pytest.approx(65_536 * 15.8)
    assert meta.unique_at(meta.num_ids) == pytest.approx(0.145, abs=0.003)
    once = meta.rows[meta.uses.index(1.0)] / meta.num_ids
    assert once == pytest.approx(0.07, abs=0.002)


def test_a_measured_workload_has_the_counted_figures() -> None:
    found = tables("a", "b")
    batches = [batch({"a_f": zipf(600, i), "b_f": zipf(150, 10 + i)}, samples=50) for i in range(4)]
    load = Workload.measured(batches, found, optimizer="adam")
    assert (load.batch_size, load.optimizer) == (50, "adam")
    assert load.pooling_factors == {"a_f": 12.0, "b_f": 3.0}
    counted = np.mean([len(b["a_f"].values().unique()) / 600 for b in batches])
    assert load.profile("a").unique_fraction == pytest.approx(counted)
    # four ranks' batches are the sample itself
    everything = torch.cat([b["a_f"].values() for b in batches])
    assert table_loads(found, 4, load).unique[0] * 2400 == pytest.approx(len(everything.unique()))
    # one rank's: what any of them has, in the mean
    alone = table_loads(found, 1, load)
    assert alone.unique[0] == pytest.approx(counted, rel=0.05)
    assert table_loads(found, 4, load).touched[0] == pytest.approx(alone.unique[0] * 600)
    assert best_plan(found, Topology(2), workload=load).tables().keys() == {"a", "b"}


def test_coverage_is_the_counted_share_of_bags_with_ids() -> None:
    """Three of four bags of one feature and one of four bags of the other: of both, four of eight."""
    (one,) = tables("a")
    one.feature_names.append("b_f")
    first, second = [2, 0, 1, 3], [0, 0, 4, 0]
    bags = KeyedJaggedTensor(["a_f", "b_f"], torch.arange(10), lengths=torch.tensor(first + second))
    load = Workload.measured([bags], [one])
    profile = load.profile("a")
    assert profile.coverage == 0.5
    assert table_loads([one], 2, load).filled.tolist() == [4.0]


def test_batches_that_carry_features_and_batches_that_are_mappings_measure_alike() -> None:
    class Carrier:
        sparse_features = batch({"a_f": zipf(100)}, samples=10)

    bare = Carrier.sparse_features
    one = Workload.measured([bare], tables("a"))
    assert one == Workload.measured([Carrier()], tables("a")) == Workload.measured([bare.to_dict()], tables("a"))


def test_a_given_fraction_wins_over_access_and_access_over_zipf() -> None:
    profile = AccessProfile.of_ids([zipf(1_000)])
    found = tables("a", "b", "c")
    load = Workload(100, 10.0, {"a": 0.25}, zipf_alpha=1.2, access={"a": profile, "b": profile})
    unique = table_loads(found, 1, load).unique
    assert unique[0] == 0.25
    assert unique[1] == pytest.approx(profile.num_rows / 1_000)
    assert unique[2] == table_loads(found, 1, Workload(100, 10.0, zipf_alpha=1.2)).unique[2]


def test_metas_name_stands_for_its_histogram() -> None:
    found = tables("small", rows=100)
    load = Workload(4096, 15.8, access="meta_2021")
    assert load.access == AccessProfile.meta_2021()
    assert table_loads(found, 8, load).unique[0] == pytest.approx(100 / (8 * 4096 * 15.8))


def test_drawn_batches_have_the_reuse_of_the_profile() -> None:
    profile = AccessProfile.of_ids([zipf(50_000)])
    for samples in (200, 2_000, 9_000):
        load = Workload(samples, 10.0, access=profile)
        drawn = random_batch(tables("a"), load, np.random.default_rng(0))["a_f"].values()
        assert len(drawn.unique()) == pytest.approx(profile.distinct(10 * samples, ROWS), rel=0.05)
        assert torch.bincount(drawn).max() / (10 * samples) == pytest.approx(profile.hottest(1), rel=0.15)


def test_the_python_of_a_comparison_names_the_profiles_instead_of_spelling_them() -> None:
    load = Workload(8, access=AccessProfile.meta_2021())
    shown = python_for(Question({}, 2, 8, 10**9), Topology(2), load)
    made = {"tables": tables("a", rows=40), "access": load.access}
    exec(shown, made)
    assert "access=access" in shown
    assert made["plan"].planned.planner.workload == load


def test_batches_and_histograms_that_cannot_be_counted_are_refused_by_name() -> None:
    batches: list[tuple[Any, str]] = [
        ([], "no batches"),
        ([{"other": None}], "no feature 'a_f', which table 'a' reads"),
        ([batch({"a_f": np.array([3, ROWS])}, 1)], "the id 5000, but table 'a' has rows 0 to 4,999"),
        ([batch({"a_f": np.array([3, -1])}, 1)], "the id -1"),
        ([batch({"a_f": zipf(8)}, 2), batch({"a_f": zipf(8)}, 4)], "4 samples, the first batch has 2"),
        (["nothing"], "must be a KeyedJaggedTensor"),
        ([{"a_f": 3}], "must be a JaggedTensor"),
        (7, "batches must be"),
    ]
    assert not_refused((partial(Workload.measured, own, tables("a")), words) for own, words in batches) == []
    refusals: list[tuple[Any, str]] = [
        (lambda: AccessProfile((), ()), "length of at least 1"),
        (lambda: AccessProfile((1.0,), (1.0, 2.0)), "one length"),
        (lambda: AccessProfile((2.0, 1.0), (1.0, 1.0)), "ascending"),
        (lambda: AccessProfile((1.0,), (0.0,)), "rows"),
        (lambda: AccessProfile((1.0,), (1.0,), coverage=1.5), r"coverage must be from 0 to 1, got 1\.5"),
        (lambda: Workload(access="meta_2020"), "'meta_2021', or one of them for each table, got 'meta_2020'"),
    ]
    assert not_refused(refusals) == []
