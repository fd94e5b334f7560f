"""The machine as the planner sees it: ranks, hosts, memory, and how fast bytes and lookups go.

Arguments that TorchRec's ``Topology`` has mean the same and have its units: bandwidths are **bytes per
millisecond**, capacities are bytes **per rank**. Every figure can be overridden; what is left out comes from
`DEVICE_DEFAULTS`.

Where the CPU figures come from (2 cores, torch 2.13, fbgemm 1.8 on CPU, one thread a rank, measured):

- lookups: 4 tables x 100k x 64, batch 2048, pooling 10: forward 3.1 ms with uniform ids and 1.0 ms with
  Zipf(1.2), of which 90% and 18% are the first use of their row in the batch: 2 ns an id, 6.5 GB/s for rows used
  the first time, 60 GB/s for rows used again.
- update in backward, same shapes: SGD 8.1 / 2.5 ms, row-wise Adagrad 4.5 / 1.7 ms (uniform / Zipf), a whole step
  with element-wise Adagrad 218 ms at 26 tables: 10 ns an id, plus each distinct row read and written at 6.5 GB/s
  times `update_cost`. The Adams, LAMBs and LARS: the native kernel at these shapes, best of 9, as so much more than its
  SGD (6.9 ms): 16.0 row-wise Adam, 18.6 LARS, 21.8 row-wise LAMB, 22.9 Adam, 30.0 ms LAMB. On CUDA: matrices moved.
- routing: the input side of such a step took 2-3 ms on 2 ranks for 82k ids sent and received: 12 ns an id.
- Gloo, 2 MB a rank, 2 ranks: all_to_all 0.8 ms, all_reduce 1.6 ms: 1.6 GB/s a rank.
  More ranks than cores slow each other down in proportion (4 ranks on 2 cores: 3.2 ms), see `cores_per_host`.
- Gloo's reduce_scatter of the same bytes: 6.1 ms on 2 ranks, 9.3 ms on 4, where all_to_all takes 0.8 and 3.2: 4.7
  times as long (geometric mean).
- fixed costs (`peer_ms`, `host_ms`, `lane_ms`, `row_cut_ms`, `step_ms`): 60 cases, which are 5 models (1 to 26
  tables, dims 16 to 64, batches 64 to 1024) under two plans on 1 launched rank and five on 2 and on 4, every phase of
  a step timed: the median of 12 steps, of which the least of 11 repeats, since the machine was shared. Least squares,
  without negative terms and in relative error, of what the costs above leave over, times `slowdown` where ranks share
  cores; then rounded, with one figure where phases differ little. Medians of the repeats were up to twice the least.
  They are the host's Python and Gloo's messages, which dominate steps below some 10 ms.

Figures that are 0 here were never measured for everybody: `recshard_lab.calibration` measures and fits them, and all of
the above anew, on the ranks at hand, and `from_profile` reads what it found.

The CUDA figures are the published constants of TorchRec's planner (V100/A100-era bandwidths); it has no such fixed
costs, so they are 0 there.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.cores import usable_cores

GIB = 1024**3
_PER_MS = GIB / 1000  # one GiB/s in bytes per ms
_DEFAULT: Any = None  # filled in from DEVICE_DEFAULTS, so that readers of a field never meet None

DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "hbm_cap": 0,
        "hbm_mem_bw": 897 * _PER_MS,
        "ddr_mem_bw": 6.5e6,
        "cache_bw": 60e6,
        "intra_host_bw": 1.6e6,
        "inter_host_bw": 1.25e6,
        "intra_host_latency_ms": 0.0,
        "inter_host_latency_ms": 0.1,
        "peer_ms": 0.26,
        "reduce_scatter_cost": 4.7,
        "lookup_ns_per_id": 2.0,
        "update_ns_per_id": 10.0,
        "route_ns_per_id": 12.0,
        "launch_ms": 0.05,
        "host_ms": 0.08,
        "lane_ms": 0.005,
        "row_cut_ms": 0.38,
        "norm_ms": 0.38,
        "step_ms": 0.23,
        "flops_per_ms": 20e6,
        "norm_ns_per_row": 0.0,
        "replica_ms": 0.0,
        "replicas_ms": 0.0,
        "cache_bytes": 0.0,
        "contention": 0.0,
        "half_duplex": 0.0,
        "bag_ns": 0.0,
        "sort_ns_per_id": 0.0,
        "sum_ns_per_number": 0.0,
        "update_id_ns": {},
        "update_row_ns": {},
        "update_cost": {
            "exact_sgd": 1.15,
            "exact_row_wise_adagrad": 0.55,
            "exact_adagrad": 5.0,
            "partial_row_wise_adam": 2.5,
            "lars_sgd": 3.0,
            "partial_row_wise_lamb": 3.5,
            "adam": 3.7,
            "lamb": 4.9,
        },
        "reserve_fraction": 0.1,
    },
    "cuda": {
        "hbm_cap": 32 * GIB,
        "ddr_cap": 128 * GIB,
        "hbm_mem_bw": 897 * _PER_MS,
        "ddr_mem_bw": 51 * _PER_MS,
        "cache_bw": 3 * 897 * _PER_MS,
        "intra_host_bw": 600 * _PER_MS,
        "inter_host_bw": 12.5 * _PER_MS,
        "intra_host_latency_ms": 0.02,
        "inter_host_latency_ms": 0.04,
        "peer_ms": 0.0,
        "reduce_scatter_cost": 1.0,
        "lookup_ns_per_id": 0.0,
        "update_ns_per_id": 0.1,
        "route_ns_per_id": 0.05,
        "launch_ms": 0.02,
        "host_ms": 0.0,
        "lane_ms": 0.0,
        "row_cut_ms": 0.0,
        "norm_ms": 0.0,
        "step_ms": 0.0,
        "flops_per_ms": 10e9,
        "norm_ns_per_row": 0.0,
        "replica_ms": 0.0,
        "replicas_ms": 0.0,
        "cache_bytes": 0.0,
        "contention": 0.0,
        "half_duplex": 0.0,
        "bag_ns": 0.0,
        "sort_ns_per_id": 0.0,
        "sum_ns_per_number": 0.0,
        "update_id_ns": {},
        "update_row_ns": {},
        "update_cost": {
            "exact_sgd": 1.0,
            "exact_row_wise_adagrad": 1.0,
            "exact_adagrad": 2.0,
            "partial_row_wise_adam": 2.0,
            "lars_sgd": 2.0,
            "partial_row_wise_lamb": 2.0,
            "adam": 3.0,
            "lamb": 3.0,
        },
        "reserve_fraction": 0.15,
    },
}


_MOST_RANKS = 4096  # traffic is a matrix over ranks: 128 MiB for each of its phases


@names_wrong_arguments
@dataclass(frozen=True)
class Topology:
    """W ranks on hosts of `local_world_size` ranks each.

    Args:
        world_size: ranks W.
        compute_device: "cpu" or "cuda"; says which defaults hold and which memory the weights live in.
        hbm_cap: bytes of device memory of one rank (default 32 GiB on cuda, as TorchRec).
        ddr_cap: bytes of host memory of one rank. Default on cpu: the memory of this machine (or of its cgroup)
            divided by `local_world_size`, so that a plan that would swap is refused; 128 GiB on cuda.
        local_world_size: ranks of one host; all of them when left out.
        hbm_mem_bw, ddr_mem_bw: memory bandwidth of embedding rows that are not in cache yet; on cuda ddr_mem_bw is
            what a device gets of the host's memory, over its link.
        intra_host_bw, inter_host_bw: what one rank sends (and receives) per ms, inside and between hosts.
        intra_host_latency_ms, inter_host_latency_ms: fixed cost of one collective.
        peer_ms: what one collective costs for every other rank it talks to, whatever it sends.
        reduce_scatter_cost: time of a reduce-scatter, as a factor on that of an all-to-all of the same bytes.
        cache_bw: bandwidth of rows read again within a batch, and of copies between buffers.
        lookup_ns_per_id, update_ns_per_id: per id in forward, and in backward (sorting, segment sums).
        route_ns_per_id: per id sent or received: choosing its rank, packing, unpacking.
        launch_ms: fixed cost of one table-batched kernel.
        host_ms: fixed cost of packing and unpacking, in each of the three exchanges of a step.
        lane_ms: the host's cost of one lane (a feature of one rectangle), in each phase that visits it.
        row_cut_ms: fixed cost of choosing ids by row, where any table is cut by rows.
        norm_ms, norm_ns_per_row: of exchanging norms, where columns are cut and the optimizer is row-wise: fixed, and
            per touched row of a piece.
        step_ms: fixed cost of a step around its phases: module calls, autograd.
        flops_per_ms: dense arithmetic of one rank.
        update_cost: per optimizer, its factor on reading and writing the unique rows.
        update_id_ns, update_row_ns: per optimizer, per id in place of `update_ns_per_id`, and per unique row besides.
        bag_ns: per bag of a lane, in forward and in backward.
        sort_ns_per_id, sum_ns_per_number: of replicas that send touched rows: per id of the batch that is sorted, and
            per number of a gradient that is added.
        replica_ms, replicas_ms: the host's cost of a replicated lane, in input_dist and again in output_dist_backward;
            and of having any, once a step.
        cache_bytes: of one rank's cache, in which rows stay from step to step; 0 where they do not.
        contention: how much even work on all ranks slows each down though every rank has a core, as a share of it.
        half_duplex: 0 where a rank sends and receives at once (networks), 1 where one waits for the other (loopback,
            where its core copies both); on one host.
        reserve_fraction: share of the capacity that plans leave free (framework, fragmentation).
        cores_per_host: on cpu, ranks beyond the cores slow everything in proportion; default this machine's.
        device_groups: names of sets of ranks, which `ParameterConstraints(device_group=...)` may ask for.

    Raises:
        ValueError: a size that is not positive, ranks that do not fill hosts, a device other than cpu or cuda.

    >>> Topology(world_size=4, local_world_size=2).num_nodes
    2
    """

    world_size: int
    compute_device: str = "cpu"
    hbm_cap: int = _DEFAULT
    ddr_cap: int = _DEFAULT
    local_world_size: int = _DEFAULT
    hbm_mem_bw: float = _DEFAULT
    ddr_mem_bw: float = _DEFAULT
    intra_host_bw: float = _DEFAULT
    inter_host_bw: float = _DEFAULT
    intra_host_latency_ms: float = _DEFAULT
    inter_host_latency_ms: float = _DEFAULT
    peer_ms: float = _DEFAULT
    reduce_scatter_cost: float = _DEFAULT
    cache_bw: float = _DEFAULT
    lookup_ns_per_id: float = _DEFAULT
    update_ns_per_id: float = _DEFAULT
    route_ns_per_id: float = _DEFAULT
    launch_ms: float = _DEFAULT
    host_ms: float = _DEFAULT
    lane_ms: float = _DEFAULT
    row_cut_ms: float = _DEFAULT
    norm_ms: float = _DEFAULT
    norm_ns_per_row: float = _DEFAULT
    bag_ns: float = _DEFAULT
    sort_ns_per_id: float = _DEFAULT
    sum_ns_per_number: float = _DEFAULT
    replica_ms: float = _DEFAULT
    replicas_ms: float = _DEFAULT
    cache_bytes: float = _DEFAULT
    contention: float = _DEFAULT
    half_duplex: float = _DEFAULT
    step_ms: float = _DEFAULT
    flops_per_ms: float = _DEFAULT
    update_cost: Mapping[str, float] = _DEFAULT
    update_id_ns: Mapping[str, float] = _DEFAULT
    update_row_ns: Mapping[str, float] = _DEFAULT
    reserve_fraction: float = _DEFAULT
    cores_per_host: int = _DEFAULT
    device_groups: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = DEVICE_DEFAULTS.get(self.compute_device)
        if defaults is None:
            raise ValueError(f"compute_device must be 'cpu' or 'cuda', got {self.compute_device!r}")
        _check_positive_int("world_size", self.world_size)
        local = self.world_size if self.local_world_size is None else self.local_world_size
        _check_positive_int("local_world_size", local)
        if self.world_size % local:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of local_world_size {local}: ranks must "
                f"fill "
                f"their hosts; the next world_size that does is {-(-self.world_size // local) * local}"
            )
        filled = {"local_world_size": local, "cores_per_host": usable_cores(), **defaults}
        for spec in fields(self):
            if getattr(self, spec.name) is None:
                value = filled[spec.name] if spec.name in filled else machine_memory_bytes() // local
                object.__setattr__(self, spec.name, value)
        for spec in fields(self):
            value = getattr(self, spec.name)
            if isinstance(value, (int, float)) and not value >= 0:
                raise ValueError(f"{spec.name} must not be negative, got {value!r}")
            if spec.name.endswith(("_bw", "flops_per_ms", "cores_per_host", "scatter_cost")) and not value > 0:
                raise ValueError(f"{spec.name} must be positive, got {value!r}")
        if self.half_duplex > 1:
            raise ValueError(f"half_duplex must lie in [0, 1], got {self.half_duplex!r}")
        if self.reserve_fraction >= 1:
            raise ValueError(f"reserve_fraction must lie in [0, 1), got {self.reserve_fraction!r}")
        object.__setattr__(self, "device_groups", _checked_groups(self.device_groups, self.world_size))

    @classmethod
    def preset(cls, name: str, **figures: Any) -> "Topology":
        """The ranks of a machine that is known by name, with its published figures.

        Rates are what programs get of the published peaks; `preset_table` prints both with their sources.

        Args:
            name: NAME is one host; NAMExN is N ranks in hosts of the machine's usual size: "h100x64", "a100x8",
                "gb200nvl72", "aws-p5x16", "cpu-laptop", "this" (this machine). `preset_table` lists them.
            figures: any argument of `Topology`, in place of the preset's.

        Raises:
            ValueError: an unknown name (the nearest is told) or argument; ranks that do not fill hosts.

        >>> top = Topology.preset("h100x64", reserve_fraction=0.2)
        >>> top.num_nodes, top.hbm_cap, top.reserve_fraction
        (8, 80000000000, 0.2)
        """
        from recshard_lab.sharding.hardware.presets import preset_arguments

        known = [spec.name for spec in fields(cls)]
        for key in figures:
            if key not in known:
                near = "".join(f"; the nearest is {word!r}" for word in get_close_matches(key, known, n=1))
                raise ValueError(f"Topology has no argument {key!r}{near}")
        size, local = figures.get("world_size"), figures.get("local_world_size")
        return cls(**{**preset_arguments(name, size, local), **figures})

    @classmethod
    def from_profile(cls, path: "str | os.PathLike[str]", **figures: Any) -> "Topology":
        """The ranks of a machine that was calibrated (`Ranks.calibrate`, ``recshard calibrate --out``).

        Args:
            path: of the device profile.
            figures: any argument of `Topology`, in place of the profile's; its ranks are those that were measured.

        Raises:
            ValueError: no profile, one of another version, other ranks than were measured.
        """
        from recshard_lab.sharding.hardware.device_profile import DeviceProfile

        return DeviceProfile.load(path).topology(**figures)  # type: ignore[arg-type]

    @property
    def num_nodes(self) -> int:
        """Hosts."""
        return self.world_size // self.local_world_size

    @names_wrong_arguments
    def node_of(self, rank: int) -> int:
        """The host that a rank runs on; ranks fill hosts in order."""
        return rank // self.local_world_size

    @property
    def memory_cap_bytes(self) -> int:
        """Bytes one rank has for weights, optimizer state and buffers: HBM on cuda, host memory on cpu."""
        return self.hbm_cap if self.compute_device == "cuda" else self.ddr_cap

    def with_memory(self, gigabytes: float) -> "Topology":
        """The same machine with so many GB (1e9 bytes) for each rank's `memory_cap_bytes`.

        Raises:
            ValueError: not above 0, or more than 1e9 GB.

        >>> Topology(8, "cuda").with_memory(80).hbm_cap
        80000000000
        """
        if not 0 < gigabytes <= 1e9:  # NaN is refused too
            raise ValueError(
                f"the memory of one rank must be above 0 and at most 1e9 GB, got {gigabytes!r}. "
                f"Fix: the memory of one device, such as 80"
            )
        cap = int(gigabytes * 1e9)
        return replace(self, hbm_cap=cap) if self.compute_device == "cuda" else replace(self, ddr_cap=cap)

    @property
    def has_tiers(self) -> bool:
        """Whether the host's memory is another one than that of the ranks."""
        return self.compute_device == "cuda"

    @property
    def memory_bw(self) -> float:
        """Bytes per ms of the memory the weights live in."""
        return self.hbm_mem_bw if self.compute_device == "cuda" else self.ddr_mem_bw

    @property
    def slowdown(self) -> float:
        """How many ranks share one core (1.0 where each has its own)."""
        return max(1.0, self.local_world_size / self.cores_per_host) if self.compute_device == "cpu" else 1.0

    def free_memory_bytes(self) -> int:
        """Capacity of one rank without the reserve."""
        return int(self.memory_cap_bytes * (1 - self.reserve_fraction))


def machine_memory_bytes() -> int:
    """Memory of this machine, or of the cgroup we run in where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total, int(limit.read()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def _checked_groups(groups: object, world_size: int) -> dict[str, tuple[int, ...]]:
    """Names of sets of ranks, after refusing what is none."""
    if not isinstance(groups, Mapping):
        raise ValueError(f"device_groups must map names to ranks, as {{'fast': [0, 1]}}, got {groups!r:.80}")
    found: dict[str, tuple[int, ...]] = {}
    for name, ranks in groups.items():
        if not isinstance(name, str) or name in DEVICE_DEFAULTS:
            raise ValueError(f"a device group needs a name other than {', '.join(DEVICE_DEFAULTS)}, got {name!r:.80}")
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise ValueError(f"device group {name!r} must be a list of ranks, got {ranks!r:.80}")
        members = tuple(ranks)
        if not members or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in members):
            raise ValueError(f"device group {name!r} must name ranks from 0 to {world_size - 1}, got {members!r:.80}")
        found[name] = tuple(sorted(set(members)))
    return found


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > _MOST_RANKS:
        raise ValueError(f"{name} must be at most {_MOST_RANKS:,}, got {shown(value)}. Fix: {name}={_MOST_RANKS}")
