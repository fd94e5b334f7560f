"""Weights by place: values, gradients, names, refusals."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import (
    DLRM,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recshard_lab.sparse import KeyedJaggedTensor

BAGS = {"f": [[7, 3, 1], [], [3]], "g": [[2], [5, 5], []]}


def ids() -> KeyedJaggedTensor:
    flat = [bag for bags in BAGS.values() for bag in bags]
    return KeyedJaggedTensor(
        list(BAGS), torch.tensor([row for bag in flat for row in bag]), lengths=torch.tensor([len(bag) for bag in flat])
    )


def collection(weighted: bool = True, device: str | None = None) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 4, f"t_{feature}", feature_names=[feature]) for feature in BAGS]
    return EmbeddingBagCollection(tables, is_weighted=weighted, device=device)


def by_module() -> Any:
    return {"f": PositionWeightedModule(3)}


def by_collection() -> Any:
    return PositionWeightedModuleCollection({"f": 3})


@pytest.mark.parametrize("make", [by_module, by_collection])
def test_each_row_is_multiplied_by_the_weight_of_its_place(make: Any) -> None:
    torch.manual_seed(0)
    model = FeatureProcessedEmbeddingBagCollection(collection(), make())
    (weight,) = model._feature_processors.parameters()
    nn.init.uniform_(weight)
    found = model(ids())
    tables = {name: bag.weight for name, bag in model._embedding_bag_collection.embedding_bags.items()}
    for sample in range(3):
        rows = [weight[place] * tables["t_f"][row] for place, row in enumerate(BAGS["f"][sample])]
        torch.testing.assert_close(found["f"][sample], sum(rows, torch.zeros(4)))
        plain = [tables["t_g"][row] for row in BAGS["g"][sample]]
        torch.testing.assert_close(found["g"][sample], sum(plain, torch.zeros(4)))
    grad = torch.randn(3, 8)
    (found.values() * grad).sum().backward()
    expected = torch.zeros(3)
    for sample, bag in enumerate(BAGS["f"]):
        for place, row in enumerate(bag):
            expected[place] += tables["t_f"][row].detach() @ grad[sample, :4]
    torch.testing.assert_close(weight.grad, expected)


def test_new_processors_change_nothing() -> None:
    ebc = collection()
    plain = EmbeddingBagCollection(ebc.embedding_bag_configs())
    plain.load_state_dict(ebc.state_dict())
    model = FeatureProcessedEmbeddingBagCollection(ebc, PositionWeightedModuleCollection({"f": 3, "g": 5}))
    torch.testing.assert_close(model(ids()).values(), plain(ids()).values())


def test_a_model_takes_processed_tables_as_its_collection() -> None:
    processed = FeatureProcessedEmbeddingBagCollection(collection(), by_collection())
    model = DLRM(processed, 3, [4], [5, 1])  # type: ignore[arg-type]
    assert model(torch.rand(3, 3), ids()).shape == (3, 1)
    assert "embedding_bag_collection._feature_processors.position_weights.f" in dict(model.named_parameters())


def test_a_bag_stored_once_is_weighed_once() -> None:
    kjt = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([7, 3, 1, 2]),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["f", "g"], torch.tensor([[0, 0], [0, 1]])),
    )
    model = FeatureProcessedEmbeddingBagCollection(collection(), by_collection())
    found = model(kjt)["f"]
    assert found.shape == (2, 4)
    assert torch.equal(found[0], found[1])


def test_state_dicts_have_torchrecs_names() -> None:
    tables = {f"_embedding_bag_collection.embedding_bags.t_{feature}.weight" for feature in BAGS}
    names = set(FeatureProcessedEmbeddingBagCollection(collection(), by_collection()).state_dict())
    assert names == tables | {"_feature_processors.position_weights.f"}
    names = set(FeatureProcessedEmbeddingBagCollection(collection(), by_module()).state_dict())
    assert names == tables | {"_feature_processors.f.position_weight"}


def test_weights_on_meta_are_ones_once_they_have_memory() -> None:
    for module in (PositionWeightedModule(3, device="meta"), PositionWeightedModuleCollection({"f": 3}, device="meta")):
        assert {p.device.type for p in module.parameters()} == {"meta"}
        module.to_empty(device="cpu")
        module.reset_parameters()
        assert all(bool((p == 1).all()) for p in module.parameters())


def test_what_cannot_be_weighed_is_refused() -> None:
    with pytest.raises(ValueError, match="feature 'f': bag 0 has 3 ids, and the processor has weights for 2 places"):
        PositionWeightedModuleCollection({"f": 2})(ids())
    with pytest.raises(ValueError, match="bag 0 has 3 ids"):
        PositionWeightedModule(2)(ids()["f"])
    with pytest.raises(ValueError, match=r"features \['h'\] have a processor and are not in the batch"):
        PositionWeightedModuleCollection({"h": 2})(ids())
    with pytest.raises(ValueError, match="build it with is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(collection(weighted=False), by_module())
    with pytest.raises(ValueError, match=r"features \['h'\] of processors. Fix: use features of \['f', 'g'\]"):
        FeatureProcessedEmbeddingBagCollection(collection(), {"h": PositionWeightedModule(2)})
    with pytest.raises(ValueError, match="the longest bag of feature 'f' must be an integer from 1, got 0"):
        PositionWeightedModuleCollection({"f": 0})
