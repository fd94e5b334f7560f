"""The worked example as text of at most 100 columns, HTML and dicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from recshard_lab import mlperf
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.model.cost import PHASES
from recshard_lab.planner.model.overlap import WORDS
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_dense, dlrm_dcn_launches
from recshard_lab.planner.sweep.mlperf_example import (
    BASELINE,
    IDEAS,
    MISSED,
    PUBLISHED_AT,
    PUBLISHED_MS,
    SPARSE_LAUNCHES,
    UNCERTAIN,
    WORLD_SIZES,
    Simulated,
    simulate,
    spread,
    with_ideas,
)
from recshard_lab.sharding import preset_table
from recshard_lab.text_table import Printable, TextTable

NO_CHANGE, ALL = "before", "all four"


@dataclass(frozen=True)
class MLPerfExample(Printable):
    """The benchmark's step on several numbers of H100s, before and after each of NVIDIA's ideas.

    Attributes:
        steps: world size -> idea -> step; "before" is none of them, "all four" all.
        spread_before, spread_after: figure -> ms of a step on 128 H100s at either end of its range.
    """

    steps: dict[int, dict[str, Simulated]] = field(repr=False)
    spread_before: dict[str, tuple[float, float]] = field(repr=False)
    spread_after: dict[str, tuple[float, float]] = field(repr=False)

    def assumptions(self) -> list[tuple[str, str, str]]:
        """Every figure: what it is, its value, where it comes from."""
        dense, counted = dlrm_dcn_dense(), dlrm_dcn_launches()
        rows, lookups = sum(mlperf.ROWS), sum(mlperf.MULTI_HOT_SIZES)
        source = "MLPerf Training, recommendation_v2/torchrec_dlrm"
        sparse = sum(SPARSE_LAUNCHES.values())
        parts = ", ".join(f"{name.replace('_', '-')} {count}" for name, count in counted.items())
        own = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in SPARSE_LAUNCHES.items())
        size = rows * mlperf.EMBEDDING_DIM * 4
        found = [
            (
                "tables",
                f"{len(mlperf.ROWS)}, {rows:,} rows x {mlperf.EMBEDDING_DIM}",
                f"{source}: {gigabytes(size)} fp32",
            ),
            ("ids a sample", f"{lookups}", f"{source}: the sum of its fixed multi-hot sizes"),
            ("global batch", f"{mlperf.GLOBAL_BATCH_SIZE:,}", f"{source}; shared by the ranks: strong scaling"),
            ("optimizer", mlperf.OPTIMIZER, f"{source}: element-wise, so states take as much as the weights"),
            ("dense parameters", f"{dense.parameters:,}", "by formula from the layer sizes, which are MLPerf's"),
            (
                "dense arithmetic",
                f"{(dense.forward_flops + dense.backward_flops) / 1e6:.1f} MFLOP",
                "a sample, forward and backward, by formula: 2 and 4 operations a weight, and what the cross layers "
                "multiply and add",
            ),
            (
                "dense peak",
                "494.5 TFLOPS",
                "NVIDIA H100 SXM data sheet, 2023: TF32, half of what it says with sparsity",
            ),
            (
                "dense launches",
                f"{sum(counted.values())}",
                f"by formula: {parts}; forward, backward and optimizer are the operators counted in the real modules; "
                "all-reduce is every gradient into its bucket and back, and a collective a bucket of 25 MiB",
            ),
            (
                "tables' launches",
                f"{sparse}",
                f"counted operators of this library on two CPU ranks (recshard bench mlperf-launches): {own}",
            ),
            ("formats on the wire", "fp32", "assumed: no codecs"),
            ("the machine", "h100", "the preset below; launch_us and tf32_share take the place of two of its figures"),
        ]
        for name, each in UNCERTAIN.items():
            found.append((name, f"{each.value:g} ({each.low:g} to {each.high:g}) {each.unit}".strip(), each.source))
        return found

    def records(self) -> list[dict[str, Any]]:
        """One dict a world size and idea, labelled as simulated."""
        return [
            {
                "simulated": True,
                "world_size": ranks,
                "change": name,
                "step_ms": step.overlap.step_ms,
                "plain_step_ms": step.overlap.plain_ms,
                "bound_by": step.overlap.bound_by,
                "launches": float(step.launches.sum()),
                **{f"{need}_ms": ms for need, ms in step.overlap.needs_ms.items()},
                "published_ms": _published(ranks, name),
            }
            for ranks, by_idea in self.steps.items()
            for name, step in by_idea.items()
        ]

    def sentences(self) -> list[str]:
        """What was simulated and what NVIDIA published."""
        ranks = " and ".join(", ".join(f"{n}" for n in self.steps).rsplit(", ", 1))
        words = [
            f"Simulated, not measured: MLPerf DLRM-DCNv2, {mlperf.GLOBAL_BATCH_SIZE:,} samples a step, on {ranks} "
            f"H100s. NVIDIA published {PUBLISHED_MS['before']} ms a step on {PUBLISHED_AT}, and "
            f"{PUBLISHED_MS['after']} ms after four changes. No figure here was fitted to either."
        ]
        if PUBLISHED_AT in self.steps:
            before, after = (self.steps[PUBLISHED_AT][name].overlap for name in (NO_CHANGE, ALL))
            ends = [self.spread_before["all together"], self.spread_after["all together"]]
            words.append(
                f"On {PUBLISHED_AT} the simulation says {before.step_ms:.2f} ms before ({ends[0][0]:.2f} to "
                f"{ends[0][1]:.2f} within the ranges assumed; {PUBLISHED_MS['before']} published), bound by "
                f"{WORDS[before.bound_by]}, and {after.step_ms:.2f} ms after ({ends[1][0]:.2f} to {ends[1][1]:.2f}; "
                f"{PUBLISHED_MS['after']} published), bound by {WORDS[after.bound_by]}."
            )
        return words

    def phase_lines(self, ranks: int) -> list[list[str]]:
        """One step before the changes, by phase."""
        step = self.steps[ranks][NO_CHANGE]
        lines = [["phase", "launches", "host ms", "network ms", "device ms", "ms"]]
        total = step.phases_ms
        for p, phase in enumerate(PHASES):
            parts = (step.host_ms[p], step.network_ms[p], step.device_ms[p], total[p])
            lines.append([phase, f"{step.launches[p]:,.0f}", *(f"{ms:.3f}" for ms in parts)])
        sums = (step.host_ms.sum(), step.network_ms.sum(), step.device_ms.sum(), total.sum())
        return [*lines, ["one after the other", f"{step.launches.sum():,.0f}", *(f"{ms:.3f}" for ms in sums)]]

    def idea_lines(self, ranks: int) -> list[list[str]]:
        """What each change makes of the step."""
        lines = [["simulated", "step ms", "bound by", "host", "chain", "network", "device", "published"]]
        for name, step in self.steps[ranks].items():
            needs = [f"{step.overlap.needs_ms[need]:.2f}" for need in ("host", "chain", "network", "device")]
            published = _published(ranks, name)
            told = "" if published is None else f"{published:g}"
            lines.append([name, f"{step.overlap.step_ms:.2f}", step.overlap.bound_by, *needs, told])
        return lines

    def spread_lines(self) -> list[list[str]]:
        """How far the step moves with each uncertain figure."""
        lines = [["figure", "range", "before, ms", "after all four, ms"]]
        for name in [*UNCERTAIN, "all together"]:
            each = UNCERTAIN.get(name)
            span = "" if each is None else f"{each.low:g} to {each.high:g} {each.unit}"
            cells = [
                "" if name not in found else f"{found[name][0]:.2f} to {found[name][1]:.2f}"
                for found in (self.spread_before, self.spread_after)
            ]
            lines.append([name, span, *cells])
        return lines

    def sections(self) -> list[tuple[str, list[list[str]], list[str]]]:
        """Heading, lines of cells (the header first), and sentences below them."""
        found: list[tuple[str, list[list[str]], list[str]]] = []
        for ranks, by_idea in self.steps.items():
            step = by_idea[NO_CHANGE]
            schemes = ", ".join(f"{count} {name}" for name, count in step.schemes.items())
            below = [
                f"Plan: {schemes}; the fullest rank holds {gigabytes(step.memory_bytes)}. {_sentence(step.overlap)}",
            ]
            heading = f"{ranks} H100s by phase, simulated ({mlperf.GLOBAL_BATCH_SIZE // ranks:,} samples a rank)"
            found.append((heading, self.phase_lines(ranks), below))
        for ranks in self.steps:
            heading = f"{ranks} H100s after each change, simulated"
            found.append((heading, self.idea_lines(ranks), []))
        found[-1][2].append(f"{NO_CHANGE}: pipeline {BASELINE}.")
        found[-1][2].extend(f"{name}: {what}." for name, what in IDEAS.items())
        found.append((f"{PUBLISHED_AT} H100s within what is assumed, simulated", self.spread_lines(), []))
        found.append(("What the simulation misses", [], list(MISSED)))
        return found

    def parts(self) -> list[str | TextTable]:
        caption = "Every figure, its value, and where it comes from"
        figures = TextTable(("figure", "value", "source"), self.assumptions(), caption=caption, wraps=True)
        parts: list[str | TextTable] = [*self.sentences(), figures, *preset_table("h100").parts()]
        for heading, table, words in self.sections():
            parts += [TextTable(table[0], table[1:], caption=heading)] if table else [f"{heading}:"]
            parts += words
        return parts


def mlperf_example(world_sizes: Sequence[int] = WORLD_SIZES) -> MLPerfExample:
    """Simulates MLPerf's DLRM-DCNv2 on H100s, beside what NVIDIA published.

    Args:
        world_sizes: numbers of H100s, each 8 or fewer or a multiple of 8, that divide 65,536.

    Raises:
        ValueError: another number, or none.
        PlanError: too few H100s to hold the tables.

    >>> found = mlperf_example([8])
    >>> str(found).splitlines()[0]
    'Simulated, not measured: MLPerf DLRM-DCNv2, 65,536 samples a step, on 8 H100s. NVIDIA published 7.68'
    """
    if not isinstance(world_sizes, (list, tuple, range)) or not world_sizes:
        raise ValueError(f"world_sizes must list numbers of H100s, e.g. [8, 64, 128], got {world_sizes!r:.80}")
    for ranks in world_sizes:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1 or mlperf.GLOBAL_BATCH_SIZE % ranks:
            raise ValueError(f"world_sizes: {mlperf.GLOBAL_BATCH_SIZE:,} samples do not divide among {ranks!r} H100s")
    ways = {NO_CHANGE: (), **{name: (name,) for name in IDEAS}, ALL: tuple(IDEAS)}
    return MLPerfExample(
        {ranks: {name: simulate(ranks, **with_ideas(*ideas)) for name, ideas in ways.items()} for ranks in world_sizes},
        spread(),
        spread(tuple(IDEAS)),
    )


def _published(ranks: int, change: str) -> float | None:
    known = {NO_CHANGE: PUBLISHED_MS["before"], ALL: PUBLISHED_MS["after"]}
    return known.get(change) if ranks == PUBLISHED_AT else None


def _sentence(overlap: Any) -> str:
    words = str(overlap)
    return f"{words[0].upper()}{words[1:]}."
