"""Predicts the costs of a plan: ms per rank and phase, bytes per rank and category, bytes from rank to rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.answers.text import estimate_text
from recshard_lab.planner.model.cost import CostModel
from recshard_lab.planner.model.latency_cost import LatencyCostModel
from recshard_lab.planner.model.loads import (
    ACROSS_BOTH,
    BY_NODE,
    HOST,
    NORMS,
    ROUTE_NUMBERS,
    SCATTER_BOTH,
    Rects,
    across_shares,
)
from recshard_lab.planner.model.memory import INDEX, MEMORY_CATEGORIES
from recshard_lab.planner.model.overlap import Overlap
from recshard_lab.planner.model.torchrec_cost import TorchRecCostModel
from recshard_lab.planner.search.rect_kinds import summed_rows
from recshard_lab.planner.workload import Array, Workload, check_route_applies
from recshard_lab.sharding import (
    EmbeddingComputeKernel,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    ShardingPlan,
    ShardingType,
    Topology,
)
from recshard_lab.sharding.plan.sharding_plan import Tables
from recshard_lab.sharding.plan.types import DDR, nearest
from recshard_lab.sharding.plan.validate import check_shards

COST_MODELS: dict[str, type[CostModel]] = {
    model.name: model for model in (CostModel, TorchRecCostModel, LatencyCostModel)
}


@dataclass(frozen=True, eq=False)
class Estimate:
    """The predicted costs of a plan.

    Attributes:
        phases: names of the P phases, in the order of a step.
        ms: ``[W, P]`` milliseconds.
        memory_categories: names of the C categories.
        memory_bytes: ``[W, C]`` held by each rank, without the reserve.
        capacity_bytes: ``[W]`` memory of each rank.
        usable_bytes: ``[W]`` the capacity without the reserve.
        host_bytes: ``[W]`` weights and optimizer state in host memory; None if there are none.
        host_room_bytes: host memory of one rank for them.
        host_weight_bytes: ``[W]`` the weights among `host_bytes`; None if there are none.
        traffic_bytes: ``[W, W]`` from rank (row) to rank (column) in one step; NaN if the cost model has no traffic.
        traffic_parts: returns `traffic_by_phase`; None if the cost model has no traffic.
        lower_bound: ms that no plan within the planner's constraints is below; None if it was not computed.
        waits: whether every phase takes as long as its slowest rank, as with collectives. If not, a step is the sum
            of the busiest rank's phases.
        overlap: the step under the workload's pipeline; None without one.
    """

    phases: tuple[str, ...]
    ms: Array
    memory_categories: tuple[str, ...]
    memory_bytes: Array
    capacity_bytes: Array
    usable_bytes: Array
    traffic_bytes: Array
    lower_bound: float | None = None
    waits: bool = True
    overlap: Overlap | None = None
    host_bytes: Array | None = None
    host_room_bytes: float = 0.0
    host_weight_bytes: Array | None = None
    traffic_parts: Callable[[], dict[str, Array]] | None = field(default=None, repr=False)

    @cached_property
    def traffic_by_phase(self) -> dict[str, Array]:
        """`traffic_bytes` by the labels of a trace (``input_dist/ids``, ``output_dist/rows/inside``, ``dense``, ...),
        ``[W, W]`` each. Empty if the cost model has no traffic."""
        return {} if self.traffic_parts is None else self.traffic_parts()

    @property
    def gap(self) -> float | None:
        """How much longer the step is than `lower_bound`, as a share: 0.02 is at most 2% from the best plan."""
        if self.lower_bound is None:
            return None
        if not self.lower_bound > 0:
            return 0.0 if self.step_ms <= 0 else float("inf")
        return max(0.0, self.step_ms / self.lower_bound - 1)

    @property
    def step_ms(self) -> float:
        """Milliseconds of a step, under the workload's pipeline if it has one."""
        return self.plain_step_ms if self.overlap is None else self.overlap.step_ms

    @property
    def plain_step_ms(self) -> float:
        """The step without a pipeline: the sum over phases of the slowest rank, since collectives wait for it."""
        if not self.waits:
            return self.max_rank_ms
        return float(self.ms.max(axis=0).sum())

    @property
    def max_rank_ms(self) -> float:
        """The sum of the busiest rank's phases, which other planners report; at most `plain_step_ms`."""
        return float(self.ms.sum(axis=1).max())

    @property
    def critical_rank(self) -> int:
        """The rank with the most work."""
        return int(self.ms.sum(axis=1).argmax())

    @property
    def held_bytes(self) -> Array:
        """``[W]`` bytes of each rank, all categories together."""
        return np.asarray(self.memory_bytes.sum(axis=1))

    @property
    def fullest_bytes(self) -> float:
        """Bytes of the fullest rank. Every summary, table and picture of the fullest rank shows this number."""
        return float(self.held_bytes.max(initial=0.0))

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its usable memory and its share of the host's memory."""
        return not self.overfull_ranks and not self.host_overfull_ranks

    @property
    def overfull_ranks(self) -> list[int]:
        """Ranks that exceed their usable memory."""
        return np.flatnonzero(self.held_bytes > self.usable_bytes).tolist()

    @property
    def host_overfull_ranks(self) -> list[int]:
        """Ranks that exceed their share of the host's memory."""
        return [] if self.host_bytes is None else np.flatnonzero(self.host_bytes > self.host_room_bytes).tolist()

    def __str__(self) -> str:
        return estimate_text(self)


