"""Figures that this library promises, each measured by one file here: ``recshard bench NAME``.

A benchmark is a module of this package. The first line of its docstring names what it measures. Its function
``figures()`` returns a list of `Figure`. Its ``TARGETS``, if it has any, maps the names of figures to their bounds: a
promise is written there once, and `Benchmark.run`, the gate and the docs read it. A new file is found by its name.

Benchmarks are part of the checkout, not of the installed package.
"""

from __future__ import annotations

import inspect
import json
import math
import pkgutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from statistics import median


@dataclass(frozen=True)
class Figure:
    """One measured number and its bound.

    Args:
        name: what was measured.
        value: the number, in `unit`.
        unit: "s", "ms", "MB", ...
        target: the bound; None if nothing is promised.
        at_most: whether the target is an upper bound (a time) or a lower one (a rate).
        beside: further numbers shown in the same row, by the name of their column. "CPU" is the CPU time of the value.
        note: lines that a reader must know, printed under the table, each once.

    >>> Figure("empty cell", 0.4, "ms", target=5.0).ok, Figure("rate", 3.0, "GB/s", target=4.0, at_most=False).ok
    (True, False)
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    at_most: bool = True
    beside: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def ok(self) -> bool:
        """Whether the value keeps its target. True without a target; NaN keeps none."""
        if self.target is None:
            return True
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def bound(self) -> str:
        """The target in words."""
        if self.target is None:
            return ""
        return f"{'at most' if self.at_most else 'at least'} {self.target:g} {self.unit}".rstrip()


@dataclass(frozen=True)
class Benchmark:
    """A module of this package.

    Args:
        name: the module's name.
        about: the first line of its docstring.
        figures: measures. Its keyword arguments are options of the command.
        targets: figure -> its bound, in the unit of the figure.
    """

    name: str
    about: str
    figures: Callable[..., list[Figure]]
    targets: Mapping[str, float] = field(default_factory=dict)

    def run(self, **options: object) -> list[Figure]:
        """Measures, and sets the targets of the figures. Passes on only the options that are set.

        Raises:
            ValueError: an option that this benchmark does not have, by name.
        """
        given = {name: value for name, value in options.items() if value}
        known = inspect.signature(self.figures).parameters
        for name in given:
            if name not in known:
                has = ", ".join("--" + option.replace("_", "-") for option in known) or "none"
                raise ValueError(f"benchmark {self.name!r} has no option --{name.replace('_', '-')}; it has: {has}")
        measured = self.figures(**given)
        return [replace(f, target=self.targets[f.name]) if f.name in self.targets else f for f in measured]


def benchmark_names() -> list[str]:
    """Names of all benchmarks.

    >>> "launch" in benchmark_names()
    True
    """
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def benchmark_named(name: str) -> Benchmark:
    """A benchmark by name; ``import-time`` means ``import_time``.

    Raises:
        ValueError: the name is unknown; the message lists all names.
    """
    module_name = name.replace("-", "_")
    if module_name not in benchmark_names():
        raise ValueError(f"no benchmark is named {name!r}. Benchmarks: {', '.join(benchmark_names())}")
    module = import_module(f"{__name__}.{module_name}")
    about = (module.__doc__ or "").strip().splitlines()[0]
    return Benchmark(module_name, about, module.figures, getattr(module, "TARGETS", {}))


def as_json(figures: Sequence[Figure]) -> str:
    """One object: figure -> value, unit, target, ok, the numbers beside, and the note if it has one.

    >>> as_json([Figure("empty cell", 0.4, "ms", target=5.0)])
    '{"empty cell": {"value": 0.4, "unit": "ms", "target": 5.0, "ok": true}}'
    """
    return json.dumps(
        {
            f.name: {**f.beside, "value": f.value if math.isfinite(f.value) else None, "unit": f.unit}
            | {"target": f.target, "ok": f.ok}
            | ({"note": f.note} if f.note else {})
            for f in figures
        }
    )


def note(text: str) -> None:
    """Prints progress to stderr; stdout carries the figures."""
    print(text, file=sys.stderr, flush=True)


def median_ms(action: Callable[[], object], repeat: int = 20, warm_up: int = 3) -> float:
    """Median wall clock of an action in milliseconds, after warming up."""
    for _ in range(warm_up):
        action()
    taken = []
    for _ in range(repeat):
        begun = time.perf_counter()
        action()
        taken.append(time.perf_counter() - begun)
    return 1e3 * median(taken)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Torch computes with ``count`` threads inside the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def seconds_in_new_python(code: str) -> float:
    """Runs code in a fresh interpreter and returns the number that it prints.

    Raises:
        RuntimeError: the code failed; the message carries what it wrote to stderr.
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the measured program ended with code {done.returncode}:\n{done.stderr}")
    return float(done.stdout.split()[-1])
