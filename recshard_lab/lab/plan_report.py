"""One plan as an HTML file: every view of it, how it was found, and what it was predicted from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab import views
from recshard_lab.lab.report import Folded, Part, Section, write_report
from recshard_lab.lab.view import Numbers
from recshard_lab.planner import Workload, estimate
from recshard_lab.planner.answers import sharding_text
from recshard_lab.planner.search_trace import SearchTrace
from recshard_lab.sharding import EmbeddingModuleShardingPlan, ShardingPlan, Topology, preset_table
from recshard_lab.sharding.device_profile import DeviceProfile
from recshard_lab.sharding.plan import Tables
from recshard_lab.sharding.presets import amount

MOST_EXPLAINED = 40
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
    tables: Tables,
    topology: Topology,
    workload: Workload,
    preset: str = "",
    search: SearchTrace | None = None,
) -> Path:
    """Writes the file; nothing is run for it, all of it is predicted.

    Args:
        path: of the HTML file.
        plan: the plan of `tables`; one that a planner made is explained, table by table.
        tables: their configs, or module path -> configs.
        topology: the ranks.
        workload: the step.
        preset: the name that the topology was made by, for its sources, or the file of a device profile.
        search: what the planner looked at, where it kept that.

    Returns:
        The path written.

    Raises:
        ValueError: a page of more than 3 MB.
    """
    flat, configs = _flat(plan, tables)
    predicted = estimate(plan, tables, topology, workload) if plan.planned is None else plan.planned.estimate(plan)
    tables = configs
    known: dict[str, Any] = {"plan": flat, "tables": tables, "topology": topology, "estimate": predicted}
    if search is not None:
        known["search"] = search
    sections = [Section(views.view_label(name), [views.draw(name, **known)]) for name in views.views_of(*known)]
    figures = Numbers(
        ("figure", "of one rank"),
        [(name, _amount(name, getattr(topology, name))) for name in _ASSUMED],
    )
    step = f"{workload.batch_size:,} samples a rank, {workload.optimizer}"
    parts: list[Part] = [figures, f"The step: {step}."]
    if preset.endswith(".json"):
        parts.append(_calibrated(DeviceProfile.load(preset)))
    elif preset and not preset.lower().startswith("this"):
        parts.append(f"$ recshard topologies {preset}\n{preset_table(preset)}")
    sections += _explained(plan)
    sections.append(Section("What it was predicted from", parts))
    ranks = f"{topology.world_size:,} rank{'s' * (topology.world_size != 1)}"
    where = f" of {Path(preset).name}" if preset else f" on {topology.compute_device}"
    return write_report(
        path,
        f"A plan for {len(tables):,} table{'s' * (len(tables) != 1)} on {ranks}",
        sections,
        subtitle=f"Predicted step {predicted.step_ms:.2f} ms{where}; {step}.",
        note="Predicted, not measured.",
    )


def _explained(plan: ShardingPlan) -> list[Section]:
    """Why each table lies where it does, those that cost most first."""
    if plan.planned is None:
        return []
    named = plan.planned.named(plan)
    largest = sorted(named, key=lambda name: -named[name][0].weight_bytes)[:MOST_EXPLAINED]
    found = sorted((plan.explain(name) for name in largest), key=lambda each: -each.share)
    parts: list[Part] = [
        Folded(f"{each.table}: {sharding_text(each.sharding)}, causes {each.share:.0%} of the step", each, each.share)
        for each in found
    ]
    which = f"the {len(found)} largest of {len(named):,} tables" if len(found) < len(named) else "every table"
    words = (
        f"For {which}, the most expensive first: what it causes of each phase, and what every other scheme and route "
        f"would cost while all other tables stay where they are."
    )
    return [Section("Why each table lies where it does", [words, *parts])]


def _flat(plan: ShardingPlan, tables: Tables) -> tuple[ShardingPlan, list[BaseEmbeddingConfig]]:
    """Plan and tables without modules, as the pictures want them; tables of one name are told apart by their paths."""
    if not isinstance(tables, Mapping):
        return plan, list(tables)
    names = [table.name for own in tables.values() for table in own]
    shardings, configs = {}, []
    for path, own in tables.items():
        for table in own:
            name = table.name if names.count(table.name) == 1 else f"{path}.{table.name}"
            shardings[name] = plan.plan[path][table.name]
            configs.append(replace(table, name=name))
    return ShardingPlan({"": EmbeddingModuleShardingPlan(shardings)}), configs


def _calibrated(profile: DeviceProfile) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in profile.machine.items())
    fitted = f", fitted to {profile.cases} models with an error of {profile.error:.1%}" if profile.cases else ""
    ranks = f"{profile.world_size} rank{'s' * (profile.world_size != 1)}"
    return f"Calibrated on {profile.date} on {ranks}{fitted}: {machine}."


def _amount(name: str, value: float) -> str:
    return f"{value:,}" if name.endswith("world_size") else amount(name, value)
