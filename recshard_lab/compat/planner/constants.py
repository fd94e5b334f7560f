"""The planner's figures, with TorchRec's values: bandwidths in bytes per ms, capacities in bytes per rank."""

from __future__ import annotations

import sys

from recshard_lab.planner.model import torchrec_cost

GIB = 1024**3
_PER_MS = GIB / 1000  # one GiB/s

MAX_SIZE = sys.maxsize
INTRA_NODE_BANDWIDTH = 600 * _PER_MS
CROSS_NODE_BANDWIDTH = 12.5 * _PER_MS
HBM_MEM_BW = 897 * _PER_MS
DDR_MEM_BW = 51 * _PER_MS
SSD_MEM_BW = 100 * 1024**2 / 1000
HBM_TO_DDR_MEM_BW = 32 * _PER_MS
HBM_CAP, DDR_CAP, SSD_CAP, HUNDRED_GB = 32 * GIB, 128 * GIB, 2 * 1024 * GIB, 100 * GIB
UVM_CACHING_RATIO = KV_CACHING_RATIO = 0.2
MIN_CW_DIM = FULL_BLOCK_EMB_DIM = 128
POOLING_FACTOR = NUM_POOLINGS = 1.0
BATCH_SIZE = 512
BIGINT_DTYPE = torchrec_cost.ID_BYTES
BATCHED_COPY_PERF_FACTOR = torchrec_cost.COPY_FACTOR
DP_ELEMENTWISE_KERNELS_PERF_FACTOR = torchrec_cost.DENSE_OPTIMIZER_FACTOR
WEIGHTED_KERNEL_MULTIPLIER = torchrec_cost.WEIGHTED_FACTOR
HALF_BLOCK_PENALTY, QUARTER_BLOCK_PENALTY = 1.15, 1.75
BWD_COMPUTE_MULTIPLIER = int(torchrec_cost.BACKWARD_FACTOR)
WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER = 1
DEFAULT_PERF_ESTIMATOR = "default_estimator"

_IN_DEVICE_MEMORY = ("fused", "quant")
_CACHED = ("fused_uvm_caching", "quant_uvm_caching")


def kernel_bw_lookup(
    compute_device: str,
    compute_kernel: str,
    hbm_mem_bw: float,
    ddr_mem_bw: float,
    hbm_to_ddr_mem_bw: float,
    caching_ratio: float | None = None,
    prefetch_pipeline: bool = False,
    ssd_mem_bw: float = SSD_MEM_BW,
) -> float | None:
    """The bandwidth at which a kernel reads rows, in the unit of the arguments; None for an unknown pair.

    Kernel "dense" has half of the memory's bandwidth. On GPUs, rows in host memory are read at a tenth of the link to
    it, and cached rows at a tenth of the mean over hits and misses. A prefetching "fused_uvm_caching" reads at
    `hbm_mem_bw`.

    Args:
        compute_device: "cpu", "cuda" or "mtia".
        compute_kernel: value of ``EmbeddingComputeKernel``.
        hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, ssd_mem_bw: of device memory, host memory, the link between them, and
            storage.
        caching_ratio: cached share of the rows. Default: 0.2.
        prefetch_pipeline: whether rows are cached before they are read.

    >>> kernel_bw_lookup("cuda", "fused_uvm_caching", 1000.0, 100.0, 10.0, caching_ratio=0.5)
    50.5
    """
    if compute_device not in ("cpu", "cuda", "mtia"):
        return None
    memory = ddr_mem_bw if compute_device == "cpu" else hbm_mem_bw
    if compute_kernel == "dense":
        return memory / 2
    if compute_kernel in _IN_DEVICE_MEMORY:
        return memory
    if compute_device != "cuda":
        return None
    if compute_kernel in ("fused_uvm", "quant_uvm"):
        return hbm_to_ddr_mem_bw / 10
    if compute_kernel in _CACHED:
        if prefetch_pipeline and compute_kernel == "fused_uvm_caching":
            return hbm_mem_bw
        hits = UVM_CACHING_RATIO if caching_ratio is None else caching_ratio
        return (hits * hbm_mem_bw + (1 - hits) * hbm_to_ddr_mem_bw) / 10
    if compute_kernel == "key_value":
        return ssd_mem_bw
    return (
        hbm_to_ddr_mem_bw
        if compute_kernel in ("ssd_virtual_table", "dram_virtual_table", "dram_ssd_virtual_table")
        else None
    )