def cost_model_named(cost_model: Any) -> Callable[..., CostModel]:
    """The cost model of this name; a class (or a function) with `CostModel`'s arguments is returned unchanged.

    Raises:
        ValueError: an unknown name, or an instance.

    >>> cost_model_named("torchrec").__name__
    'TorchRecCostModel'
    """
    if isinstance(cost_model, str) and cost_model in COST_MODELS:
        return COST_MODELS[cost_model]
    if not isinstance(cost_model, str) and callable(cost_model):
        return cost_model
    raise ValueError(
        f"cost_model {cost_model!r:.80} does not exist{nearest(str(cost_model)[:80], COST_MODELS)}; known: "
        f"{', '.join(COST_MODELS)}. Fix: use one of these names, or pass a subclass of CostModel"
    )


@names_wrong_arguments
def estimate(
    plan: ShardingPlan,
    tables: Tables,
    topology: Topology,
    workload: Workload | None = None,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    cost_model: str | type[CostModel] = "recshard",
) -> Estimate:
    """The predicted costs of `plan`.

    Args:
        plan: the plan. Shards may be omitted as in `ShardingPlan.resolved`.
        tables: their configs, or module path -> configs.
        topology: the ranks.
        workload: the training step. Default: `Workload()`.
        constraints: table -> constraints; only their workload fields (pooling factors, batch sizes) are used.
        cost_model: "recshard"; "latency", one forward without backward and optimizer; "torchrec" (the formulas of
            TorchRec 1.8's estimator); or a subclass of `CostModel`.

    Raises:
        PlanError: tables and plan do not name the same tables, or a shard is on a rank that does not exist.

    >>> from recshard_lab.sharding import Shard
    >>> movies = BaseEmbeddingConfig(name="movies", num_embeddings=1000, embedding_dim=16, feature_names=["movie"])
    >>> plan = ShardingPlan({"": {"movies": ParameterSharding("table_wise", shards=[Shard(0, (0, 1000), (0, 16))])}})
    >>> int(estimate(plan, [movies], Topology(2)).memory_bytes[0, 0])
    64000
    """
    pairs = plan.pairs(tables)
    made_by = cost_model_named(cost_model)
    model = made_by([config for config, _ in pairs], topology, workload or Workload(), constraints)
    return estimate_loads(model, plan_loads(model, pairs), pairs, sum(map(bool, plan.plan.values())))


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanRects(Rects):
    """The n shards of a plan, and their ranks.

    Attributes:
        ranks: ``[n]`` integers.
        shares: ``[n]`` of ACROSS, see `across_shares`.
        summed: ``[n]`` the share of the table's rows that are not replicated.
    """

    ranks: Any
    shares: Array
    summed: Array

    def loads(self, model: CostModel) -> Array:
        """``[K, n]``."""
        found = model.rect_loads(self)
        if not model.has_tiers and self.host is not None and self.host.any():
            raise PlanError(
                f"cost_model={model.name!r} has no formulas for shards in the host's memory. Fix: cost_model='recshard'"
            )
        found[ACROSS_BOTH] *= self.shares
        found[SCATTER_BOTH] /= np.maximum(self.summed, 1e-9)
        return found


