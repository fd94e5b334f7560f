"""What the controls of the scheme switcher ask of a model that lies somewhere already. Plain functions, no widget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from recshard_lab.lab.live.live_model import LiveModel
from recshard_lab.planner import EmbeddingShardingPlanner, Workload
from recshard_lab.sharding import ParameterConstraints, ParameterSharding, ShardingPlan, Topology, row_wise
from recshard_lab.sharding.plan.types import HBM

AS_IT_IS, PLANNED = "as it is", "planner"


def plan_of_wishes(
    live: LiveModel,
    wishes: Mapping[str, str],
    splits: Mapping[str, Sequence[int]],
    topology: Topology,
    workload: Workload,
) -> ShardingPlan:
    """The plan asked for.

    Args:
        live: where the tables lie now.
        wishes: table -> AS_IT_IS, PLANNED or a scheme.
        splits: table -> its split lines, for those under "row_wise".
        topology, workload: what the planner plans for, where it is asked.

    Raises:
        PlanError: the planner finds nothing that fits.
    """
    made: dict[str, ParameterSharding] = {}
    for table in live.tables:
        wish = wishes[table.name]
        if wish == AS_IT_IS:
            made[table.name] = live.plan.plan[live.path_of[table.name]][table.name]
        elif wish == "row_wise" and table.name in splits:
            sizes = np.diff([0, *splits[table.name], table.num_embeddings]).tolist()
            made[table.name] = row_wise(sizes=sizes)(table, topology)
        elif wish != PLANNED:
            made[table.name] = ParameterSharding(wish).resolved(table, topology.world_size, topology.local_world_size)
    if PLANNED in wishes.values():
        made |= _planned(live, made, topology, workload)
    plan = ShardingPlan({path: {} for path in live.plan.plan})  # type: ignore[misc]
    for table in live.tables:
        plan.plan[live.path_of[table.name]][table.name] = made[table.name]
    return plan


def _planned(
    live: LiveModel, fixed: Mapping[str, ParameterSharding], topology: Topology, workload: Workload
) -> dict[str, ParameterSharding]:
    """The planner's choice for the tables that are not fixed."""
    wishes = {}
    for name, sharding in fixed.items():
        kernels = [str(sharding.compute_kernel)]
        if sharding.replicated:
            wishes[name] = ParameterConstraints(["data_parallel"], kernels)
        else:
            wishes[name] = ParameterConstraints(
                shards=sharding.shards, compute_kernels=kernels, cache_params=sharding.cache_params
            )
    planner = EmbeddingShardingPlanner(topology, constraints=wishes, workload=workload)
    found = planner.plan_tables(live.tables, explain=False).tables()
    return {name: sharding for name, sharding in found.items() if name not in fixed}


def python_of_wishes(live: LiveModel, plan: ShardingPlan) -> str:
    """The change from what lies there to `plan`, and applying it, in Python that uses `ranks`."""
    lines = [
        "from recshard_lab import ParameterSharding, Shard, ShardingPlan",
        "from recshard_lab.lab import LiveModel",
    ]
    lines += ["", "plan = ShardingPlan({"]
    for path, tables in plan.plan.items():
        changed = [name for name in tables if tables[name] != live.plan.plan[path][name]]
        lines.append(f'    "{path}": {{')
        for name in changed:
            sharding = tables[name]
            lines.append(f'        "{name}": ParameterSharding(')
            lines.append(f'            "{sharding.sharding_type}", "{sharding.compute_kernel}", shards=[')
            lines += [
                f"                Shard({s.rank}, {s.rows}, {s.cols}{'' if s.tier == HBM else f', {s.tier!r}'}),"
                for s in sharding.shards
            ]
            lines.append("            ]),")
        if len(changed) < len(tables):
            lines.append(f"        # {len(tables) - len(changed)} tables that it does not name stay where they lie")
        lines.append("    },")
    named = (("step", live.step), ("optimizers", live.optimizers))
    names = "".join(f', {key}="{name}"' for key, name in named if name)
    return "\n".join([*lines, "})", f'live = LiveModel(ranks, "{live.model}"{names})', "live.reshard(plan)"])
