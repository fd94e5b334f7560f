"""TorchRec's DeepFM parts against loops over numbers, and what cannot be built."""

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DeepFM, DeepFMNN, FactorizationMachine, SimpleDeepFMNN
from recshard_lab.sparse import KeyedJaggedTensor


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


def test_the_published_model_needs_no_dense_features() -> None:
    model = DeepFMNN(tables(4, 4), 0, [5])
    logits = model(torch.zeros(2, 0), IDS)
    logits.sum().backward()
    assert logits.shape == (2, 1)
    assert all(p.grad is not None for p in model.parameters())


def test_meta_holds_no_memory() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])], device="meta")
    for model in (DeepFMNN(ebc, 3, [5], dense_device="meta"), SimpleDeepFMNN(3, ebc, 5, 6, dense_device="meta")):
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"one embedding_dim, at least 2 .*, got \{'t0': 4, 't1': 8\}"):
        DeepFMNN(tables(4, 8), 3, [5])
    with pytest.raises(ValueError, match="at least 2"):
        DeepFMNN(tables(1), 3, [5])
    with pytest.raises(ValueError, match=r"SimpleDeepFMNN needs tables of one embedding_dim"):
        SimpleDeepFMNN(3, tables(4, 8), 5, 6)
    with pytest.raises(ValueError, match=r"must be at least 1, got \[3, 0, 6\]"):
        SimpleDeepFMNN(3, tables(4), 0, 6)
    with pytest.raises(ValueError, match="dense_features has 2 columns, the model was built for 3"):
        DeepFMNN(tables(4, 4), 3, [5])(torch.zeros(2, 2), IDS)
    with pytest.raises(ValueError, match="embeddings is empty"):
        DeepFM(nn.Identity())([])
