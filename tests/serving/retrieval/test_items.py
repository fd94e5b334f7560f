"""From a trained TwoTower to an index of all items."""

from functools import partial

import pytest
import torch

import recshard_lab
from recshard_lab.serving.retrieval import FaissIndex, ItemFeatures, encode_items, index_of_items
from recshard_lab.sharding import ShardingPlan, construct_module_sharding_plan, row_wise
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from tests.serving.retrieval import jobs


def test_an_index_of_items_has_the_vectors_of_the_candidate_tower() -> None:
    model, items = jobs.two_tower(), jobs.items()
    vectors = encode_items(model, items, batch_size=10)
    for number in range(jobs.ITEMS):
        (genres,) = items.bags(torch.tensor([1000 + number]), ["genre"])
        one = KeyedJaggedTensor(
            ["movie", "genre"],
            torch.cat([torch.tensor([number]), genres.values()]),
            lengths=torch.cat([torch.tensor([1]), genres.lengths()]),
        )
        torch.testing.assert_close(vectors[number], model.candidate(one)[0].detach())
    assert not vectors.requires_grad
    users = model.query(KeyedJaggedTensor(["user"], torch.tensor([3, 7]), lengths=torch.tensor([1, 1]))).detach()
    for make in (None, partial(FaissIndex, kind="ivf", cells=2, nprobe=2)):
        found = index_of_items(model, items, make, batch_size=7).search(users, 5)
        assert torch.equal(found.ids, 1000 + (users @ vectors.T).topk(5).indices)


def test_bags_of_items_come_in_any_order_and_number() -> None:
    items = jobs.items()
    wanted = torch.tensor([1004, 1000, 1036, 1004])
    movie, genre = items.bags(wanted, ["movie", "genre"])
    assert movie.values().tolist() == [4, 0, 36, 4]
    assert [bag.tolist() for bag in genre.to_dense()] == [[4], [], [], [4]]
    weighted = ItemFeatures(
        torch.tensor([5, 6]),
        {"tag": JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0.1, 0.2, 0.3]), lengths=torch.tensor([2, 1]))},
    )
    (tags,) = weighted.bags(torch.tensor([6, 5]), ["tag"])
    assert tags.values().tolist() == [3, 1, 2]
    torch.testing.assert_close(tags.weights(), torch.tensor([0.3, 0.1, 0.2]))


def test_wrong_item_features_are_refused_by_name() -> None:
    items = jobs.items()
    with pytest.raises(ValueError, match="item 5 has no features"):
        items.bags(torch.tensor([1000, 5]), ["movie"])
    with pytest.raises(ValueError, match=r"items have no feature 'actor'. They have: movie, genre"):
        items.bags(items.ids, ["actor"])
    with pytest.raises(ValueError, match="item 1003 already has features"):
        items.with_items(jobs.items(3, 4))
    with pytest.raises(ValueError, match=r"item feature 'movie' has 37 bags for 36 items"):
        ItemFeatures(items.ids[1:], items.sparse)
    with pytest.raises(ValueError, match="item id 3 occurs twice"):
        ItemFeatures(torch.tensor([3, 3]), {})
    with pytest.raises(ValueError, match=r"item column 'year' must be \[37\] floating point, got torch.float32 \[3\]"):
        ItemFeatures(items.ids, {}, {"year": torch.ones(3)})
    with pytest.raises(ValueError, match="batch_size=0 is not a number of items"):
        encode_items(jobs.two_tower(), items, 0)


def test_items_of_samples_have_the_features_of_their_first_sample() -> None:
    bags = JaggedTensor(torch.tensor([5, 6, 7, 8, 9]), lengths=torch.tensor([1, 0, 2, 2]))
    columns = {"movie": torch.tensor([30, 10, 30, 20]), "year": torch.tensor([1, 2, 3, 4]), "genre": bags}
    items = ItemFeatures.from_samples(columns, "movie", ["year", "genre"])
    assert items.ids.tolist() == [10, 20, 30]
    assert items.sparse["year"].values().tolist() == [2, 4, 1]
    assert [bag.tolist() for bag in items.sparse["genre"].to_dense()] == [[], [8, 9], [5]]
    with pytest.raises(ValueError, match=r"no column 'studio'\. They have: movie, year, genre"):
        ItemFeatures.from_samples(columns, "movie", ["studio"])
    with pytest.raises(ValueError, match="'genre' has bags of ids"):
        ItemFeatures.from_samples(columns, "genre", ["year"])


def test_a_sharded_model_encodes_on_each_rank_what_the_whole_model_encodes() -> None:
    model = jobs.two_tower()
    plan = construct_module_sharding_plan(
        model.embedding_bag_collection, {name: row_wise() for name in ("users", "movies", "genres")}, world_size=2
    )
    with recshard_lab.launch(2) as two:
        found = two.run(jobs.encode_own_items, ShardingPlan({"embedding_bag_collection": plan}).to_json())
    torch.testing.assert_close(torch.cat(found), encode_items(model, jobs.items(), batch_size=10))