def plan_loads(model: CostModel, pairs: list[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> Array:
    """The loads ``[K, W]`` of a plan.

    Raises:
        PlanError: a shard on a rank that does not exist; a route that does not apply.
    """
    rects = plan_rects(model.topology, pairs)
    ranks = model.topology.world_size
    return np.stack([np.bincount(rects.ranks, weights=row, minlength=ranks) for row in rects.loads(model)])


def loads_by_table(model: CostModel, pairs: list[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> Array:
    """The loads ``[T, K, W]`` of each table. Their sum is `plan_loads`.

    Raises:
        PlanError: as `plan_loads`.
    """
    rects = plan_rects(model.topology, pairs)
    ranks, cells = model.topology.world_size, rects.of * model.topology.world_size + rects.ranks
    flat: Array = np.stack([np.bincount(cells, row, len(pairs) * ranks) for row in rects.loads(model)])
    return flat.reshape(len(flat), len(pairs), ranks).transpose(1, 0, 2)


def plan_rects(topology: Topology, pairs: list[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> PlanRects:
    """The shards of a plan as arrays.

    Raises:
        PlanError: a shard on a rank that does not exist; a route that does not apply.
    """
    world_size = topology.world_size
    flat: list[tuple[float, ...]] = []
    shares: list[float] = []
    summed: list[float] = []
    for index, (config, sharding) in enumerate(pairs):
        full = sharding.resolved(config, world_size, topology.local_world_size)
        highest = max(shard.rank for shard in full.shards)
        if highest >= world_size:
            check_shards(
                config, full.shards, full.sharding_type == ShardingType.DATA_PARALLEL, world_size
            )  # raises, with the shard and the fix
        dense_kernel = float(full.compute_kernel == EmbeddingComputeKernel.DENSE)
        by_node = float(full.sharding_type in BY_NODE)
        held = 0.0 if full.cache_params is None else full.cache_params.load_factor
        flags = (dense_kernel, ROUTE_NUMBERS[taken_route(config, full)], by_node, held)
        copies = full.replica_flags
        flat += [
            (index, s.rank, s.rows[0], s.rows[1] - s.rows[0], s.cols[1] - s.cols[0], copy, s.tier == DDR, *flags)
            for s, copy in zip(full.shards, copies, strict=True)
        ]
        if full.route == "two_hop":
            cold = [shard for shard, copy in zip(full.shards, copies, strict=True) if not copy]
            found = iter(across_shares([s.cols for s in cold], [topology.node_of(s.rank) for s in cold]))
            shares += [1.0 if copy else next(found) for copy in copies]
        else:
            shares += [1.0] * len(full.shards)
        summed += [summed_rows([s.rect for s in full.shards], config.num_embeddings)] * len(full.shards)
    columns = np.array(flat, dtype=float).reshape(-1, 11).T
    of, ranks, first, rows, cols, replicated, host, dense, route, node_rows, cached = columns
    where = {"ranks": ranks.astype(np.intp), "shares": np.array(shares), "summed": np.array(summed)}
    return PlanRects(of.astype(np.intp), rows, cols, replicated, dense, route, node_rows, first, host, cached, **where)


def taken_route(config: BaseEmbeddingConfig, sharding: ParameterSharding) -> str:
    """The output path of a table. A table without row shards has nothing to reduce-scatter, and uses "direct".

    Raises:
        PlanError: a table that is not pooled, with an output path other than "direct".
    """
    check_route_applies(config, sharding.route)
    cut = any(shard.num_rows != config.num_embeddings for shard in sharding.shards)
    return sharding.route if cut or sharding.route != "reduce_scatter" else "direct"


def estimate_loads(
    model: CostModel,
    loads: Array,
    pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]] = (),
    collections: int = 1,
) -> Estimate:
    """The estimate of the loads ``[K, W]`` of these tables and shardings, in the model's order."""
    parts = partial(model.traffic, loads, norm_traffic(model, pairs) if loads[NORMS].any() else None, collections)
    unknown = np.full((model.topology.world_size,) * 2, np.nan)
    traffic = list(parts().values())
    categories: tuple[str, ...] = MEMORY_CATEGORIES
    memory = model.memory(loads).T
    if model.tables.dynamic.any():
        index = index_bytes(model.topology, pairs)
        memory[:, categories.index("optimizer_state")] -= index
        categories, memory = (*categories, INDEX), np.append(memory, index[:, None], axis=1)
    return Estimate(
        phases=model.phase_names,
        ms=model.phases(loads).T,
        memory_categories=categories,
        memory_bytes=memory,
        capacity_bytes=np.full(model.topology.world_size, float(model.topology.memory_cap_bytes)),
        usable_bytes=np.full(model.topology.world_size, model.usable_bytes),
        traffic_bytes=np.sum(traffic, axis=0) if traffic else unknown,
        waits=model.waits,
        overlap=None if model.workload.pipeline == "none" else model.overlapped.overlap(loads),
        host_bytes=loads[HOST] if loads[HOST].any() else None,
        host_room_bytes=model.host_room,
        host_weight_bytes=host_weights(model.topology, pairs) if loads[HOST].any() else None,
        traffic_parts=parts if traffic else None,
    )


def host_weights(topology: Topology, pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> Array:
    """Bytes ``[W]`` of weights in host memory."""
    held = np.zeros(topology.world_size)
    for config, sharding in pairs:
        for shard in sharding.resolved(config, topology.world_size, topology.local_world_size).shards:
            if shard.tier == DDR:
                held[shard.rank] += shard.num_elements * config.data_type.bytes_per_element
    return held


def index_bytes(topology: Topology, pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> Array:
    """Bytes ``[W]`` of the indexes of dynamic tables in the ranks' own memory."""
    held = np.zeros(topology.world_size)
    for config, sharding in pairs:
        if not config.dynamic:
            continue
        for shard in sharding.resolved(config, topology.world_size, topology.local_world_size).shards:
            if shard.tier != DDR or not topology.has_tiers:
                held[shard.rank] += shard.num_rows * config.index_bytes_per_row
    return held


def norm_traffic(model: CostModel, pairs: Sequence[tuple[BaseEmbeddingConfig, ParameterSharding]]) -> Array:
    """Bytes ``[W, W]`` of row norms: every column shard sends them to all shards with the same rows."""
    top = model.topology
    sent = np.zeros((top.world_size, top.world_size))
    for index, (config, sharding) in enumerate(pairs):
        shards = sharding.resolved(config, top.world_size, top.local_world_size).shards
        if all(shard.num_cols == config.embedding_dim for shard in shards):
            continue
        first, end = np.array([shard.rows for shard in shards], dtype=float).T
        cols = np.array([shard.num_cols for shard in shards], dtype=float)
        at, none = np.full(len(shards), index), np.zeros(len(shards))
        loads = model.rect_loads(Rects(at, end - first, cols, none, none, first=first))[NORMS]
        each = loads / np.maximum(config.embedding_dim / cols - 1, 1e-9)  # to another shard of the same rows
        shared = np.minimum(end[:, None], end) - np.maximum(first[:, None], first)
        told = each[:, None] * np.maximum(shared, 0) / (end - first)[:, None]
        ranks = [shard.rank for shard in shards]
        np.add.at(sent, (np.array(ranks)[:, None], np.array(ranks)), told)
    return sent
