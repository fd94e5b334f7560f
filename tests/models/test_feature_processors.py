"""Weights by place: values, gradients, names, refusals."""

from typing import Any

import pytest
import torch
from torch import nn

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recshard_lab.sparse import JaggedTensor, KeyedJaggedTensor
from tests.models.bags import batch_of
from tests.refusals import not_refused

BAGS = {"f": [[7, 3, 1], [], [3]], "g": [[2], [5, 5], []]}


def collection(weighted: bool = True) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(10, 4, f"t_{feature}", feature_names=[feature]) for feature in BAGS]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


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
    found = model(batch_of(BAGS))
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
    batch, processed = batch_of(BAGS), FeatureProcessedEmbeddingBagCollection
    refusals: list[tuple[Any, str]] = [
        (
            lambda: PositionWeightedModuleCollection({"f": 2})(batch),
            "'f': bag 0 has 3 ids, and the processor has weights for 2",
        ),
        (lambda: PositionWeightedModule(2)(batch["f"]), "bag 0 has 3 ids"),
        (
            lambda: PositionWeightedModuleCollection({"h": 2})(batch),
            r"\['h'\] have a processor and are not in the batch",
        ),
        (lambda: processed(collection(weighted=False), by_module()), "build it with is_weighted=True"),
        (
            lambda: processed(collection(), {"h": PositionWeightedModule(2)}),
            r"\['h'\] of processors. Fix: use features of",
        ),
        (
            lambda: PositionWeightedModuleCollection({"f": 0}),
            "longest bag of feature 'f' must be an integer from 1, got 0",
        ),
    ]
    assert not_refused(refusals) == []


# ---- places that `pre_process_input` has written into weights ----


def test_a_place_beyond_the_weights_is_refused_by_name() -> None:
    module = PositionWeightedModuleCollection({"f": 2})
    whole = KeyedJaggedTensor(["f"], torch.tensor([7, 3, 9]), torch.zeros(3), torch.tensor([3]))
    module.pre_process_input(whole)
    assert whole.weights().tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"feature 'f': the batch's weights contain place 2, .* Fix:"):
        module(whole)


def test_shards_of_a_bag_keep_the_places_of_the_whole_bag() -> None:
    module = PositionWeightedModule(3)
    whole = JaggedTensor(torch.tensor([7, 3, 9]), lengths=torch.tensor([3]), weights=torch.zeros(3))
    with torch.no_grad():
        module.position_weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    expected = module(whole).weights()
    module.pre_process_input(whole)
    part = JaggedTensor(whole.values()[1:], lengths=torch.tensor([2]), weights=whole.weights()[1:])
    assert torch.equal(module(part).weights(), expected[1:])
