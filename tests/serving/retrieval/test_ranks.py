"""Items split over launched ranks are found as in one index."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab.serving.retrieval import (
    ExactIndex,
    FaissIndex,
    PartitionedIndex,
    RankIndex,
    index_of_items,
    load_index,
)
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, construct_module_sharding_plan, row_wise
from tests.serving.retrieval import jobs
from tests.serving.retrieval.spaces import space, whole_numbers


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    with recshard_lab.launch(2) as ranks:
        yield ranks


def test_ranks_find_exactly_what_one_index_finds(two: Any) -> None:
    vectors, ids, queries = whole_numbers()
    whole, split = ExactIndex(vectors, ids), RankIndex.build(two, vectors, ids, ExactIndex)
    exclude = [[int(own)] for own in ids[:6]]
    for k in (1, 7, 90):
        for ours, theirs in zip(
            split.search_up_to(queries, k, exclude), whole.search_up_to(queries, k, exclude), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert torch.equal(split.ids(), whole.ids())
    assert split.info().settings == {"ranks": ["exact", "exact"]}
    split.close()
    assert two.run(jobs.held) == [0, 0]
    with pytest.raises(ValueError, match=r"index 'index-.*' is closed. Fix: build it again"):
        split.ids()


def test_items_change_on_the_ranks_and_are_saved_there(two: Any, tmp_path: Path) -> None:
    vectors, ids, queries = space()
    make = partial(FaissIndex, kind="ivf", cells=2, nprobe=2)
    whole, split = ExactIndex(vectors[:150], ids[:150]), RankIndex.build(two, vectors[:150], ids[:150], make)
    for index in (whole, split):
        index.add(vectors[150:], ids[150:])
        index.replace(2 * queries[:3], ids[torch.tensor([1, 80, 170])])
        index.remove(ids[40:120])
    expected = whole.search(queries, 20)
    assert torch.equal(split.search(queries, 20).ids, expected.ids)
    split.save(tmp_path / "7")
    loaded = load_index(tmp_path / "7")
    assert isinstance(loaded, PartitionedIndex)
    assert torch.equal(loaded.search(queries, 20).ids, expected.ids)
    with pytest.raises(ValueError, match=f"item {ids[0]} is already in the index"):
        split.add(vectors[:1], ids[:1])
    with pytest.raises(ValueError, match="item 5 is not in the index of 120 items"):
        split.remove(torch.tensor([5]))
    split.close()


def test_one_item_on_two_ranks(two: Any) -> None:
    split = RankIndex.build(two, torch.ones(1, 3), torch.tensor([9]), ExactIndex)
    assert split.search(torch.ones(3), 1).ids.tolist() == [9]
    split.close()


def test_ranks_without_the_index_and_with_the_same_items_are_refused(two: Any) -> None:
    with pytest.raises(ValueError, match=r"no rank holds an index named 'movies'. Fix: hold_index\(name, index\)"):
        RankIndex(two, "movies")
    two.run(jobs.hold_the_same, "same")
    with pytest.raises(ValueError, match="item 0 is in two ranks"):
        RankIndex(two, "same")


def test_a_sharded_model_encodes_on_each_rank_what_the_whole_model_encodes(two: Any) -> None:
    model = jobs.two_tower()
    plan = construct_module_sharding_plan(
        model.embedding_bag_collection, {name: row_wise() for name in ("users", "movies", "genres")}, world_size=2
    )
    assert isinstance(plan, EmbeddingModuleShardingPlan)
    two.run(jobs.encode_own_items, ShardingPlan({"embedding_bag_collection": plan}).to_json(), "movies")
    split, whole = RankIndex(two, "movies"), index_of_items(model, jobs.items(), batch_size=10)
    queries = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    ours, theirs = split.search(queries, 10), whole.search(queries, 10)
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.scores, theirs.scores)
    split.close()
