"""The page of a sweep of simulated plans, with its Pareto pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recshard_lab.lab import views
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.planner import Workload
from recshard_lab.planner.sweep.points import Sweep
from recshard_lab.sharding import preset_table
from recshard_lab.text_table import TextTable

SIMULATED_NOTE = "Simulated, not measured: no ranks were launched. Every number follows from the figures above."


def sweep_page(found: Sweep, workload: Workload, title: str = "What if", more: Sequence[Section] = ()) -> Exportable:
    """A sweep as a page: the Pareto pictures, all points, and the figures of the simulation.

    Args:
        found: the sweep.
        workload: its step.
        title: of the page.
        more: further sections, which are first.
    """
    pictures = [views.pareto(found), views.pareto(found, y="step_ms")]
    records = found.records()
    heads = [name for name in records[0] if any(record[name] not in (None, "") for record in records)]
    rows = [[_cell(record[name]) for name in heads] for record in records]
    figures = [f"The step: {workload_text(workload)}. Swept: {', '.join(found.varied) or 'nothing'}."]
    names = dict.fromkeys(point.topology for point in found.points)
    for name in names:
        if not name.endswith(" ranks") and not name.lower().startswith("this"):
            figures.append(f"$ recshard topologies {name}\n{preset_table(name)}")
    sections = [
        *more,
        Section("Simulated points", pictures),
        Section("All points", [TextTable(heads, rows)]),
        Section("Figures of the simulation", figures),
    ]
    subtitle, stem = found.sentences()[0], "sweep"
    return Exportable(f"{title} (simulated)", sections, subtitle, SIMULATED_NOTE, pictures={"": pictures}, name=stem)


def workload_text(workload: Workload) -> str:
    """A step in a sentence, without the settings that sweeps usually vary.

    >>> workload_text(Workload(pooling_factors=10.0, dense_parameters=1000))
    '10 ids per bag, ids uniform, 1,000 dense parameters'
    """
    factors = workload.pooling_factors
    if isinstance(factors, (int, float)):
        parts = [f"{factors:g} id{'s' * (factors != 1)} per bag"]
    else:
        parts = [f"{sum(factors.values()):,.6g} ids per sample in {len(factors)} features"]
    if workload.access is not None:
        parts.append("ids used as measured")
    elif workload.unique_fraction is not None:
        share = workload.unique_fraction
        parts.append(f"distinct ids {share:g}" if isinstance(share, (int, float)) else "distinct ids by feature")
    else:
        alpha = workload.zipf_alpha
        skew = (
            "of each table's skew" if not isinstance(alpha, (int, float)) else f"Zipf {alpha:g}" if alpha else "uniform"
        )
        parts.append(f"ids {skew}")
    if workload.dense_parameters:
        parts.append(f"{workload.dense_parameters:,} dense parameters")
    if workload.dense_launches:
        parts.append(f"{workload.dense_launches:,} launches of dense kernels")
    return ", ".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:,.4g}" if value == value else ""
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
