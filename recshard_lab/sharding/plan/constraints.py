"""What you may require of the planner, table by table."""

import numbers
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.sharding.plan.cache_params import CacheParams
from recshard_lab.sharding.plan.row_shares import RowShares
from recshard_lab.sharding.plan.types import EmbeddingComputeKernel, Shard, check_route
from recshard_lab.sharding.plan.validate import as_shards


@names_wrong_arguments
@dataclass
class ParameterConstraints:
    """Requirements for the plan of one table.

    Names are TorchRec's; `ranks`, `route`, `shards`, `forbidden_sharding_types` and `forbidden_ranks` are added.

    Args:
        sharding_types: the allowed schemes. Default: all registered schemes.
        compute_kernels: the allowed kernels, best first. Default: "fused".
        cache_params: the cache, if `compute_kernels` has "fused_uvm_caching". Default: ``CacheParams()``.
        min_partition: minimum columns of a column shard. Default: 4, or 1 if the dim is not a multiple of 4.
        pooling_factors: mean ids per bag, one per feature of the table. Default: the workload's.
        num_poolings: bags per sample, one per feature. Default: 1.
        batch_sizes: samples per rank, one per feature. Default: the workload's.
        is_weighted: whether the table's ids have per-sample weights.
        ranks: the only ranks that may store a shard of the table. Under ``["row_wise"]`` alone, each of them stores
            one. Without `ranks`, the planner may split rows over a half or a quarter of all ranks if that costs less.
        route: its output path, one of `ROUTES` or "distinct_rows". Default: the cheapest.
        shards: the exact shards. The planner keeps them and plans the other tables around them.
        forbidden_sharding_types: schemes that are not allowed.
        forbidden_ranks: ranks that must not store a shard of the table.
        row_shares: how the table's lookups spread over its rows, in id order. The planner may then balance lookups
            instead of rows, and replicate the rows that are looked up most.
        device_group: one of the topology's `device_groups`; only its ranks may store a shard of the table. Or the
            device type, "cpu" or "cuda", which must be the topology's.
        colocate_with: names of tables whose shards must be on the same ranks as this table's, shard by shard. It
            suffices to name the group at one of its tables.

    Raises:
        ValueError: a requirement that no plan can meet: an empty list, a duplicate rank, an unknown kernel.

    >>> ParameterConstraints(sharding_types=["row_wise"], ranks=[0, 1]).ranks
    [0, 1]
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=list)
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    _: KW_ONLY
    ranks: Sequence[int] | None = None
    route: str | None = None
    shards: Sequence[Shard] | None = None
    forbidden_sharding_types: list[str] | None = None
    forbidden_ranks: Sequence[int] | None = None
    device_group: str | None = None
    row_shares: RowShares | None = None
    colocate_with: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("sharding_types", "compute_kernels", "ranks", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not len(value)):
                raise ValueError(
                    f"{name} must be a list with at least one entry or None, got {shown(value)}. Fix: leave {name} out"
                )
        for name in ("sharding_types", "compute_kernels", "forbidden_sharding_types"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or not all(isinstance(entry, str) for entry in value)):
                raise ValueError(f"{name} must be a list of names, got {shown(value)}. Fix: write them as strings")
        for name in ("ranks", "forbidden_ranks"):
            value = getattr(self, name)
            if value is None:
                continue
            ranks = [int(rank) for rank in value if _whole(rank)]
            if len(ranks) < len(value) or min(ranks, default=0) < 0 or len(set(ranks)) < len(ranks):
                raise ValueError(
                    f"{name} must be distinct whole numbers from 0 up, got {shown(value)}. Fix: {name}=[0]"
                )
            setattr(self, name, ranks)
        if self.shards is not None:
            self.shards = as_shards(self.shards)
            for name in ("sharding_types", "ranks", "forbidden_sharding_types", "forbidden_ranks", "min_partition"):
                if getattr(self, name) is not None:
                    raise ValueError(f"shards and {name} are mutually exclusive. Fix: remove one of them")
        if self.colocate_with is not None:
            names = self.colocate_with
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                raise ValueError(
                    f"colocate_with must be a list of names of tables, got {names!r:.80}. Fix: colocate_with=['movies']"
                )
            self.colocate_with = list(names)
        if self.device_group is not None and not isinstance(self.device_group, str):
            raise ValueError(f"device_group must be a name, got {self.device_group!r:.80}. Fix: device_group='fast'")
        if self.row_shares is not None and not isinstance(self.row_shares, RowShares):
            raise ValueError(f"row_shares must be RowShares, got {self.row_shares!r:.60}. Fix: RowShares.of_ids(...)")
        if not isinstance(self.is_weighted, numbers.Integral | np.bool_):
            raise ValueError(f"is_weighted must be True or False, got {self.is_weighted!r}. Fix: is_weighted=True")
        if self.min_partition is not None and (not _whole(self.min_partition) or self.min_partition < 1):
            raise ValueError(
                f"min_partition must be a whole number of at least 1 column, got {self.min_partition!r}. Fix: "
                f"min_partition=32"
            )
        if self.route is not None:
            self.route = check_route(self.route)
        known = [kernel.value for kernel in EmbeddingComputeKernel]
        for kernel in self.compute_kernels or ():
            if kernel not in known:
                raise ValueError(
                    f"compute_kernels: kernel {kernel!r:.60} does not exist. Fix: use one of {', '.join(known)}"
                )
        if self.cache_params is not None:
            caches = str(EmbeddingComputeKernel.FUSED_UVM_CACHING) in map(str, self.compute_kernels or ())
            if not (caches and isinstance(self.cache_params, CacheParams)):
                raise ValueError(
                    f"cache_params={shown(self.cache_params)} must be CacheParams, with compute_kernel "
                    f"'fused_uvm_caching'. Fix: compute_kernels=['fused_uvm_caching'], cache_params=CacheParams()"
                )
        for name in ("pooling_factors", "num_poolings", "batch_sizes"):
            for value in getattr(self, name) or ():
                real = isinstance(value, numbers.Real) and not isinstance(value, bool)
                if not real or not 0 <= value < float("inf") or (name == "batch_sizes" and not _whole(value)):
                    kind = "whole numbers" if name == "batch_sizes" else "finite numbers"
                    given = shown(getattr(self, name))
                    raise ValueError(f"{name} must be {kind} from 0 up, got {given}. Fix: {name}=[10]")


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral | np.integer) and not isinstance(value, bool | np.bool_)
