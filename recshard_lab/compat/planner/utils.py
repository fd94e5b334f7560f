"""Small functions of the planner, and two searches over one number."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from recshard_lab.comm import CommOp, codecs_for
from recshard_lab.compat.distributed.shard_sizes import placement as placement
from recshard_lab.compat.distributed.types import StorageUsageType
from recshard_lab.compat.planner.base import SharderData
from recshard_lab.compat.planner.constants import GIB, NUM_POOLINGS
from recshard_lab.compat.planner.costs import Storage
from recshard_lab.compat.planner.options import ShardingOption
from recshard_lab.compat.planner.options import reset_shard_rank as reset_shard_rank

_MIB = 1024**2
_WIRE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "int8": 1, "mx4": 0.5}


def bytes_to_gb(num_bytes: int) -> float:
    """GiB of a number of bytes."""
    return float(num_bytes / GIB)


def bytes_to_mb(num_bytes: float) -> float:
    """MiB of a number of bytes."""
    return float(num_bytes / _MIB)


def gb_to_bytes(gb: float) -> int:
    """Bytes of a number of GiB."""
    return int(gb * GIB)


def mb_to_bytes(mb: float) -> int:
    """Bytes of a number of MiB.

    >>> mb_to_bytes(1.5)
    1572864
    """
    return int(mb * _MIB)


def prod(iterable: Iterable[int]) -> int:
    """The product; 1 of no numbers."""
    return math.prod(iterable)


def sharder_name(t: type[Any]) -> str:
    """Module and name of a class, the key of its sharder.

    >>> sharder_name(int)
    'builtins.int'
    """
    return f"{t.__module__}.{t.__name__}"


def storage_repr_in_gb(storage: Storage | None) -> str:
    """A storage in GiB; empty text for None.

    >>> storage_repr_in_gb(Storage(3 << 29, 1 << 30))
    'Storage(hbm = 1.5 GB, ddr = 1.0 GB)'
    """
    if storage is None:
        return ""
    return f"Storage(hbm = {round(bytes_to_gb(storage.hbm), 3)} GB, ddr = {round(bytes_to_gb(storage.ddr), 3)} GB)"


def build_sharder_data(sharder: Any) -> SharderData:
    """What estimators need of a sharder.

    Args:
        sharder: with ``fused_params`` and ``qcomm_codecs_registry``, as collections' sharders have.
    """
    registry = getattr(sharder, "qcomm_codecs_registry", None)
    sizes: dict[str, tuple[float, float]] = {}
    for name in registry or {}:
        codec = codecs_for(CommOp[name], registry)
        sizes[name] = (_wire_bytes(codec.forward), _wire_bytes(codec.backward))
    fused = getattr(sharder, "fused_params", None)
    kind = StorageUsageType.DEFAULT if fused is None else StorageUsageType.BASE
    return SharderData(dict(fused or {}), sizes, kind)


def _wire_bytes(codec: Any) -> float:
    return _WIRE_BYTES[str(codec.comm_type)]


def build_sharder_data_map(sharder_map: Mapping[str, Any]) -> dict[str, SharderData]:
    """`build_sharder_data` of each sharder."""
    return {name: build_sharder_data(sharder) for name, sharder in sharder_map.items()}


def is_prefetch_pipelined(sharding_option: ShardingOption, sharder_data: SharderData) -> bool:
    """Whether rows are cached before they are read: by the option's cache, otherwise by the sharder."""
    cache = sharding_option.cache_params
    own = None if cache is None else getattr(cache, "prefetch_pipeline", None)
    return bool(own or sharder_data.fused_params.get("prefetch_pipeline", False))


def extract_comm_data_type_size(
    sharding_option: ShardingOption, sharder_data: SharderData
) -> tuple[float, float, float, float]:
    """Bytes of a number in messages: all-to-all forward and backward, reduce-scatter forward and backward."""
    own = float(sharding_option.tensor.element_size())
    pooled = sharding_option.is_pooled
    exchanged = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL if pooled else CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    sizes = sharder_data.qcomm_dtype_sizes
    reduced = sizes.get(CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name, (own, own)) if pooled else (own, own)
    return (*sizes.get(exchanged.name, (own, own)), *reduced)


