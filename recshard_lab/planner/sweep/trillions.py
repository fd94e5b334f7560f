"""Simulates models of 1.25 and 3 trillion parameters on 64 to 4,096 GPUs: memory, copies of the tables, step time.

Meta published that it trained models of these two sizes, and no list of their tables. The tables here are synthetic:
their total is the published one, and their number, pooling and reuse are those of Meta's published lookup traces. The
rest is assumed. `FIGURES` has every figure with its source.

The example answers, per number of GPUs:

- **memory tiers**: whether the tables fit into HBM, only with part of the rows in host memory (``fused_uvm``), or not;
- **2D parallelism** (`DMPCollection`): W ranks are W / S copies of the tables on S ranks each. Exchanges stay inside a
  group of S ranks. In return, copies are averaged every `SYNC_EVERY` steps, and each rank holds W / S times the bytes.

Shape letters: W ranks, S ranks of a sharding group, T tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import NormalDist
from time import perf_counter
from typing import Any

from recshard_lab.arguments import checks_arguments
from recshard_lab.embedding.configs import DataType, EmbeddingBagConfig
from recshard_lab.planner.access import META_2021_POOLING
from recshard_lab.planner.answers.text import gigabytes
from recshard_lab.planner.sweep.points import Sweep, SweepPoint
from recshard_lab.planner.sweep.whatif import sweep
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ParameterConstraints
from recshard_lab.text_table import Printable, TextTable

MODELS = {"meta-1.25t": 1_250_000_000_000, "meta-3t": 3_000_000_000_000}
WORLD_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
SMALLEST_GROUP, MOST_TABLES = 32, 10_000
NUM_TABLES, DIMS, SPREAD = 856, (64, 96, 128, 192, 256), 2.5
BATCH_SIZE, SYNC_EVERY = 512, 1_000
FLOPS_PER_SAMPLE = 638e6
CODECS, OPTIMIZER = "fp16/bf16", "exact_row_wise_adagrad"

_TRACES = "facebookresearch/dlrm_datasets, 2021: 856 tables"
FIGURES: tuple[tuple[str, str, str], ...] = (
    ("parameters", "1.25 and 3 trillion", "PyTorch blog, Introducing TorchRec (pytorch.org/blog/introducing-torchrec)"),
    ("tables", f"{NUM_TABLES}", _TRACES),
    ("ids per bag", f"{META_2021_POOLING}", f"{_TRACES}, mean"),
    ("reuse of rows", "meta_2021", f"{_TRACES}, histogram"),
    (
        "dense part",
        "638 MFLOP forward per sample",
        "largest of three production models, arXiv 2104.05158; x 3 with backward",
    ),
    ("dense parameters", "319 million", "assumed: one multiply-add per parameter and sample"),
    ("rows per table", "log-normal, sigma 2.5", "assumed"),
    ("columns", ", ".join(map(str, DIMS)), "assumed: the same number of tables each"),
    ("weights", "fp16", "assumed"),
    ("messages", CODECS, "assumed: fp16 rows, bf16 gradients"),
    ("optimizer", "row-wise Adagrad", "assumed: 4 bytes of state per row"),
    ("batch", f"{BATCH_SIZE} samples per GPU", "assumed"),
    (
        "sync of copies",
        f"every {SYNC_EVERY:,} steps",
        "assumed; TorchRec's pipelines sync after every batch by default (meta-pytorch/torchrec, pull request 2929)",
    ),
)
"""Each figure of the example, its value, and where it comes from."""


def trillion_tables(total: int, count: int = NUM_TABLES) -> list[EmbeddingBagConfig]:
    """T synthetic tables with about `total` parameters: log-normal rows at the quantiles (i + 0.5) / T, fp16.

    >>> tables = trillion_tables(1_250_000_000_000)
    >>> f"{sum(t.num_embeddings * t.embedding_dim for t in tables) / 1e12:.3f} trillion in {len(tables)} tables"
    '1.250 trillion in 856 tables'
    """
    weights = [exp(SPREAD * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    dims = [DIMS[i % len(DIMS)] for i in range(count)]
    unit = total / sum(weight * dim for weight, dim in zip(weights, dims, strict=True))
    return [
        EmbeddingBagConfig(
            max(10, round(unit * weight)), dim, name=f"t{i}", feature_names=[f"f{i}"], data_type=DataType.FP16
        )
        for i, (weight, dim) in enumerate(zip(weights, dims, strict=True))
    ]


def trillion_workload(batch_size: int = BATCH_SIZE) -> Workload:
    """The training step of the example."""
    return Workload(
        batch_size,
        META_2021_POOLING,
        access="meta_2021",
        optimizer=OPTIMIZER,
        codecs=CODECS,
        dense_flops_per_sample=3 * FLOPS_PER_SAMPLE,
        dense_parameters=int(FLOPS_PER_SAMPLE / 2),
    )


@dataclass(frozen=True)
class TrillionExample(Printable):
    """A model on several numbers of GPUs; `print` it.

    Attributes:
        name: of `MODELS`; parameters: their number.
        hbm: the points with all rows in HBM; host: those with rows in host memory too, where HBM does not suffice.
        seconds: of the simulation.
    """

    name: str
    parameters: int
    hbm: Sweep = field(repr=False)
    host: Sweep | None = field(repr=False)
    seconds: float

    @property
    def points(self) -> list[tuple[str, SweepPoint]]:
        """Memory and point of every combination of W and S: in HBM if it fits there, otherwise with host memory."""
        hosted = {(p.world_size, p.sharding_group_size): p for p in (() if self.host is None else self.host.points)}
        found = []
        for point in self.hbm.points:
            if (point.sharding_group_size or 0) > point.world_size:
                continue
            other = hosted.get((point.world_size, point.sharding_group_size))
            found.append(("HBM", point) if point.fits or other is None else ("HBM + host", other))
        return found

    @property
    def shown(self) -> list[tuple[str, SweepPoint]]:
        """For each W: one copy of the tables (S = W), and the group size with the shortest step if that is another."""
        chosen = []
        for ranks in dict.fromkeys(point.world_size for _, point in self.points):
            mine = [entry for entry in self.points if entry[1].world_size == ranks]
            whole = next(entry for entry in mine if entry[1].sharding_group_size == ranks)
            fits = [entry for entry in mine if entry[1].fits]
            best = min(fits, key=lambda entry: entry[1].step_ms, default=whole)
            chosen += [whole] if best is whole else [whole, best]
        return chosen

    def records(self) -> list[dict[str, Any]]:
        """One dict per combination of W and S, numbers unrounded."""
        return [
            {"example": self.name, "memory": tier, "copies": copies_of(point), "gap": gap_of(point), **point.record()}
            for tier, point in self.points
        ]

    def parts(self) -> list[str | TextTable]:
        rows = []
        for tier, p in self.shown:
            cells = [f"{p.world_size:,}", f"{p.sharding_group_size:,}", f"{copies_of(p):,}", tier if p.fits else "no"]
            if p.fits:
                gap = gap_of(p)
                cells += [f"{p.step_ms:.1f} ms", f"{p.samples_per_s:,.0f}", gigabytes(p.memory_bytes)]
                cells += [
                    gigabytes(p.host_bytes) if p.host_bytes else "",
                    f"{p.sync_ms / 1e3:.2g} s" if p.sync_ms else "",
                ]
                cells += ["" if gap is None else f"{gap:.0%}"]
            rows.append([*cells, *[""] * (10 - len(cells))])
        heads = ["GPUs", "group", "copies", "fits in", "step", "samples/s", "HBM", "host", "sync", "gap"]
        full = [("HBM alone", self.hbm), *([("HBM and host memory", self.host)] if self.host is not None else [])]
        reasons = {
            f"A group of {p.sharding_group_size:,} GPUs, {tier}: {p.reason}": None
            for tier, found in full
            for p in found.points
            if p.problem == "does not fit"
        }
        return [
            f"Simulated in {self.seconds:.0f} s, not measured: {self.name}, {self.parameters / 1e12:g} trillion "
            f"parameters in {self.hbm.num_tables} synthetic tables; {self.hbm.fixed_text()}.",
            "First line per number of GPUs: one copy of the tables. Second line: the sharding group size with the "
            "shortest step, if that is another one. HBM and host are the bytes of the fullest rank.",
            f"A sync averages the copies. Each step includes 1/{SYNC_EVERY:,} of it. The gap is the step's distance "
            "from a proved lower bound, without the sync.",
            TextTable(heads, rows),
            *reasons,
            TextTable(["figure", "value", "source"], FIGURES, widest=(16, 26, 54), wraps=True),
        ]


@checks_arguments
def trillion_example(
    name: str,
    world_sizes: Sequence[int] = WORLD_SIZES,
    topology: str = "h100",
    num_tables: int = NUM_TABLES,
    progress: Any = False,
) -> TrillionExample:
    """Plans a model of `MODELS` for every number of GPUs and every group size from 32, doubling, up to it.

    Args:
        name: "meta-1.25t" or "meta-3t".
        world_sizes: numbers of GPUs.
        topology: a preset.
        num_tables: T; fewer tables of the same total are planned faster.
        progress: as in `sweep`.

    Raises:
        ValueError: an unknown model or preset; no numbers of GPUs; no tables.

    >>> found = trillion_example("meta-1.25t", [64], num_tables=40)
    >>> [(tier, point.sharding_group_size, point.fits) for tier, point in found.points]
    [('HBM + host', 32, True), ('HBM', 64, True)]
    """
    if not world_sizes or not 1 <= num_tables <= MOST_TABLES:
        raise ValueError(
            f"trillion_example needs numbers of GPUs and 1 to {MOST_TABLES:,} tables, got {world_sizes!r:.40} and "
            f"{num_tables!r:.40}. Fix: world_sizes=[64], num_tables=40"
        )
    if name not in MODELS:
        raise ValueError(f"no model is named {name!r:.80}. Fix: use one of {', '.join(MODELS)}")
    begun = perf_counter()
    tables = trillion_tables(MODELS[name], num_tables)
    sizes = [SMALLEST_GROUP]
    while sizes[-1] < max(world_sizes):
        sizes.append(2 * sizes[-1])
    more: dict[str, Any] = {
        "topology": topology,
        "sync_every": SYNC_EVERY,
        "use_inter_host_allreduce": True,
        "progress": progress,
    }
    load = trillion_workload()
    hbm = sweep(tables, load, world_size=list(world_sizes), sharding_group_size=sizes, **more)
    full = sorted({p.sharding_group_size or 0 for p in hbm.points if p.problem == "does not fit"})
    host = None
    if full:
        either = {table.name: ParameterConstraints(compute_kernels=["fused", "fused_uvm"]) for table in tables}
        more |= {"constraints": either, "sharding_group_size": full}
        host = sweep(tables, load, world_size=list(world_sizes), **more)
    return TrillionExample(name, MODELS[name], hbm, host, perf_counter() - begun)


def copies_of(point: SweepPoint) -> int:
    """Copies of the tables."""
    return point.world_size // (point.sharding_group_size or point.world_size)


def gap_of(point: SweepPoint) -> float | None:
    """How much longer the step is than its lower bound, as a share, syncs aside."""
    if not point.fits or not point.lower_bound:
        return None
    return max(0.0, (point.step_ms - point.sync_ms / SYNC_EVERY) / point.lower_bound - 1)
