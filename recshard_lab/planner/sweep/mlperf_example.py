"""A worked example: MLPerf's DLRM-DCNv2 on 8, 64 and 128 H100s, simulated, with everything that is assumed.

NVIDIA published 7.68 ms a step for it on 128 H100s before, and 3.4 ms after four changes. The figures here are *not*
fitted to them: they come from data sheets, formulas and counts, and where nobody publishes one it is assumed, with a
range. What the simulation says stands beside what was published, and how far it moves within the ranges.

A phase takes, on its slowest rank, ``network + device + host`` ms; the dense part computes while the host launches, and
takes the longer of both, and its all-reduce. `planner/model/overlap.py` says what a pipeline makes of phases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from recshard_lab import mlperf
from recshard_lab.embedding.configs import EmbeddingBagConfig
from recshard_lab.planner.model.cost import PHASES, CostModel
from recshard_lab.planner.model.estimate import plan_loads
from recshard_lab.planner.model.overlap import INPUT, Overlap
from recshard_lab.planner.planner import EmbeddingShardingPlanner
from recshard_lab.planner.sweep.mlperf_dense import dlrm_dcn_dense, dlrm_dcn_launches
from recshard_lab.planner.workload import Array, Workload
from recshard_lab.sharding import Topology

WORLD_SIZES = (8, 64, 128)
PUBLISHED_MS = {"before": 7.68, "after": 3.4}
PUBLISHED_AT = 128  # H100s
SPARSE_LAUNCHES = {"input_dist": 45, "forward": 9, "backward": 14}  # counted: `recshard bench mlperf-launches`
BASELINE = "sparse_dist"
TF32_PEAK = 494.5e9  # operations a ms: half of the data sheet's 989 TFLOPS, which count zeros


@dataclass(frozen=True)
class Uncertain:
    """A figure that nobody publishes.

    Attributes:
        value: taken; low, high: where it may lie.
        unit, source: in words.
    """

    value: float
    low: float
    high: float
    unit: str
    source: str


UNCERTAIN: dict[str, Uncertain] = {
    "launch_us": Uncertain(
        10,
        5,
        20,
        "us",
        "host time of one launch from torch: assumed; NVIDIA (Nsight Systems, 2020) tells 20 us on V100",
    ),
    "sparse_launches": Uncertain(
        1, 0.5, 2, "x", "this library's own counted launches for the tables; those of NVIDIA's run are not published"
    ),
    "tf32_share": Uncertain(
        0.3, 0.1, 0.6, "of peak", "assumed: what matrices of a few hundred rows get of TF32's peak"
    ),
    "latency": Uncertain(
        1, 0.5, 2, "x", "of 20 us a collective inside a node and 40 us between nodes: this library's defaults, assumed"
    ),
    "d2h_us": Uncertain(20, 5, 50, "us", "a blocking copy of sizes to the host, two a step: assumed"),
    "zipf_alpha": Uncertain(
        0, 0, 1.05, "", "skew of ids: the reference draws its multi-hot ids uniformly, but by the log's own skewed id"
    ),
}

IDEAS: dict[str, str] = {
    "cheaper launches": "launch_us halved (by how much is not published)",
    "CUDA graphs": "the MLPs, the loss and the all-reduce are one graph, the optimizer another: 2 launches",
    "threads + prefetch": "input_dist is launched by a thread of its own and a batch earlier: pipeline prefetch",
    "pinned copies": "d2h_us at the low end of its range",
}

MISSED = (
    "Host and device of the sparse phases are added although a GPU's queue lets the host run ahead: pessimistic where "
    "neither bounds the step.",
    "A launch costs the same whatever is launched; Python, the allocator and autograd are only in that figure.",
    "Contention between the streams that overlap, and between NVLink and the network, is left out; so is that the "
    "dense all-reduce runs beside backward.",
    "Graphs are taken to cost two launches and nothing else; captures and static buffers cost memory.",
    "Stragglers, input from storage, evaluation and checkpoints are left out.",
    "NVIDIA's sharding, kernels and number formats are not published in full; the plan here is this library's.",
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
        batch_size: of one rank; all together have 65,536 samples.
        figures: of `Workload`, in place of the benchmark's.

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
        "dense_features": mlperf.DENSE_FEATURES,
        "dense_launches": sum(dlrm_dcn_launches().values()),
    }
    return Workload(**{**own, **figures})


@dataclass(frozen=True)
class Simulated:
    """A step on so many H100s.

    Attributes:
        world_size: of them.
        launches, host_ms, network_ms, device_ms: ``[P]`` of each phase, on its slowest rank.
        plain_ms: one phase after the other.
        overlap: under the pipeline.
        memory_bytes: that the fullest rank holds; schemes: how many tables lie under each.
    """

    world_size: int
    launches: Array
    host_ms: Array
    network_ms: Array
    device_ms: Array
    overlap: Overlap
    memory_bytes: float
    schemes: Mapping[str, int]

    @property
    def phases_ms(self) -> Array:
        """``[P]``"""
        return phases_of(self.host_ms, self.network_ms, self.device_ms)


def phases_of(host: Array, network: Array, device: Array) -> Array:
    """``[P]`` ms of phases: the dense one computes while the host launches."""
    ms = network + device + host
    dense = PHASES.index("dense")
    ms[dense] = network[dense] + max(device[dense], host[dense])
    return ms


def simulate(
    world_size: int,
    figures: Mapping[str, float] | None = None,
    pipeline: str = BASELINE,
    graphs: bool = False,
    threads: bool = False,
) -> Simulated:
    """The benchmark's step.

    Args:
        world_size: H100s in hosts of 8.
        figures: of `UNCERTAIN`, in place of their values.
        pipeline: "sparse_dist" or "prefetch".
        graphs: the dense part is two launches.
        threads: input_dist is launched by a thread of its own.

    >>> found = simulate(8)
    >>> found.overlap.step_ms <= found.overlap.plain_ms
    True
    """
    taken = {name: each.value for name, each in UNCERTAIN.items()} | dict(figures or {})
    model, loads, memory, schemes = _planned(world_size, taken["zipf_alpha"], taken["latency"], taken["tf32_share"])
    _, network, _, device = model.overlapped.split(loads)
    slowest = (network + device).argmax(axis=1)
    at = np.arange(len(PHASES)), slowest
    counted = launches(taken["sparse_launches"], graphs)
    host = counted * taken["launch_us"] * 1e-3
    host[INPUT] += 2 * taken["d2h_us"] * 1e-3
    ms = phases_of(host, network[at], device[at])
    first = model.latency_ms if pipeline == "sparse_dist" else 0.0
    needs = {
        "chain": first + float(ms[1:].sum()),
        "network": float(network.sum(axis=0).max()),
        "device": float(device.sum(axis=0).max()),
        "host": float(host.sum() - (host[INPUT] if threads else 0.0)),
        "copy": model.overlapped.copy_ms,
    }
    if threads:
        needs["thread"] = float(host[INPUT])
    overlap = Overlap(pipeline, float(ms.sum()), needs)
    return Simulated(world_size, counted, host, network[at], device[at], overlap, memory, schemes)


def launches(sparse_factor: float = 1.0, graphs: bool = False) -> Array:
    """``[P]`` launches of each phase; one of the tables' is the lookup, in both directions."""
    dense = 2.0 if graphs else float(sum(dlrm_dcn_launches().values()))
    forward, backward = (SPARSE_LAUNCHES[part] * sparse_factor for part in ("forward", "backward"))
    by_phase = {
        "input_dist": SPARSE_LAUNCHES["input_dist"] * sparse_factor,
        "lookup": 1.0,
        "output_dist": forward - 1,
        "dense": dense,
        "output_dist_backward": backward - 1,
        "lookup_backward": 1.0,
    }
    return np.array([by_phase[phase] for phase in PHASES])


