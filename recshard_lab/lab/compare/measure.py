"""Runs a plan on launched ranks for a few steps and returns milliseconds, bytes stored and bytes sent.

The notebook calls ``measure_plan``; every rank runs ``steps_on_rank``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from recshard_lab.calibration.batches import random_batch as random_batch
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.lab.draw.theme import bytes_text, ms_text, number
from recshard_lab.planner import MEMORY_CATEGORIES, Workload
from recshard_lab.planner.model.memory import INDEX
from recshard_lab.planner.workload import is_pooled
from recshard_lab.sharding import ShardingPlan, Topology
from recshard_lab.sharding.hardware.topology import DEVICE_DEFAULTS

if TYPE_CHECKING:
    import torch

    from recshard_lab.comm.trace import Trace
    from recshard_lab.launcher.device_memory import RankMemory
    from recshard_lab.sparse import KeyedJaggedTensor

WARM_UP = 3  # steps before the clock runs: kernels are built, buffers grow
TIMED = 10  # steps of which the median is reported
FAR_APART = 1.5  # times: above it, a note explains why predicted and measured differ
BUSY = 0.15  # share of the cores: from there on, other programs count as a reason
_CALIBRATED = ("bag_ns", "sort_ns_per_id", "sum_ns_per_number", "cache_bytes", "contention", "half_duplex")


@dataclass(frozen=True, eq=False)
class Measured:
    """The ranks' measurements; views draw them beside an `Estimate`.

    Attributes:
        step_ms_by_rank: ``[W]`` median of the timed steps.
        memory_categories: names of the C categories, those of the `Estimate`.
        memory_bytes: ``[W, C]`` bytes of tables, optimizer state and buffers, as the model counts them.
        traffic_bytes: ``[W, W]`` counted, from row to column, in one step.
        backends: table -> its kernel.
        steps: number of timed steps.
        host_memory_bytes: ``[W, 2]`` bytes of weights and of optimizer state in the host's memory; None if they have
            none there.
        in_use: by rank, the device memory in one step as measured, see `peak_of`. Empty if it was not measured.
        traffic_by_phase: `traffic_bytes` by the label of the collective, as `Estimate.traffic_by_phase`.
        waited_ms: label -> ``[W]`` ms that a rank waits in these collectives of a step for the last rank; the median
            over steps. Only for blocking collectives of all ranks.
        others: share of this machine's cores that other programs used meanwhile, 0 to 1; None if unknown.
        times_note: `Ranks.times_note` of the ranks, shown beside the times.
    """

    step_ms_by_rank: np.ndarray
    memory_categories: tuple[str, ...]
    memory_bytes: np.ndarray
    traffic_bytes: np.ndarray
    backends: dict[str, str]
    steps: int
    traffic_by_phase: dict[str, np.ndarray] = field(default_factory=dict)
    host_memory_bytes: np.ndarray | None = None
    in_use: tuple[RankMemory, ...] = ()
    waited_ms: dict[str, np.ndarray] = field(default_factory=dict)
    others: float | None = None
    times_note: str = ""

    @classmethod
    def of(
        cls, found: Sequence[Mapping[str, Any]], steps: int, backends: dict[str, str], times_note: str = ""
    ) -> Measured:
        """From the report of every rank: ``step_ms``, ``memory`` by category, ``sent`` as of `sent_by_label`, and
        optionally ``took`` as of `took_by_label`."""
        labels = dict.fromkeys(label for one in found for label in one["sent"])
        nothing = [0.0] * len(found)
        phases = {label: np.array([one["sent"].get(label, nothing) for one in found], dtype=float) for label in labels}
        names = (*MEMORY_CATEGORIES, *[INDEX] * any(INDEX in one["memory"] for one in found))
        memory = [[one["memory"].get(name, 0) for name in names] for one in found]
        host = np.array([list(one.get("host_memory", {}).values()) or [0, 0] for one in found], dtype=float)
        return cls(
            step_ms_by_rank=np.array([one["step_ms"] for one in found]),
            memory_categories=names,
            memory_bytes=np.array(memory, dtype=float),
            traffic_bytes=np.sum(list(phases.values()), axis=0) if phases else np.zeros((len(found),) * 2),
            backends=backends,
            steps=steps,
            traffic_by_phase=phases,
            host_memory_bytes=host if host.any() else None,
            in_use=tuple(one["in_use"] for one in found) if all("in_use" in one for one in found) else (),
            waited_ms=waited([one.get("took", {}) for one in found], steps),
            times_note=times_note,
        )

    @property
    def step_ms(self) -> float:
        """The slowest rank's step."""
        return float(self.step_ms_by_rank.max())

    def __str__(self) -> str:
        held = bytes_text(float(self.memory_bytes.sum(axis=1).max()))
        note = f" ({self.times_note})" if self.times_note else ""
        return f"{ms_text(self.step_ms)} per step (median of {self.steps}), at most {held} on a rank{note}"


