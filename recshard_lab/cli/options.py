"""Options that several commands have, under one spelling, and the examples below each help text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from recshard_lab.sizes import size_in

if TYPE_CHECKING:
    from recshard_lab.sharding import Topology

MACHINE, STEP, PLANNER, OUTPUT = "Machine", "Training step", "Planner", "Output"
"""Panels of a help text."""


def examples(*commands: str, more: Mapping[str, Iterable[str]] = MappingProxyType({})) -> str:
    """The end of a help text: one command a line, then heading -> further lines."""
    return _panel("Examples", commands) + "".join("\n\n" + _panel(head, lines) for head, lines in more.items())


def _panel(head: str, lines: Iterable[str]) -> str:
    return "\n".join([f"[bold]{escape(head)}[/]", *map(escape, lines)])


def size(unit: str) -> Callable[[Any], float]:
    """A parser of sizes in `unit`, for ``typer.Option(parser=...)``."""

    def parse(text: Any) -> float:
        try:
            return size_in(unit, str(text))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def size_option(unit: str, help: str, panel: str = "Options") -> Any:
    """An option that takes ``80``, ``80GB`` or ``80GiB``."""
    words = f"{help} A number is in {unit}. 2{unit} and 2{unit[0]}iB work too."
    return typer.Option(help=words, parser=size(unit), metavar="SIZE", rich_help_panel=panel)


Source = Annotated[
    str, typer.Argument(help="Tables (.yaml, .json, .csv), or a model: package.module:factory, file.py:factory.")
]
TopologyName = Annotated[
    str,
    typer.Option(
        "--topology",
        metavar="NAME",
        help="A machine by name (recshard topologies): h100x8, cpu-laptop. Or a profile (recshard calibrate).",
        rich_help_panel=MACHINE,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", "-n", help="Number of ranks. Default: the topology's.", min=1, metavar="N", rich_help_panel=MACHINE
    ),
]
Memory = Annotated[float | None, size_option("GB", "Memory of one rank.", MACHINE)]
BatchSize = Annotated[int, typer.Option(help="Samples per rank and step.", min=1, metavar="N", rich_help_panel=STEP)]
Optimizer = Annotated[
    str, typer.Option(help="Optimizer of the embeddings, by fbgemm's name.", metavar="NAME", rich_help_panel=STEP)
]
Pipeline = Annotated[
    str,
    typer.Option(
        help="Training pipeline, which decides what overlaps: none, sparse_dist, prefetch.",
        metavar="NAME",
        rich_help_panel=STEP,
    ),
]
Constraints = Annotated[
    Path | None,
    typer.Option(
        help="File of constraints, table -> ParameterConstraints: .yaml, .json.",
        metavar="FILE",
        rich_help_panel=PLANNER,
    ),
]
Solver = Annotated[
    str,
    typer.Option(help="greedy, or exact (improves greedy's plan by a MILP).", metavar="NAME", rich_help_panel=PLANNER),
]
CostModel = Annotated[
    str,
    typer.Option(
        help="recshard, latency (inference), or torchrec (the model of TorchRec 1.8).",
        metavar="NAME",
        rich_help_panel=PLANNER,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option("--plan", help="Use this plan (.json) instead of planning.", metavar="FILE", rich_help_panel=PLANNER),
]
Plotly = Annotated[
    str,
    typer.Option(
        help="Interactive pictures of a page: embed (opens offline), cdn, none.", metavar="NAME", rich_help_panel=OUTPUT
    ),
]


def machine_of(topology: str, ranks: int | None, memory_gb: float | None = None) -> Topology:
    """The machine of the options ``--topology``, ``--ranks`` and ``--memory-gb``."""
    from recshard_lab.sharding import Topology

    figures = {} if ranks is None else {"world_size": ranks}
    if topology.endswith(".json"):
        machine = Topology.from_profile(topology, **figures)
    else:
        machine = Topology.preset(topology, **figures) if topology else Topology(ranks or 2)
    return machine if memory_gb is None else machine.with_memory(memory_gb)


def check_out(paths: Iterable[Path], formats: Mapping[str, str], folder: str = "") -> None:
    """Refuses outputs that cannot be written, before the work starts.

    Args:
        paths: values of ``--out``.
        formats: supported suffix -> what such a file contains.
        folder: what a path without suffix contains; empty if it is not supported.

    Raises:
        ValueError: a suffix that is not supported, or a folder that does not exist.
    """
    from difflib import get_close_matches

    for path in paths:
        suffix = path.suffix.lower()
        if suffix not in formats and (suffix or not folder):
            near = get_close_matches(suffix, formats, n=1, cutoff=0.5)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            known = [f"{each} ({about})" for each, about in formats.items()]
            known += [f"a folder ({folder})"] if folder else []
            kind = repr(suffix) if suffix else "a path without suffix"
            right = path.with_suffix((near or list(formats))[0])
            raise ValueError(
                f"--out {path}: {kind} is not a supported format{meant}. Supported: {', '.join(known)}. "
                f"Fix: --out {right}"
            )
        if not path.parent.is_dir():
            raise ValueError(f"--out {path}: folder {str(path.parent)!r} does not exist. Fix: mkdir -p {path.parent}")


def stderr() -> Console:
    """A console on stderr that never breaks a line: terminals wrap it, and a path stays whole."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def note_on_stderr(note: str) -> None:
    """Prints a note on stderr, so that pipes do not receive it."""
    stderr().print(f"[yellow]note:[/] {escape(note)}")


def note_written(*paths: Path | None) -> None:
    """Names the files and folders that were written, with their sizes, on stderr. Skips None and devices."""
    for path in dict.fromkeys(paths):
        if path is not None and (path.is_file() or path.is_dir()):
            stderr().print(escape(f"Wrote {path} ({size_text(path)})"))


def size_text(path: Path) -> str:
    """The size of a file, or of all files below a folder.

    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp()) / "plan.json"
    >>> _ = file.write_text("x" * 1500)
    >>> size_text(file), size_text(file.parent)
    ('1.5 KB', '1 file, 1.5 KB')
    """
    from recshard_lab.planner.answers.text import gigabytes

    if path.is_file():
        return gigabytes(path.stat().st_size)
    return sizes_text([each for each in path.rglob("*") if each.is_file()])


def sizes_text(files: Sequence[Path]) -> str:
    """The number of files, and their size together."""
    from recshard_lab.planner.answers.text import gigabytes

    return f"{len(files):,} file{'s' * (len(files) != 1)}, {gigabytes(sum(path.stat().st_size for path in files))}"
