"""TorchRec's `ParameterConstraints`: its fields in its order, and this library's further ones by keyword."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar

from recshard_lab.compat.planner.constants import POOLING_FACTOR
from recshard_lab.compat.planner.costs import PlannerError, PlannerErrorType
from recshard_lab.compat.planner.hashes import hash_sha256_to_int
from recshard_lab.compat.refusals import Refusal, refused
from recshard_lab.embedding import BaseEmbeddingConfig, DataType
from recshard_lab.sharding import EmbeddingComputeKernel
from recshard_lab.sharding import ParameterConstraints as OurConstraints

_WHY = "a plan cannot store it"
_REFUSED = {
    "stochastic_rounding": Refusal(_WHY, "omit it: updates round to nearest"),
    "bounds_check_mode": Refusal(_WHY, "fused_params={'bounds_check_mode': ...} of the sharder", (None,)),
    "output_dtype": Refusal(_WHY, "fused_params={'output_dtype': ...} of the sharder", (None, DataType.FP32)),
    "key_value_params": Refusal(_WHY, "compute_kernels=['fused_uvm_caching']", (None,)),
    "use_virtual_table": Refusal(_WHY, "a DynamicEmbeddingConfig for the table"),
}


@dataclass(unsafe_hash=False, eq=True)
class ParameterConstraints:
    """Requirements for the plan of one table, with TorchRec's fields and defaults.

    Args:
        sharding_types, compute_kernels: the allowed names. Default: all.
        min_partition: columns of a column shard.
        pooling_factors: mean ids per bag, one per feature. One number counts for all features.
        num_poolings: bags per sample, one per feature. batch_sizes: samples per rank, one per feature.
        is_weighted: whether ids have weights, if the module does not say it.
        cache_params: the cache of kernel "fused_uvm_caching".
        enforce_hbm: whether the cache must be in device memory. Caches are always there.
        stochastic_rounding, bounds_check_mode, output_dtype, key_value_params, use_virtual_table: reach enumerators of
            yours. A plan refuses values that it cannot execute.
        feature_names: of the table.
        device_group: "cpu" or "cuda".
        ranks, route, shards, forbidden_sharding_types, forbidden_ranks, row_shares, colocate_with: as of
            `recshard_lab.ParameterConstraints`. They apply to this library's own search.

    >>> ParameterConstraints(["row_wise"]).pooling_factors
    [1.0]
    """

    refused_values: ClassVar[Mapping[str, Refusal]] = _REFUSED

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [POOLING_FACTOR])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    _: KW_ONLY
    ranks: Any = None
    route: str | None = None
    shards: Any = None
    forbidden_sharding_types: list[str] | None = None
    forbidden_ranks: Any = None
    row_shares: Any = None
    colocate_with: Any = None

    def __hash__(self) -> int:
        return hash_sha256_to_int([getattr(self, entry.name) for entry in fields(self)])

    def ours(self, table: BaseEmbeddingConfig) -> OurConstraints:
        """This library's constraints of a table.

        Raises:
            PlannerError: a value that no plan can execute. ValueError: as of this library's constraints.
        """
        refuse_unsupported(table.name, self)
        count = len(table.feature_names)
        factors = self.pooling_factors * count if len(self.pooling_factors) == 1 else self.pooling_factors
        named = {entry.name for entry in fields(OurConstraints)} - {"pooling_factors", "cache_params"}
        caches = EmbeddingComputeKernel.FUSED_UVM_CACHING in (self.compute_kernels or ())
        return OurConstraints(
            pooling_factors=factors,
            cache_params=self.cache_params if caches else None,
            **{name: getattr(self, name) for name in named},
        )


def refuse_unsupported(table: str, part: Any) -> None:
    """Raises a `PlannerError` for a field of constraints or of an option that no plan can execute."""
    if (found := refused(_REFUSED, {name: getattr(part, name, None) for name in _REFUSED})) is not None:
        raise PlannerError(f"table {table!r}: {found[1]}", PlannerErrorType.STRICT_CONSTRAINTS)