def measure_plan(
    ranks: Any,
    plan: ShardingPlan,
    tables: Sequence[BaseEmbeddingConfig],
    workload: Workload | None = None,
    *,
    steps: int = 10,
    seed: int = 0,
) -> Measured:
    """Trains the tables under the plan on random batches of the workload and measures it.

    Only the tables run, without the dense layers of the workload.

    Args:
        ranks: a launched session, as `recshard_lab.launch` gives it.
        plan: for the number of launched ranks; its module paths are ignored.
        tables: the configs of all its tables, all pooled or none.
        workload: batch size, pooling factors, skew and optimizer; `Workload()` by default.
        steps: number of timed steps, after `WARM_UP` untimed ones.
        seed: of weights and batches.

    Raises:
        PlanError: the plan does not tile the tables on these ranks; a name in `workload` that no table has.
        ValueError: pooled and unpooled tables together, or more bytes than this machine has free.
    """
    workload = workload or Workload()
    workload.check_names(tables)
    if len({is_pooled(table) for table in tables}) != 1:
        raise ValueError("tables must be all pooled (EmbeddingBagConfig) or all unpooled. Fix: measure one collection")
    named = ShardingPlan({"": dict(plan.tables())}).resolved(tables, ranks.world_size, ranks.local_world_size)  # type: ignore[dict-item]
    if ranks.devices[0].type == "cpu":
        _check_room(named, tables)
    with other_programs(ranks) as others:
        found = ranks.run(steps_on_rank, named.to_json(), list(tables), workload, steps, seed)
    return replace(Measured.of(found, steps, found[0]["backends"], ranks.times_note), others=others())


@contextmanager
def other_programs(ranks: Any) -> Iterator[Callable[[], float | None]]:
    """Measures the load of other programs than the ranks and this process while the block runs.

    Args:
        ranks: a launched session.

    Returns:
        A function to call after the block: the share of this machine's cores, 0 to 1; None for ranks that run on
        other machines.
    """
    here = ranks.shape.engine in ("fork", "spawn")
    begun = _cores_used(ranks.pids) if here else None
    share: list[float | None] = [None]
    yield lambda: share[0]
    if begun is not None:
        total, others = (after - before for before, after in zip(begun, _cores_used(ranks.pids), strict=True))
        share[0] = min(1.0, max(0.0, others / total)) if total > 0 else None


def _cores_used(pids: Sequence[int]) -> tuple[float, float]:
    """Seconds of all cores so far, and those used by programs other than these processes and this one."""
    import psutil

    cores = sorted(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else None
    each = psutil.cpu_times(percpu=True)
    used = [each[core] for core in cores if core < len(each)] if cores else each
    total = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in used)
    idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in used)
    ours = 0.0
    for pid in (psutil.Process().pid, *pids):
        try:
            own = psutil.Process(pid).cpu_times()
        except psutil.Error:  # it ended meanwhile
            continue
        ours += own.user + own.system
    return total, total - idle - ours


