"""Processors that read places from weights, which `pre_process_input` has written."""

import pytest
import torch

from recshard_lab import JaggedTensor, KeyedJaggedTensor
from recshard_lab.models import PositionWeightedModule, PositionWeightedModuleCollection


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
