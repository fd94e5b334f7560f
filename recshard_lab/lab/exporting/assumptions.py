"""The figures that a prediction uses, and the software versions of a page."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import fields
from datetime import date
from typing import Any

from recshard_lab.interrupts import uninterrupted
from recshard_lab.lab.draw.theme import counted, number
from recshard_lab.lab.exporting.report import Folded, Part, Section
from recshard_lab.planner import Workload
from recshard_lab.sharding import Topology, preset_table
from recshard_lab.sharding.hardware.device_profile import DeviceProfile
from recshard_lab.sharding.hardware.presets import amount
from recshard_lab.text_table import TextTable

_FIRST = (  # the figures of a topology that affect a plan most
    "world_size",
    "local_world_size",
    "compute_device",
    "hbm_cap",
    "ddr_cap",
    "hbm_mem_bw",
    "ddr_mem_bw",
    "intra_host_bw",
    "inter_host_bw",
    "launch_ms",
    "flops_per_ms",
    "reserve_fraction",
)


def assumptions(topology: Topology, workload: Workload, preset: str = "") -> Section:
    """The section of a page with every figure that its predictions use.

    Args:
        preset: name of the topology's preset, for its sources, or the file of a device profile.
    """
    rest = [each.name for each in fields(topology) if each.name not in _FIRST]
    parts: list[Part] = [
        TextTable(("figure", "of one rank"), [(name, _figure(topology, name)) for name in _FIRST]),
        Folded("Every other figure of the machine", TextTable(("figure", "value"), _rows(topology, rest))),
        TextTable(("of the step", "value"), _rows(workload, [each.name for each in fields(workload)])),
    ]
    if preset.endswith(".json"):
        parts.append(_calibrated(DeviceProfile.load(preset)))
    elif preset and not preset.lower().startswith("this"):
        parts.append(f"$ recshard topologies {preset}\n{preset_table(preset)}")
    return Section("Figures of the prediction", parts)


def versions(plotly: str = "none") -> str:
    """Software versions and date of a page, in a line."""
    with uninterrupted():
        import torch

    from recshard_lab import __version__

    words = f"Written by recshard_lab {__version__} on {date.today()}, with Python {platform.python_version()}, "
    words += f"torch {torch.__version__} on {platform.system()} {platform.machine()}"
    if plotly == "none":
        return words + "."
    from recshard_lab.lab.exporting.page import plotly_version

    where = "in this file" if plotly == "embed" else "from the network"
    return f"{words}; pictures by plotly.js {plotly_version()} (MIT licence), {where}."


def _rows(of: Any, names: list[str]) -> list[tuple[str, str]]:
    return [(name, _figure(of, name)) for name in names]


def _figure(of: Any, name: str) -> str:
    """One field as text. A long mapping is shortened and ends with the number of further entries."""
    value = getattr(of, name)
    if isinstance(value, Mapping):
        shown = [f"{key} {_plain(each)}" for key, each in list(value.items())[:12]]
        more = len(value) - len(shown)
        return ", ".join(shown) + (f", and {more:,} more" if more else "") or "none"
    if isinstance(of, Topology) and isinstance(value, float | int) and not isinstance(value, bool):
        whole = name.endswith(("world_size", "_host"))
        known = name.endswith(("_bw", "_cap", "_ms"))
        return f"{value:,}" if whole else amount(name, value) if known else number(value)
    return _plain(value)


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | list | set | frozenset):
        return ", ".join(map(str, value))
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


def _calibrated(profile: DeviceProfile) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in profile.machine.items())
    fitted = f", fitted to {profile.cases} models with an error of {profile.error:.1%}" if profile.cases else ""
    return f"Calibrated on {profile.date} on {counted(profile.world_size, 'rank')}{fitted}: {machine}."