def get_num_poolings(constraints: Mapping[str, Any] | None, so: ShardingOption) -> list[float]:
    """Bags per sample of each feature: the option's, otherwise the constraint's, otherwise 1."""
    if so.num_poolings:
        return list(so.num_poolings)
    limit = (constraints or {}).get(so.name)
    return list(limit.num_poolings) if limit is not None and limit.num_poolings else [NUM_POOLINGS] * so.num_inputs


class BinarySearchPredicate:
    """Proposes numbers to find the largest one from A to B for which a step function is true.

    Args:
        A, B: the first and last number.
        tolerance: search while the interval has more than `tolerance` numbers.

    >>> search, tried = BinarySearchPredicate(0, 100, 5), []
    >>> x = search.next(True)
    >>> while x is not None:
    ...     tried.append(x)
    ...     x = search.next(x <= 37)
    >>> tried
    [50, 24, 37, 43]
    """

    def __init__(self, A: int, B: int, tolerance: int) -> None:
        self.left, self.right, self.tolerance = A, B, tolerance
        self.x: int | None = None

    def next(self, prior_result: bool) -> int | None:
        """The next number, or None at the end.

        Args:
            prior_result: the function's value of the last number; ignored in the first call.
        """
        if self.x is not None:
            if prior_result:
                self.left = self.x + 1
            else:
                self.right = self.x - 1
        if self.right < self.left or self.right - self.left < self.tolerance:
            return None
        self.x = (self.left + self.right) // 2
        return self.x


class LuusJaakolaSearch:
    """Proposes numbers to minimise a function on [A, B]: steps of random size around the best number so far.

    Each improvement after the first number shrinks the next steps by 5%. Numbers beyond an end become the end, which is
    tried at most once.

    Args:
        A, B: the ends.
        max_iterations: numbers to try.
        seed: of the steps.
        left_cost: the function's value at A, if it is known.
    """

    def __init__(
        self,
        A: float,
        B: float,
        max_iterations: int,
        seed: int = 42,
        left_cost: float | None = None,
    ) -> None:
        self.left, self.right, self.max_iterations, self.iteration = A, B, max_iterations, -1
        self.gen = torch.Generator().manual_seed(seed)
        self.x = self.y = self.uniform(A, B)
        self.fx = math.inf
        self.d = self.right - self.left
        self.fleft: float | None = left_cost
        self.fright: float | None = None

    def shrink_right(self, B: float) -> None:
        """Moves the right end to `B`: the function is infinite from there."""
        self.right, self.fright = B, math.inf
        self.x = self.clamp(self.x)

    def clamp(self, x: float) -> float:
        """The nearest number within the ends."""
        return min(max(x, self.left), self.right)

    def uniform(self, A: float, B: float) -> float:
        """A random number from A to B."""
        return A + (B - A) * float(torch.rand(1, generator=self.gen))

    def next(self, fy: float) -> float | None:
        """The next number, or None after `max_iterations`.

        Args:
            fy: the function's value of the last number; ignored in the first call.
        """
        self.iteration += 1
        if self.iteration == 0:
            return self.y
        if self.y == self.left:
            self.fleft = fy
        elif self.y == self.right:
            self.fright = fy
        if self.iteration == 1:
            self.x, self.fx = self.y, fy
        elif fy < self.fx:
            self.x, self.fx, self.d = self.y, fy, 0.95 * self.d
        if self.iteration >= self.max_iterations:
            return None
        for _ in range(64):  # a random step ends at a known end with probability 1 / 2 at most, unless both are close
            y = self.clamp(self.x + self.uniform(-self.d, self.d))
            if (self.fleft if y == self.left else self.fright if y == self.right else None) is None:
                self.y = y
                return y
        return None

    def best(self) -> tuple[float, float]:
        """The best number and the function's value of it."""
        return self.x, self.fx
