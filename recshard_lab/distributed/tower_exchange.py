"""The messages of sharded towers: batches to the nodes of the towers, and outputs back to the ranks of the samples.

A rank exchanges only with the ranks that have its local number on the other nodes::

    nodes of 2          tower on node 1                       its output
    rank 0  rank 1      rank 0 -> rank 2, rank 1 -> rank 3    rank 2 -> rank 0, rank 3 -> rank 1
    rank 2  rank 3

Shape letters: B local batch, F features of a tower, N ids, M nodes, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recshard_lab.comm import ShardingEnv, all_to_all, issue_all_gather, issue_all_to_all, raise_first_error
from recshard_lab.sparse import KeyedJaggedTensor

_FAILED = -1
_FORM = 8  # numbers that describe an output: dtype, dimensions after the batch, their sizes
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Destination:
    """Where a tower's features go.

    Attributes:
        features: the features that the tower reads, F.
        weight_dtype: of its per-sample weights; None if it reads none.
        node: the node of its tables.
    """

    features: tuple[str, ...]
    weight_dtype: torch.dtype | None
    node: int


@dataclass(frozen=True)
class _Packed:
    """A tower's part of the local batch: ``[F * B]`` lengths, ``[N]`` ids and weights, and the ids of each feature."""

    batch_size: int
    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    counts: list[int]

    @classmethod
    def of(cls, features: KeyedJaggedTensor, to: Destination) -> _Packed:
        """Raises a ValueError if the tower cannot read the batch."""
        if not isinstance(features, KeyedJaggedTensor):
            raise ValueError(f"a tower reads a KeyedJaggedTensor, got {features!r:.80}. Fix: pass the batch's")
        keys = features.keys()
        missing = [name for name in to.features if name not in keys]
        if missing:
            raise ValueError(
                f"feature {missing[0]!r} of a tower is not in the batch, which has {keys}. "
                f"Fix: add it, with lengths 0 for samples without ids"
            )
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            raise ValueError(
                "a variable batch arrived, and towers exchange batches of one size per rank. "
                "Fix: pass a KeyedJaggedTensor without stride_per_key_per_rank and inverse_indices"
            )
        own = features.permute([keys.index(name) for name in to.features])
        weights = None
        if to.weight_dtype is not None:
            weights = own.weights_or_none()
            if weights is None:
                raise ValueError(f"the batch of {keys} has no weights, and a tower reads them. Fix: pass weights=")
            if weights.requires_grad:
                raise ValueError(
                    "per-sample weights require a gradient, which does not travel between nodes. Fix: detach them"
                )
            weights = weights.to(to.weight_dtype)
        lengths = own.lengths().reshape(-1).long()
        return cls(own.stride(), lengths, own.values().long(), weights, [int(n) for n in own.length_per_key()])


def send_batches(
    destinations: Sequence[Destination],
    batches: Sequence[KeyedJaggedTensor | None],
    env: ShardingEnv,
    host_env: ShardingEnv,
) -> Callable[[], Callable[[], tuple[list[KeyedJaggedTensor], list[int]]]]:
    """Sends the sizes of the local batch. Collective.

    Args:
        destinations: of each tower.
        batches: the batch that each tower reads.
        env: the ranks.
        host_env: the same ranks, for sizes on the CPU.

    Returns:
        A function that sends the ids. It returns one that waits for them: the batch of each tower, which is empty
        where the tower is on another node, and the batch size of all ranks ``[W]``.

    Raises:
        ValueError: a batch that a tower cannot read, on every rank when the ids are to be sent.
    """
    packed: list[_Packed] = []
    error: Exception | None = None
    row = [_FAILED, *(0 for to in destinations for _ in to.features)]
    try:
        packed = [_Packed.of(batch, to) for batch, to in zip(batches, destinations, strict=True)]  # type: ignore[arg-type]
        sizes = {own.batch_size for own in packed}
        if len(sizes) > 1:
            raise ValueError(f"features and weighted_features have batches of {sorted(sizes)} samples. Fix: one size")
        row = [packed[0].batch_size, *(n for own in packed for n in own.counts)]
    except Exception as caught:
        error = caught
    pending = issue_all_gather(torch.tensor(row), host_env, "towers/sizes")

    def send() -> Callable[[], tuple[list[KeyedJaggedTensor], list[int]]]:
        table = pending.wait().view(env.world_size, -1).tolist()
        if any(own[0] == _FAILED for own in table):
            raise_first_error(error, host_env)
        exchange = _BatchExchange(destinations, packed, table, env)
        ids = exchange.issue([[own.lengths, own.ids] for own in packed], exchange.id_elements, torch.int64)
        weights = None
        if exchange.weight_dtype is not None:
            parts = [[] if own.weights is None else [own.weights] for own in packed]
            weights = exchange.issue(parts, exchange.weight_elements, exchange.weight_dtype)
        return lambda: exchange.arrived(ids.wait(), None if weights is None else weights.wait())

    return send


