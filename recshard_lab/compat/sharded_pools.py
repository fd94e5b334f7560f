"""Sharded object pools: rank r stores the rows from ``r * ceil(P / W)`` on.

    ids of a call ---> the ranks that store their rows ---> rows return in the order of the ids

A lookup or update is collective: all ranks call it, with any ids.

Shape letters: W ranks, P pool size, n ids of a call, D columns, F features, L sum of the features' longest bags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

from recshard_lab.arguments import device_named
from recshard_lab.comm import ShardingEnv, agreed, all_to_all
from recshard_lab.compat.pools import (
    KeyedJaggedTensorPool,
    PaddedSamples,
    TensorPool,
    check_ids,
    check_rows,
    check_samples,
    check_size,
    no_uvm,
)
from recshard_lab.distributed import LazyAwaitable, LazyNoWait
from recshard_lab.sparse import KeyedJaggedTensor


class RowBlocks:
    """Which rank stores which rows, and their exchange.

    Args:
        pool_size: P.
        env: the ranks.
        plan: TorchRec's ``ObjectPoolShardingPlan``.

    Raises:
        ValueError: a plan for inference, or replicas on several nodes.
    """

    def __init__(self, pool_size: int, env: ShardingEnv, plan: Any) -> None:
        self.pool_size, self.env = check_size("pool_size", pool_size), env
        kind = getattr(plan.sharding_type, "value", plan.sharding_type)
        if kind not in ("row_wise", "replicated_row_wise"):
            raise ValueError(f"sharding_type must be row_wise or replicated_row_wise, got {kind!r}")
        if kind == "replicated_row_wise" and (env.local_size or env.world_size) < env.world_size:
            raise ValueError(
                "replicated_row_wise on several nodes is not supported: an update would reach one node only. Fix: use "
                "ObjectPoolShardingType.ROW_WISE"
            )
        if plan.inference:
            raise ValueError(
                "inference=True is not supported: one process with several GPUs would store the shards. Fix: look up "
                "the unsharded pool"
            )
        self.block = -(-pool_size // env.world_size)
        self.start = min(env.rank * self.block, pool_size)
        self.size = min(self.start + self.block, pool_size) - self.start

    def send(self, ids: Tensor) -> Sent:
        """Sends each id ``[n]`` to the rank that stores its row."""
        return Sent(self, ids)


class Sent:
    """Ids at the ranks that store their rows.

    Attributes:
        order: ``[n]``, the ids sorted by rank.
        rows: ``[m]``, the received ids as rows of this rank's block.
    """

    def __init__(self, blocks: RowBlocks, ids: Tensor) -> None:
        self.env = blocks.env
        owners = ids // blocks.block
        self.order = owners.argsort(stable=True)
        counts = owners.bincount(minlength=self.env.world_size)
        ones = [1] * self.env.world_size
        self.sends = counts.tolist()
        self.receives = all_to_all(counts, ones, ones, self.env, "pool sizes").tolist()
        self.rows = self.forth(ids) - blocks.start

    def forth(self, rows: Tensor) -> Tensor:
        """Sends rows ``[n, ...]`` of the caller after their ids; returns those of this rank ``[m, ...]``."""
        return self._exchange(rows[self.order], self.sends, self.receives)

    def back(self, rows: Tensor) -> Tensor:
        """Returns rows ``[m, ...]`` of this rank to the callers; theirs ``[n, ...]`` are in the order of their ids."""
        received = self._exchange(rows, self.receives, self.sends)
        result = torch.empty_like(received)
        result[self.order] = received
        return result

    def _exchange(self, rows: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        width = rows[:1].numel() if rows.shape[0] else int(torch.tensor(rows.shape[1:]).prod())
        send_splits, recv_splits = ([count * width for count in counts] for counts in (sends, receives))
        flat = all_to_all(rows.contiguous().reshape(-1), send_splits, recv_splits, self.env, "pool rows")
        return flat.reshape(sum(receives), *rows.shape[1:])


class _ShardedPool(nn.Module):
    """This rank's rows as buffers; the state dict has them as ShardedTensors."""

    def __init__(self, blocks: RowBlocks) -> None:
        super().__init__()
        self._blocks = blocks
        self.register_state_dict_post_hook(_as_sharded)
        self.register_load_state_dict_pre_hook(_from_sharded)

    @property
    def pool_size(self) -> int:
        """P, on all ranks together."""
        return self._blocks.pool_size

    def _ids(self, ids: Tensor) -> Tensor:
        return agreed(self._blocks.env, lambda: check_ids(ids, self.pool_size))


