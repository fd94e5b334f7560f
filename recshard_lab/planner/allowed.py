"""What a sharder allows, as constraints of its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.sharding import EmbeddingComputeKernel, ParameterConstraints, PlanError, scheme_names


def within(
    sharder: Any,
    tables: Sequence[BaseEmbeddingConfig],
    constraints: Mapping[str, ParameterConstraints],
    compute_device: str,
) -> dict[str, ParameterConstraints]:
    """`constraints`, with those of `tables` narrowed to what the sharder's methods return.

    Args:
        sharder: may have ``sharding_types(compute_device)`` and ``compute_kernels(sharding_type, compute_device)``;
            one that returns all there is narrows nothing.
        tables: the tables of its module.
        constraints: table name -> wishes.
        compute_device: "cpu" or "cuda".

    Raises:
        PlanError: a table whose constraint and sharder allow nothing in common.
    """
    types = _listed(getattr(sharder, "sharding_types", None), compute_device)
    types = [] if set(types) >= set(scheme_names()) else types
    first = types[0] if types else scheme_names()[0]
    kernels = _listed(getattr(sharder, "compute_kernels", None), first, compute_device)
    kernels = [] if set(kernels) >= {str(kernel) for kernel in EmbeddingComputeKernel} else kernels
    narrowed = dict(constraints)
    if types or kernels:
        for table in tables:
            own = narrowed.get(table.name) or ParameterConstraints()
            narrowed[table.name] = replace(
                own,
                sharding_types=_common(own.sharding_types, types, "sharding_types", table, sharder),
                compute_kernels=_common(own.compute_kernels, kernels, "compute_kernels", table, sharder),
            )
    return narrowed


def _listed(method: Any, *args: str) -> list[str]:
    return [str(getattr(entry, "value", entry)) for entry in method(*args)] if callable(method) else []


def _common(
    wished: Sequence[str] | None, allowed: list[str], what: str, table: BaseEmbeddingConfig, sharder: Any
) -> list[str] | None:
    if not allowed:
        return None if wished is None else list(wished)
    common = [entry for entry in (allowed if wished is None else wished) if entry in allowed]
    if not common:
        raise PlanError(
            f"table {table.name!r} is constrained to {what} {list(wished or ())}, but {type(sharder).__name__} allows "
            f"{allowed}. Fix: an entry that both have"
        )
    return common
