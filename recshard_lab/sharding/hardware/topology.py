"""The machine for the planner: ranks, hosts, memory, and the speed of transfers and lookups.

Arguments that TorchRec's ``Topology`` has mean the same and have its units: bandwidths are **bytes per
millisecond**, capacities are bytes **per rank**. You can override every figure; the others come from
`DEVICE_DEFAULTS`.

Sources of the CPU figures (measured on 2 cores, torch 2.13, fbgemm 1.8 on CPU, one thread per rank):

- lookups: 4 tables x 100k x 64, batch 2048, pooling 10: forward 3.1 ms with uniform ids and 1.0 ms with
  Zipf(1.2), of which 90% and 18% are the first use of their row in the batch: 2 ns per id, 6.5 GB/s for first uses
  of a row, 60 GB/s for later uses.
- update in backward, same shapes: SGD 8.1 / 2.5 ms, row-wise Adagrad 4.5 / 1.7 ms (uniform / Zipf), a whole step
  with element-wise Adagrad 218 ms at 26 tables: 10 ns per id, plus each distinct row read and written at 6.5 GB/s
  times `update_cost`. The Adams, LAMBs and LARS: native kernel at these shapes, best of 9, relative to its SGD
  (6.9 ms): 16.0 row-wise Adam, 18.6 LARS, 21.8 row-wise LAMB, 22.9 Adam, 30.0 ms LAMB. On CUDA: matrices moved.
- routing: input_dist of such a step took 2-3 ms on 2 ranks for 82k ids sent and received: 12 ns per id.
- index of a dynamic table: a step of an index of 1 M or 4 M slots, 70% full, whose ids are all present, CPU time of one
  thread: 0.16-0.18 ms for 4,096 ids, 1.09-1.22 ms for 32,768. Assumed on CUDA, where torch operators search: 67
  operators (counted) of `launch_ms`, and per id two buckets of tags and ids and four masks of them at `hbm_mem_bw`
  (3.6 kB).
- Gloo, 2 MB per rank, 2 ranks: all_to_all 0.8 ms, all_reduce 1.6 ms: 1.6 GB/s per rank.
  If ranks share cores, times grow in proportion (4 ranks on 2 cores: 3.2 ms), see `cores_per_host`.
- Gloo's reduce_scatter of the same bytes: 6.1 ms on 2 ranks, 9.3 ms on 4, where all_to_all takes 0.8 and 3.2: 4.7
  times as long (geometric mean).
- fixed costs (`peer_ms`, `host_ms`, `shard_feature_ms`, `row_split_ms`, `step_ms`): 60 cases, from 5 models (1 to 26
  tables, dims 16 to 64, batches 64 to 1024) under two plans on 1 rank and five plans on 2 and on 4 ranks. The time of
  a phase is the minimum over 11 repeats of the median of 12 steps, because the machine was shared; other repeats took
  up to twice as long. The residual after the costs above, times `slowdown` if ranks share cores, is fitted by
  non-negative least squares of relative errors, then rounded. Phases that differ little share one figure. These costs
  are the host's Python and Gloo's messages, which dominate steps below 10 ms.

Figures that are 0 here have no general value. `recshard_lab.calibration` measures and fits them and all figures above
on your ranks, and `from_profile` reads its result.

The CUDA bandwidths are the published constants of TorchRec's planner (V100/A100-era). Its other figures, of hosts,
messages and small kernels, are those of `machines.GPU_FIGURES` and `machines.INFINIBAND`, each with its source.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from recshard_lab.arguments import names_wrong_arguments, shown
from recshard_lab.cores import usable_cores
from recshard_lab.sharding.hardware.machines import GPU_FIGURES, INFINIBAND

GIB = 1024**3
_PER_MS = GIB / 1000  # one GiB/s in bytes per ms
_DEFAULT: Any = None  # replaced from DEVICE_DEFAULTS on construction, so no field is ever None

_CALIBRATED_ONLY: dict[str, Any] = {  # figures without a general value
    **dict.fromkeys(("norm_ns_per_row", "replica_ms", "replicas_ms", "cache_bytes", "contention", "half_duplex"), 0.0),
    **dict.fromkeys(("sync_ms", "kernel_ms", "gather_row_bytes", "matrix_half_batch", "straggler_sigma"), 0.0),
    **dict.fromkeys(("bag_ns", "sort_ns_per_id", "sum_ns_per_number"), 0.0),
    **{"update_id_ns": {}, "update_number_ns": {}},
}
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
        "inter_host_peer_ms": 0.26,
        "reduce_scatter_cost": 4.7,
        "lookup_ns_per_id": 2.0,
        "update_ns_per_id": 10.0,
        "route_ns_per_id": 12.0,
        "index_ns_per_id": 40.0,
        "index_ms": 0.05,
        "launch_ms": 0.05,
        "host_ms": 0.08,
        "shard_feature_ms": 0.005,
        "row_split_ms": 0.38,
        "norm_ms": 0.38,
        "step_ms": 0.23,
        "flops_per_ms": 20e6,
        "tf32_flops_per_ms": 20e6,
        **_CALIBRATED_ONLY,
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
        "reduce_scatter_cost": 1.0,
        "lookup_ns_per_id": 0.0,
        "update_ns_per_id": 0.1,
        "route_ns_per_id": 0.05,
        "index_ns_per_id": 3.7,
        "index_ms": 1.3,
        "shard_feature_ms": 0.0,
        "row_split_ms": 0.0,
        "norm_ms": 0.0,
        "step_ms": 0.0,
        "flops_per_ms": 10e9,
        "tf32_flops_per_ms": 10e9,
        **_CALIBRATED_ONLY,
        **{figure.field: figure.value for figure in (*GPU_FIGURES, *INFINIBAND)},
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


_MAX_RANKS = 4096  # traffic is a matrix over ranks: 128 MiB per phase


@names_wrong_arguments
@dataclass(frozen=True)
class Topology:
    """W ranks on hosts of `local_world_size` ranks each.

    Args:
        world_size: ranks W.
        compute_device: "cpu" or "cuda"; selects the defaults and the memory that stores the weights.
        hbm_cap: bytes of device memory per rank (default 32 GiB on cuda, as in TorchRec).
        ddr_cap: bytes of host memory per rank. Default on cpu: the memory of this machine (or of its cgroup) divided
            by `local_world_size`, so that the planner refuses plans that would swap; 128 GiB on cuda.
        local_world_size: ranks per host. Default: all ranks.
        hbm_mem_bw, ddr_mem_bw: memory bandwidth of embedding rows that are not in cache; on cuda, ddr_mem_bw is the
            bandwidth of a device to host memory.
        intra_host_bw, inter_host_bw: bytes per ms that one rank sends (and receives) inside and between hosts.
        intra_host_latency_ms, inter_host_latency_ms: fixed cost of one collective.
        peer_ms, inter_host_peer_ms: cost of one collective per peer rank on the same host and on another host,
            independent of its bytes.
        reduce_scatter_cost: time of a reduce-scatter relative to an all-to-all of the same bytes.
        gather_row_bytes: a random read of a row takes the time of its bytes plus this many: rows of as many bytes reach
            half of the memory's bandwidth.
        cache_bw: bandwidth of rows read again within a batch, and of copies between buffers.
        lookup_ns_per_id, update_ns_per_id: per id in forward, and in backward (sorting, segment sums).
        route_ns_per_id: per id sent or received: choosing its rank, packing, unpacking.
        index_ns_per_id, index_ms: finding an id's slot in the index of a dynamic table, and updating its score; and the
            fixed cost of one shard's index in a step.
        launch_ms: host time of one kernel launch. On cuda every launch of a step counts (see
            `planner.model.launch_counts`). On cpu only the table-batched kernels count: `host_ms`, `row_split_ms`,
            `norm_ms` and `step_ms` include the others.
        host_ms: host time of one exchange: on cuda the enqueued collective, on cpu its packing and unpacking too.
        sync_ms: time that the host waits for the device to read the sizes of the ids' messages, once a step.
        kernel_ms: least device time of one kernel.
        shard_feature_ms: host cost of one feature of one shard, in each phase that processes it.
        row_split_ms: fixed cost of choosing ids by row, if any table is split by rows.
        norm_ms, norm_ns_per_row: cost of exchanging row norms, for column shards under a row-wise optimizer: fixed,
            and per touched row of a shard.
        step_ms: fixed cost of a step outside its phases: module calls, autograd.
        flops_per_ms, tf32_flops_per_ms: dense floating-point operations per ms of one rank, in float32 and in TF32.
        matrix_half_batch: batch size at which dense layers reach half of these rates: at batch B they reach the share
            ``B / (B + matrix_half_batch)``.
        straggler_sigma: relative standard deviation of a rank's time in a phase; W ranks wait for the slowest, which
            takes ``1 + straggler_sigma * sqrt(2 ln W)`` as long as the mean.
        update_cost: optimizer -> factor on reading and writing the distinct rows.
        update_id_ns, update_number_ns: optimizer -> ns per id, in place of `update_ns_per_id`, and ns of arithmetic per
            number of a distinct row, wherever the row is stored.
        bag_ns: ns per bag of one feature of one shard, in forward and in backward.
        sort_ns_per_id, sum_ns_per_number: for ids that travel once (replicas that send touched rows, "distinct_rows",
            deduplicated sequences): ns per sorted id of the batch, and per added number of a row or gradient.
        replica_ms, replicas_ms: host cost of one feature of a replica, in input_dist and in output_dist_backward; and
            the fixed cost per step of having replicas.
        cache_bytes: cache of one rank that keeps rows from step to step; 0 if it keeps none.
        contention: slowdown of each rank when all ranks work and each has a core, as a share of its time.
        half_duplex: on one host, 0 if a rank sends and receives concurrently (networks), 1 if sequentially (loopback,
            where one core copies both ways).
        reserve_fraction: share of the capacity that plans leave free (framework, fragmentation).
        cores_per_host: on cpu, times grow in proportion if ranks exceed cores. Default: this machine's cores.
        device_groups: name -> ranks, for `ParameterConstraints(device_group=...)`.

    Raises:
        ValueError: a size that is not positive, ranks that do not fill hosts, a device other than cpu and cuda.

    >>> Topology(world_size=4, local_world_size=2).num_nodes
    2
    """

    world_size: int
    compute_device: str = "cpu"
    hbm_cap: int = _DEFAULT
    ddr_cap: int = _DEFAULT
    _: KW_ONLY  # TorchRec has other arguments from here on
    local_world_size: int = _DEFAULT
    hbm_mem_bw: float = _DEFAULT
    ddr_mem_bw: float = _DEFAULT
    intra_host_bw: float = _DEFAULT
    inter_host_bw: float = _DEFAULT
    intra_host_latency_ms: float = _DEFAULT
    inter_host_latency_ms: float = _DEFAULT
    peer_ms: float = _DEFAULT
    inter_host_peer_ms: float = _DEFAULT
    reduce_scatter_cost: float = _DEFAULT
    gather_row_bytes: float = _DEFAULT
    cache_bw: float = _DEFAULT
    lookup_ns_per_id: float = _DEFAULT
    update_ns_per_id: float = _DEFAULT
    route_ns_per_id: float = _DEFAULT
    index_ns_per_id: float = _DEFAULT
    index_ms: float = _DEFAULT
    launch_ms: float = _DEFAULT
    host_ms: float = _DEFAULT
    sync_ms: float = _DEFAULT
    kernel_ms: float = _DEFAULT
    shard_feature_ms: float = _DEFAULT
    row_split_ms: float = _DEFAULT
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
    tf32_flops_per_ms: float = _DEFAULT
    matrix_half_batch: float = _DEFAULT
    straggler_sigma: float = _DEFAULT
    update_cost: Mapping[str, float] = _DEFAULT
    update_id_ns: Mapping[str, float] = _DEFAULT
    update_number_ns: Mapping[str, float] = _DEFAULT
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
                f"world_size {self.world_size} is not a multiple of local_world_size {local}: ranks must fill their "
                f"hosts. Fix: world_size={-(-self.world_size // local) * local}"
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
            raise ValueError(f"half_duplex must be in [0, 1], got {self.half_duplex!r}")
        if self.reserve_fraction >= 1:
            raise ValueError(f"reserve_fraction must be in [0, 1), got {self.reserve_fraction!r}")
        object.__setattr__(self, "device_groups", _checked_groups(self.device_groups, self.world_size))

    @classmethod
    def preset(cls, name: str, **figures: Any) -> "Topology":
        """The topology of a machine known by name, with its published figures.

        Rates are the shares of published peaks that programs reach; `preset_table` prints both with their sources.

        Args:
            name: NAME is one host; NAMExN is N ranks in hosts of the machine's usual size: "h100x64", "a100x8",
                "gb200nvl72", "aws-p5x16", "cpu-laptop", "this" (this machine). `preset_table` lists them.
            figures: arguments of `Topology` that override the preset's.

        Raises:
            ValueError: an unknown name (with the nearest known one) or argument; ranks that do not fill hosts.

        >>> top = Topology.preset("h100x64", reserve_fraction=0.2)
        >>> top.num_nodes, top.hbm_cap, top.reserve_fraction
        (8, 80000000000, 0.2)
        """
        from recshard_lab.sharding.hardware.presets import preset_arguments

        known = [spec.name for spec in fields(cls)]
        for key in figures:
            if key not in known:
                near = "".join(f" (did you mean {name!r}?)" for name in get_close_matches(key, known, n=1))
                raise ValueError(f"Topology has no argument {key!r}{near}")
        size, local = figures.get("world_size"), figures.get("local_world_size")
        return cls(**{**preset_arguments(name, size, local), **figures})

    @classmethod
    def from_profile(cls, path: "str | os.PathLike[str]", **figures: Any) -> "Topology":
        """The topology of a calibrated machine (`Ranks.calibrate`, ``recshard calibrate --out``).

        Args:
            path: path of the device profile.
            figures: arguments of `Topology` that override the profile's; the number of ranks must be the measured one.

        Raises:
            ValueError: not a profile, a profile of another version, or other ranks than the measured ones.
        """
        from recshard_lab.sharding.hardware.device_profile import DeviceProfile

        return DeviceProfile.load(path).topology(**figures)  # type: ignore[arg-type]

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self.world_size // self.local_world_size

    @names_wrong_arguments
    def node_of(self, rank: int) -> int:
        """The host of a rank; ranks fill hosts in order."""
        return rank // self.local_world_size

    @property
    def memory_cap_bytes(self) -> int:
        """Bytes per rank for weights, optimizer state and buffers: HBM on cuda, host memory on cpu."""
        return self.hbm_cap if self.compute_device == "cuda" else self.ddr_cap

    def with_memory(self, gigabytes: float) -> "Topology":
        """This topology with `gigabytes` (1e9 bytes) as each rank's `memory_cap_bytes`.

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
        """Whether host memory and device memory are different."""
        return self.compute_device == "cuda"

    @property
    def memory_bw(self) -> float:
        """Bytes per ms of the memory that stores the weights."""
        return self.hbm_mem_bw if self.compute_device == "cuda" else self.ddr_mem_bw

    @property
    def slowdown(self) -> float:
        """Ranks per core, at least 1.0."""
        return max(1.0, self.local_world_size / self.cores_per_host) if self.compute_device == "cpu" else 1.0

    def free_memory_bytes(self) -> int:
        """Capacity of one rank without the reserve."""
        return int(self.memory_cap_bytes * (1 - self.reserve_fraction))


