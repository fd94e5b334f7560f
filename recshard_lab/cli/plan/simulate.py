"""The work of ``recshard plan sweep``, imported when it runs: a sweep as text, CSV and a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.progress import Progress

from recshard_lab import mlperf
from recshard_lab.lab import export
from recshard_lab.lab.exporting.exportable import Exportable
from recshard_lab.lab.exporting.report import Section
from recshard_lab.lab.exporting.sweep_report import sweep_page
from recshard_lab.planner import read_tables
from recshard_lab.planner.sweep.mlperf_example import (
    WORLD_SIZES,
    mlperf_dlrm_dcnv2_tables,
    mlperf_dlrm_dcnv2_workload,
    mlperf_example,
)
from recshard_lab.planner.sweep.points import SweepPoint
from recshard_lab.planner.sweep.trillions import MODELS, trillion_example, trillion_workload
from recshard_lab.planner.sweep.trillions import WORLD_SIZES as WORLD_SIZES_OF_TRILLIONS
from recshard_lab.planner.sweep.whatif import sweep
from recshard_lab.sharding.plan.types import nearest
from recshard_lab.text_table import Printable, wrapped

Progressed: TypeAlias = Callable[[int, int, SweepPoint], None]
Page: TypeAlias = Callable[[], Exportable]


def run_whatif(
    path: Path | None,
    example: str,
    topology: str,
    axes: Mapping[str, str],
    sync_every: int,
    html: Path | None,
    csv: Path | None,
    console: Any,
    plotly: str = "embed",
) -> None:
    """Simulates, prints, and writes the files that `recshard plan sweep` was called with.

    Args:
        path, example: a file of tables, or the name of an example.
        axes: option -> its text; empty texts are ignored.

    Raises:
        ValueError: neither or both of them; an option that cannot be parsed, or that the example fixes.
        OSError: a file cannot be read or written.
    """
    given = {name: text for name, text in axes.items() if text}
    if (path is None) == (not example):
        what = "tables are missing" if path is None else f"{str(path)!r} and --example {example} exclude each other"
        raise ValueError(
            f"{what}: a sweep needs a file of tables or an example. Fix: recshard plan sweep tables.yaml, or "
            f"recshard plan sweep --example NAME ({', '.join(EXAMPLES)})"
        )
    if example and example not in EXAMPLES:
        raise ValueError(
            f"--example {example}: no example has this name{nearest(example, EXAMPLES)}. "
            f"Fix: use one of {', '.join(EXAMPLES)}."
        )
    for option in given if example else ():
        if option != "world_size":
            fixed = option.replace("_", " ")
            raise ValueError(f"--example {example} fixes {fixed}. Fix: leave --{option.replace('_', '-')} out.")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating")

        def report(done: int, count: int, point: SweepPoint) -> None:
            bar.update(task, completed=done, total=count)

        if path is None:
            sizes = integers(given["world_size"], "--ranks") if given else None
            found, page = EXAMPLES[example](topology, sizes, report)
            note = ""
        else:
            found, page, note = _of_file(path, topology, given, sync_every, report)
    print(found)
    if note:
        print(wrapped(note))
    if csv is not None:
        found.to_csv(csv)
    if html is not None:
        export(page(), html, plotly=plotly)


def _of_file(
    path: Path, topology: str, given: Mapping[str, str], sync_every: int, report: Progressed
) -> tuple[Printable, Page, str]:
    """A sweep of the tables in a file, its page, and a note."""
    read = read_tables(path)
    arguments: dict[str, Any] = {"topology": words(topology)}
    for name in ("world_size", "batch_size", "global_batch_size"):
        if name in given:
            option = "--ranks" if name == "world_size" else f"--{name.replace('_', '-')}"
            arguments[name] = integers(given[name], option)
    if "memory_gb" in given:
        arguments["hbm_cap"] = integers(given["memory_gb"], "--memory-gb", 10**9)
    for name in ("codecs", "optimizer", "pipeline"):
        if name in given:
            arguments[name] = words(given[name])
    if "sharding_group_size" in given:
        sizes = words(given["sharding_group_size"])
        option = "--sharding-group-size"
        arguments["sharding_group_size"] = [None if size == "all" else integers(size, option)[0] for size in sizes]
    workload = read.workload()
    found = sweep(read.tables, workload, **arguments, sync_every=sync_every, progress=report)
    embeddings_only = "Embeddings only: a file of tables has no dense layers, so a real step takes longer."
    note = "" if workload.dense_parameters else embeddings_only
    return found, lambda: sweep_page(found, workload, f"What if: {path.name}"), note


def _mlperf(topology: str, sizes: list[int] | None, report: Progressed) -> tuple[Printable, Page]:
    """The worked example of MLPerf's DLRM-DCNv2: on H100s as text, on other machines too in the page."""
    found = mlperf_example(sizes or list(WORLD_SIZES))

    def page() -> Exportable:
        load = mlperf_dlrm_dcnv2_workload()
        compared = sweep(
            mlperf_dlrm_dcnv2_tables(),
            load,
            topology=["a100", "h100", "gb200nvl72"] if topology == "h100" else words(topology),
            world_size=[8, 16, 32, 64, 72, 128, 144],
            global_batch_size=mlperf.GLOBAL_BATCH_SIZE,
            pipeline=["none", "sparse_dist"],
        )
        words_ = "The same tables and batch on other machines, with the figures of their presets."
        parts = [Section(title, list(own)) for title, own in found.sections()]
        return sweep_page(compared, load, "MLPerf DLRM-DCNv2", [*parts, Section("Other machines", [words_])])

    return found, page


def _trillions(name: str, topology: str, sizes: list[int] | None, report: Progressed) -> tuple[Printable, Page]:
    """The worked example of a model with trillions of parameters, in groups of GPUs and tiers of memory."""
    found = trillion_example(name, sizes or list(WORLD_SIZES_OF_TRILLIONS), topology, progress=report)

    def page() -> Exportable:
        parts = found.parts()
        more = [Section("Memory and copies", parts[:-1]), Section("Every figure", parts[-1:])]
        return sweep_page(found.hbm, trillion_workload(), f"{name} on {topology}", more)

    return found, page


EXAMPLES: dict[str, Callable[..., tuple[Printable, Page]]] = {
    "mlperf-dlrm-dcnv2": _mlperf,
    **{name: partial(_trillions, name) for name in MODELS},
}


def integers(text: str, name: str, scale: float = 1) -> list[int]:
    """Numbers separated by commas; 64k is 65,536.

    Raises:
        ValueError: other text.

    >>> integers("8,16, 2k", "--ranks")
    [8, 16, 2048]
    """
    found = []
    for part in text.replace(" ", "").split(","):
        try:
            size = 1024 if part.lower().endswith("k") else 1
            value = float(part[:-1] if size > 1 else part) * size * scale
        except ValueError:
            raise ValueError(f"{name} takes numbers separated by commas, got {text!r}. Fix: {name} 8,16") from None
        if not 1 <= value < 2**62 or (value != int(value) and scale == 1):
            allowed = "whole numbers of at least 1" if scale == 1 else "numbers above 0"
            raise ValueError(f"{name} takes {allowed}, got {part!r}. Fix: {name} 8,16")
        found.append(int(value))
    return found


def words(text: str) -> list[str]:
    """Words separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
