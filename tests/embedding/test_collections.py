"""The unsharded collections do what their docstrings say, by arithmetic written out here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings

import recshard_lab as rs
from recshard_lab.embedding import BaseEmbeddingConfig
from recshard_lab.sparse import KeyedJaggedTensor
from tests.embedding.tables import MEAN, SUM, batches, tables


def one(**changes: object) -> rs.EmbeddingBagConfig:
    return rs.EmbeddingBagConfig(
        **{"num_embeddings": 4, "embedding_dim": 4, "name": "t", "feature_names": ["f"], **changes}
    )


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
@given(features=batches)
@settings(max_examples=30, deadline=None)
def test_each_bag_is_the_sum_or_mean_of_its_rows(pooling: Any, weighted: bool, features: KeyedJaggedTensor) -> None:
    collection = rs.EmbeddingBagCollection(tables(pooling), is_weighted=weighted)
    output = collection(features)
    keys = output.keys()
    assert keys == ["seen@movies", "liked", "seen@posters", "genre"]
    assert output.values().shape == (features.stride(), 4 + 4 + 32 + 8)
    for table in tables(pooling):
        weight = collection.embedding_bags[table.name].weight
        for feature in table.feature_names:
            bags = features[feature]
            ids, per_id = bags.values().tolist(), bags.weights().tolist()
            begin = 0
            for sample, length in enumerate(bags.lengths().tolist()):
                expected = torch.zeros(table.embedding_dim)
                for place in range(begin, begin + length):
                    expected += weight[ids[place]].detach() * (per_id[place] if weighted else 1.0)
                if table.pooling is MEAN and length:
                    expected /= length
                key = feature if feature in keys else f"{feature}@{table.name}"
                torch.testing.assert_close(output[key][sample].detach(), expected)
                begin += length


@given(features=batches)
@settings(max_examples=20, deadline=None)
def test_each_id_keeps_its_row_in_a_sequence_collection(features: KeyedJaggedTensor) -> None:
    configs = [
        rs.EmbeddingConfig(t.num_embeddings, t.embedding_dim, t.name, feature_names=t.feature_names) for t in tables()
    ]
    collection = rs.EmbeddingCollection(configs, need_indices=True)
    output = collection(features)
    assert list(output) == ["seen@movies", "liked", "seen@posters", "genre"]
    for key, table in (
        ("seen@movies", "movies"),
        ("liked", "movies"),
        ("seen@posters", "posters"),
        ("genre", "genres"),
    ):
        bags = features[key.split("@")[0]]
        assert torch.equal(output[key].values(), collection.embeddings[table].weight[bags.values()])
        assert torch.equal(output[key].lengths(), bags.lengths())
        assert torch.equal(output[key].weights(), bags.values())
    assert collection.embedding_names_by_table() == [["seen@movies", "liked"], ["seen@posters"], ["genre"]]


def test_nothing_is_allocated_on_meta_and_materialising_draws_the_weights() -> None:
    huge = one(num_embeddings=10**12)
    collection = rs.EmbeddingBagCollection([huge], device="meta")
    assert collection.device.type == "meta"
    assert collection.embedding_bags["t"].weight.shape == (10**12, 4)
    small = rs.EmbeddingBagCollection([one(weight_init_min=1, weight_init_max=2)], device=torch.device("meta"))
    small.to_empty(device="cpu")
    small.reset_parameters()
    assert small.embedding_bags["t"].weight.min() >= 1


def test_initial_weights_are_drawn_as_the_config_says() -> None:
    torch.manual_seed(0)
    weight = rs.EmbeddingBagCollection([one(num_embeddings=400)]).embedding_bags["t"].weight
    assert weight.abs().max() <= 400**-0.5
    assert weight.std().item() == pytest.approx(2 * 400**-0.5 / 12**0.5, rel=0.05)
    ranged = rs.EmbeddingBagCollection([one(weight_init_min=3.0, weight_init_max=4.0)]).embedding_bags["t"].weight
    assert ranged.min() >= 3
    assert ranged.max() <= 4
    called = rs.EmbeddingBagCollection([one(init_fn=torch.nn.init.ones_)]).embedding_bags["t"].weight
    assert bool((called == 1).all())


def test_half_precision_tables_are_summed_in_single() -> None:
    collection = rs.EmbeddingBagCollection([one(data_type=rs.DataType.FP16, init_fn=torch.nn.init.ones_)])
    many = KeyedJaggedTensor(["f"], torch.zeros(4097, dtype=torch.int64), lengths=torch.tensor([4097]))
    assert collection(many)["f"][0, 0] == 4097  # half precision cannot count past 2048
    assert collection.embedding_bags["t"].weight.dtype == torch.float16


@pytest.mark.parametrize("bad", [4, -1, 2**40])
def test_an_id_that_is_no_row_is_named_with_its_feature_and_sample(bad: int) -> None:
    features = KeyedJaggedTensor(["f"], torch.tensor([0, 3, bad]), lengths=torch.tensor([1, 0, 2]))
    message = rf"feature 'f', sample 2: id {bad} is not a row of table 't', which has ids 0 to 3"
    with pytest.raises(ValueError, match=message):
        rs.EmbeddingBagCollection([one()])(features)
    with pytest.raises(ValueError, match=message):
        rs.EmbeddingCollection([rs.EmbeddingConfig(4, 4, "t", feature_names=["f"])])(features)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (KeyedJaggedTensor(["g"], torch.tensor([0]), lengths=torch.tensor([1])), "feature 'f' of table 't' is not in"),
        (KeyedJaggedTensor(["f"], torch.tensor([0]), lengths=torch.tensor([1])), "the collection has is_weighted=True"),
        (KeyedJaggedTensor(["f"], torch.tensor([0.5]), lengths=torch.tensor([1])), "not int32 or int64"),
        (
            KeyedJaggedTensor(["f"], torch.tensor([0]), torch.tensor([1]), lengths=torch.tensor([1])),
            "weights are torch.int64, not floating point",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(features: KeyedJaggedTensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rs.EmbeddingBagCollection([one()], is_weighted=True)(features)


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ([], "tables is empty"),
        ([rs.DynamicEmbeddingConfig("u", 4, 128)], "table 'u' is dynamic, .*Fix: use DynamicEmbeddingBagCollection"),
        ([one(name="")], "number 0 has no name"),
        ([one(name="a.b")], "'a.b': a name with a dot"),
        ([one(), one()], "two tables are named 't'"),
        ([one(feature_names=[])], "no feature_names"),
        ([one(feature_names=["f", "f"])], "names a feature twice"),
        ([one(data_type=rs.DataType.INT8)], "'t' is INT8, which cannot be trained"),
        ([one(pooling=rs.PoolingType.NONE)], "use PoolingType.SUM or MEAN, or an EmbeddingCollection"),
        ([rs.EmbeddingConfig(4, 4, "t", feature_names=["f"])], "'t' has pooling None"),
    ],
)
def test_tables_that_cannot_be_held_are_refused(configs: list[BaseEmbeddingConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rs.EmbeddingBagCollection(configs)  # type: ignore[arg-type]


def test_a_sequence_collection_has_one_dim_or_says_that_it_has_not() -> None:
    wide, narrow = (rs.EmbeddingConfig(4, dim, f"t{dim}", feature_names=["f"]) for dim in (8, 4))
    assert rs.EmbeddingCollection([wide]).embedding_dim() == 8
    with pytest.raises(ValueError, match=r"several embedding_dim, \[4, 8\]"):
        rs.EmbeddingCollection([wide, narrow]).embedding_dim()