def machine_memory_bytes() -> int:
    """Bytes of memory of this machine, or of this process's cgroup if less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    try:
        with open("/sys/fs/cgroup/memory.max") as limit:
            return min(total, int(limit.read()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return total


def _checked_groups(groups: object, world_size: int) -> dict[str, tuple[int, ...]]:
    """Device groups as name -> sorted ranks.

    Raises:
        ValueError: not a mapping of names to ranks.
    """
    if not isinstance(groups, Mapping):
        raise ValueError(f"device_groups must map names to ranks, as {{'fast': [0, 1]}}, got {groups!r:.80}")
    checked: dict[str, tuple[int, ...]] = {}
    for name, ranks in groups.items():
        if not isinstance(name, str) or name in DEVICE_DEFAULTS:
            raise ValueError(f"a device group needs a name other than {', '.join(DEVICE_DEFAULTS)}, got {name!r:.80}")
        if isinstance(ranks, str) or not isinstance(ranks, Iterable):
            raise ValueError(f"device group {name!r} must be a list of ranks, got {ranks!r:.80}")
        members = tuple(ranks)
        if not members or not all(isinstance(rank, int) and 0 <= rank < world_size for rank in members):
            raise ValueError(f"device group {name!r} must name ranks from 0 to {world_size - 1}, got {members!r:.80}")
        checked[name] = tuple(sorted(set(members)))
    return checked


def _check_positive_int(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if value > _MAX_RANKS:
        raise ValueError(f"{name} must be at most {_MAX_RANKS:,}, got {shown(value)}. Fix: {name}={_MAX_RANKS}")
