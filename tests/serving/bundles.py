"""Models and batches that the tests of bundles share."""

import torch
from torch import Tensor, nn

from recshard_lab import DLRM, EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.serving import Batch, Inputs

COLUMNS = ("age", "price", "hour")


def tables(rows: int = 50, features: int = 3, dim: int = 8) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(rows + i, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(features)]


def dlrm(weighted: bool = False, **more: str) -> DLRM:
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(tables(), weighted, **more)
    sizes = {"dense_arch_layer_sizes": [8, 8], "over_arch_layer_sizes": [8, 1]}
    return DLRM(collection, dense_in_features=len(COLUMNS), **sizes).eval()


def batch_of(inputs: Inputs, size: int, most: int = 3, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, most + 1, (len(inputs.sparse) * size,), generator=draw)
    counts = lengths.reshape(len(inputs.sparse), size).sum(1).tolist()
    ids = [torch.randint(0, s.rows or 9, (n,), generator=draw) for s, n in zip(inputs.sparse, counts, strict=True)]
    values = torch.cat([torch.empty(0, dtype=torch.int64), *ids])
    weights = torch.rand(len(values), generator=draw) if inputs.weighted else None
    return Batch(torch.randn(size, len(inputs.dense), generator=draw), values, lengths, weights)


def eager(model: nn.Module, inputs: Inputs, batch: Batch) -> Tensor:
    with torch.no_grad():
        answer: Tensor = model(batch.dense, batch.to_keyed_jagged(inputs))
    return answer.squeeze(1)
