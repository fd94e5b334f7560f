"""A worked example: MLPerf's DLRM-DCNv2 on 8, 64 and 128 H100s, predicted with every assumption.

NVIDIA published 7.68 ms per step on 128 H100s, and 3.4 ms after four changes. The planner plans this model for these
machines, and the cost model predicts the step, with the figures of the preset ``h100``. Each change of NVIDIA's is a
change of `Topology` or `Workload`. No figure is fitted to the published times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from recshard_lab import mlperf
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.model.cost import PHASES, CostModel
from recshard_lab.planner.model.estimate import Estimate, estimate_loads, plan_loads
from recshard_lab.planner.model.overlap import WORDS, Overlap
from recshard_lab.planner.model.simulation import LOCK_SHARE, PACK_SHARE, QUEUED, StepParts
from recshard_lab.planner.planner import EmbeddingShardingPlanner
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_dense, dlrm_dcn_launches
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ShardingPlan, Topology, preset_table
from recshard_lab.sharding.hardware.presets import amount
from recshard_lab.text_table import Printable, TextTable

WORLD_SIZES = (8, 64, 128)
MLPERF_PUBLISHED_MS = {"before": 7.68, "after": 3.4}
PUBLISHED_AT = 128  # H100s
NO_CHANGE, ALL = "before", "all four"


@dataclass(frozen=True)
class Idea:
    """One of NVIDIA's changes.

    Attributes:
        about: what it does, and what is assumed of it.
        factors: figure of `Topology` -> factor.
        workload: arguments of `Workload`.
    """

    about: str
    factors: Mapping[str, float] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)


MLPERF_IDEAS: dict[str, Idea] = {
    "cheaper launches": Idea("a launch takes half the host time; assumed, NVIDIA states no figure", {"launch_ms": 0.5}),
    "CUDA graphs": Idea("the dense part is two launches", workload={"dense_launches": 2}),
    "threads + prefetch": Idea(
        "a second host thread launches input_dist, with the pipeline prefetch",
        workload={"pipeline": "prefetch", "pipeline_threads": True},
    ),
    "pinned copies": Idea("the host's read of sizes takes a quarter of the time; assumed", {"sync_ms": 0.25}),
}
#: figure of `Topology` -> factors to the ends of its range: assumed
RANGES: dict[str, tuple[float, float]] = {
    "launch_ms": (0.25, 1.5),
    "host_ms": (0.5, 2),
    "sync_ms": (0.5, 2),
    "kernel_ms": (0.5, 2),
    "inter_host_latency_ms": (0.5, 2),
    "inter_host_peer_ms": (0.5, 2),
    "gather_row_bytes": (0, 2),
    "tf32_flops_per_ms": (0.5, 1.5),
    "matrix_half_batch": (0.5, 2),
    "straggler_sigma": (0, 2),
}
MISSED = (
    "Input from storage, evaluation and checkpoints are left out.",
    "Every operator costs the host the same. Python and the allocator are part of that figure.",
    "Kernels per operator are assumed until a profiler counts them on a GPU.",
    "Collectives of one GPU run one after the other, in the order of their launch.",
    "CUDA graphs cost two launches; capture and static buffers are free.",
    "NVIDIA's plan, kernels and number formats are not published in full: the plan and launches are this library's.",
)


def mlperf_dlrm_dcnv2_tables() -> list[EmbeddingBagConfig]:
    """The benchmark's 26 tables, 204.2 million rows of 128 columns.

    >>> tables = mlperf_dlrm_dcnv2_tables()
    >>> len(tables), f"{sum(table.weight_bytes for table in tables) / 1e9:.1f} GB"
    (26, '104.5 GB')
    """
    return [
        EmbeddingBagConfig(
            name=f"t_{feature}", num_embeddings=rows, embedding_dim=mlperf.EMBEDDING_DIM, feature_names=[feature]
        )
        for feature, rows in zip(mlperf.FEATURES, mlperf.ROWS, strict=True)
    ]


def mlperf_dlrm_dcnv2_workload(batch_size: int = mlperf.GLOBAL_BATCH_SIZE // 8, **figures: Any) -> Workload:
    """The benchmark's step.

    Args:
        batch_size: samples of one rank; all ranks together have 65,536.
        figures: arguments of `Workload` that override the benchmark's.

    >>> mlperf_dlrm_dcnv2_workload(512).pooling_factor("cat_20")
    100.0
    """
    dense = dlrm_dcn_dense()
    own: dict[str, Any] = {
        "batch_size": batch_size,
        "pooling_factors": dict(zip(mlperf.FEATURES, map(float, mlperf.MULTI_HOT_SIZES), strict=True)),
        "optimizer": mlperf.OPTIMIZER,
        "dense_parameters": dense.parameters,
        "dense_flops_per_sample": float(dense.forward_flops + dense.backward_flops),
        "dense_bytes_per_parameter": 12.0,  # weight, gradient, and Adagrad's sum
        "dense_traffic_per_sample": 4.0 * dense.traffic,
        "dense_features": mlperf.DENSE_FEATURES,
        "dense_launches": sum(dlrm_dcn_launches().values()),
        "matmul_precision": "high",
    }
    return Workload(**{**own, **figures})


@dataclass(frozen=True)
class MLPerfStep:
    """A predicted step of the benchmark.

    Attributes:
        plan, topology, workload: what it is predicted for.
        estimate: the prediction.
        parts: ms of each phase on the host, the device and the network.
        schemes: scheme -> number of tables.
    """

    plan: ShardingPlan
    topology: Topology
    workload: Workload
    estimate: Estimate
    parts: StepParts
    schemes: Mapping[str, int]

    @property
    def overlap(self) -> Overlap:
        """The step under its pipeline."""
        assert self.estimate.overlap is not None
        return self.estimate.overlap

    @property
    def step_ms(self) -> float:
        """The predicted time between two batches."""
        return self.estimate.step_ms


def mlperf_step(world_size: int, ideas: Sequence[str] = (), factors: Mapping[str, float] | None = None) -> MLPerfStep:
    """Plans the benchmark for H100s and predicts its step.

    Args:
        world_size: H100s, in hosts of 8.
        ideas: of `MLPERF_IDEAS`.
        factors: figure of `Topology` -> factor, for the prediction. The plan is made without them.

    >>> step = mlperf_step(8)
    >>> step.step_ms <= step.overlap.plain_ms
    True
    """
    plan = _plan(world_size, tuple(ideas))
    topology, workload = _machine(world_size, ideas)
    changed = {name: getattr(topology, name) * factor for name, factor in (factors or {}).items()}
    pairs = plan.pairs(mlperf_dlrm_dcnv2_tables())
    model = CostModel([config for config, _ in pairs], replace(topology, **changed), workload)
    loads = plan_loads(model, pairs)
    kinds = [sharding.sharding_type for _, sharding in pairs]
    schemes = {str(kind): kinds.count(kind) for kind in dict.fromkeys(kinds)}
    parts = model.overlapped.parts(loads)
    return MLPerfStep(plan, model.topology, workload, estimate_loads(model, loads, pairs), parts, schemes)


def _machine(world_size: int, ideas: Sequence[str]) -> tuple[Topology, Workload]:
    topology = Topology.preset(f"h100x{world_size}")
    figures: dict[str, Any] = {"pipeline": "sparse_dist"}
    for idea in map(MLPERF_IDEAS.__getitem__, ideas):
        figures |= idea.workload
        topology = replace(topology, **{name: getattr(topology, name) * by for name, by in idea.factors.items()})
    return topology, mlperf_dlrm_dcnv2_workload(mlperf.GLOBAL_BATCH_SIZE // world_size, **figures)


@lru_cache(maxsize=64)
def _plan(world_size: int, ideas: tuple[str, ...]) -> ShardingPlan:
    topology, workload = _machine(world_size, ideas)
    planner = EmbeddingShardingPlanner(topology, workload=workload)
    return planner.plan_tables(mlperf_dlrm_dcnv2_tables(), explain=False)


def spread(ideas: Sequence[str] = ()) -> dict[str, tuple[float, float]]:
    """Figure of `RANGES` -> ms of a step on 128 H100s with its least and its largest factor; last all of them together.

    "all together" takes of each figure the factor with the shorter step, then of each the one with the longer.
    """

    def at(factors: Mapping[str, float]) -> float:
        return mlperf_step(PUBLISHED_AT, ideas, factors).step_ms

    found = {name: (at({name: low}), at({name: high})) for name, (low, high) in RANGES.items()}
    fast = {name: RANGES[name][int(ends[0] > ends[1])] for name, ends in found.items()}
    slow = {name: RANGES[name][int(ends[0] <= ends[1])] for name, ends in found.items()}
    return {**found, "all together": (at(fast), at(slow))}


@dataclass(frozen=True)
class MLPerfExample(Printable):
    """The benchmark's step on several numbers of H100s, before and after each of NVIDIA's changes.

    Attributes:
        steps: world size -> change -> step; "before" has no change, "all four" has all.
        spread_before, spread_after: of `spread`, without and with all changes.
    """

    steps: dict[int, dict[str, MLPerfStep]] = field(repr=False)
    spread_before: dict[str, tuple[float, float]] = field(repr=False)
    spread_after: dict[str, tuple[float, float]] = field(repr=False)

    def records(self) -> list[dict[str, Any]]:
        """One dict per world size and change, marked as simulated."""
        return [
            {
                "simulated": True,
                "world_size": ranks,
                "change": name,
                "step_ms": step.step_ms,
                "plain_step_ms": step.overlap.plain_ms,
                "lower_bound_ms": step.overlap.lower_bound_ms,
                "bound_by": step.overlap.bound_by,
                **{f"{need}_ms": step.overlap.needs_ms.get(need) for need in ("host", "chain", "network", "device")},
                "published_ms": _published(ranks, name),
            }
            for ranks, by_idea in self.steps.items()
            for name, step in by_idea.items()
        ]

    def parts(self) -> list[str | TextTable]:
        return [part for _, parts in self.sections() for part in parts]

    def sections(self) -> list[tuple[str, list[str | TextTable]]]:
        """Title, and its sentences and tables."""
        found: list[tuple[str, list[str | TextTable]]] = [("Prediction", list(self.sentences()))]
        heads, title = ("figure", "value", "source"), "Every figure and its source"
        found.append((title, [TextTable(heads, assumptions(), caption=title, widest=(22, 26, 48), wraps=True)]))
        for ranks, by_idea in self.steps.items():
            before = by_idea[NO_CHANGE]
            title = f"{ranks} H100s, simulated, {before.workload.batch_size:,} samples per rank"
            schemes = ", ".join(f"{count} {name}" for name, count in before.schemes.items())
            phases = TextTable(
                ("phase", "host ms", "device ms", "network ms"),
                _phases(before),
                right=(1, 2, 3),
                caption=f"{title}, before",
            )
            held = f"Plan: {schemes}. The fullest rank stores {gigabytes(before.estimate.fullest_bytes)}."
            found.append((title, [phases, held, _changes(ranks, by_idea)]))
        about: list[str | TextTable] = [f"{NO_CHANGE}: pipeline sparse_dist."]
        about += [f"{name}: {idea.about}." for name, idea in MLPERF_IDEAS.items()]
        title = f"{PUBLISHED_AT} H100s, simulated, with each figure at both ends of its range"
        ranges = ("figure", "range", "before, ms", "all four, ms")
        found += [("Changes", about), (title, [TextTable(ranges, self._ranges(), caption=title)])]
        return [*found, ("Limits", ["Limits of the prediction:", *MISSED])]

    def sentences(self) -> list[str]:
        """The prediction beside the published times."""
        ranks = " and ".join(", ".join(f"{n}" for n in self.steps).rsplit(", ", 1))
        words = [
            f"Simulated, not measured: MLPerf DLRM-DCNv2, {mlperf.GLOBAL_BATCH_SIZE:,} samples per step, on {ranks} "
            f"H100s. NVIDIA published {MLPERF_PUBLISHED_MS['before']} ms per step on {PUBLISHED_AT} H100s, and "
            f"{MLPERF_PUBLISHED_MS['after']} ms after four changes. No figure is fitted to these times."
        ]
        if PUBLISHED_AT in self.steps:
            for name, ends in ((NO_CHANGE, self.spread_before), (ALL, self.spread_after)):
                step, published = self.steps[PUBLISHED_AT][name].overlap, _published(PUBLISHED_AT, name)
                assert published is not None
                low, high = ends["all together"]
                words.append(
                    f"{PUBLISHED_AT} H100s, {name}: {step.step_ms:.2f} ms predicted ({low:.2f} to {high:.2f} ms within "
                    f"the assumed ranges), {published:g} published, {100 * (step.step_ms / published - 1):+.0f}%. The "
                    f"largest need is {WORDS[step.bound_by]}, {step.lower_bound_ms:.2f} ms."
                )
        return words

    def _ranges(self) -> list[list[str]]:
        topology, rows = _machine(PUBLISHED_AT, ())[0], []
        for name in self.spread_before:
            ends = (
                ""
                if name not in RANGES
                else " to ".join(amount(name, getattr(topology, name) * by) for by in RANGES[name])
            )
            steps = (self.spread_before[name], self.spread_after[name])
            rows.append([name, ends, *(f"{low:.2f} to {high:.2f}" for low, high in steps)])
        return rows


def assumptions() -> list[tuple[str, str, str]]:
    """Every figure of the example: name, value, source."""
    dense, launched = dlrm_dcn_dense(), dlrm_dcn_launches()
    rows, source = sum(mlperf.ROWS), "MLPerf Training, recommendation_v2/torchrec_dlrm"
    flops = (dense.forward_flops + dense.backward_flops) / 1e6
    parts = ", ".join(f"{name.replace('_', '-')} {count}" for name, count in launched.items())
    size = f"{gigabytes(rows * mlperf.EMBEDDING_DIM * 4)} in fp32"
    found = [
        ("tables", f"{len(mlperf.ROWS)}, {rows:,} rows x {mlperf.EMBEDDING_DIM}", f"{source}; {size}"),
        ("ids per sample", f"{sum(mlperf.MULTI_HOT_SIZES)}, uniform", f"{source}; the sum of its multi-hot sizes"),
        ("global batch", f"{mlperf.GLOBAL_BATCH_SIZE:,}", f"{source}; divided among the ranks"),
        ("optimizer", mlperf.OPTIMIZER, source),
        ("dense parameters", f"{dense.parameters:,}", f"computed from the layer sizes in {source}"),
        ("dense operations", f"{flops:.1f} MFLOP per sample", "forward and backward, computed from the layer sizes"),
        ("dense memory traffic", f"{4 * dense.traffic / 1e6:.1f} MB per sample", "computed from the layer sizes, fp32"),
        ("dense launches", f"{sum(launched.values())}", f"counted on the real modules: {parts}"),
        ("table launches", "by phase and scheme", "counted on a device that records operators (launch_counts.py)"),
        ("messages", "fp32", "assumed: no codecs"),
        ("queued steps", f"{QUEUED}", "assumed: the host runs at most so many steps ahead of the device"),
        ("lock share", f"{LOCK_SHARE:g}", "assumed: share of a launch that holds CPython's lock"),
        ("pack share", f"{PACK_SHARE:g}", "assumed: share of input_dist before the sizes are known"),
    ]
    topology = _machine(PUBLISHED_AT, ())[0]
    for record in preset_table("h100").records():
        name, reached = (
            record["field"],
            f", times {record['share']:g}: {record['share_source']}" if record["share"] != 1 else "",
        )
        found.append((name, amount(name, getattr(topology, name)), f"{record['source']}{reached}"))
    return found


def mlperf_example(world_sizes: Sequence[int] = WORLD_SIZES) -> MLPerfExample:
    """Predicts MLPerf's DLRM-DCNv2 on H100s, beside what NVIDIA published.

    Args:
        world_sizes: numbers of H100s, each 8 or fewer or a multiple of 8, that divide 65,536.

    Raises:
        ValueError: another number, or none.
        PlanError: too few H100s to hold the tables.

    >>> found = mlperf_example([8])
    >>> str(found).splitlines()[0]
    'Simulated, not measured: MLPerf DLRM-DCNv2, 65,536 samples per step, on 8 H100s. NVIDIA published'
    """
    if not isinstance(world_sizes, (list, tuple, range)) or not world_sizes:
        raise ValueError(f"world_sizes must be a list of numbers of H100s, got {world_sizes!r:.80}. Fix: [8, 64, 128]")
    for ranks in world_sizes:
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1 or mlperf.GLOBAL_BATCH_SIZE % ranks:
            raise ValueError(f"world_sizes: {mlperf.GLOBAL_BATCH_SIZE:,} samples do not divide among {ranks!r} H100s")
    ways = {NO_CHANGE: (), **{name: (name,) for name in MLPERF_IDEAS}, ALL: tuple(MLPERF_IDEAS)}
    steps = {ranks: {name: mlperf_step(ranks, ideas) for name, ideas in ways.items()} for ranks in world_sizes}
    return MLPerfExample(steps, spread(), spread(tuple(MLPERF_IDEAS)))


def _phases(step: MLPerfStep) -> list[list[str]]:
    parts = (step.parts.host, step.parts.device, step.parts.network)
    rows = [[phase, *(f"{part[p]:.3f}" for part in parts)] for p, phase in enumerate(PHASES)]
    return [*rows, ["sum", *(f"{part.sum():.3f}" for part in parts)]]


def _changes(ranks: int, by_idea: Mapping[str, MLPerfStep]) -> TextTable:
    needs = ("host", "chain", "network", "device")
    rows = []
    for name, step in by_idea.items():
        published = _published(ranks, name)
        cells = [f"{step.step_ms:.2f}", *(f"{step.overlap.needs_ms[need]:.2f}" for need in needs)]
        rows.append([name, *cells, "" if published is None else f"{published:g}"])
    heads = ("change", "step ms", *(f"{need} ms" for need in needs), "published ms")
    return TextTable(
        heads, rows, right=range(1, len(heads)), caption=f"{ranks} H100s, simulated, after each change alone"
    )


def _published(ranks: int, change: str) -> float | None:
    known = {NO_CHANGE: MLPERF_PUBLISHED_MS["before"], ALL: MLPERF_PUBLISHED_MS["after"]}
    return known.get(change) if ranks == PUBLISHED_AT else None
