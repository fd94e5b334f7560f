"""The last row shard of a table is shorter than the others: lookups and training on three ranks, with fixed ids."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import recshard_lab
from recshard_lab import DistributedModelParallel, ParameterSharding, ShardingPlan
from recshard_lab.distributed import EmbeddingBagCollectionSharder
from tests.distributed.test_limits import bags, collection, table


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    with recshard_lab.launch(3) as launched:
        yield launched


def uneven(rows: int) -> tuple[list[list[float]], list[list[float]], list[int]]:
    """On every rank: outputs and weights after a step under row_wise, and the rows that it holds."""
    rank = torch.distributed.get_rank()
    plan = ShardingPlan({"": {"t": ParameterSharding("row_wise")}})  # type: ignore[dict-item]
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": "exact_sgd", "learning_rate": 1.0})]
    weights = torch.arange(rows).float().view(-1, 1).repeat(1, 4)
    dmp = DistributedModelParallel(collection(table(rows), weights), plan=plan, sharders=sharders)
    out = dmp(bags([rows - 1], [0], [rows - 1, rows - 2], [rank])).values()
    (out * 3).sum().backward()  # gradients are averaged over ranks
    (collection_,) = dmp.collections.values()
    (shards,) = collection_.table_shards().values()
    held = [weight.shape[0] for weight in shards.local_weights.values()]
    return out[:, :1].tolist(), dmp.full_state_dict()["embedding_bags.t.weight"][:, :1].tolist(), held


@pytest.mark.parametrize(("rows", "expected"), [(10, [[4], [4], [2]]), (7, [[3], [3], [1]]), (4, [[2], [2], []])])
def test_ids_of_the_last_row_shard_are_looked_up_and_trained_where_it_is_shorter(
    three: Any, rows: int, expected: list[list[int]]
) -> None:
    used = torch.zeros(rows)
    for rank in range(3):
        for row in (rows - 1, 0, rows - 1, rows - 2, rank):
            used[row] += 1
    after = (torch.arange(rows) - used).view(-1, 1).tolist()
    for rank, (out, weights, held) in enumerate(three.run(uneven, rows)):
        assert held == expected[rank]
        assert out == [[rows - 1], [0], [2 * rows - 3], [rank]]
        assert weights == after