def with_ideas(*names: str) -> dict[str, Any]:
    """Arguments of `simulate` under some of `IDEAS`."""
    figures: dict[str, float] = {}
    if "cheaper launches" in names:
        figures["launch_us"] = UNCERTAIN["launch_us"].value / 2
    if "pinned copies" in names:
        figures["d2h_us"] = UNCERTAIN["d2h_us"].low
    threads = "threads + prefetch" in names
    return {
        "figures": figures,
        "graphs": "CUDA graphs" in names,
        "threads": threads,
        "pipeline": "prefetch" if threads else BASELINE,
    }


def spread(ideas: tuple[str, ...] = ()) -> dict[str, tuple[float, float]]:
    """Figure -> ms of a step on 128 H100s with it at either end of its range, the last one all of them together."""
    chosen = with_ideas(*ideas)
    ends = {name: (each.low, each.high) for name, each in UNCERTAIN.items() if name not in chosen["figures"]}
    if "launch_us" in chosen["figures"]:  # halved, wherever it lies
        ends["launch_us"] = (UNCERTAIN["launch_us"].low / 2, UNCERTAIN["launch_us"].high / 2)

    def at(**figures: float) -> float:
        return simulate(PUBLISHED_AT, **{**chosen, "figures": {**chosen["figures"], **figures}}).overlap.step_ms

    found = {name: (at(**{name: low}), at(**{name: high})) for name, (low, high) in ends.items()}
    turned = [name for name in ends if found[name][0] > found[name][1]]
    quick = {name: pair[name in turned] for name, pair in ends.items()}
    slow = {name: pair[name not in turned] for name, pair in ends.items()}
    return {**found, "all together": (at(**quick), at(**slow))}


@lru_cache(maxsize=64)
def _planned(
    world_size: int, zipf_alpha: float, latency: float, tf32_share: float
) -> tuple[CostModel, Array, float, dict[str, int]]:
    """The costs without a host's share, and the loads ``[K, W]`` of the plan that is chosen under them."""
    own = ("launch_ms", "host_ms", "sync_ms", "kernel_ms", "matrix_half_batch", "straggler_sigma")  # in `UNCERTAIN`
    figures = {**dict.fromkeys(own, 0.0), "flops_per_ms": TF32_PEAK * tf32_share}
    top = Topology.preset(f"h100x{world_size}", **figures)
    top = replace(
        top,
        intra_host_latency_ms=top.intra_host_latency_ms * latency,
        inter_host_latency_ms=top.inter_host_latency_ms * latency,
    )
    load = mlperf_dlrm_dcnv2_workload(mlperf.GLOBAL_BATCH_SIZE // world_size, pipeline=BASELINE, zipf_alpha=zipf_alpha)
    tables = mlperf_dlrm_dcnv2_tables()
    planner = EmbeddingShardingPlanner(top, workload=load)
    plan = planner.plan_tables(tables)
    model = CostModel(tables, top, load)
    loads = plan_loads(model, plan.pairs(tables))
    kinds = [sharding.sharding_type for sharding in plan.tables().values()]
    return (
        model,
        loads,
        float(model.memory_total(loads).max()),
        {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
    )
