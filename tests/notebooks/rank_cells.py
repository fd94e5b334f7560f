"""The cells of a notebook that run on ranks, run there on the ledger device, which no tensor of theirs may miss.

A cell fails if it mixes devices, if a collective that it calls itself gets a CPU tensor, or if it leaves a tensor or a
module on the CPU. Batches (`recshard_lab.data.Batch`) may stay in host memory: training loops and pipelines copy them.

Of the cells that run in the notebook's own process, only those run on which rank cells depend.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partialmethod, wraps
from pathlib import Path
from types import FunctionType
from typing import Any

import nbformat

LAUNCH = re.compile(r"^%recshard_launch -n (\d+)(?: --nodes (\d+))?", re.MULTILINE)
PUSH = re.compile(r"^%recshard_push (.+)$", re.MULTILINE)
HEAD = re.compile(r"^%%recshard(?: --timeout \d+)?\n")
FILE = re.compile(r"^%%writefile (.+)\n")
COLLECTIVES = ("all_reduce", "all_to_all_single", "all_gather", "broadcast", "reduce_scatter", "send", "recv")
ON_RANKS = re.compile(r"ranks\.exec\(|ranks\.eval\(f?\"\[")  # a cell of the notebook that computes on ranks
TIMEOUT_S = 1.0  # of cells that hang on purpose


@dataclass
class Found:
    """What the rank cells of a notebook did on the device.

    Attributes:
        cells: positions of the cells that ran on ranks.
        on_cpu: cell -> what was left on the CPU, or handed to a collective from there.
        waits: cell -> waits of the host for the device, on rank 0.
    """

    cells: list[int] = field(default_factory=list)
    on_cpu: dict[int, list[str]] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)


def sources(path: Path) -> list[tuple[str, bool]]:
    """Each code cell in order: its text, and whether it raises on purpose. Other cells are empty."""
    cells = nbformat.read(path, as_version=4).cells
    return [
        (cell.source if cell.cell_type == "code" else "", "raises-exception" in cell.metadata.get("tags", []))
        for cell in cells
    ]


def world_size(path: Path) -> int:
    """The number of ranks that a notebook launches by magic; 0 if it does not."""
    found = [LAUNCH.search(source) for source, _ in sources(path)]
    return max((int(match[1]) for match in found if match), default=0)


def on_ranks(source: str) -> bool:
    """Whether a cell computes on ranks. One that kills a rank, or pushes names to them, is left out."""
    left_out = "SIGKILL" in source or PUSH.search(source)
    return bool(HEAD.match(source) or ON_RANKS.search(source)) and not left_out


def run_on_ledger(cells: list[tuple[str, bool]], ranks: Any, **instead: Any) -> Found:
    """Runs the rank cells, as `sources` returns them, on launched ranks.

    Args:
        cells: of one notebook.
        ranks: as many as the notebook launches.
        instead: values that are pushed in place of the notebook's own, by name.
    """
    ranks.run(prepare)
    found, names, known = Found(), {"ranks": ranks}, set()
    needed = _needed([source for source, _ in cells])
    for number, (source, raises) in enumerate(cells):
        if push := PUSH.search(source):
            if number in needed and push.start():
                exec(source[: push.start()], names)
            ranks.push({name: instead.get(name, names[name]) for name in push[1].split()})
        elif file := FILE.match(source):
            Path(eval(f"f'{file[1]}'", names)).write_text(source[file.end() :])
        elif on_ranks(source):
            found.cells.append(number)
            ranks.run(begin)
            try:
                if HEAD.match(source):
                    ranks.exec(HEAD.sub("", source), timeout_s=TIMEOUT_S if raises else None)
                else:
                    exec(_plain(source), names)
            except Exception as error:
                if not raises:
                    found.on_cpu[number] = [str(error)]
                    return found
            (waits, left), *others = ranks.run(end)
            left = sorted({*left, *(name for _, more in others for name in more)} - known)
            known |= set(left)
            found.waits[number] = waits
            if left:
                found.on_cpu[number] = left
        elif number in needed:
            exec(_plain(source), names)
    return found


def _plain(source: str) -> str:
    """A cell without its magics."""
    return "\n".join(line for line in source.splitlines() if not line.startswith("%"))


def _needed(cells: list[str]) -> set[int]:
    """The notebook's own cells from which rank cells take a name, directly or through others."""
    makes: dict[str, list[int]] = {}
    uses: dict[int, set[str]] = {}
    wanted: list[tuple[int, str]] = []
    for number, source in enumerate(cells):
        if HEAD.match(source):
            continue
        pushed = {name for names in PUSH.findall(source) for name in names.split()}
        if file := FILE.match(source):
            wanted += [(number, name) for name in re.findall(r"{(\w+)}", file[1])]
            continue
        tree = ast.parse(_plain(re.sub(r"^(\w+ = )%.*$", r"\1None", source, flags=re.MULTILINE)))
        stored, loaded = _names(tree)
        for name in stored:
            makes.setdefault(name, []).append(number)
        uses[number] = loaded | pushed
        if pushed or ON_RANKS.search(source):
            wanted += [(number, name) for name in loaded | pushed]
    needed: set[int] = set()
    while wanted:
        at, name = wanted.pop()
        for number in [made for made in makes.get(name, []) if made <= at]:
            if number not in needed and "recshard_launch" not in cells[number]:
                needed.add(number)
                wanted += [(number, used) for used in uses[number]]
    return needed


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names that code stores and names that it loads; imports and definitions are stored."""
    stored, loaded = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (stored if isinstance(node.ctx, ast.Store) else loaded).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            stored |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return stored, loaded


# ---- what runs on the ranks ----

_seen: list[str] = []
_open: list[tuple[ExitStack, Any]] = []


_given: dict[str, Any] = {}  # the names of a fresh rank


def prepare() -> None:
    """Makes the ledger this rank's device, for cells and for the library; later calls forget what cells have made."""
    names = sys.modules["__main__"].__dict__
    if _given:
        for name in set(names) - set(_given):
            del names[name]
        return
    _given.update(names)
    import torch
    import torch.distributed as dist

    from benchmarks import ledger
    from recshard_lab.distributed import DefaultDataParallelWrapper

    ledger.register()
    os.environ["RECSHARD_DEVICE"] = ledger.DEVICE
    names["device"] = torch.device(ledger.DEVICE)
    # torch gives a device written in Python no pinned memory, which DDP's search for unused parameters needs
    DefaultDataParallelWrapper.__init__ = partialmethod(
        DefaultDataParallelWrapper.__init__, find_unused_parameters=False
    )
    for name in COLLECTIVES:
        setattr(dist, name, _watched(getattr(dist, name)))


