"""Predicted and measured latency of plans: the planner's cost model "latency" beside calls of the served model.

`measure_devices` times small models on the devices and fits the figures of a `Topology` to them. Every predicted
latency is linear in these figures, so a non-negative least-squares fit of relative errors finds them.

The cost model describes ranks that each have a batch. Devices of one process share one batch, so that of W devices each
counts as a rank with a W-th of its samples. The output device alone runs the dense part.

Shape letters: B samples of a batch, W devices or ranks, M probes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median, quantiles
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.distributed import ShardedCollection
from recshard_lab.embedding import EmbeddingBagCollection, EmbeddingBagConfig
from recshard_lab.embedding.quantized.collections import Types
from recshard_lab.embedding.quantized.kernels import PackedKernel
from recshard_lab.planner import Estimate, Workload, estimate
from recshard_lab.serving.inference.devices import devices_named
from recshard_lab.serving.inference.tiles import DeviceTiles
from recshard_lab.sharding import (
    ShardingPlan,
    Topology,
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    running_topology,
    table_wise,
)
from recshard_lab.sparse import KeyedJaggedTensor
from recshard_lab.text_table import Printable, TextTable

if TYPE_CHECKING:
    from recshard_lab.serving.inference.shard import ShardedInference

#: fitted figures: costs, and speeds whose inverse is a cost
COSTS = (
    "host_ms",
    "launch_ms",
    "shard_feature_ms",
    "row_split_ms",
    "route_ns_per_id",
    "lookup_ns_per_id",
    "bag_ns",
)
SPEEDS = ("cache_bw", "intra_host_bw")
_NONE = 1e30  # a speed at which nothing takes time


class Probe(NamedTuple):
    """A model to time: tables of ``rows x dim``, and a batch with ``pooling`` ids a bag."""

    tables: int
    dim: int
    batch: int
    pooling: int
    rows: int = 10_000


PROBES = (
    Probe(1, 16, 1, 1),
    Probe(24, 16, 1, 1),
    Probe(8, 16, 64, 32),
    Probe(8, 64, 256, 8),
    Probe(24, 64, 64, 2),
    Probe(4, 64, 1024, 2),
)
ROUNDS = 12
_WARM_UP = 3  # calls that do not count


@dataclass(frozen=True)
class PlanLatency:
    """One plan.

    Attributes:
        plan: its name in the table.
        devices: names of the devices, or the number of ranks.
        predicted_ms: of one call. phases_ms: phase -> ms of it, on the slowest device.
        measured_ms: median of the calls. p90_ms: their 90th percentile.
    """

    plan: str
    devices: str
    predicted_ms: float
    phases_ms: Mapping[str, float]
    measured_ms: float
    p90_ms: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_ms / self.measured_ms


@dataclass(frozen=True)
class LatencyTable(Printable):
    """Predicted beside measured latency of plans; `print` it.

    Attributes:
        batch_size: samples of one call.
        source: where the figures of the prediction are from.
        plans: the rows of the table.
    """

    batch_size: int
    source: str
    plans: tuple[PlanLatency, ...]

    def records(self) -> list[dict[str, Any]]:
        """One dict per plan, numbers unrounded."""
        return [
            {
                "plan": one.plan,
                "devices": one.devices,
                "batch_size": self.batch_size,
                "predicted_ms": one.predicted_ms,
                "measured_ms": one.measured_ms,
                "p90_ms": one.p90_ms,
                "predicted_over_measured": one.ratio,
                **{f"{phase}_ms": ms for phase, ms in one.phases_ms.items()},
            }
            for one in self.plans
        ]

    def parts(self) -> Sequence[str | TextTable]:
        """A sentence, and a row for each plan."""
        phases = list(self.plans[0].phases_ms) if self.plans else []
        heads = ("plan", "devices", "predicted ms", "measured ms", "p90 ms", "ratio", *phases)
        rows = [
            (
                one.plan,
                one.devices,
                f"{one.predicted_ms:.3f}",
                f"{one.measured_ms:.3f}",
                f"{one.p90_ms:.3f}",
                f"{one.ratio:.2f}",
                *(f"{one.phases_ms[phase]:.3f}" for phase in phases),
            )
            for one in self.plans
        ]
        head = f"Latency of one call with {self.batch_size:,} samples. Figures of the prediction: {self.source}."
        return [head, TextTable(heads, rows, right=range(2, len(heads)))]


@names_wrong_arguments
def compare_latencies(
    served: Mapping[str, ShardedInference],
    *batch: Any,
    topology: Topology | None = None,
    calls: int = 30,
) -> LatencyTable:
    """The predicted latency of plans beside the measured one. Models take turns, so that other load slows them all.

    Over launched ranks it is collective: each rank passes its batch, and measures its calls.

    Args:
        served: name -> a model from `shard_for_inference`. All on the same devices, or over the same ranks.
        batch: arguments of one call, with a `KeyedJaggedTensor`.
        topology: figures of the devices or ranks, such as from `measure_devices` or `Topology.from_profile`. Default:
            for devices, `measure_devices` measures them, which takes seconds; for ranks, the defaults of the library.
        calls: timed calls of each model, after three others.

    Raises:
        ValueError: no model, models on other devices than the first, or a batch without ids.

    >>> from recshard_lab import shard_for_inference
    >>> tables = EmbeddingBagCollection([EmbeddingBagConfig(100, 16, "t", feature_names=["f"])])
    >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1, 7, 2]), lengths=torch.tensor([2, 1]))
    >>> split = construct_module_sharding_plan(tables, {"t": row_wise()}, world_size=2)
    >>> served = shard_for_inference(tables, ShardingPlan({"": split}), ["cpu", "cpu"])
    >>> found = compare_latencies({"row_wise": served}, batch, topology=Topology(2))
    >>> found.plans[0].measured_ms > 0, list(found.plans[0].phases_ms)
    (True, ['input_dist', 'lookup', 'output_dist', 'dense'])
    """
    if not isinstance(served, Mapping) or not served:
        raise ValueError("served must have one model or more. Fix: compare_latencies({'row_wise': served}, batch)")
    first = next(iter(served.values()))
    places = _places(first)
    for name, model in served.items():
        if _places(model) != places:
            raise ValueError(
                f"model {name!r} is on {', '.join(_places(model)) or 'launched ranks'}, and {next(iter(served))!r} on "
                f"{', '.join(places) or 'launched ranks'}. Fix: compare models on the same devices"
            )
    source = "the topology that was passed"
    if topology is None and places:
        topology, source = measure_devices(places, _formats(first)), f"measured on {', '.join(places)}"
    elif topology is None:
        topology, source = running_topology(), "defaults of the library"
    predicted = {name: _predicted(model, batch, topology) for name, model in served.items()}
    times = _in_turn([partial(model, *batch) for model in served.values()], calls)
    size = next(argument.stride() for argument in batch if isinstance(argument, KeyedJaggedTensor))
    where = ", ".join(places) or f"{topology.world_size} rank{'s' * (topology.world_size > 1)}"
    rows = [
        PlanLatency(
            name,
            where,
            found.step_ms,
            {phase: float(ms) for phase, ms in zip(found.phases, found.ms.max(axis=0), strict=True)},
            median(own),
            quantiles(own, n=10)[-1],
        )
        for (name, found), own in zip(predicted.items(), times, strict=True)
    ]
    return LatencyTable(size, source, tuple(rows))


@names_wrong_arguments
def measure_devices(devices: Sequence[torch.device | str], dtype: Types | None = None) -> Topology:
    """Figures of these devices for the cost model "latency", from calls of small models. Takes seconds.

    Pass the result to ``EmbeddingShardingPlanner(topology, cost_model="latency")`` or `compare_latencies`. GPUs and the
    host in one list get the same figures: those that fit all of them best.

    Args:
        devices: as of `shard_for_inference`.
        dtype: the number format of the tables, as of `quantize_embeddings`. Default: fp32.
    """
    places = [str(place) for place in devices_named(devices)]
    kind = "cuda" if any(place.startswith("cuda") for place in places) else "cpu"
    base = Topology(len(places), compute_device=kind)
    found = [pair for probe in PROBES for pair in _probes(probe, places, dtype)]
    calls = [partial(model, batch) for model, batch in found]
    loads = [_workload(model, (batch,), len(places)) for model, batch in found]
    measured = np.array([_faster_half(own) for own in _in_turn(calls, ROUNDS)])
    nothing: dict[str, Any] = dict.fromkeys(COSTS, 0.0)
    nothing |= dict.fromkeys((*SPEEDS, "ddr_mem_bw", "hbm_mem_bw"), _NONE)
    nothing |= dict.fromkeys(("peer_ms", "intra_host_latency_ms", "step_ms", "kernel_ms", "sync_ms"), 0.0)
    nothing["gather_row_bytes"] = 0.0
    memory = "ddr_mem_bw" if kind == "cpu" else "hbm_mem_bw"
    units = {**dict.fromkeys(COSTS, 1.0), **dict.fromkeys((*SPEEDS, memory), 1.0)}
    columns = [
        [_estimated(model, load, replace(base, **{**nothing, name: unit})).step_ms for name, unit in units.items()]
        for (model, _), load in zip(found, loads, strict=True)
    ]
    fitted = _fitted(np.array(columns), measured)
    figures = {
        name: value if name in COSTS else 1 / max(value, 1 / _NONE) for name, value in zip(units, fitted, strict=True)
    }
    return replace(base, **{**nothing, **figures, **_dense_figures(places[0], base)})


def _fitted(columns: Any, measured: Any) -> Any:
    """Figures ``>= 0`` whose predictions ``columns @ figures`` have the least relative errors."""
    from scipy.optimize import nnls

    scale = np.maximum(columns.max(axis=0), 1e-300)
    return nnls(columns / scale / measured[:, None], np.ones(len(measured)))[0] / scale


def _probes(
    probe: Probe, places: Sequence[str], dtype: Types | None
) -> list[tuple[ShardedInference, KeyedJaggedTensor]]:
    """A model on the devices for each of three schemes, and its batch."""
    from recshard_lab.serving.inference.shard import shard_for_inference

    names = [f"t{one}" for one in range(probe.tables)]
    if isinstance(dtype, Mapping):  # the formats in turn
        kinds = list(dict.fromkeys(dtype.values()))
        dtype = {name: kinds[number % len(kinds)] for number, name in enumerate(names)}
    model = EmbeddingBagCollection([EmbeddingBagConfig(probe.rows, probe.dim, n, feature_names=[n]) for n in names])
    draw, bags, ranks = torch.Generator().manual_seed(0), probe.tables * probe.batch, len(places)
    ids = torch.randint(probe.rows, (bags * probe.pooling,), generator=draw)
    batch = KeyedJaggedTensor(names, ids, lengths=torch.full((bags,), probe.pooling))
    schemes = (
        {name: table_wise(rank=number % ranks) for number, name in enumerate(names)},
        {name: row_wise() for name in names},
        {name: column_wise(ranks=[*range(min(ranks, probe.dim))]) for name in names},
    )
    plans = [ShardingPlan({"": construct_module_sharding_plan(model, scheme, world_size=ranks)}) for scheme in schemes]
    return [(shard_for_inference(model, plan, places, dtype=dtype), batch.to(places[0])) for plan in plans]


def _dense_figures(place: str, base: Topology) -> dict[str, float]:
    """Rate of matrix products on the output device, and the batch size at which half of it is reached."""
    width, sizes = 512, (1, 1024)
    layer = nn.Linear(width, width, bias=False, device=place)
    inputs = [torch.rand(size, width, device=place) for size in sizes]
    with torch.no_grad():
        ms = [_faster_half(own) for own in _in_turn([partial(layer, own) for own in inputs], ROUNDS)]
    flops = 2.0 * width * width
    per_sample = max((ms[1] - ms[0]) / (sizes[1] - sizes[0]), 1e-12)
    half = max(0.0, ms[0] / per_sample - sizes[0])
    # the cost model divides the batch by W, and multiplies times if ranks share cores
    rate = flops / per_sample * base.slowdown
    return {"flops_per_ms": rate, "tf32_flops_per_ms": rate, "matrix_half_batch": half / base.world_size}


def _in_turn(calls: Sequence[Any], rounds: int) -> list[list[float]]:
    """Milliseconds of each call in each round, device work included."""
    times: list[list[float]] = [[] for _ in calls]
    for number in range(rounds + _WARM_UP):
        for own, call in zip(times, calls, strict=True):
            begun = perf_counter()
            call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if number >= _WARM_UP:
                own.append(1e3 * (perf_counter() - begun))
    return times


def _faster_half(ms: Sequence[float]) -> float:
    """The mean of the faster half, which other load on the machine changes least.

    >>> _faster_half([3.0, 1.0, 9.0])
    2.0
    """
    return fmean(sorted(ms)[: len(ms) // 2 + 1])


def _places(served: ShardedInference) -> list[str]:
    return [account.device for account in served.memory()] if served.has_devices else []


def _parts(served: ShardedInference) -> dict[str, Any]:
    """Module path -> sharded collection."""
    return {
        path: part for path, part in served.module.named_modules() if isinstance(part, DeviceTiles | ShardedCollection)
    }


def _formats(served: ShardedInference) -> dict[str, Any] | None:
    """Table -> format, of a model with packed rows."""
    packed = [
        part for part in _parts(served).values() if any(isinstance(own.kernel, PackedKernel) for own in part.groups)
    ]
    return {table.name: table.data_type for part in packed for table in part.tables} or None


def _workload(served: ShardedInference, batch: Sequence[Any], divided: int) -> Workload:
    """What one device or rank has to do for a batch, of which it has a share of ``1 / divided``."""
    sparse = [argument for argument in batch if isinstance(argument, KeyedJaggedTensor)]
    if not sparse:
        raise ValueError("the batch has no KeyedJaggedTensor. Fix: pass the arguments of one call of the model")
    bags = {feature: bag for own in sparse for feature, bag in own.to_dict().items()}
    tables = [table for part in _parts(served).values() for table in part.tables]
    found = Workload.measured([bags], tables)
    inside = tuple(f"{path}." if path else "" for path in _parts(served))
    dense = sum(one.numel() for name, one in served.module.named_parameters() if not name.startswith(inside))
    samples = max(1, math.ceil(found.batch_size / divided))
    share = found.batch_size / divided / samples
    factors: Any = found.pooling_factors
    return replace(
        found,
        batch_size=samples,
        pooling_factors={feature: factor * share for feature, factor in factors.items()},
        weighted=any(own.weights_or_none() is not None for own in sparse),
        dense_parameters=dense,
        dense_flops_per_sample=6.0 * dense * divided,
    )


def _estimated(served: ShardedInference, workload: Workload, topology: Topology) -> Estimate:
    tables = {path: list(part.tables) for path, part in _parts(served).items()}
    return estimate(served.plan, tables, topology, workload, cost_model="latency")


def _predicted(served: ShardedInference, batch: Sequence[Any], topology: Topology) -> Estimate:
    return _estimated(served, _workload(served, batch, topology.world_size if served.has_devices else 1), topology)
