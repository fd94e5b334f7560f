"""Plans and predicts for many configurations: ranks, batches, memory, codecs, optimizers, pipelines.

Nothing is launched and nothing is measured: every number of a sweep is **simulated** and labelled so. A point without a
plan, because tables do not fit or ranks do not fill hosts, stays in the sweep with its reason.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, TypeAlias

from recshard_lab.arguments import names_wrong_arguments
from recshard_lab.embedding.configs import BaseEmbeddingConfig
from recshard_lab.planner.model.codecs import codec_names, codecs_text
from recshard_lab.planner.model.estimate import Estimate
from recshard_lab.planner.planner import EmbeddingShardingPlanner
from recshard_lab.planner.sweep.points import Sweep, SweepPoint
from recshard_lab.planner.sweep.replicas import Replicated
from recshard_lab.planner.workload import Workload
from recshard_lab.sharding import ParameterConstraints, PlanError, Topology

Progress: TypeAlias = bool | Callable[[int, int, SweepPoint], None]
MOST_POINTS = 100_000


@names_wrong_arguments
def sweep(
    tables: Sequence[BaseEmbeddingConfig],
    workload: Workload | None = None,
    *,
    topology: str | Topology | Sequence[str | Topology] = "h100",
    world_size: int | Sequence[int] | None = None,
    batch_size: int | Sequence[int] | None = None,
    global_batch_size: int | Sequence[int] | None = None,
    hbm_cap: int | Sequence[int] | None = None,
    codecs: Any = None,
    optimizer: str | Sequence[str] | None = None,
    pipeline: str | Sequence[str] | None = None,
    sharding_group_size: int | Sequence[int | None] | None = None,
    sync_every: int = 1,
    use_inter_host_allreduce: bool = False,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    solver: str = "greedy",
    local_search_passes: int = 3,
    explain: bool = False,
    progress: Progress = False,
) -> Sweep:
    """Plans every combination of the arguments and predicts its step.

    Args:
        tables: their configs.
        workload: the step. The swept arguments override its values.
        topology: presets by name, or topologies. `world_size` overrides their number of ranks.
        world_size: ranks. Default: the topology's.
        batch_size: samples per rank: more ranks process more samples per step (weak scaling).
        global_batch_size: samples of all ranks together: more ranks process fewer samples each (strong scaling).
        hbm_cap: bytes of memory of one rank; of host memory if ranks run on CPUs.
        codecs: formats in messages, as for `Workload`, or a list of these.
        optimizer, pipeline: as for `Workload`, one or several.
        sharding_group_size: ranks that share one copy of the tables, as for `DMPCollection`. None: all ranks.
        sync_every: steps between two syncs of the copies. Each step includes its share of a sync.
        use_inter_host_allreduce: as for `DMPCollection`.
        constraints, solver, local_search_passes: as for `EmbeddingShardingPlanner`.
        explain: add fixes to the reason of a point without a plan (up to a second per point).
        progress: True for a bar in the terminal, or a callback with (points done, all points, the last point).

    Raises:
        ValueError: an argument that is wrong for every point; both batch sizes; more than 100,000 points.

    >>> from recshard_lab.embedding.configs import EmbeddingBagConfig
    >>> movies = EmbeddingBagConfig(name="movies", num_embeddings=10**6, embedding_dim=64, feature_names=["movie"])
    >>> found = sweep([movies], topology="h100", world_size=[8, 16], codecs=["fp32", "fp16"])
    >>> [(point.world_size, point.codecs, point.fits) for point in found.points]
    [(8, 'fp32', True), (8, 'fp16', True), (16, 'fp32', True), (16, 'fp16', True)]
    """
    load = workload or Workload()
    load.check_names(tables)
    if batch_size is not None and global_batch_size is not None:
        raise ValueError(
            f"sweep got batch_size={batch_size!r} (per rank) and global_batch_size={global_batch_size!r} (all ranks). "
            f"Fix: pass one of them, not both"
        )
    if not isinstance(sync_every, int) or sync_every < 1:
        raise ValueError(f"sync_every must be a positive integer, got {sync_every!r}. Fix: sync_every=1")
    if not isinstance(progress, bool) and not callable(progress):
        raise ValueError(f"progress must be True, False or a callback, got {progress!r:.80}. Fix: progress=True")
    _check_counts(world_size=world_size, batch_size=batch_size, global_batch_size=global_batch_size, hbm_cap=hbm_cap)
    _check_counts(sharding_group_size=sharding_group_size)
    strong = global_batch_size is not None
    tops = _listed(topology)
    for each in tops:
        if isinstance(each, str):
            Topology.preset(each)  # an unknown name would fail in every point
        elif not isinstance(each, Topology):
            raise ValueError(f"topology must be presets by name or Topology, got {each!r:.80}. Fix: topology='h100'")
    formats = [codecs_text(codec_names(one)) for one in _codec_list(load.codecs if codecs is None else codecs)]
    axes: list[Sequence[Any]] = [
        tops,
        _listed(world_size),
        _listed(global_batch_size if strong else load.batch_size if batch_size is None else batch_size),
        _listed(hbm_cap),
        formats,
        [replace(load, optimizer=name).optimizer for name in _listed(optimizer or load.optimizer)],
        [replace(load, pipeline=name).pipeline for name in _listed(pipeline or load.pipeline)],
        _listed(sharding_group_size),
    ]
    count = math.prod(map(len, axes))
    if not 1 <= count <= MOST_POINTS:
        raise ValueError(
            f"a sweep has 1 to {MOST_POINTS:,} points, these arguments make {count:,}. Fix: pass shorter lists"
        )
    options = {"constraints": constraints, "solver": solver, "local_search_passes": local_search_passes}
    planner = EmbeddingShardingPlanner(Topology(1), workload=load, **options)  # type: ignore[arg-type]
    points_of = _Points(tables, planner, explain, strong, sync_every, use_inter_host_allreduce)
    begun = perf_counter()
    every: Iterable[tuple[Any, ...]] = itertools.product(*axes)
    if progress is True:
        from rich.progress import track

        every = track(list(every), description=f"simulating {count} plans")
    points: list[SweepPoint] = []
    for values in every:
        points.append(points_of.point(*values))
        if not isinstance(progress, bool):
            progress(len(points), count, points[-1])
    return Sweep(tuple(points), len(tables), perf_counter() - begun, strong, sync_every)


@dataclass
class _Points:
    """Plans the points of one sweep, with the settings of `base`."""

    tables: Sequence[BaseEmbeddingConfig]
    base: EmbeddingShardingPlanner
    explain: bool
    strong: bool
    sync_every: int
    use_inter_host_allreduce: bool
    known: list[tuple[Topology, Workload, Estimate | PlanError]] = field(default_factory=list)

    def point(
        self,
        topology: str | Topology,
        ranks: int | None,
        batch: int,
        hbm_cap: int | None,
        codecs: str,
        optimizer: str,
        pipeline: str,
        group_size: int | None,
    ) -> SweepPoint:
        begun = perf_counter()
        point = SweepPoint(
            topology=topology if isinstance(topology, str) else f"{topology.compute_device} ranks",
            world_size=ranks or 0,
            batch_size=0 if self.strong else batch,
            global_batch_size=batch if self.strong else batch * (ranks or 0),
            hbm_cap=hbm_cap or _host(topology).memory_cap_bytes,
            codecs=codecs,
            optimizer=optimizer,
            pipeline=pipeline,
            sharding_group_size=group_size,
        )
        try:
            top = _ranks(topology, ranks, hbm_cap)
            ranks = top.world_size
            point = replace(point, world_size=ranks, hbm_cap=top.memory_cap_bytes)
            if self.strong and batch % ranks:
                raise ValueError(
                    f"{batch:,} samples do not divide among {ranks:,} ranks. Fix: use a multiple of {ranks:,}"
                )
            each = batch // ranks if self.strong else batch
            point = replace(point, batch_size=each, global_batch_size=each * ranks)
            replicas = Replicated(top, group_size or ranks, self.use_inter_host_allreduce)
            load = replace(self.base.workload, batch_size=each, codecs=codecs, optimizer=optimizer, pipeline=pipeline)
            figures = self._predicted(self._estimate(replicas.group, load), replicas, load)
        except ValueError as error:  # this combination has no plan; PlanError is a ValueError
            kind = "does not fit" if isinstance(error, PlanError) else "impossible"
            figures = {"problem": kind, "reason": str(error)}
        return replace(point, **figures, plan_s=perf_counter() - begun)

    def _estimate(self, group: Topology, load: Workload) -> Estimate:
        """The estimate of one copy. Points that differ only in the number of copies share it, or its refusal."""
        known = (found for topology, workload, found in self.known if topology == group and workload == load)
        result = next(known, None)
        if result is None:
            planner = copy(self.base)
            planner.topology, planner.workload = group, load
            try:
                result = planner.plan_tables(self.tables, explain=self.explain).estimate
            except PlanError as refusal:
                result = refusal
            self.known.append((group, load, result))
        if isinstance(result, PlanError):
            raise result
        return result

    def _predicted(self, found: Estimate, replicas: Replicated, load: Workload) -> dict[str, Any]:
        """The fields of a point that has a plan."""
        sync_ms, dense_ms = replicas.sync_ms(found), replicas.more_dense_ms(load)
        more = dense_ms + sync_ms / self.sync_every
        phases = dict(zip(found.phases, found.ms.max(axis=0).tolist(), strict=True))
        phases["dense"] += dense_ms
        return {
            "fits": True,
            "step_ms": found.step_ms + more,
            "plain_step_ms": found.plain_step_ms + more,
            "bound_by": "" if found.overlap is None else found.overlap.bound_by,
            "sync_ms": sync_ms,
            "lower_bound": None if found.lower_bound is None else found.lower_bound + dense_ms,
            "memory_bytes": found.fullest_bytes,
            "host_bytes": 0.0 if found.host_bytes is None else float(found.host_bytes.max()),
            "phases_ms": phases,
        }


def _host(topology: str | Topology) -> Topology:
    """The topology of one host: its figures per rank hold for any number of ranks."""
    return Topology.preset(re.sub(r"x\d+$", "", topology)) if isinstance(topology, str) else topology


def _ranks(topology: str | Topology, ranks: int | None, hbm_cap: int | None) -> Topology:
    """The topology with this number of ranks and this memory per rank."""
    if isinstance(topology, str):
        top = Topology.preset(topology, **({} if ranks is None else {"world_size": ranks}))
    elif ranks is None or ranks == topology.world_size:
        top = topology
    else:
        local = min(topology.local_world_size, ranks)
        top = replace(topology, world_size=ranks, local_world_size=local)
    if hbm_cap is None:
        return top
    return replace(top, hbm_cap=hbm_cap) if top.compute_device == "cuda" else replace(top, ddr_cap=hbm_cap)


def _check_counts(**given: Any) -> None:
    for name, values in given.items():
        for value in _listed(values):
            whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
            if value is not None and not whole:
                raise ValueError(
                    f"{name} must be a positive integer or a list of them, got {value!r:.80}. Fix: {name}=8"
                )


def _listed(given: Any) -> Sequence[Any]:
    if isinstance(given, (str, Topology)) or not isinstance(given, (Sequence, range)):
        return [given]
    return list(given)


def _codec_list(given: Any) -> Sequence[Any]:
    """Formats for `codec_names`: a tuple is a pair of formats, a list has several."""
    return list(given) if isinstance(given, list) else [given]
