"""Pools that are spread over two ranks read and write as the whole pool does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recshard_lab.comm import ShardingEnv
from recshard_lab.compat.pools import KeyedJaggedTensorPool, TensorPool
from recshard_lab.compat.sharded_pools import KeyedJaggedTensorPoolSharder, TensorPoolSharder
from recshard_lab.launcher import Ranks, launch
from recshard_lab.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")
PLAN = SimpleNamespace(sharding_type="row_wise", inference=False)


@pytest.fixture(scope="module")
def two() -> Any:
    with launch(2) as ranks:
        yield ranks


def rows_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a rank, and rows for them; the ranks share no id."""
    ids = torch.tensor([[0, 6, 3], [5, 2]][rank] if rank < 2 else [], dtype=torch.int64)
    return ids, torch.arange(2.0 * len(ids)).reshape(-1, 2) + 10 * rank


def samples_of(rank: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    ids = rows_of(rank)[0]
    lengths = torch.arange(2 * len(ids)) % 3
    count = int(lengths.sum())
    weights = torch.arange(float(count)) + 10 * rank
    return ids, KeyedJaggedTensor(["a", "b"], torch.arange(count) + 10 * rank, weights, lengths)


def rows_over_ranks() -> list[Any]:
    rank = dist.get_rank()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    pool = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), PLAN, env)
    pool.update(*rows_of(rank))
    again = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), PLAN, env)
    again.load_state_dict(pool.state_dict())
    ids = torch.arange(7).flip(0) if rank else torch.tensor([], dtype=torch.int64)
    return [pool.lookup(ids).wait(), again(ids).wait(), pool._pool.shape[0]]


def samples_over_ranks() -> dict[str, Any]:
    rank = dist.get_rank()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    whole = KeyedJaggedTensorPool(7, {"b": 2, "a": 3}, is_weighted=True)
    pool = KeyedJaggedTensorPoolSharder().shard(whole, PLAN, env)
    pool.update(*samples_of(rank))
    found = pool(torch.arange(7)).wait()
    return {key: [part.to_dense(), part.to_dense_weights()] for key, part in found.to_dict().items()}


def a_wrong_id() -> None:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    pool = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), PLAN, env)
    pool.lookup(torch.tensor([7 * dist.get_rank()]))


def test_rows_are_read_where_they_were_written(two: Ranks) -> None:
    whole = TensorPool(7, 2, torch.float32, CPU)
    for rank in (0, 1):
        whole.update(*rows_of(rank))
    first, second = two.run(rows_over_ranks)
    assert first[0].shape == (0, 2)
    assert torch.equal(second[0], whole(torch.arange(7).flip(0)))
    assert torch.equal(second[1], second[0])
    assert [first[2], second[2]] == [4, 3]


def test_samples_are_read_where_they_were_written(two: Ranks) -> None:
    whole = KeyedJaggedTensorPool(7, {"b": 2, "a": 3}, is_weighted=True, device=CPU)
    for rank in (0, 1):
        whole.update(*samples_of(rank))
    expected = whole.lookup(torch.arange(7)).to_dict()
    for found in two.run(samples_over_ranks):
        assert list(found) == ["b", "a"]
        for key, (values, weights) in found.items():
            torch.testing.assert_close(values, expected[key].to_dense())
            torch.testing.assert_close(weights, expected[key].to_dense_weights())


def test_a_wrong_id_of_one_rank_is_raised_on_both(two: Ranks) -> None:
    with pytest.raises(Exception, match=r"rank 1: id 7 is not in the pool, which has ids 0 to 6"):
        two.run(a_wrong_id)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"sharding_type": "row_wise", "inference": True}, "inference=True is not supported"),
        ({"sharding_type": "table_wise", "inference": False}, "sharding_type must be row_wise"),
    ],
)
def test_other_plans_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), SimpleNamespace(**plan), ShardingEnv(1, 0))


def test_replicas_are_refused_on_several_nodes_only() -> None:
    plan = SimpleNamespace(sharding_type="replicated_row_wise", inference=False)
    pool = TensorPoolSharder().shard(TensorPool(7, 2, torch.float32), plan, ShardingEnv(1, 0))
    pool.update(*rows_of(1))
    assert pool.lookup(torch.tensor([2])).wait().tolist() == [[12.0, 13.0]]


def test_a_pool_names_what_is_wrong() -> None:
    pool = KeyedJaggedTensorPool(3, {"a": 2}, device=CPU)
    batch = KeyedJaggedTensor(["a"], torch.arange(4), lengths=torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="feature 'a' has 3 values in sample 1, the pool keeps at most 2"):
        pool.update(torch.tensor([0, 1]), batch)
    with pytest.raises(ValueError, match="the batch has 2 samples for 1 ids"):
        pool.update(torch.tensor([0]), batch)
    with pytest.raises(ValueError, match="id -1 is not in the pool"):
        pool.lookup(torch.tensor([-1]))
    with pytest.raises(ValueError, match="enable_uvm=True is not supported"):
        TensorPool(3, 2, torch.float32, enable_uvm=True)