def why_apart(predicted_ms: float, measured: Measured, topology: Topology, more: str = "") -> str:
    """Why measured and predicted step differ by a factor above 1.5; empty otherwise.

    Args:
        predicted_ms: of the measured plan.
        topology: that of the prediction.
        more: a sentence about work that only the measured step contains.

    >>> measured = Measured.of([{"step_ms": 40.0, "memory": {}, "sent": {}}], 10, {})
    >>> why_apart(4.6, measured, Topology(1))
    'Measured is 8.7 times predicted: the prediction is not calibrated to this machine, see notebook 12.'
    >>> why_apart(4.6, replace(measured, others=0.8), Topology(1))
    'Measured is 8.7 times predicted: other programs used 80% of the cores.'
    >>> why_apart(30.0, measured, Topology(1))
    ''
    """
    if not (predicted_ms > 0 and measured.step_ms > 0):
        return ""
    ratio = measured.step_ms / predicted_ms
    if 1 / FAR_APART <= ratio <= FAR_APART:
        return ""
    words = f"Measured is {number(ratio, 2)} times predicted"
    reasons = []
    if ratio > 1 and measured.others is not None and measured.others >= BUSY:
        reasons.append(f"other programs used {measured.others:.0%} of the cores")
    elif not is_calibrated(topology):
        reasons.append("the prediction is not calibrated to this machine, see notebook 12")
    words += f": {reasons[0]}." if reasons else "."
    return f"{words} {more}".strip() if ratio > 1 else words


def is_calibrated(topology: Topology) -> bool:
    """Whether a topology has calibrated figures (`Topology.from_profile`)."""
    usual = DEVICE_DEFAULTS[topology.compute_device]
    return any(getattr(topology, name) != usual[name] for name in _CALIBRATED)


def sent_by_label(sent: Trace, world_size: int, steps: int) -> dict[str, list[float]]:
    """Label -> bytes that this rank sent to each rank, per step.

    >>> from recshard_lab.comm.trace import CollectiveEvent, Trace
    >>> sent_by_label(Trace([CollectiveEvent("all_to_all", "input_dist/ids", (0, 8), 0.0)] * 2), 2, 4)
    {'input_dist/ids': [0.0, 4.0]}
    """
    return {label: [count / steps for count in row] for label, row in sent.bytes_by_label(world_size).items()}


def took_by_label(sent: Trace) -> dict[str, list[float]]:
    """Label -> ms of this rank in each collective of all ranks.

    >>> from recshard_lab.comm.trace import CollectiveEvent, Trace
    >>> took_by_label(Trace([CollectiveEvent("all_to_all", "input_dist/ids", (0, 8), 0.0, ms=2.0)] * 2))
    {'input_dist/ids': [2.0, 2.0]}
    """
    found: dict[str, list[float]] = {}
    for event in sent.events:
        if event.ms > 0 and not event.label.endswith(("/inside", "/across")):
            found.setdefault(event.label, []).append(event.ms)
    return found


def waited(took: Sequence[Mapping[str, Sequence[float]]], steps: int) -> dict[str, np.ndarray]:
    """Label -> ``[W]`` ms that each rank waits per step for the last rank, from the times of all ranks.

    The last rank of a collective spends the shortest time in it, so clocks need not agree.

    >>> waited([{"ids": [5.0, 5.0]}, {"ids": [1.0, 2.0]}], steps=2)["ids"].tolist()
    [3.5, 0.0]
    """
    found = {}
    for label in dict.fromkeys(label for one in took for label in one):
        counts = {len(one.get(label, ())) for one in took}
        if len(counts) != 1 or counts.pop() % steps:  # some ranks only: not a collective of all
            continue
        ms = np.array([one[label] for one in took])  # [W, steps * times]
        late = (ms - ms.min(axis=0)).reshape(len(took), steps, -1).sum(axis=2)
        found[label] = np.median(late, axis=1)
    return found


