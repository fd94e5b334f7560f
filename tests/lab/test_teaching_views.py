"""Views that teach: a jagged batch, the way of one id, the skew of accesses; each against numbers found another way."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch

from recshard_lab.lab import views
from recshard_lab.planner import AccessProfile
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, Topology, scheme_named, scheme_names
from recshard_lab.sparse import KeyedJaggedTensor
from tests.lab.pictures import SVG
from tests.lab.plans import table


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 1, 4])
    values = torch.arange(11) * 7
    return KeyedJaggedTensor(["a", "b"], values, torch.rand(11) if weighted else None, lengths=lengths)


def tooltips(svg: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(svg).iter(f"{SVG}title")]


@pytest.mark.parametrize("weighted", [False, True])
def test_every_bag_is_told_with_its_slice(weighted: bool) -> None:
    kjt = batch(weighted)
    view = views.jagged_anatomy(kjt)
    assert len(view.numbers.rows) == 6
    for row, start, end in zip(view.numbers.rows, kjt.offsets()[:-1], kjt.offsets()[1:], strict=True):
        assert row[3:6] == [
            str(int(end - start)),
            str(int(start)),
            " ".join(map(str, kjt.values()[start:end].tolist())),
        ]
    assert len(view.numbers.heads) == 6 + weighted
    for place, value in enumerate(kjt.values().tolist()):
        assert any(text.startswith(f"values[{place}] = {value}\n") for text in tooltips(view.svg))


@pytest.mark.parametrize("scheme", scheme_names())
@pytest.mark.parametrize("id", [0, 417, 999])
def test_an_id_visits_shards_that_have_its_row_and_together_all_columns(scheme: str, id: int) -> None:
    config, topology = table("movies", 1000, 64), Topology(4, local_world_size=2)
    sharding = scheme_named(scheme).default(config, topology, [2] if scheme == "table_wise" else None)
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"movies": sharding})})
    view = views.follow_id(plan, [config], "f_movies", id, home_rank=1, topology=topology)
    assert not view.problem
    columns: list[int] = []
    for _, rank, rows, cols, local, sent, back in view.numbers.rows:
        first, end = (int(n.replace(",", "")) for n in rows.split(" to "))
        assert first + int(local) == id < end
        assert (sent == "0 B") == (back == "0 B") == (rank == "1")
        columns += range(*(int(n) for n in cols.split(" to ")))
    assert columns == list(range(64))


def test_what_cannot_be_followed_is_refused_with_what_can() -> None:
    config = table("movies", 1000, 64)
    sharding = scheme_named("row_wise").default(config, Topology(2), None)
    plan = ShardingPlan({"": EmbeddingModuleShardingPlan({"movies": sharding})})
    assert "f_movies" in views.follow_id(plan, [config], "film", 1).problem
    assert "0 to 999" in views.follow_id(plan, [config], "movies", 1000).problem
    assert "0 to 1" in views.follow_id(plan, [config], "movies", 1, home_rank=5, topology=Topology(2)).problem
    assert "does not place" in views.follow_id(ShardingPlan({}), [config], "movies", 1).problem


def test_the_curve_of_hot_rows_is_that_of_the_counts() -> None:
    rng = np.random.default_rng(3)
    ids = (rng.zipf(1.3, 20_000) - 1) % 5000
    view = views.access_skew({"movies": AccessProfile.of_ids([ids])}, num_embeddings=5000, world_size=4)
    counts = np.sort(np.bincount(ids, minlength=5000))[::-1]
    told = dict(zip(view.numbers.heads, view.numbers.rows[0], strict=True))
    for share in (0.1, 1.0, 10.0):
        expected = 100 * counts[: int(50 * share)].sum() / 20_000
        assert float(told[f"lookups of hottest {share:.3g}%"][:-1]) == pytest.approx(expected, rel=0.05)
    first = 100 * counts[:1250].sum() / 20_000
    equal, balanced = view.figure.data[-2:]
    assert equal.y[0] == pytest.approx(first)
    assert sum(equal.y) == pytest.approx(100)
    assert max(balanced.y) < max(equal.y)


def test_skew_says_what_it_lacks() -> None:
    profile = AccessProfile.of_ids([[1, 2, 2, 3]])
    assert "No table" in views.access_skew({}).problem
    assert "movies" in views.access_skew({"movies": profile}, table="users").problem
    assert "2 rows" in views.access_skew(profile, num_embeddings=2).problem
    assert "at least 1" in views.access_skew(profile, world_size=0).problem
