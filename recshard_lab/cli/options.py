"""Options that several commands have, under one spelling, and the examples below each help text."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

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


def ranks_option(help: str, panel: str = "Options") -> Any:
    """``--ranks`` or ``-n``: a number of ranks."""
    return typer.Option("--ranks", "-n", help=help, min=1, metavar="N", rich_help_panel=panel)


def list_option(help: str, panel: str, *names: str) -> Any:
    """An option that takes values separated by commas."""
    return typer.Option(*names, help=help, metavar="LIST", rich_help_panel=panel)


def name_option(help: str, panel: str, *names: str) -> Any:
    """An option that takes a name."""
    return typer.Option(*names, help=help, metavar="NAME", rich_help_panel=panel)


def file_option(help: str, panel: str, *names: str) -> Any:
    """An option that takes the path of a file."""
    return typer.Option(*names, help=help, metavar="FILE", rich_help_panel=panel)


def out_option(formats: Mapping[str, str], folder: bool = False) -> Any:
    """``--out`` of a command that writes several formats, once for each output.

    Args:
        formats: as of `check_out`. Formats of equal content are named together.
        folder: whether a path without suffix is supported.
    """
    alike: dict[str, list[str]] = {}
    for suffix, about in formats.items():
        alike.setdefault(about, []).append(suffix)
    kinds = [f"{', '.join(suffixes)} ({about})" for about, suffixes in alike.items()]
    words = ", ".join([*kinds, "or a folder"] if folder else kinds)
    return file_option(f"Path of an output: {words}. Repeat it for more outputs.", OUTPUT)


PlanFile = Annotated[Path | None, file_option("Use this plan (.json) instead of planning.", PLANNER, "--plan")]
Plotly = Annotated[str, name_option("Interactive pictures of a page: embed (opens offline), cdn, none.", OUTPUT)]


@dataclass(frozen=True)
class MachineOptions:
    """The options of every command for a machine that need not be this one."""

    topology: Annotated[
        str,
        name_option(
            "A machine by name (recshard topologies): h100x8, cpu-laptop. Or a profile (recshard calibrate).",
            MACHINE,
            "--topology",
        ),
    ] = ""
    ranks: Annotated[int | None, ranks_option("Number of ranks. Default: the topology's.", MACHINE)] = None
    memory_gb: Annotated[float | None, size_option("GB", "Memory of one rank.", MACHINE)] = None


@dataclass(frozen=True)
class StepOptions(MachineOptions):
    """The options of every command that predicts the training step of a plan."""

    batch_size: Annotated[
        int, typer.Option(help="Samples per rank and step.", min=1, metavar="N", rich_help_panel=STEP)
    ] = 512
    optimizer: Annotated[str, name_option("Optimizer of the embeddings, by fbgemm's name.", STEP)] = "exact_sgd"


@dataclass(frozen=True)
class PlannerOptions(StepOptions):
    """The options of every command that runs the planner."""

    pipeline: Annotated[
        str, name_option("Training pipeline, which decides what overlaps: none, sparse_dist, prefetch.", STEP)
    ] = "none"
    constraints: Annotated[
        Path | None,
        file_option("File of constraints, table -> ParameterConstraints: .yaml, .json.", PLANNER),
    ] = None
    solver: Annotated[str, name_option("greedy, or exact (improves greedy's plan by a MILP).", PLANNER)] = "greedy"
    cost_model: Annotated[
        str, name_option("recshard, latency (inference), or torchrec (the model of TorchRec 1.8).", PLANNER)
    ] = "recshard"


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has the fields of one of these classes in place of its parameter ``options``.

    >>> @with_options
    ... def show(options: StepOptions) -> None:
    ...     print(options.topology, options.batch_size)
    >>> show(topology="h100x8")
    h100x8 512
    """
    signature = inspect.signature(command, eval_str=True)
    kind = signature.parameters["options"].annotation
    types = get_type_hints(kind, include_extras=True)

    def run(**values: Any) -> None:
        options = {each.name: values.pop(each.name) for each in fields(kind) if each.name in values}
        command(**values, options=kind(**options))

    expanded = []
    for own in signature.parameters.values():
        new = [own.replace(name=f.name, annotation=types[f.name], default=f.default) for f in fields(kind)]
        expanded += new if own.name == "options" else [own]
    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in expanded]
    run.__name__, run.__doc__, run.__annotations__ = command.__name__, command.__doc__, {}
    run.__signature__ = signature.replace(parameters=keywords)  # type: ignore[attr-defined]
    return run


def machine_of(options: MachineOptions) -> Topology:
    """The machine of the options ``--topology``, ``--ranks`` and ``--memory-gb``."""
    from recshard_lab.sharding import Topology

    topology, ranks = options.topology, options.ranks
    figures = {} if ranks is None else {"world_size": ranks}
    if topology.endswith(".json"):
        machine = Topology.from_profile(topology, **figures)
    else:
        machine = Topology.preset(topology, **figures) if topology else Topology(ranks or 2)
    return machine if options.memory_gb is None else machine.with_memory(options.memory_gb)


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
