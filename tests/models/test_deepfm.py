"""TorchRec's DeepFM parts against loops over numbers, and what cannot be built."""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DeepFM, DeepFMNN, FactorizationMachine, SimpleDeepFMNN
from recshard_lab.sparse import KeyedJaggedTensor
from tests.refusals import not_refused


def tables(*dims: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(10, dim, f"t{n}", feature_names=[f"f{n}"]) for n, dim in enumerate(dims)]
    )


IDS = KeyedJaggedTensor(["f0", "f1"], torch.tensor([3, 1, 4]), lengths=torch.tensor([1, 0, 1, 1]))


def test_the_machine_adds_the_products_of_all_pairs_of_numbers() -> None:
    inputs = [torch.randn(3, 2), torch.randn(3, 4, 1), torch.randn(3, 1)]
    found = FactorizationMachine()(inputs)
    for sample in range(3):
        numbers = [float(number) for tensor in inputs for number in tensor[sample].flatten()]
        assert float(found[sample]) == pytest.approx(sum(a * b for a, b in combinations(numbers, 2)), abs=1e-5)


def test_the_simple_model_is_torchrecs() -> None:
    torch.manual_seed(0)
    model = SimpleDeepFMNN(3, tables(4, 4), hidden_layer_size=5, deep_fm_dimension=6)
    dense = torch.randn(2, 3)
    weight = dict(model.named_parameters())

    def layer(name: str, x: Tensor) -> Tensor:
        return x @ weight[f"{name}.weight"].T + weight[f"{name}.bias"]

    bottom = layer("dense_arch.model.2", layer("dense_arch.model.0", dense).relu()).relu()
    pooled = model.sparse_arch(IDS)
    row = torch.cat([bottom, pooled["f0"], pooled["f1"]], 1)
    deep = layer("inter_arch.deep_fm.dense_module.0", row).relu()
    pairs = torch.stack([row[:, a] * row[:, b] for a, b in combinations(range(12), 2)]).sum(0)
    top = layer("over_arch.model.0", torch.cat([bottom, deep, pairs.unsqueeze(1)], 1))
    expected = 1 / (1 + (-top).exp())
    torch.testing.assert_close(model(dense, IDS), expected)


def test_what_does_not_fit_is_refused() -> None:
    refusals: list[tuple[Any, str]] = [
        (lambda: DeepFMNN(tables(4, 8), 3, [5]), r"one embedding_dim, at least 2, got \{'t0': 4, 't1': 8\}"),
        (lambda: DeepFMNN(tables(1), 3, [5]), "at least 2"),
        (lambda: SimpleDeepFMNN(3, tables(4, 8), 5, 6), r"SimpleDeepFMNN needs tables of one embedding_dim"),
        (lambda: SimpleDeepFMNN(3, tables(4), 0, 6), r"must be at least 1, got \[3, 0, 6\]"),
        (lambda: DeepFMNN(tables(4, 4), 3, [5])(torch.zeros(2, 2), IDS), "2 columns, the model was built for 3"),
        (lambda: DeepFM(nn.Identity())([]), "embeddings is empty"),
    ]
    assert not_refused(refusals) == []
