"""Pools of rows and of samples."""

from typing import Any

import torch
from torch import distributed as dist
from torchrec import KeyedJaggedTensor
from torchrec.distributed.keyed_jagged_tensor_pool import KeyedJaggedTensorPoolSharder
from torchrec.distributed.tensor_pool import TensorPoolSharder
from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType, ShardingEnv
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.object_pool import ObjectPool
from torchrec.modules.tensor_pool import TensorPool

from tests.compat.parity.case import case, on_ranks, raised

ROWS = "torchrec.modules.tensor_pool.TensorPool"
SAMPLES = "torchrec.modules.keyed_jagged_tensor_pool.KeyedJaggedTensorPool"
CPU = torch.device("cpu")


def rows(**more: Any) -> TensorPool:
    return TensorPool(pool_size=5, dim=2, dtype=torch.float32, device=CPU, **more)


def samples(**more: Any) -> KeyedJaggedTensorPool:
    return KeyedJaggedTensorPool(pool_size=5, feature_max_lengths={"a": 2, "b": 3}, device=CPU, **more)


def batch(**more: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(1, 7), lengths=torch.tensor([1, 2, 0, 3]), **more)


@case(ROWS)
def rows_by_id() -> Any:
    pool = rows()
    pool.update(ids=torch.tensor([1, 4]), values=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    return [pool.lookup(ids=torch.tensor([4, 1, 0])), pool(torch.tensor([1], dtype=torch.int32)), pool.state_dict()]


@case(ROWS, "torchrec.modules.object_pool.ObjectPool")
def facts_of_a_pool() -> Any:
    pool = rows()
    empty = TensorPool(3, 2, torch.float16)
    return [pool.pool_size, pool.dim, pool.dtype, pool.device, isinstance(pool, ObjectPool), empty.device, empty.dtype]


@case(ROWS)
def rows_that_are_passed() -> Any:
    pool = rows(loaded_values=torch.arange(10.0).reshape(5, 2))
    other = rows()
    other.load_state_dict(pool.state_dict())
    return [pool(torch.tensor([2])), other(torch.tensor([4, 0]))]


@case(ROWS)
def rows_written_twice() -> Any:
    pool = rows()
    pool.update(torch.tensor([0, 0]), torch.tensor([[1.0, 1.0], [2.0, 2.0]]))
    pool.update(torch.tensor([], dtype=torch.int64), torch.ones(0, 2))
    return [pool(torch.tensor([0])), pool(torch.tensor([], dtype=torch.int64))]


@case(ROWS, differs="wrong ids and rows raise ValueError with the value, not AssertionError")
def errors_of_rows() -> Any:
    pool = rows()
    return [
        raised(lambda: pool.lookup(torch.tensor([5]))),
        raised(lambda: pool.update(torch.tensor([0]), torch.ones(1, 3))),
        raised(lambda: pool.update(torch.tensor([0]), torch.ones(1, 2, dtype=torch.int64))),
    ]


@case(SAMPLES)
def samples_by_id() -> Any:
    pool = samples()
    pool.update(ids=torch.tensor([3, 1]), values=batch())
    return [pool.lookup(ids=torch.tensor([1, 3, 0])), pool.state_dict()]


@case(SAMPLES)
def samples_with_weights() -> Any:
    pool = samples(is_weighted=True, values_dtype=torch.int64)
    pool.update(torch.tensor([3, 1]), batch(weights=torch.arange(6.0)))
    return [list(pool.state_dict()), pool.is_weighted, pool.state_dict()["weights"].dtype]


@case(SAMPLES, differs="weights are read by lookup; TorchRec's lookup raises AttributeError")
def weights_of_samples() -> Any:
    pool = samples(is_weighted=True)
    pool.update(torch.tensor([3, 1]), batch(weights=torch.arange(6.0)))
    return raised(lambda: pool.lookup(torch.tensor([1])))


@case(SAMPLES)
def facts_of_a_pool_of_samples() -> Any:
    pool = samples()
    return [pool.pool_size, pool.feature_max_lengths, pool.values_dtype, pool.is_weighted, isinstance(pool, ObjectPool)]


@case(SAMPLES)
def samples_overwritten() -> Any:
    pool = samples()
    pool.update(torch.tensor([0, 1]), batch())
    pool.update(torch.tensor([1, 2]), batch())
    restored = samples()
    restored.load_state_dict(pool.state_dict())
    ids = torch.tensor([0, 1, 2, 4])
    return [pool.lookup(ids), restored.lookup(ids), pool.lookup(torch.tensor([], dtype=torch.int64)).lengths()]


@case(SAMPLES, differs="a bag that is too long, and an id outside of the pool, raise ValueError with the value")
def errors_of_samples() -> Any:
    pool = samples()
    long = KeyedJaggedTensor(["a", "b"], torch.arange(7), lengths=torch.tensor([3, 1, 0, 3]))
    return [
        raised(lambda: pool.update(torch.tensor([0, 1]), long)),
        raised(lambda: pool.lookup(torch.tensor([5]))),
        raised(lambda: pool.update(torch.tensor([0, 1]), batch().split([1, 1])[0])),
    ]


PLAN = ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)


def rows_on_a_rank(rank: int) -> Any:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    pool = TensorPoolSharder().shard(rows(), PLAN, env, CPU)
    pool.update(ids=torch.tensor([rank, 4 - rank]), values=torch.tensor([[rank + 1.0, 2.0], [3.0, 4.0 + rank]]))
    found = pool.lookup(torch.tensor([[4, 1, 0], [3]][rank])).wait()
    shard = pool.state_dict()["_pool"].local_shards()[0]
    return [
        found,
        pool(torch.tensor([0])).wait(),
        shard.tensor,
        shard.metadata.shard_offsets,
        shard.metadata.shard_sizes,
    ]


def samples_on_a_rank(rank: int) -> Any:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    pool = KeyedJaggedTensorPoolSharder().shard(samples(), PLAN, env, CPU)
    pool.update(torch.tensor([rank, 4 - rank]), batch())
    return [pool.lookup(torch.tensor([[4, 1, 0], [3]][rank])).wait(), list(pool.state_dict())]


@case("torchrec.distributed.tensor_pool.TensorPoolSharder", "torchrec.distributed.tensor_pool.ShardedTensorPool")
def rows_on_two_ranks() -> Any:
    return on_ranks(2, rows_on_a_rank)


@case("torchrec.distributed.keyed_jagged_tensor_pool.KeyedJaggedTensorPoolSharder")
def samples_on_two_ranks() -> Any:
    return on_ranks(2, samples_on_a_rank)
