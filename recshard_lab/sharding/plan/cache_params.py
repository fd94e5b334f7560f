"""The cache of a table with compute kernel "fused_uvm_caching"."""

from dataclasses import asdict, dataclass
from typing import Any

from recshard_lab.embedding.dynamic.config import EmulatedCost
from recshard_lab.sharding.plan.types import PlanError

ALGORITHMS = ("lru", "lfu")


@dataclass(frozen=True)
class CacheParams:
    """How many rows of each shard are cached in the rank's memory, and which row makes room. Names are TorchRec's.

    Args:
        algorithm: which row leaves a full cache: ``"lru"``, the least recently used one; ``"lfu"``, the least
            frequently used one. fbgemm's ``CacheAlgorithm`` is accepted.
        load_factor: cached rows / rows of the shard, above 0 and at most 1. Default: 0.2, as in TorchRec. The number of
            rows is rounded up to whole buckets of 128.
        cost: makes each access to the rows below the cache slower, see `EmulatedCost`. Default: none. It serves for
            lessons on CPU ranks, whose cached rows are in the same memory as all others.

    Raises:
        PlanError: another algorithm, a load factor out of range, or another kind of cost.

    >>> CacheParams(load_factor=0.1).rows(100_000)
    10000
    """

    algorithm: str = "lru"
    load_factor: float = 0.2
    cost: EmulatedCost | None = None

    def __post_init__(self) -> None:
        given: Any = self.algorithm
        name = "lru" if given is None else str(getattr(given, "name", given)).lower()
        if name not in ALGORITHMS:
            raise PlanError(f"cache algorithm {given!r:.60} does not exist. Fix: use one of {', '.join(ALGORITHMS)}")
        object.__setattr__(self, "algorithm", name)
        share: Any = 0.2 if self.load_factor is None else self.load_factor
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
            raise PlanError(f"cache load_factor must be above 0 and at most 1, got {share!r:.60}. Fix: load_factor=0.2")
        object.__setattr__(self, "load_factor", float(share))
        if self.cost is not None and not isinstance(self.cost, EmulatedCost):
            raise PlanError(f"cache cost must be an EmulatedCost, got {self.cost!r:.60}. Fix: EmulatedCost(20)")

    def rows(self, num_rows: int) -> int:
        """The cached rows of a shard with ``num_rows`` rows, before they are rounded to buckets."""
        return max(1, min(num_rows, round(self.load_factor * num_rows)))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as in a plan's JSON."""
        cost = {} if self.cost is None else {"cost": asdict(self.cost)}
        return {"algorithm": self.algorithm, "load_factor": self.load_factor, **cost}
