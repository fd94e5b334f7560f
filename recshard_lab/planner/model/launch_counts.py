"""Operators that the host launches for the tables in a step on a GPU, and the kernels that they run, by phase.

An operator costs the host `Topology.launch_ms`; each of its kernels costs the device `Topology.kernel_ms` beside its
work. `benchmarks.launches` counts operators on a device that records them; a test counts again and compares. The counts
do not grow with tables, features or ranks, with two exceptions that are left out: one or two operators where arrived
ids are permuted, and row norms of another number of column shards than eight, one operator for each.
"""

from typing import NamedTuple

import numpy as np

from recshard_lab.planner.workload import Array
from recshard_lab.sharding import Topology

#: kernels of one operator, where it runs more than one: assumed until torch.profiler has counted them on a GPU
KERNELS = {
    "block_bucketize_sparse_features": 4,
    "cumsum": 2,
    "index_put_": 4,
    "lookup_backward": 16,  # radix sort, run lengths, two scans, updates of short and of long segments
    "permute_1D_sparse_data": 2,
    "repeat_interleave": 3,
    "sort": 8,
}


class Launches(NamedTuple):
    """Operators and kernels in each of the six phases of `cost.PHASES`."""

    operators: tuple[int, ...]
    kernels: tuple[int, ...]


#: what a plan launches, and what each of its properties adds
LAUNCHES = {
    "table_wise": Launches((19, 1, 1, 0, 1, 1), (22, 1, 1, 0, 1, 16)),
    "row_shards": Launches((5, 0, 0, 0, 0, 0), (9, 0, 0, 0, 0, 0)),
    "replicas": Launches((42, 1, 6, 0, 9, 5), (58, 1, 7, 0, 9, 21)),
    "two_hop": Launches((0, 0, 2, 0, 2, 0), (0, 0, 2, 0, 2, 0)),
    "distinct_rows": Launches((26, 0, 23, 0, 22, 0), (39, 0, 29, 0, 29, 0)),
    "fp16": Launches((0, 0, 15, 0, 15, 0), (0, 0, 15, 0, 15, 0)),
    "norms": Launches((0, 0, 0, 0, 0, 9), (0, 0, 0, 0, 0, 9)),
    "int8": Launches((0, 0, 40, 0, 40, 0), (0, 0, 40, 0, 40, 0)),
}
LAUNCHES["bf16"] = LAUNCHES["fp16"]


def fixed_costs(topology: Topology) -> dict[str, Array]:
    """Costs of each phase that do not depend on the number of ids: property of a plan -> ms ``[6]``.

    Properties are those of `LAUNCHES`. "table_wise" includes exchanges, and "norms" that of row norms. The host
    launches while the device runs, so the larger counts: the host's time for operators and exchanges, or
    the device's time to start kernels. input_dist exchanges sizes, then ids. On a CPU, the figures of exchanges include
    the operators, and only the two table-batched kernels count beside them.

    >>> fixed_costs(Topology(2, "cuda", launch_ms=0.02, host_ms=0.04, kernel_ms=0.001))["two_hop"].tolist()
    [0.0, 0.0, 0.08, 0.0, 0.08, 0.0]
    """
    gpu, none = topology.compute_device == "cuda", np.zeros(6)
    host = dict.fromkeys(LAUNCHES, none)
    if gpu:
        host |= {name: topology.launch_ms * np.array(own.operators) for name, own in LAUNCHES.items()}
    else:
        host["table_wise"] = topology.launch_ms * np.array([0, 1, 0, 0, 0, 1])
    more = {
        "table_wise": topology.host_ms * np.array([2 if gpu else 1, 0, 1, 0, 1, 0]),
        "two_hop": topology.host_ms * np.array([0, 0, 1, 0, 1, 0]),
        "row_shards": topology.row_split_ms * np.array([1, 0, 0, 0, 0, 0]),
        "replicas": topology.replicas_ms * np.array([0, 0, 0, 0, 1, 0]),
        "norms": (topology.norm_ms + gpu * topology.host_ms) * np.array([0, 0, 0, 0, 0, 1]),
    }
    starts = {name: topology.kernel_ms * np.array(own.kernels) for name, own in LAUNCHES.items()}
    return {
        name: np.maximum((ms + more.get(name, none)) * topology.slowdown, starts.get(name, none))
        for name, ms in host.items()
    }
