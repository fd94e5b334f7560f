"""Machines by name for `Topology.preset`, and a table of their figures with sources."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.cores import usable_cores
from recshard_lab.interrupts import uninterrupted
from recshard_lab.sharding.hardware.machines import (
    ALIASES,
    ASSUMED,
    MACHINES,
    TFLOPS,
    Machine,
    Published,
    machine_of_gpu,
)
from recshard_lab.text_table import Printable, TextTable

THIS = "this"


def preset_names() -> list[str]:
    """Names of the presets, without aliases.

    >>> "h100" in preset_names(), "this" in preset_names()
    (True, True)
    """
    return [*(machine.name for machine in MACHINES), THIS]


@checks_arguments
def preset_arguments(name: str, world_size: int | None = None, local_world_size: int | None = None) -> dict[str, Any]:
    """The arguments of `Topology` of a preset.

    Args:
        name: NAME for one host, or NAMExN for N ranks.
        world_size: N, if `name` does not contain it.
        local_world_size: ranks per host. Default: the machine's usual number.

    Raises:
        ValueError: an unknown name, two different N, N below 1, ranks that do not fill hosts.

    >>> preset_arguments("h100x16")["world_size"], preset_arguments("h100x16")["local_world_size"]
    (16, 8)
    """
    machine, ranks = _parsed(name)
    if ranks is not None and world_size is not None and ranks != world_size:
        raise ValueError(f"preset {name!r} has {ranks} ranks, but world_size is {world_size}. Fix: pass one of them")
    ranks = world_size if ranks is None else ranks
    if machine is None:
        return _this_machine(ranks, local_world_size)
    world = machine.ranks if ranks is None else ranks
    if world < 1:
        raise ValueError(f"preset {name!r}: world_size must be a positive integer, got {world!r}")
    usual = world if machine.one_host else min(machine.ranks, world)
    local = usual if local_world_size is None else local_world_size
    if local_world_size is None and world % local:
        down, up = world // local * local, (world // local + 1) * local
        raise ValueError(
            f"preset {name!r}: {world} ranks do not fill hosts of {local}. Fix: use {machine.name}x{down} or "
            f"{machine.name}x{up}, or pass local_world_size="
        )
    figures = {figure.field: figure.value for figure in machine.figures}
    if machine.one_host:
        figures["ddr_cap"] = int(figures["ddr_cap"] // local)
    return {"world_size": world, "local_world_size": local, "compute_device": machine.device, **figures}


@dataclass(frozen=True)
class PresetTable(Printable):
    """Presets as text of at most 100 columns (``print``), as HTML, as `records` and for pandas.

    Attributes:
        machines: the machines in the table.
        detailed: whether it shows every figure with its sources, or one line per machine.
    """

    machines: tuple[Machine, ...]
    detailed: bool

    def records(self) -> list[dict[str, Any]]:
        """One dictionary per figure: preset, field, peak, share, value, source, share_source; units of `Topology`."""
        return [
            {
                "preset": machine.name,
                "field": figure.field,
                "peak": figure.peak,
                "share": figure.share,
                "value": figure.value,
                "source": figure.source,
                "share_source": figure.share_source,
            }
            for machine in self.machines
            for figure in machine.figures
        ]

    def parts(self) -> list[str | TextTable]:
        return _details(self.machines[0]) if self.detailed else _overview(self.machines)


@checks_arguments
def preset_table(name: str | None = None) -> PresetTable:
    """All presets, one line per machine, or all figures of one preset with their sources.

    Args:
        name: a preset, with or without a number of ranks.

    Raises:
        ValueError: an unknown name, or "this", which has no published figures.

    >>> [line.split()[1:3] for line in str(preset_table("h100")).splitlines() if "hbm_cap" in line]
    [['80', 'GB']]
    """
    if name is None:
        return PresetTable(MACHINES, False)
    machine = _parsed(name)[0]
    if machine is None:
        raise ValueError(
            f"{THIS!r} is this machine and has no published figures. Fix: print(Topology.preset({THIS!r}))"
        )
    return PresetTable((machine,), True)


def _parsed(name: str) -> tuple[Machine | None, int | None]:
    """The machine (None for "this") and the ranks after an x."""
    spelled = name.strip().lower()
    known = {machine.name: machine for machine in MACHINES}
    if (machine := known.get(ALIASES.get(spelled, spelled))) is not None:
        return machine, None
    split = re.fullmatch(r"(.+?)x(\d+)", spelled)
    base, ranks = (split[1], int(split[2])) if split else (spelled, None)
    base = ALIASES.get(base, base)
    if base != THIS and base not in known:
        near = difflib.get_close_matches(base, [*known, THIS, *ALIASES], n=1, cutoff=0.0)[0]
        suffix = f"x{ranks}" if ranks is not None else ""
        raise ValueError(
            f"topology preset {name!r} does not exist (did you mean {near + suffix!r}?); known: "
            f"{', '.join(preset_names())}; NAMExN is N ranks"
        )
    if ranks == 0:
        raise ValueError(f"preset {name!r} has 0 ranks. Fix: use NAMExN with N at least 1")
    return known.get(base), ranks


def _this_machine(ranks: int | None, local_world_size: int | None) -> dict[str, Any]:
    """One rank per GPU, with the figures of the GPU if listed; without GPUs, one rank per core."""
    with uninterrupted():
        import torch

    if not torch.cuda.is_available():
        world = ranks or usable_cores()
        return {"world_size": world, "local_world_size": local_world_size or world}
    world = ranks or torch.cuda.device_count()
    device = torch.cuda.get_device_properties(0)
    machine = machine_of_gpu(device.name)
    figures: dict[str, Any] = {} if machine is None else {figure.field: figure.value for figure in machine.figures}
    local = local_world_size or (world if machine is None or world % machine.ranks else min(machine.ranks, world))
    return {**figures, "hbm_cap": device.total_memory, "compute_device": "cuda"} | {
        "world_size": world,
        "local_world_size": local,
    }


def _overview(machines: Sequence[Machine]) -> list[str | TextTable]:
    rows = []
    for machine in machines:
        by_field = {figure.field: figure for figure in machine.figures}
        memory = by_field["hbm_cap" if machine.device == "cuda" else "ddr_cap"]
        rates = [_used(by_field.get(name)) for name in ("hbm_mem_bw", "intra_host_bw", "inter_host_bw")]
        rows.append((machine.name, str(machine.ranks), amount(memory.field, memory.value), *rates))
    return [
        TextTable(("preset", "ranks/host", "memory", "bandwidth", "inside a host", "between hosts"), rows),
        "Per rank and direction: achievable of published. NAMExN is N ranks in hosts of this size. "
        "preset_table(NAME) or `recshard topologies NAME` shows every figure with its source.",
    ]


def _details(machine: Machine) -> list[str | TextTable]:
    rows = []
    for figure in machine.figures:
        sources = [_sentence("published", figure.source)]
        if figure.share != 1:
            sources.append(_sentence(f"share {figure.share:g}", figure.share_source))
        rows += [(figure.field, _used(figure), sources[0]), *(("", "", source) for source in sources[1:])]
    return [
        f"{machine.name}: {machine.about}; {machine.ranks} ranks per host.",
        TextTable(("figure", "value", "source"), rows, wraps=True),
        "All other figures are the defaults of the device, see recshard_lab.sharding.hardware.topology.",
    ]


def _sentence(what: str, source: str) -> str:
    """``what: source``; only the source for assumed figures."""
    if what == "published" and source.startswith(ASSUMED):
        return source
    return f"{what}: {source}"


def _used(figure: Published | None) -> str:
    if figure is None:
        return "-"
    if figure.share == 1:
        return amount(figure.field, figure.value)
    used, unit = amount(figure.field, figure.value).split(" ")
    peak, peak_unit = amount(figure.field, figure.peak).split(" ")
    return f"{used} of {peak} {unit}" if unit == peak_unit else f"{used} {unit} of {peak} {peak_unit}"


def amount(field: str, value: float) -> str:
    """A figure of `Topology` with a unit, as in data sheets.

    >>> amount("intra_host_bw", 450e6), amount("hbm_cap", 80e9), amount("launch_ms", 0.02)
    ('450 GB/s', '80 GB', '20 us')
    """
    if field.endswith("_bw"):
        return f"{value / 1e6:,.0f} GB/s" if value >= 1e10 else f"{value / 1e6:,.4g} GB/s"
    if field.endswith("_cap"):
        return f"{value / 1e9:,.4g} GB"
    if field.endswith("flops_per_ms"):
        return f"{value / TFLOPS:,.4g} TFLOPS"
    if field.endswith("_ms"):
        return f"{value * 1000:,.4g} us"
    if field.endswith("_bytes"):
        return f"{value:,.4g} bytes"
    return f"{value:,.4g}"
