"""Words for people: an estimate as text, and what to change when tables do not fit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from recshard_lab.embedding.configs import BaseEmbeddingConfig, DataType
from recshard_lab.planner.cost import CostModel
from recshard_lab.planner.estimate import Estimate
from recshard_lab.planner.options import DoesNotFit, Placement
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology, scheme_names

if TYPE_CHECKING:
    from recshard_lab.planner.planner import EmbeddingShardingPlanner

MOST_RANKS = 8  # lines of a text table; the slowest ranks are kept


def gigabytes(num_bytes: float) -> str:
    """Bytes in the unit that reads best.

    >>> gigabytes(20_480_000_000), gigabytes(1_500_000)
    ('20.5 GB', '1.5 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"


def estimate_text(found: Estimate) -> str:
    """At most 100 columns: the step, then a line a rank (the slowest eight)."""
    order = np.argsort(-found.ms.sum(axis=1), kind="stable")[:MOST_RANKS]
    header = f"{'rank':>4} " + " ".join(
        f"{name.replace('output_dist_backward', 'output_bwd'):>15}" for name in found.phases
    )
    used = found.memory_bytes.sum(axis=1)
    lines = [
        f"predicted step {found.step_ms:.2f} ms (busiest rank {found.critical_rank}: {found.max_rank_ms:.2f} ms), "
        f"{'fits' if found.fits else 'DOES NOT FIT'}: {gigabytes(used.max())} of {gigabytes(found.capacity_bytes[0])}",
        header,
    ]
    for rank in sorted(order.tolist()):
        lines.append(f"{rank:>4} " + " ".join(f"{ms:>15.3f}" for ms in found.ms[rank]))
    if len(order) < len(found.ms):
        lines.append(f"  ... and {len(found.ms) - len(order)} ranks with less work")
    return "\n".join(lines)


def why_it_does_not_fit(planner: "EmbeddingShardingPlanner", tables: Sequence[BaseEmbeddingConfig], stuck: int) -> str:
    """What does not fit, by how much, and the smallest changes that were found to make it fit (each was planned)."""
    table, top = tables[stuck], planner.topology
    wish = planner.constraints.get(table.name)
    allowed = list((wish.sharding_types if wish else None) or scheme_names())
    size = f"{table.num_embeddings:,} x {table.embedding_dim:,}, {gigabytes(table.weight_bytes)}"
    free = max(0, top.free_memory_bytes())
    needed, limit = _least_bytes(planner, tables), free * top.world_size
    others = f" beside the other {len(tables) - 1} tables" if len(tables) > 1 else ""
    lines = [
        f"table {table.name!r} ({size}) does not fit on any rank under {', '.join(allowed)}{others} "
        f"(a rank has {gigabytes(free)} after the reserve)."
    ]
    if needed > limit:
        lines.append(
            f"All tables need at least {gigabytes(needed)}, {top.world_size} ranks have {gigabytes(limit)}: "
            f"{gigabytes(needed - limit)} too little."
        )
    changes = [change for change in (_allow_more(planner, tables, table), _half(planner, tables, table)) if change]
    cap = _smallest_cap(planner, tables)
    if cap is not None:
        name = "hbm_cap" if top.compute_device == "cuda" else "ddr_cap"
        more = gigabytes(cap - top.memory_cap_bytes)
        changes.append(f"{name}={cap} ({gigabytes(cap)} a rank, {more} more)")
    lines.append("Smallest change that fits: " + (", or ".join(changes) or "none found; use more ranks") + ".")
    return " ".join(lines)


def _try(
    planner: "EmbeddingShardingPlanner",
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology | None = None,
    constraints: dict[str, ParameterConstraints] | None = None,
) -> list[Placement] | None:
    from recshard_lab.planner.planner import EmbeddingShardingPlanner

    trial = EmbeddingShardingPlanner(
        topology or planner.topology,
        constraints=planner.constraints if constraints is None else constraints,
        workload=planner.workload,
        local_search_passes=0,
    )
    model = CostModel(tables, trial.topology, trial.workload, trial.constraints)
    try:
        return trial._solve(model, tables)
    except (DoesNotFit, PlanError):
        return None


def _allow_more(
    planner: "EmbeddingShardingPlanner", tables: Sequence[BaseEmbeddingConfig], table: BaseEmbeddingConfig
) -> str | None:
    wish = planner.constraints.get(table.name)
    if wish is None or wish.sharding_types is None:
        return None
    for name in scheme_names():
        if name in wish.sharding_types:
            continue
        more = {**planner.constraints, table.name: replace(wish, sharding_types=[*wish.sharding_types, name])}
        found = _try(planner, tables, constraints=more)
        if found is not None:
            index = [t.name for t in tables].index(table.name)
            return f"allow {name} over {len(set(found[index].ranks))} ranks"
    return None


def _half(
    planner: "EmbeddingShardingPlanner", tables: Sequence[BaseEmbeddingConfig], table: BaseEmbeddingConfig
) -> str | None:
    if table.data_type is not DataType.FP32:
        return None
    halved = [replace(t, data_type=DataType.FP16) if t is table else t for t in tables]
    return f"fp16 weights for {table.name!r}" if _try(planner, halved) is not None else None


def _smallest_cap(planner: "EmbeddingShardingPlanner", tables: Sequence[BaseEmbeddingConfig]) -> int | None:
    """The smallest capacity of a rank for which a plan was found, to about a percent, rounded up to MB."""
    on_cuda = planner.topology.compute_device == "cuda"

    def fits(cap: int) -> bool:
        top = planner.topology
        larger = replace(top, hbm_cap=cap) if on_cuda else replace(top, ddr_cap=cap)
        return _try(planner, tables, larger) is not None

    low = max(1, planner.topology.memory_cap_bytes)
    high = low
    for _ in range(40):
        high *= 2
        if fits(high):
            break
        low = high
    else:
        return None
    while high - low > max(1_000_000, low // 100):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    rounded = -(-high // 1_000_000) * 1_000_000
    return rounded if fits(rounded) else high


def _least_bytes(planner: "EmbeddingShardingPlanner", tables: Sequence[BaseEmbeddingConfig]) -> float:
    """Bytes of all ranks together that no plan can do without: each table in its cheapest cut, and what is fixed."""
    from recshard_lab.planner.cost import MEMORY
    from recshard_lab.planner.options import options_of

    model = CostModel(tables, planner.topology, planner.workload, planner.constraints)
    options = options_of(model, tables, planner.constraints)
    least = sum(min(float(option.loads[MEMORY:].sum()) for option in choices) for choices in options)
    return least + float(model.fixed_memory[:-1].sum()) * planner.topology.world_size