def _watched(function: Any) -> Any:
    """A collective that notes CPU tensors that a cell hands to it itself."""

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if sys._getframe(1).f_code.co_filename.startswith("<cell"):
            left = [name for value in (*args, *kwargs.values()) for name in _on_cpu("its argument", value, set())]
            _seen.extend(f"{function.__name__}: {name}" for name in left)
        return function(*args, **kwargs)

    return watched


def begin() -> None:
    """Starts counting."""
    from benchmarks import ledger

    stack = ExitStack()
    _open.append((stack, stack.enter_context(ledger.record())))
    _seen.clear()


def end() -> tuple[int, list[str]]:
    """Waits of the host since `begin`, and what is on the CPU now."""
    stack, counts = _open.pop()
    stack.close()
    names = sys.modules["__main__"].__dict__
    seen: set[int] = set()
    left = [found for name, value in list(names.items()) if name[0] != "_" for found in _on_cpu(name, value, seen)]
    return len(counts.syncs), [*_seen, *left]


def _on_cpu(name: str, value: Any, seen: set[int], depth: int = 3) -> Iterator[str]:
    """The tensors of a value that are on the CPU, by how a cell would write them."""
    import torch

    from recshard_lab.data import Batch

    if id(value) in seen or depth < 0 or isinstance(value, type | FunctionType | Batch):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            yield f"{name} ({value.dtype} {list(value.shape)})"
    elif isinstance(value, torch.nn.Module):
        for part, tensor in [*value.named_parameters(), *value.named_buffers()]:
            yield from _on_cpu(f"{name}.{part}", tensor, seen, depth)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _on_cpu(f"{name}[{key!r}]", part, seen, depth - 1)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _on_cpu(f"{name}[{number}]", part, seen, depth - 1)
    elif hasattr(value, "lengths") and hasattr(value, "values") and callable(value.values):
        yield from _on_cpu(f"{name}.values()", value.values(), seen, depth - 1)
