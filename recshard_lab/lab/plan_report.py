"""One plan as an HTML file: placement, memory, phases and traffic, and what they were predicted from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab import views
from recshard_lab.lab.report import Section, write_report
from recshard_lab.lab.view import Numbers
from recshard_lab.planner import Workload, estimate
from recshard_lab.sharding import ShardingPlan, Topology, preset_table
from recshard_lab.sharding.presets import amount

_ASSUMED = (
    "world_size",
    "local_world_size",
    "hbm_cap",
    "ddr_cap",
    "hbm_mem_bw",
    "ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
    "launch_ms",
    "flops_per_ms",
)


def write_plan_report(
    path: str | Path,
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    topology: Topology,
    workload: Workload,
    preset: str = "",
) -> Path:
    """Writes the file; nothing is run for it, all of it is predicted.

    Args:
        path: of the HTML file.
        plan: the plan of `tables`.
        tables: their configs.
        topology: the ranks.
        workload: the step.
        preset: the name that the topology was made by, for its sources.

    Returns:
        The path written.

    Raises:
        ValueError: a page of more than 3 MB.
    """
    predicted = estimate(plan, tables, topology, workload)
    known = {"plan": plan, "tables": tables, "topology": topology, "estimate": predicted}
    sections = [Section(views.view_label(name), [views.draw(name, **known)]) for name in views.views_of(*known)]
    figures = Numbers(
        ("figure", "of one rank"),
        [(name, _amount(name, getattr(topology, name))) for name in _ASSUMED],
    )
    step = f"{workload.batch_size:,} samples a rank, {workload.optimizer}"
    parts: list[Numbers | str] = [figures, f"The step: {step}."]
    if preset and not preset.lower().startswith("this"):
        parts.append(f"$ recshard topologies {preset}\n{preset_table(preset)}")
    sections.append(Section("What it was predicted from", parts))
    ranks = f"{topology.world_size:,} rank{'s' * (topology.world_size != 1)}"
    where = f" of {preset}" if preset else f" on {topology.compute_device}"
    return write_report(
        path,
        f"A plan for {len(tables):,} table{'s' * (len(tables) != 1)} on {ranks}",
        sections,
        subtitle=f"Predicted step {predicted.step_ms:.2f} ms{where}; {step}.",
        note="Predicted, not measured.",
    )


def _amount(name: str, value: float) -> str:
    return f"{value:,}" if name.endswith("world_size") else amount(name, value)
