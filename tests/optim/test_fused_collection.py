"""The optimizer of an unsharded fused collection: copies of the collection have one of their own."""

from copy import deepcopy

import pytest
import torch

from recshard_lab import EmbeddingBagConfig, FusedEmbeddingBagCollection, KeyedJaggedTensor
from recshard_lab.embedding import FusedEmbeddingCollection

TABLE = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["f"])
BATCH = KeyedJaggedTensor(["f"], torch.tensor([0]), lengths=torch.tensor([1]))


def test_a_copy_has_its_own_optimizer() -> None:
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.SGD, {"lr": 0.5})
    own = fused.fused_optimizer()
    twin = deepcopy(fused)
    assert twin.fused_optimizer() is not own
    own.param_groups[0]["lr"] = 2.0
    own.step()
    assert (fused.optimizer_spec.learning_rate, twin.optimizer_spec.learning_rate) == (2.0, 0.5)


def test_states_are_those_of_the_kernel() -> None:
    fused = FusedEmbeddingBagCollection([TABLE], torch.optim.Adam, {"lr": 0.5})
    fused(BATCH).values().sum().backward()
    states = fused.fused_optimizer().state_dict()["state"]["t.weight"]
    assert {"t.weight.momentum_1", "t.weight.momentum_2"} <= set(states)
    assert states["t.weight.momentum_1"].data_ptr() == fused.optimizer_states()["t"]["momentum1"].data_ptr()


@pytest.mark.parametrize("kind", [FusedEmbeddingBagCollection, FusedEmbeddingCollection])
def test_another_location_is_refused_with_the_reason(kind: type) -> None:
    with pytest.raises(ValueError, match=r"location=MANAGED is not supported: .* Fix:"):
        kind([TABLE], torch.optim.SGD, {"lr": 0.5}, location="MANAGED")