def steps_on_rank(
    plan_json: str, tables: Sequence[BaseEmbeddingConfig], workload: Workload, steps: int, seed: int
) -> dict[str, Any]:
    """Builds, warms up, steps and reports on one rank. Collective."""
    import torch
    import torch.distributed as dist

    from recshard_lab.comm import CommType, QCommsConfig, get_qcomm_codecs_registry
    from recshard_lab.distributed import (
        DistributedModelParallel,
        DynamicEmbeddingBagCollectionSharder,
        DynamicEmbeddingCollectionSharder,
        EmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder,
    )
    from recshard_lab.embedding import (
        DynamicEmbeddingBagCollection,
        DynamicEmbeddingCollection,
        EmbeddingBagCollection,
        EmbeddingCollection,
        EmbOptimType,
    )

    pooled, optimizer, own = all(map(is_pooled, tables)), EmbOptimType(workload.optimizer), list(tables)
    forward, backward = (CommType(name) for name in workload.codecs)
    codecs, meta = get_qcomm_codecs_registry(QCommsConfig(forward, backward)), torch.device("meta")
    collection: Any
    sharder: Any
    if tables[0].dynamic:
        kinds = (DynamicEmbeddingBagCollection, DynamicEmbeddingBagCollectionSharder) if pooled else (
            DynamicEmbeddingCollection, DynamicEmbeddingCollectionSharder)  # fmt: skip
        more = {"is_weighted": True} if workload.weighted else {}
        collection = kinds[0](own, optimizer, {"lr": 0.01}, **more)  # type: ignore[arg-type]
        sharder = kinds[1](qcomm_codecs_registry=codecs)
    else:
        fused = {"optimizer": optimizer, "learning_rate": 0.01}
        kind = EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder
        sharder = kind(fused_params=fused, qcomm_codecs_registry=codecs)
        collection = (
            EmbeddingBagCollection(own, is_weighted=workload.weighted, device=meta)  # type: ignore[arg-type]
            if pooled
            else EmbeddingCollection(own, device=meta)  # type: ignore[arg-type]
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the first weights
        model = DistributedModelParallel(collection, plan=ShardingPlan.from_json(plan_json), sharders=[sharder])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = np.random.default_rng([seed, rank])
    batches = [random_batch(tables, workload, rng).to(model.device) for _ in range(min(steps, 4))]
    on_gpu = model.device.type == "cuda"

    def step(batch: KeyedJaggedTensor) -> None:
        output = model(batch)
        values = output.values() if pooled else torch.cat([one.values() for one in output.values()])
        values.backward(torch.full_like(values, 1e-3))
        if on_gpu:
            torch.cuda.synchronize()

    timed, sent = timed_steps(lambda number: step(batches[number % len(batches)]), steps)
    return {
        "step_ms": float(np.median(timed)),
        "memory": model.memory_bytes(),
        "host_memory": model.host_memory_bytes(),
        "in_use": peak_of(lambda: step(batches[0]), model.device),
        "sent": sent_by_label(sent, world_size, steps),
        "took": took_by_label(sent),
        "backends": model.backends(),
    }


def peak_of(step: Callable[[], Any], device: torch.device) -> RankMemory:
    """Runs one more step and measures this rank's device memory at its peak. Collective if the step is.

    On CUDA the allocator reports the peak. On CPU torch reports none, so every operator of this step is traced and
    the live tensors are counted. This resets the peak of `Ranks.memory`.
    """
    from recshard_lab.launcher.device_memory import counting, measure, reset_peak

    with counting() if device.type == "cpu" else nullcontext():
        reset_peak(device)
        step()
        return measure(device)


def timed_steps(step: Callable[[int], Any], steps: int) -> tuple[list[float], Trace]:
    """Times steps that all ranks run together, after a barrier and `WARM_UP` untimed ones. Collective.

    Args:
        step: runs one step until its work is done on the device; called with 0, 1, 2 and so on.
        steps: number of timed steps.

    Returns:
        ms of each timed step, and the collectives of the timed steps.
    """
    import torch.distributed as dist

    from recshard_lab.comm import trace

    if dist.is_initialized():
        dist.barrier()
    for at in range(WARM_UP):
        step(at)
    timed = []
    with trace() as sent:
        for at in range(steps):
            begun = perf_counter()
            step(at)
            timed.append(1000 * (perf_counter() - begun))
    return timed, sent


def _check_room(plan: ShardingPlan, tables: Sequence[BaseEmbeddingConfig]) -> None:
    """Raises ValueError for a plan of CPU ranks that needs more memory than this machine has."""
    import psutil

    needed = sum(
        table.data_type.bytes_per_element * sum(shard.num_elements for shard in sharding.shards)
        for table, sharding in plan.pairs(tables)
    )
    free = psutil.virtual_memory().available
    if needed > 0.7 * free:
        raise ValueError(
            f"the plan's weights take {bytes_text(needed)} on all ranks together, this machine has {bytes_text(free)} "
            f"free: it can be predicted here, but not run. Fix: fewer rows per table"
        )