class _BatchExchange:
    """The messages of one batch."""

    def __init__(
        self, destinations: Sequence[Destination], packed: Sequence[_Packed], sizes: list[list[int]], env: ShardingEnv
    ) -> None:
        self.destinations, self.env = destinations, env
        self.device = packed[0].ids.device
        self.batch_sizes = [row[0] for row in sizes]
        self.peers = peers_of(env)
        #: tower -> rank -> ids of each feature
        self.counts: list[list[list[int]]] = []
        start = 1
        for to in destinations:
            self.counts.append([row[start : start + len(to.features)] for row in sizes])
            start += len(to.features)
        dtypes = [to.weight_dtype for to in destinations if to.weight_dtype is not None]
        self.weight_dtype = torch.float64 if torch.float64 in dtypes else torch.float32 if dtypes else None

    def id_elements(self, tower: int, rank: int) -> int:
        """Elements of the lengths and ids that a rank sends to a tower."""
        counts = self.counts[tower][rank]
        return len(counts) * self.batch_sizes[rank] + sum(counts)

    def weight_elements(self, tower: int, rank: int) -> int:
        """Elements of the weights that a rank sends to a tower."""
        return 0 if self.destinations[tower].weight_dtype is None else sum(self.counts[tower][rank])

    def issue(self, parts: list[list[Tensor]], elements: Callable[[int, int], int], dtype: torch.dtype) -> Any:
        """Sends the parts of each tower to its node."""
        env, sends, receives = self.env, [0] * self.env.world_size, [0] * self.env.world_size
        message: list[Tensor] = []
        for node, peer in enumerate(self.peers):
            for tower, to in enumerate(self.destinations):
                if to.node == node:
                    message += parts[tower]
                    sends[peer] += elements(tower, env.rank)
                if to.node == env.node:
                    receives[peer] += elements(tower, peer)
        flat = torch.cat([part.to(dtype) for part in message]) if message else torch.empty(0, dtype=dtype)
        return issue_all_to_all(flat.to(self.device), sends, receives, env, "towers/ids")

    def arrived(self, ids: Tensor, weights: Tensor | None) -> tuple[list[KeyedJaggedTensor], list[int]]:
        """The batch of each tower, feature-major, and the batch sizes of all ranks."""
        here = [tower for tower, to in enumerate(self.destinations) if to.node == self.env.node]
        lengths: dict[int, list[Tensor]] = {tower: [] for tower in here}
        values: dict[int, list[tuple[Tensor, ...]]] = {tower: [] for tower in here}
        own_weights: dict[int, list[tuple[Tensor, ...]]] = {tower: [] for tower in here}
        id_start = weight_start = 0
        for peer in self.peers:
            for tower in here:
                counts = self.counts[tower][peer]
                batch = self.batch_sizes[peer]
                bags = len(counts) * batch
                lengths[tower].append(ids[id_start : id_start + bags].view(len(counts), batch))
                values[tower].append(ids[id_start + bags : id_start + bags + sum(counts)].split(counts))
                id_start += bags + sum(counts)
                if weights is not None and self.destinations[tower].weight_dtype is not None:
                    own_weights[tower].append(weights[weight_start : weight_start + sum(counts)].split(counts))
                    weight_start += sum(counts)
        total = sum(self.batch_sizes[peer] for peer in self.peers)
        found = []
        for tower, to in enumerate(self.destinations):
            weighted = to.weight_dtype is not None
            if tower in here:
                parts = (values[tower], own_weights[tower])
                flat, heavy = ([part for of in zip(*own, strict=True) for part in of] for own in parts)
                joined = torch.cat(flat), torch.cat(heavy) if weighted else None, torch.cat(lengths[tower], 1)
            else:
                none = torch.empty(0, dtype=torch.int64, device=self.device)
                joined = none, none.to(to.weight_dtype) if weighted else None, none
            found.append(
                KeyedJaggedTensor(
                    list(to.features),
                    joined[0],
                    joined[1],
                    lengths=joined[2].reshape(-1),
                    stride=total if tower in here else 0,
                )
            )
        return found, self.batch_sizes


def exchange_forms(
    outputs: Sequence[Tensor | None],
    error: Exception | None,
    sources: Sequence[int],
    env: ShardingEnv,
    host_env: ShardingEnv,
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape after the batch and dtype of each tower's output, on all ranks. Collective.

    Args:
        outputs: of each tower on this node; None for towers on other nodes.
        error: why this rank has none.
        sources: the rank that sends this one the output of each tower.
        env: the ranks.
        host_env: the same ranks, for numbers on the CPU.

    Raises:
        Exception: the error of the first rank that has one, on every rank.
    """
    row = [0] * (1 + _FORM * len(sources))
    try:
        if error is not None:
            raise error
        for tower, rows in enumerate(outputs):
            if rows is not None:
                shape = rows.shape[1:]
                if len(shape) > _FORM - 2 or rows.dtype not in _DTYPES:
                    raise ValueError(
                        f"a tower's output is {list(rows.shape)} {rows.dtype}. "
                        f"Fix: return floating-point numbers with at most {_FORM - 1} dimensions"
                    )
                start = 1 + _FORM * tower
                row[start : start + 2 + len(shape)] = [_DTYPES.index(rows.dtype), len(shape), *shape]
    except Exception as caught:
        error, row[0] = caught, _FAILED
    table = issue_all_gather(torch.tensor(row), host_env, "towers/forms").wait().view(env.world_size, -1).tolist()
    if any(own[0] == _FAILED for own in table):
        raise_first_error(error, host_env)
    found = []
    for tower, rank in enumerate(sources):
        dtype, dims, *shape = table[rank][1 + _FORM * tower : 1 + _FORM * (tower + 1)]
        found.append((tuple(shape[:dims]), _DTYPES[dtype]))
    return found


def peers_of(env: ShardingEnv) -> list[int]:
    """The rank with this rank's local number on each node, ``[M]``."""
    local = env.local_world_size
    return list(range(env.rank % local, env.world_size, local))


class ToSources(torch.autograd.Function):
    """Forward: one slice of the flat message to each rank. Backward: the gradients of the slices return."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, env: ShardingEnv, sends: list[int], receives: list[int]) -> Tensor:
        ctx.env, ctx.sends, ctx.receives = env, sends, receives
        return all_to_all(message, sends, receives, env, "towers/outputs")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.receives, ctx.sends, ctx.env, "towers/output gradients"), None, None, None