def _as_sharded(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    assert isinstance(module, _ShardedPool)
    blocks = module._blocks
    for name, part in module.named_buffers(recurse=False):
        offsets = [blocks.start, 0]
        shards = [Shard.from_tensor_and_offsets(part, offsets, blocks.env.rank)] if blocks.size else []
        state[prefix + name] = init_from_local_shards(
            shards, blocks.pool_size, part.shape[1], process_group=blocks.env.pg
        )


def _from_sharded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, part in module.named_buffers(recurse=False):
        if f"{prefix}{name}" in state:
            shards = state[f"{prefix}{name}"].local_shards()
            state[f"{prefix}{name}"] = shards[0].tensor if shards else part


class ShardedTensorPool(_ShardedPool):
    """A `TensorPool` whose rows are spread over ranks. `TensorPoolSharder` makes it.

    Args:
        env: the ranks.
        pool_size: P.
        dim: D.
        dtype: of the rows.
        sharding_plan: TorchRec's ``ObjectPoolShardingPlan``.
        device: of this rank's rows; default CPU.
        enable_uvm: must be False.
    """

    _pool: Tensor

    @no_uvm
    def __init__(
        self,
        env: ShardingEnv,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        sharding_plan: Any,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__(RowBlocks(pool_size, env, sharding_plan))
        shape = (self._blocks.size, check_size("dim", dim))
        self.register_buffer("_pool", torch.zeros(shape, dtype=dtype, device=device_named(device or "cpu")))

    def lookup(self, ids: Tensor) -> LazyAwaitable[Tensor]:
        """``.wait()`` returns rows ``[n, D]`` of this rank's ids ``[n]``. Collective."""
        sent = self._blocks.send(self._ids(ids))
        return LazyNoWait(sent.back(self._pool[sent.rows]))

    def forward(self, ids: Tensor) -> LazyAwaitable[Tensor]:
        """As `lookup`."""
        return self.lookup(ids)

    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrites the rows of this rank's ids ``[n]`` with values ``[n, D]``. Collective.

        Of several rows for one id, that of the highest rank stays.
        """
        dim, dtype = self._pool.shape[1], self._pool.dtype
        ids = self._ids(ids)
        agreed(self._blocks.env, lambda: check_rows(values, ids, dim, dtype))
        sent = self._blocks.send(ids)
        self._pool[sent.rows] = sent.forth(values)


class ShardedKeyedJaggedTensorPool(_ShardedPool):
    """A `KeyedJaggedTensorPool` whose samples are spread over ranks. `KeyedJaggedTensorPoolSharder` makes it.

    Args:
        pool_size: P.
        feature_max_lengths: feature -> the most values that a sample has of it.
        values_dtype: of the values.
        is_weighted: whether values have weights.
        sharding_env: the ranks.
        sharding_plan: TorchRec's ``ObjectPoolShardingPlan``.
        device: of this rank's rows; default CPU.
        enable_uvm: must be False.
    """

    values: Tensor
    key_lengths: Tensor
    weights: Tensor | None

    @no_uvm
    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype,
        is_weighted: bool,
        sharding_env: ShardingEnv,
        sharding_plan: Any,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__(RowBlocks(pool_size, sharding_env, sharding_plan))
        self._samples = PaddedSamples(feature_max_lengths)
        there = device_named(device or "cpu")
        self._samples.add_buffers(self, self._blocks.size, values_dtype, is_weighted, there)

    def lookup(self, ids: Tensor) -> LazyAwaitable[KeyedJaggedTensor]:
        """``.wait()`` returns the samples of this rank's ids ``[n]``: a batch of stride n. Collective."""
        sent = self._blocks.send(self._ids(ids))
        weights = None if self.weights is None else sent.back(self.weights[sent.rows])
        values, lengths = sent.back(self.values[sent.rows]), sent.back(self.key_lengths[sent.rows])
        return LazyNoWait(self._samples.batch(values, lengths, weights))

    def forward(self, ids: Tensor) -> LazyAwaitable[KeyedJaggedTensor]:
        """As `lookup`."""
        return self.lookup(ids)

    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Overwrites the samples of this rank's ids ``[n]`` with those of a batch of stride n. Collective.

        Of several samples for one id, that of the highest rank stays.
        """
        ids = self._ids(ids)
        rows = agreed(self._blocks.env, lambda: check_samples(self._samples, ids, values, self.weights))
        sent = self._blocks.send(ids)
        for part, own in zip((self.values, self.key_lengths, self.weights), rows, strict=True):
            if part is not None and own is not None:
                part[sent.rows] = sent.forth(own.to(part.dtype))


class TensorPoolSharder:
    """Shards a `TensorPool`."""

    def shard(
        self,
        module: TensorPool,
        plan: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTensorPool:
        """An empty sharded pool of the same size and dtype; the rows of `module` are not copied.

        Args:
            module: the pool.
            plan: TorchRec's ``ObjectPoolShardingPlan``.
            env: the ranks.
            device: of the rows; default CPU.
            module_fqn: path of the pool in its model; not needed.

        Raises:
            ValueError: a plan for inference, or replicas on several nodes.
        """
        return ShardedTensorPool(env, module.pool_size, module.dim, module.dtype, plan, device)


class KeyedJaggedTensorPoolSharder:
    """Shards a `KeyedJaggedTensorPool`."""

    def shard(
        self,
        module: KeyedJaggedTensorPool,
        plan: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedKeyedJaggedTensorPool:
        """An empty sharded pool of the same size and features. Arguments and errors as those of `TensorPoolSharder`."""
        return ShardedKeyedJaggedTensorPool(
            module.pool_size, module.feature_max_lengths, module.values_dtype, module.is_weighted, env, plan, device
        )
