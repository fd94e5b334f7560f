"""The points of a sweep, as text, HTML, CSV, dicts and for pandas."""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.planner.answers.text import gigabytes, use_one_of
from recshard_lab.planner.workload import Array
from recshard_lab.text_table import Printable, TextTable, line_width

SIMULATED = "simulated"
NAN = float("nan")
_HEADS = {
    "topology": "topology",
    "world_size": "ranks",
    "sharding_group_size": "group",
    "batch_size": "batch/rank",
    "global_batch_size": "batch",
    "hbm_cap": "memory",
    "codecs": "codecs",
    "optimizer": "optimizer",
    "pipeline": "pipeline",
}
AXES = tuple(_HEADS)
# objective -> 1 if less is better, -1 if more is better
OBJECTIVES: dict[str, int] = {
    "world_size": 1,
    "step_ms": 1,
    "samples_per_s": -1,
    "samples_per_s_per_rank": -1,
    "hbm_cap": 1,
    "memory_bytes": 1,
    "batch_size": -1,
    "global_batch_size": -1,
}
_NARROW = 7  # characters of a column that is shortened
_REASONS = 6  # that are printed; `records` has all


@dataclass(frozen=True)
class SweepPoint:
    """One configuration: its plan's predicted step, or the reason why no plan exists.

    Attributes:
        topology: a preset, or the device of the ranks.
        world_size: number of ranks; sharding_group_size: ranks that share one copy of the tables, None for all.
        batch_size: samples per rank; global_batch_size: samples of all ranks.
        hbm_cap: bytes of memory of one rank.
        codecs: formats of rows and gradients in messages.
        optimizer, pipeline: as in `Workload`.
        fits: whether a plan exists. If not, `problem` is "does not fit" or "impossible", and `reason` is the error.
        step_ms: simulated, under the pipeline, with its share of syncs; plain_step_ms: without the pipeline.
        bound_by: the resource that limits a pipelined step.
        sync_ms: time of one sync of the copies.
        lower_bound: ms; no plan's step is shorter, syncs aside.
        memory_bytes: held by the fullest rank.
        host_bytes: of weights and optimizer state in host memory, of the rank with the most.
        phases_ms: phase -> ms of its slowest rank.
        plan_s: seconds of planning.
    """

    topology: str
    world_size: int
    batch_size: int
    global_batch_size: int
    hbm_cap: int
    codecs: str
    optimizer: str
    pipeline: str
    sharding_group_size: int | None = None
    fits: bool = False
    problem: str = ""
    reason: str = ""
    step_ms: float = NAN
    plain_step_ms: float = NAN
    bound_by: str = ""
    sync_ms: float = NAN
    lower_bound: float | None = None
    memory_bytes: float = NAN
    host_bytes: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=dict)
    plan_s: float = 0.0

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks."""
        return self.global_batch_size / self.step_ms * 1000 if self.step_ms > 0 else NAN

    @property
    def samples_per_s_per_rank(self) -> float:
        """Samples per second of one rank."""
        return self.samples_per_s / self.world_size if self.world_size else NAN

    def record(self) -> dict[str, Any]:
        """One flat dict, labelled as simulated."""
        own = {spec.name: getattr(self, spec.name) for spec in fields(self) if spec.name != "phases_ms"}
        rates = {name: getattr(self, name) for name in ("samples_per_s", "samples_per_s_per_rank")}
        phases = {f"{name}_ms": ms for name, ms in self.phases_ms.items()}
        return {SIMULATED: True, **own, **rates, **phases}


@dataclass(frozen=True)
class Sweep(Printable):
    """The points of a sweep.

    Attributes:
        points: in the order of the arguments; the last argument changes fastest.
        num_tables: number of tables.
        seconds: duration of the sweep.
        strong: whether the global batch was fixed (strong scaling).
        sync_every: steps between two syncs of replicas.
    """

    points: tuple[SweepPoint, ...]
    num_tables: int
    seconds: float = 0.0
    strong: bool = False
    sync_every: int = 1

    @property
    def varied(self) -> tuple[str, ...]:
        """The axes on which points differ."""
        found = [name for name in AXES if len({getattr(point, name) for point in self.points}) > 1]
        other = "batch_size" if self.strong else "global_batch_size"
        return tuple(name for name in found if name != other)

    @property
    def objectives(self) -> tuple[str, ...]:
        """The default objectives of `pareto`: ranks, memory of a rank (if they vary), and samples per second."""
        return (*(name for name in ("world_size", "hbm_cap") if name in self.varied), "samples_per_s")

    @property
    def objectives_text(self) -> str:
        """`objectives` in words."""
        return ", ".join({"world_size": "fewer ranks", "hbm_cap": "less memory"}.get(n, "more samples/s")
                         for n in self.objectives)  # fmt: skip

    @names_wrong_arguments
    def pareto(self, *objectives: str) -> tuple[SweepPoint, ...]:
        """The points on the Pareto frontier: no other point is better in all objectives.

        Args:
            objectives: any of ``world_size``, ``step_ms``, ``samples_per_s``, ``samples_per_s_per_rank``, ``hbm_cap``,
                ``memory_bytes``, ``batch_size``, ``global_batch_size``; each in the better direction.
                Default: `objectives`.

        Raises:
            ValueError: an unknown objective.
        """
        names = objectives or self.objectives
        for name in names:
            if not isinstance(name, str) or name not in OBJECTIVES:
                raise ValueError(f"no objective is named {name!r:.60}{use_one_of(name, OBJECTIVES)}")
        values = [[OBJECTIVES[name] * float(getattr(point, name)) for name in names] for point in self.points]
        fitting = np.array([point.fits for point in self.points])
        table = np.where(fitting[:, None], np.array(values, dtype=float), np.nan)
        return tuple(point for point, kept in zip(self.points, undominated(table), strict=True) if kept)

    def records(self) -> list[dict[str, Any]]:
        """One dict per point, labelled as simulated, numbers unrounded."""
        best = {id(point) for point in self.pareto()}
        columns = dict.fromkeys(name for point in self.points for name in point.record())
        return [{**dict.fromkeys(columns), **point.record(), "pareto": id(point) in best} for point in self.points]

    def fixed_text(self) -> str:
        """The values that all points share, in words."""
        first = self.points[0]
        shared = [
            f"{_HEADS[name]} {axis_text(name, first)}"
            for name in AXES
            if name not in self.varied and name not in ("global_batch_size", "sharding_group_size")
            if not (name == "batch_size" and self.strong)
        ]
        if self.strong and "global_batch_size" not in self.varied:
            shared.append(f"batch {first.global_batch_size:,} of all ranks")
        return ", ".join(shared)

    def sentences(self) -> list[str]:
        """A summary: the points, the values that they share, and why points have no plan."""
        fit = sum(point.fits for point in self.points)
        words = [
            f"Simulated, not measured: {len(self.points)} point{'s' * (len(self.points) != 1)} of {self.num_tables:,} "
            f"table{'s' * (self.num_tables != 1)}, {fit} with a plan, in "
            f"{self.seconds:.1f} s. All: {self.fixed_text()}."
        ]
        if fit:
            words.append(f"* on the Pareto frontier: no other point is better in all of {self.objectives_text}.")
        if any(point.sharding_group_size for point in self.points):
            every = "every step" if self.sync_every == 1 else f"every {self.sync_every} steps"
            words.append(f"Copies of the tables are averaged {every}. Each step includes its share.")
        reasons = dict.fromkeys(f"{point.problem}: {point.reason}" for point in self.points if not point.fits)
        words += [f"{text[0].upper()}{text[1:]}" for text in list(reasons)[:_REASONS]]
        if len(reasons) > _REASONS:
            words.append(f"... and {len(reasons) - _REASONS} more reasons: records() has them all")
        return words

    def parts(self) -> list[str | TextTable]:
        axes, best = self.varied, {id(point) for point in self.pareto()}
        columns: dict[str, list[str]] = {
            _HEADS[name]: [axis_text(name, point) for point in self.points] for name in axes
        }
        columns["simulated step"] = [f"{p.step_ms:.3f} ms" if p.fits else p.problem for p in self.points]
        columns["*"] = ["*" if id(point) in best else "" for point in self.points]
        columns["samples/s"] = [f"{p.samples_per_s:,.0f}" if p.fits else "" for p in self.points]
        columns["fullest rank"] = [gigabytes(p.memory_bytes) if p.fits else "" for p in self.points]
        if any(point.bound_by for point in self.points):
            columns["bound by"] = [point.bound_by for point in self.points]
        widths = {head: max(map(len, [head, *cells])) for head, cells in columns.items()}
        for head in ("fullest rank", "bound by", "samples/s"):  # left out if lines get too long
            if sum(widths.values()) + 2 * (len(widths) - 1) > line_width():
                columns.pop(head, None), widths.pop(head, None)
        over = sum(widths.values()) + 2 * (len(widths) - 1) - line_width()
        for head in ("optimizer", "topology", "pipeline", "codecs"):
            cut = max(0, min(over, widths.get(head, 0) - _NARROW))
            if cut:
                widths[head] -= cut
                over -= cut
        rows = list(zip(*columns.values(), strict=True))
        return [*self.sentences(), TextTable(list(columns), rows, widest=list(widths.values()))]


def axis_label(name: str) -> str:
    """The name of an axis for readers.

    >>> axis_label("world_size")
    'ranks'
    """
    return _HEADS[name]


def axis_text(name: str, point: SweepPoint) -> str:
    """A point's value on an axis, in words."""
    value = getattr(point, name)
    if name == "hbm_cap":
        return gigabytes(value)
    if name == "sharding_group_size":
        return "all" if value is None else f"{value:,}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def undominated(values: Array) -> NDArray[np.bool_]:
    """``[n]`` True for each point that no other point dominates: as good in all columns and better in one.

    Args:
        values: ``[n, d]``, less is better. A point with a NaN is dominated by definition.

    >>> undominated(np.array([[1.0, 5.0], [2.0, 2.0], [3.0, 3.0], [1.0, 5.0]])).tolist()
    [True, True, False, True]
    """
    known = np.asarray(~np.isnan(values).any(axis=1))
    kept = known.copy()
    for i in np.flatnonzero(known):
        no_worse = (values[known] <= values[i]).all(axis=1)
        better = (values[known] < values[i]).any(axis=1)
        kept[i] = not (no_worse & better).any()
    return kept
