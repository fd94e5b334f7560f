"""Process groups after an error on a rank: rebuilt in place, as torch itself had registered them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import recshard_lab as rs
from recshard_lab.launcher import RankError, Ranks

pytestmark = pytest.mark.timeout(120)


def pooled_ids() -> list[float]:
    """Output of a new sharded model whose row k is all k, for the bag [1, 2]."""
    table = rs.EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="t", feature_names=["f"])
    collection = rs.EmbeddingBagCollection([table])
    with torch.no_grad():
        collection.embedding_bags["t"].weight.copy_(torch.arange(10.0)[:, None].expand(10, 2))
    model = rs.DistributedModelParallel(collection)
    return model(rs.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([2]))).values()[0].tolist()


def default_types() -> dict[str, str]:
    """Group -> the type of its default backend. torch raises if no backend is registered under it."""
    types = dist.ProcessGroup.BackendType.__members__
    groups = list(dist.distributed_c10d._world.pg_map)
    assert all(group._backend_id(types[group.name().upper()]) for group in groups)
    return {group.group_name: group.name() for group in groups}


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("mine")
    dist.barrier()


def test_models_are_built_after_errors_on_backends_of_the_types_that_torch_looks_up(ranks: Ranks) -> None:
    assert ranks.run(pooled_ids) == [[3.0, 3.0]] * 3
    types = ranks.run(default_types)
    assert set(types[0].values()) == {"gloo", "custom"}
    for _ in range(2):
        with pytest.raises(RankError, match="mine"):
            ranks.run(raise_on_rank_1)
        assert ranks.run(default_types) == types
        assert ranks.run(pooled_ids) == [[3.0, 3.0]] * 3
