"""DLRM against the paper's formula written out sample by sample, with plain tensors."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.models import DLRM
from tests.models.bags import batch_of
from tests.refusals import not_refused

DIM = 4


def tables(dims: tuple[int, int] = (DIM, DIM)) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="t1", num_embeddings=10, embedding_dim=dims[0], feature_names=["f1", "f3"]),
        EmbeddingBagConfig(name="t2", num_embeddings=6, embedding_dim=dims[1], feature_names=["f2"]),
    ]


# bags of three samples
BAGS = {"f1": [[1], [2, 2], [9]], "f2": [[0, 5], [], [3]], "f3": [[], [7], [1, 0, 4]]}


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables())


def mlp_by_hand(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = (layer.weight @ x + layer.bias).clamp(min=0)  # type: ignore[operator]
    return x


@pytest.mark.parametrize("dense_features", [0, 3])
def test_logits_follow_the_paper(dense_features: int) -> None:
    bags = collection()
    model = DLRM(bags, dense_features, [5, DIM] if dense_features else [], [6, 1])
    dense = torch.randn(3, dense_features)
    logits = model(dense, batch_of(BAGS))
    assert logits.shape == (3, 1)
    weight = {name: module.weight for name, module in bags.embedding_bags.items()}
    for sample in range(3):
        if dense_features:
            bottom = mlp_by_hand(model.dense_arch.mlp.layers, dense[sample])
        else:
            bottom = model.dense_arch.constant
        # key order of the collection: table by table
        vectors = [bottom]
        for feature, table in (("f1", "t1"), ("f3", "t1"), ("f2", "t2")):
            rows = [weight[table][row] for row in BAGS[feature][sample]]
            vectors.append(torch.stack(rows).sum(0) if rows else torch.zeros(DIM))
        dots = [vectors[i] @ vectors[j] for i in range(4) for j in range(i + 1, 4)]
        x = mlp_by_hand(model.over_arch.mlp.layers, torch.cat([bottom, torch.stack(dots)]))
        expected = model.over_arch.out.weight @ x + model.over_arch.out.bias
        assert torch.allclose(logits[sample], expected, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    refusals: list[tuple[Any, str]] = [
        (lambda: DLRM(EmbeddingBagCollection(tables((4, 8))), 0, [], [1]), r"got \{'t1': 4, 't2': 8\}"),
        (lambda: DLRM(collection(), 3, [8], [1]), r"dense_arch_layer_sizes must be \[..., 4\] for 3 dense"),
        (lambda: DLRM(collection(), 0, [8, 4], [1]), r"dense_arch_layer_sizes must be \[\] for 0 dense"),
        (lambda: DLRM(collection(), 0, [], []), "over_arch_layer_sizes is empty"),
        (lambda: DLRM(collection(), -1, [4], [1]), "dense_in_features must be 0 or more"),
        (
            lambda: DLRM(collection(), 0, [], [1])(torch.zeros(3, 2), batch_of(BAGS)),
            "2 columns, the model was built for 0",
        ),
    ]
    assert not_refused(refusals) == []
